"""One update: what runs the user's ``step_fn``, behind the hand-over (`hand_over.py`), and the handle that tells of it.

Inside ``step_fn`` a model's parameters are the optimizer's copies: `inside_optimizer`, also in `OptimizerCtx`.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

import torch

from roundpipe.core.caller import warn
from roundpipe.core.checks import is_number
from roundpipe.core.errors import ConfigError, RoundPipeError, add_note, shown
from roundpipe.core.options import check_passed_on
from roundpipe.runtime.config import OPTIONS
from roundpipe.runtime.optimizer.adoption import adopt_own
from roundpipe.runtime.optimizer.grad_scaler import ScalerScope
from roundpipe.runtime.optimizer.late_gradients import LateGradients
from roundpipe.runtime.optimizer.option_watch import OptionWatch
from roundpipe.runtime.optimizer.pieces import PiecewiseUpdates
from roundpipe.runtime.optimizer.wrong_parameters import WrongParameters
from roundpipe.runtime.profiling.host_log import HostLog
from roundpipe.runtime.ranks.turns import Ranks
from roundpipe.runtime.threads import Board
from roundpipe.runtime.weights.fingerprint import Fingerprint
from roundpipe.runtime.weights.parameter_pair import ParameterPair

NOT_MADE = object()
"""In the place of an update's result: its round failed."""

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
    """One asynchronous update, or a hand-over alone, for the optimizer's thread."""

    name: str
    number: int = 0
    is_update: bool = True
    began_s: float = field(default_factory=time.monotonic)
    is_closed: bool = False
    """Whether nothing can be added to ``then`` any more; changed under the board's lock, as is `is_done`."""
    is_done: bool = False
    then: list[Callable[[], None]] = field(default_factory=list)
    """What its thread does behind it, however it ends."""
    result: Any = None
    """What ``step_fn`` returned, or `NOT_MADE`."""
    error: BaseException | None = None
    is_seen: bool = False
    """Whether whoever asked for the result has got the error, so that no later call raises it."""
    claim: threading.Lock = field(default_factory=threading.Lock)
    """Taken by whoever runs it."""
    _is_taken_back: bool = False

    def take_back(self) -> bool:
        """Whether nobody has begun it; then nobody will."""
        self._is_taken_back = self._is_taken_back or self.claim.acquire(blocking=False)
        return self._is_taken_back


