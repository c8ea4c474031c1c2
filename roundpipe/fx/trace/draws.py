"""What is known of random draws before they are made: uniform ones are not below 0, nor above 1.

A model that leaves out layers by chance asks in each training step whether a draw is below a rate. That is 0 for most
who train it, and the answer then is the same in every step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from roundpipe.fx.guards.value_reader import UNKNOWN

_UNIFORM = (torch.rand, torch.rand_like)
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def known_of_draws(comparison: Node | None) -> Any:
    """Whether a comparison of uniform draws with a number holds for all of them or for none; else `UNKNOWN`."""
    if comparison is None or len(comparison.args) != 2 or comparison.kwargs:
        return UNKNOWN
    target = comparison.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    draws, bound = comparison.args
    if name not in _COMPARISONS or type(bound) not in (int, float) or not isinstance(draws, Node):
        return UNKNOWN
    if draws.target not in _UNIFORM or "out" in draws.kwargs or len(draws.users) > 1:  # one may have written them
        return UNKNOWN
    lowest, highest = (_COMPARISONS[name](draw, bound) for draw in (0, 1))  # type: ignore[arg-type]
    return lowest if lowest == highest else UNKNOWN  # rounding may make a draw 1
