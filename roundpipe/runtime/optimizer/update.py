"""Runs the user's ``step_fn``: inside it a model's parameters are the optimizer's copies.

Whether it is running: `inside_optimizer`, also set by the context manager `OptimizerCtx`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field

import torch

from roundpipe.core.caller import warn
from roundpipe.runtime.optimizer.grad_scaler import ScalerScope
from roundpipe.runtime.profiling.meter import HostLog
from roundpipe.runtime.weights.master_weights import Fingerprint, ParameterPair

_INSIDE: ContextVar[bool] = ContextVar("roundpipe_inside_optimizer", default=False)
_RUNNING: ContextVar[UpdateRunner | None] = ContextVar("roundpipe_running_optimizer", default=None)


def inside_optimizer() -> bool:
    """Whether parameters asked for in this thread are the optimizer's."""
    return _INSIDE.get()


class OptimizerCtx:
    """While open, ``parameters()`` and ``named_parameters()`` of a RoundPipe model are the optimizer's."""

    def __init__(self) -> None:
        self._tokens: list[Token[bool]] = []

    def __enter__(self) -> OptimizerCtx:
        self._tokens.append(_INSIDE.set(True))
        return self

    def __exit__(self, *exception: object) -> None:
        _INSIDE.reset(self._tokens.pop())


@dataclass(slots=True, eq=False)
class Update:
    """One asynchronous update."""

    index: int
    """Of the step, counted from 1."""
    began_s: float = field(default_factory=time.monotonic)
    is_done: bool = False
    """Changed under the board's lock."""
    claim: threading.Lock = field(default_factory=threading.Lock)
    """Whoever gets it decides: the optimizer's thread runs the update, an interrupted `step` takes it back."""


class UpdateRunner:
    """Runs the ``step_fn`` of one model; until one has written a copy, looks whether it leaves all as they are."""

    def __init__(self, name: str, log: HostLog, scalers: ScalerScope) -> None:
        self._name = name
        self._log = log
        self._scalers = scalers
        self._looks = True
        self._is_warning_due = False

    @property
    def is_inside(self) -> bool:
        """Whether the calling code runs in this model's ``step_fn``."""
        return _RUNNING.get() is self

    def run(self, step_fn: Callable[[], object], index: int, pairs: Sequence[ParameterPair]) -> None:
        """Run it; an error of it gains a note that says in which step it was raised."""
        token = _RUNNING.set(self)
        try:
            with self._log.doing("update", f"optimizer step {index}"), OptimizerCtx(), self._scalers.running():
                copies = [pair.copy for pair in pairs if pair.copy is not None] if self._looks else []
                has_gradients = any(copy.grad is not None for copy in copies)
                before = [Fingerprint.of(copy) for copy in copies] if has_gradients else []
                step_fn()
                if before:
                    self._look(before)
        except BaseException as error:
            error.add_note(f"raised in step_fn of step {index} of {self._name}")
            raise
        finally:
            _RUNNING.reset(token)

    def _look(self, before: Sequence[Fingerprint]) -> None:
        """Gradients that ``step_fn`` took away, or that a scaler may have refused, were to have no effect."""
        if any(copy.is_marked or copy.has_other_values for copy in before):
            self._looks = False
            return
        gradients = [copy.parameter.grad for copy in before]
        dense = [each for each in gradients if each is not None and each.layout is torch.strided]
        have_effect = any(each.any() for each in dense) and all(each.isfinite().all() for each in dense)
        if have_effect and not self._scalers.in_use:
            self._looks, self._is_warning_due = False, True

    def warn_if_idle(self) -> None:
        """Warn, once, in the training thread, of a ``step_fn`` that changed nothing."""
        if self._is_warning_due:
            self._is_warning_due = False
            warn(
                "step_fn changed none of the parameters that have gradients. Unless that is meant (such as to let "
                "gradients accumulate), the optimizer is made from other parameters: make it from "
                "model.optim_parameters(), not from model.parameters() or those of the original module"
            )
