"""What an update makes on a device beside parameters, gradients and states, and lets go of again.

By an optimizer's class and its options: how many tensors are made that are as large as what is updated, and whether for
all parameters at once (``foreach``), for one at a time, or for pieces (`pieces.py`). Fused ones make none. One without
these options is taken to make one for all at once, and more for one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

PIECE_ELEMENTS = 2**24
"""What is updated at once on a device by optimizers that work in pieces."""
OF_ONE = 4
"""Most tensors at a time where parameters are updated one by one."""
OF_ALL = 3
"""Most tensors for each parameter where all are updated together, by those of torch's of which no more is known."""


def temporary_bytes(
    optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor], *, in_pieces: bool = False
) -> int:
    """The most at a time in a step of these; what it makes for other parameters is on the host.

    ``in_pieces``: whether it works in pieces.
    """
    ids = {id(each) for each in parameters}
    of_groups = (
        _bytes_of(type(optimizer), group, [each for each in group["params"] if id(each) in ids], in_pieces)
        for group in optimizer.param_groups
    )
    return max(of_groups, default=0)


def bytes_of_unknown(sizes_bytes: Sequence[int]) -> int:
    """Where it is not known what updates parameters of these sizes."""
    return sum(sizes_bytes) + OF_ONE * max(sizes_bytes, default=0)


def bytes_by_default(number: int, sizes_bytes: Sequence[int], itemsize: int) -> int:
    """Where so many tensors are made for each parameter of all, or in pieces, or one by one: as torch decides."""
    return _most([number * sum(sizes_bytes), OF_ONE * max(sizes_bytes, default=0) if number else 0], itemsize)


def _bytes_of(kind: type, group: dict[str, Any], parameters: Sequence[torch.Tensor], in_pieces: bool) -> int:
    if not parameters or group.get("fused"):
        return 0
    sizes_bytes = [each.nbytes for each in parameters]
    if "foreach" not in group:
        return bytes_of_unknown(sizes_bytes)
    number = _tensors_of(kind, group)
    ways_bytes = []
    if group["foreach"] is not False:
        ways_bytes.append(number * sum(sizes_bytes))
    if group["foreach"] is not True and (number or group.get("nesterov")):
        ways_bytes.append(OF_ONE * max(sizes_bytes))
    return _most(ways_bytes, max(each.itemsize for each in parameters) if in_pieces else None)


def _most(ways_bytes: Sequence[int], itemsize: int | None) -> int:
    """Of ways in which an update may be made; with an ``itemsize``, in pieces."""
    num_bytes = max(ways_bytes, default=0)
    return num_bytes if itemsize is None else min(num_bytes, OF_ONE * PIECE_ELEMENTS * itemsize)


def _tensors_of(kind: type, group: dict[str, Any]) -> int:
    """Tensors that are made for each parameter where all are updated together."""
    if kind is torch.optim.SGD:
        return int(bool(group["weight_decay"] or group["maximize"]))
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        is_decoupled = group.get("decoupled_weight_decay", kind is torch.optim.AdamW)
        return 1 + bool(group["maximize"] or (group["weight_decay"] and not is_decoupled))
    return OF_ALL
