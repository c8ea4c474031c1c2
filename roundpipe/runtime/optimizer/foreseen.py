"""Optimizers before their first step: which have the copies, and how many states they will make of each.

torch tells of optimizers as they step. What lives on a device from the first step on must be known before.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch


def optimizers_of(copies: Sequence[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """Those that have been made of these; none if a copy is in none, or in one whose states are not known ahead.

    It looks at every object that there is: some hundredths of a second.
    """
    wanted = {id(copy) for copy in copies}
    found, held = [], set[int]()
    for each in gc.get_objects():
        if issubclass(type(each), torch.optim.Optimizer):  # its class as it is, not as it may pretend
            groups = getattr(each, "param_groups", ())  # none yet where another thread is making it
            its = wanted.intersection(id(parameter) for group in groups for parameter in group["params"])
            if its and any(num_states(each, group) is None for group in groups):
                return []
            if its:
                found.append(each)
                held |= its
    return found if held == wanted else []


def num_states(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int | None:
    """Tensors as large as a copy that it keeps of each in a group; None: not known."""
    if type(optimizer) is torch.optim.SGD:
        return int(bool(group["momentum"]))
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        return 2 + bool(group["amsgrad"])
    return None
