"""Options of optimizers, such as the learning rate, that change while an asynchronous update has yet to read them."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class OptionWatch:
    """Knows the optimizers that one model's ``step_fn`` has stepped, and their options when it was asked for."""

    def __init__(self) -> None:
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Those that have stepped in ``step_fn``, or are known to be about to."""
        self._asked: list[tuple[torch.optim.Optimizer, list[dict[str, Any]]]] = []
        self._is_told = False

    def steps(self, optimizer: torch.optim.Optimizer) -> bool:
        """One steps in ``step_fn``, or will; whether that is new."""
        is_first = optimizer not in self.optimizers
        self.optimizers.add(optimizer)
        return is_first

    def begin(self) -> None:
        """An update is asked for; no other is under way."""
        self._asked = [] if self._is_told else [(each, _options(each)) for each in self.optimizers]

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