class StepHandle:
    """One update that `roundpipe.RoundPipe.step` was asked for."""

    def __init__(self, update: Update, board: Board, runner: UpdateRunner, finish: Callable[[], None]) -> None:
        self._update = update
        self._board = board
        self._runner = runner
        self._finish = weakref.WeakMethod(finish)
        """Returns when a device has done what updates gave to it; a handle does not keep the model for it."""

    def __repr__(self) -> str:
        """What a notebook shows."""
        error = self._update.error
        state = "under way" if not self.done() else "done" if error is None else f"raised {type(error).__name__}"
        return f"<{self._update.name}: {state}>"

    def done(self) -> bool:
        """Whether ``step_fn`` has run, or never will."""
        return self._update.is_done

    def wait(self, timeout: float | None = None) -> bool:
        """Return once it is done, however it ended; False: not within ``timeout`` seconds.

        The update is then in the optimizer's copies; `roundpipe.RoundPipe.synchronize` brings it into the model.

        Raises:
            ConfigError: called inside this ``step_fn``, or ``timeout`` is no number of seconds.
        """
        update = self._update
        if self._runner.is_inside and not update.is_done:
            raise ConfigError("a step's handle was asked to wait inside the step_fn that it is about")
        if timeout is not None and not (is_number(timeout) and timeout >= 0):
            raise ConfigError(f"timeout={shown(timeout)}; give seconds, or None to wait until the update is done")
        is_done = self._board.wait(lambda: update.is_done, "a step's handle", update.name, timeout)
        if is_done and (finish := self._finish()) is not None:
            finish()
        return is_done

    def result(self, timeout: float | None = None) -> Any:
        """What ``step_fn`` returned, once it has run.

        Raises:
            Exception: what ``step_fn`` raised; no later call into the model raises it then.
            RoundPipeError: the round before it failed, so that there was no update.
            TimeoutError: it is not done within ``timeout`` seconds.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"{self._update.name} was not done within {timeout} s")
        if self._update.error is not None:
            self._update.is_seen = True
            raise self._update.error
        if self._update.result is NOT_MADE:
            raise RoundPipeError(
                f"{self._update.name} was not made: the round whose gradients it was for failed. The next call into "
                "the model raises that round's error"
            )
        return self._update.result


class UpdateRunner:
    """Runs the ``step_fn`` of one model; until one has written a copy, looks whether it leaves all as they are."""

    def __init__(self, name: str, log: HostLog, scalers: ScalerScope, ranks: Ranks | None = None) -> None:
        self._name = name
        self.ranks = ranks
        self._log = log
        self._scalers, scalers.adopt = scalers, self.adopt
        self.options = OptionWatch()
        self.late = LateGradients()
        self.pieces = PiecewiseUpdates(self.late)
        self._looks = True
        self._due: frozenset[int] = frozenset()
        """Copies with gradients, by id, while it is looked whether ``step_fn`` changes one."""
        self._warnings: list[str] = []
        """What updates have found, for the training thread to say."""
        self._pairs: Sequence[ParameterPair] = ()
        """Of the ``step_fn`` that runs."""
        self._wrong = WrongParameters()

    @property
    def is_inside(self) -> bool:
        """Whether the calling code runs in this model's ``step_fn``."""
        return _RUNNING.get() is self

    @staticmethod
    def running() -> UpdateRunner | None:
        """The one in whose ``step_fn`` the calling code runs."""
        return _RUNNING.get()

    def check_step(self, step_fn: object, is_async: object, kwargs: Mapping[str, Any]) -> None:
        """Raise a `ConfigError` if a step can't be made of these, or here."""
        if not callable(step_fn):
            is_optimizer = isinstance(step_fn, torch.optim.Optimizer)
            given = f"an optimizer, {type(step_fn).__name__}" if is_optimizer else repr(step_fn)
            raise ConfigError(
                f"step_fn is {given}; give a function that does one optimizer step, such as "
                "lambda: (optimizer.step(), optimizer.zero_grad())"
            )
        if not isinstance(is_async, bool):
            raise ConfigError(
                f"is_async is {type(is_async).__name__}; give True or False. What step_fn takes comes behind it: "
                "step(step_fn, True, argument)"
            )
        place = "forward_backward(run_config=RoundPipeRunConfig(...))"
        check_passed_on(step_fn, kwargs, OPTIONS, "step_fn", place)
        if self.is_inside:
            raise ConfigError("step() was called inside step_fn; a step can't contain another one")

    def check_evaluation(self, is_async: bool, adds_gradients: bool) -> None:
        """Raise a `ConfigError` if the model can't be called inside this ``step_fn``."""
        if is_async:
            raise ConfigError(
                f"{self._name} was called inside an asynchronous step_fn, while the next round may be running. An "
                "optimizer that evaluates the loss itself, such as LBFGS, needs step(..., is_async=False)"
            )
        if self.has_shards:
            raise ConfigError(
                f"{self._name} was called inside step_fn, where with shard_optimizer=True this rank has new weights "
                "of its own shard only; call it after the step"
            )
        if self.ranks is not None and adds_gradients:
            raise ConfigError(
                f"{self._name} was trained inside step_fn, where gradients are not averaged over ranks: an optimizer "
                "that evaluates the loss itself, such as LBFGS, needs one process"
            )

    def run(self, step_fn: Callable[[], object], index: int, pairs: Sequence[ParameterPair]) -> Any:
        """What it returns; an error of it gains a note that says in which step it was raised."""
        token, self._pairs = _RUNNING.set(self), pairs
        if self.options.has_changed():
            self._warnings.append(
                "options of the optimizer, such as the learning rate, were changed before an asynchronous update had "
                "read them: which values it takes depends on timing. Put scheduler.step() into the function given to "
                "step, or wait for the update: step(step_fn, is_async=False)"
            )
        if self.options.has_others():
            self._warnings.append(
                "names in an asynchronous step_fn stood for other optimizers when the update was asked for; it is made "
                "by those that they stand for now. Give what changes as an argument, step(step_fn, True, optimizer), "
                "or wait for the update: step(step_fn, is_async=False)"
            )
        try:
            with self._log.doing("update", f"optimizer step {index}"), OptimizerCtx(), self._scalers.running():
                copies = [pair.copy for pair in pairs if pair.copy is not None] if self._looks else []
                self._due = frozenset(id(pair.copy) for pair in pairs if self._looks and pair.has_gradient)
                before = [Fingerprint.of(copy) for copy in copies] if self._due else []
                self._wrong.begin(pairs)
                self.late.begin(pairs)
                result = step_fn()
                found, is_told = self._wrong.found(), False
                if before and self._looks:
                    is_told = self._look(before)
                if found and not is_told:
                    self._warnings.append(found)
                return result
        except BaseException as error:
            if self.ranks is not None:
                self.ranks.update_failed()
            add_note(error, f"roundpipe: raised in step_fn of step {index} of {self._name}")
            raise
        finally:
            self.pieces.after_step()
            self.late.end()
            _RUNNING.reset(token)
            self._pairs = ()

    @property
    def has_shards(self) -> bool:
        """Whether this rank has a part of each gradient."""
        return self.ranks is not None and self.ranks.shard is not None

    def before_step(self, parameters: frozenset[int], *, has_closure: bool) -> None:
        """An optimizer that has these, by id, is about to step in ``step_fn``; fused ones leave no mark."""
        self._wrong.note_optimizer(parameters, has_closure=has_closure)
        if self._looks and not self._due.isdisjoint(parameters):
            self._looks = False
            if _is_called_by(torch.amp.GradScaler):
                if self.has_shards:
                    raise ConfigError(
                        "torch.amp.GradScaler looks for overflows in this rank's part of the gradients alone, so that "
                        f"with shard_optimizer=True {self._name} would be updated on some ranks and not on others; use "
                        "roundpipe.GradScaler, which has the same methods"
                    )
                self._warnings.append(
                    "step_fn uses torch.amp.GradScaler. Its scale stays on the device that scaled the first loss, and "
                    "gradients on the host are unscaled before it has come from there; an asynchronous update also "
                    "changes it while losses are scaled. Use roundpipe.GradScaler, which has the same methods"
                )

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """One that is about to step and has the model's own parameters gets the copies of them."""
        adopt_own(optimizer, self._pairs)

    def copies_of(self, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The same with copies in the place of the model's own parameters, which have no gradients in ``step_fn``."""
        copies: dict[torch.Tensor, torch.Tensor] = {
            pair.parameter: pair.copy for pair in self._pairs if pair.copy is not None
        }
        return [copies.get(each, each) for each in parameters]

    def late_of(self, parameters: Sequence[torch.Tensor]) -> LateGradients | None:
        """Late gradients that can be clipped, together with others of these; None: there are none."""
        if not self.late.has(parameters):
            return None
        if not any(id(each) in self.pieces.away for each in parameters):
            return self.late
        self.late.look(map(id, parameters))  # others are on a device
        return None

    def _look(self, before: Sequence[Fingerprint]) -> bool:
        """Whether ``step_fn`` has changed nothing, which is told of.

        Gradients that it took away, or that a scaler may have refused, were to have no effect.
        """
        if any(copy.is_marked or copy.has_other_values for copy in before):
            self._looks = False
            return False
        gradients = [copy.parameter.grad for copy in before]
        dense = [each for each in gradients if each is not None and each.layout is torch.strided]
        have_effect = any(each.any() for each in dense) and all(each.isfinite().all() for each in dense)
        is_wrong = bool(have_effect and not self._scalers.in_use)
        if is_wrong:
            self._looks = False
            self._warnings.append(
                "step_fn changed none of the parameters that have gradients. Unless that is meant (such as to let "
                "gradients accumulate), the optimizer is made from other parameters: make it from "
                "model.optim_parameters(), or from those of the module that was compiled"
            )
        return is_wrong

    def warn_if_due(self) -> None:
        """Warn, once, in the training thread, of what updates have found."""
        while self._warnings:
            warn(self._warnings.pop(0))


def _is_called_by(kind: type) -> bool:
    """Whether a method of the class is about to return to the calling code."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") != kind.__module__:
        frame = frame.f_back
    return frame.f_globals.get("__name__") == kind.__module__
