"""Optimizers that the training loop steps by itself, without `RoundPipe.step`:

    loss = model(x); loss.backward(); optimizer.step(); optimizer.zero_grad()

torch tells of every optimizer's step. One of the copies, or of the model's own parameters, is an update that is waited
for: before it everything under way ends, behind it the copies go into the model. That clipping and unscaling find the
gradients in between is seen to where a backward ends (`OptimizerSide.end_call`).

The hooks stay for the process: another thread may be in the middle of a step, which goes through them one by one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Stepped(Protocol):
    """Is told of steps; see `OptimizerSide`."""

    def before_plain_step(self, parameters: frozenset[int]) -> None: ...

    def after_plain_step(self, parameters: frozenset[int]) -> None: ...


_LOCK = threading.Lock()
_watching: tuple[weakref.ref[Stepped], ...] | None = None
"""None: torch has no hooks yet."""


def watch(side: Stepped) -> None:
    """Tell it of steps as long as it lives, or until `unwatch`."""
    global _watching
    with _LOCK:
        if _watching is None:
            register_optimizer_step_pre_hook(_before)
            register_optimizer_step_post_hook(_after)
        _watching = (*(each for each in _watching or () if each() is not None), weakref.ref(side))


def unwatch(side: Stepped) -> None:
    """Tell it of no more steps."""
    global _watching
    with _LOCK:
        _watching = tuple(each for each in _watching or () if each() not in (None, side))


def _sides() -> Iterator[Stepped]:
    return (side for reference in _watching or () if (side := reference()) is not None)


def _ids(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    return frozenset(id(parameter) for group in optimizer.param_groups for parameter in group["params"])


@torch.compiler.disable(reason="it may wait for threads")
def _before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    parameters = _ids(optimizer) if _watching else frozenset[int]()
    for side in _sides():
        side.before_plain_step(parameters)


@torch.compiler.disable(reason="it may wait for threads")
def _after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    parameters = _ids(optimizer) if _watching else frozenset[int]()
    for side in _sides():
        side.after_plain_step(parameters)
