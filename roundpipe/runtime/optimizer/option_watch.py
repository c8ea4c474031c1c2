"""Options of optimizers, such as the learning rate, that change while an asynchronous update has yet to read them."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class OptionWatch:
    """Knows the optimizers that one model's ``step_fn`` has stepped, and their options when it was asked for."""

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._asked: list[tuple[torch.optim.Optimizer, list[dict[str, Any]]]] = []
        self._is_told = False

    def has_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """One has stepped, in ``step_fn``."""
        self._optimizers.add(optimizer)

    def begin(self) -> None:
        """An update is asked for; no other is under way."""
        self._asked = [] if self._is_told else [(each, _options(each)) for each in self._optimizers]

    def has_changed(self) -> bool:
        """Whether options are others than when the update was asked for, just before it runs; true once."""
        asked, self._asked = self._asked, []
        changed = any(_options(optimizer) != options for optimizer, options in asked)
        self._is_told |= changed
        return changed


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if isinstance(value, int | float)}
        for group in optimizer.param_groups
    ]
