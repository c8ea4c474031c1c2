"""What changes while an asynchronous update has yet to read it: options of optimizers, and what names stand for."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from roundpipe.effects.uses import reached_by


class OptionWatch:
    """Knows the optimizers that one model's ``step_fn`` has stepped, and their options when it was asked for."""

    def __init__(self) -> None:
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Those that have stepped in ``step_fn``, or are known to be about to."""
        self._asked: list[tuple[torch.optim.Optimizer, list[dict[str, Any]]]] = []
        self._is_told = self._is_told_of_others = False
        self._function: tuple[Any, set[int]] | None = None
        """What the update is made by, and the optimizers that it reached when it was asked for, by id."""

    def steps(self, optimizer: torch.optim.Optimizer) -> bool:
        """One steps in ``step_fn``, or will; whether that is new."""
        is_first = optimizer not in self.optimizers
        self.optimizers.add(optimizer)
        return is_first

    def begin(self, step_fn: Any = None) -> None:
        """An update by ``step_fn`` is asked for; no other is under way."""
        self._asked = [] if self._is_told else [(each, _options(each)) for each in self.optimizers]
        self._function = None if self._is_told_of_others else (step_fn, _optimizers_of(step_fn))

    def has_others(self) -> bool:
        """Whether the function reaches other optimizers than when the update was asked for; true once."""
        asked, self._function = self._function, None
        is_other = asked is not None and asked[1] != _optimizers_of(asked[0])
        self._is_told_of_others |= is_other
        return is_other

    def has_changed(self) -> bool:
        """Whether options are others than when the update was asked for, just before it runs; true once."""
        asked, self._asked = self._asked, []
        changed = any(_options(optimizer) != options for optimizer, options in asked)
        self._is_told |= changed
        return changed


def _optimizers_of(function: Any) -> set[int]:
    return {id(value) for value in reached_by(function) if isinstance(value, torch.optim.Optimizer)}


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if isinstance(value, int | float)}
        for group in optimizer.param_groups
    ]
