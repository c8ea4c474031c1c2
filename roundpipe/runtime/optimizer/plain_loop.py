"""Optimizers that the training loop steps by itself, without `RoundPipe.step`:

    loss = model(x); loss.backward(); optimizer.step(); optimizer.zero_grad()

torch tells of every optimizer's step. One of the copies, or of the model's own parameters, is an update that is waited
for: before it everything under way ends, behind it the copies go into the model. That clipping and unscaling find the
gradients in between is seen to where a backward ends (`OptimizerSide.end_call`).

Beside `RoundPipe.step` an optimizer's ``zero_grad()`` is looked at, too: it waits behind an update that has yet to read
the gradients, and takes those of a round that no step has taken. So does that of the module, which else would clear
what an update is taking, and leave the copies' gradients. `step_hooks` is where torch tells of all that.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from roundpipe.core.caller import warn
from roundpipe.core.errors import ConfigError
from roundpipe.runtime.optimizer.grad_scaler import ScalerScope
from roundpipe.runtime.optimizer.late_gradients import FirstGradients
from roundpipe.runtime.optimizer.update import UpdateRunner, inside_optimizer
from roundpipe.runtime.optimizer.update_thread import UpdateThread
from roundpipe.runtime.optimizer.wrong_parameters import ABOUT_HOOKS, have_hooks
from roundpipe.runtime.ranks.turns import Ranks
from roundpipe.runtime.weights.gate import Gates, Steps
from roundpipe.runtime.weights.master_weights import MasterWeights, take_writes
from roundpipe.runtime.weights.pairs import clear_gradients
from roundpipe.runtime.weights.parameter_pair import ParameterPair

_BY_TENSOR = ("Adafactor", "LBFGS", "LARS", "Lamb", "LAMB", "Muon", "Shampoo", "SOAP")
"""Optimizers, by name, whose update of an element depends on the tensor that it is in."""


class PlainSteps(ABC):
    """What an `OptimizerSide` does around such a step."""

    _pairs: MasterWeights
    _name: str
    _gates: Gates
    _steps: Steps
    _ranks: Ranks | None
    _scalers: ScalerScope
    _runner: UpdateRunner
    _updates: UpdateThread
    _weights_changed: bool
    _is_settled: bool
    is_calling: bool
    _closed: bool

    def __init__(self) -> None:
        self.num_steps = 0
        """Steps made so far, asynchronous ones as soon as they are asked for."""
        self.is_async = False
        """Whether the last step was asynchronous."""
        self._loop: Literal["unknown", "steps", "copies", "own"] = "unknown"
        """How the training loop updates: by `RoundPipe.step`, or by itself the copies or the model's own parameters."""
        self._has_told_of_hooks = False
        self._stepping: list[ParameterPair] = []
        """Pairs whose copies a loop's own optimizer is about to change, or was when it raised."""
        self._has_new_gradients = False
        """Whether a call may have brought gradients since the last step."""
        self.is_trained_elsewhere = False
        """Whether a loss of another model may have added gradients to the model's parameters."""
        self.adds_up = False
        """Whether rounds add to gradients that those before have brought, as no step has taken them."""
        self._evaluates = False
        """Whether a ``step_fn`` has called the model."""
        self._first = FirstGradients()
        self._caller: int | None = None
        """The thread of the latest call."""

    @abstractmethod
    def synchronize(self) -> None: ...

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None: ...

    @abstractmethod
    def come_home(self) -> None: ...

    @abstractmethod
    def before_step_of(self, optimizer: torch.optim.Optimizer) -> None: ...

    @abstractmethod
    def _ready(self, waiter: str) -> None: ...

    @abstractmethod
    def _write_now(self, pairs: Sequence[ParameterPair]) -> None: ...

    @property
    def is_callers(self) -> bool:
        """Whether the calling code runs in the thread of the latest call, if there was one, and not for a step."""
        return self._caller in (None, threading.get_ident()) and not self._steps.is_inside

    def note_round(self, adds_gradients: bool) -> None:
        """A round is about to begin."""
        self.adds_up |= adds_gradients and self._has_new_gradients

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether it is one of the model's own parameters."""
        return self._pairs.has(parameter)

    def has_copy(self, copy: torch.Tensor, parameter: torch.Tensor) -> bool:
        """Whether it is the copy that an optimizer should have of a parameter."""
        pair = self._pairs.of(parameter)
        return not self._closed and pair is not None and pair.copy is copy

    def has_new_gradient(self, parameter: torch.Tensor) -> bool:
        """Whether a gradient of one of the model's own parameters waits for the step that is about to be made."""
        if self._closed or (pair := self._pairs.of(parameter)) is None:
            return False
        return pair.has_gradient if self._runner.is_inside else self._has_new_gradients and self._loop != "steps"

    def _before_look(self) -> None:
        """Code asks for the copies: between a round and its step, to clip the round's gradients, which come now."""
        if self._loop not in ("steps", "unknown") or self._ranks is not None or self._closed:
            return
        is_edited = self._is_settled and not all(pair.is_shown for pair in self._pairs)
        is_first = self._loop == "unknown" and self._has_new_gradients and not self._pairs.with_copies()
        is_due = is_edited or is_first or (self._loop == "steps" and self._has_new_gradients)
        if is_due and self.is_callers and not self.is_calling and not self._runner.is_inside:
            if is_first:
                self._pairs.trainable()  # makes them, so that they get gradients that have come before
            self.synchronize()

    def before_plain_clipping(self, parameters: frozenset[int]) -> None:
        """Gradients of these, by id, are about to be clipped, or measured for that, outside of ``step_fn``."""
        if any(id(pair.copy) in parameters for pair in self._pairs):
            self._before_look()

    def before_plain_step(self, parameters: frozenset[int], kind: str) -> None:
        """An optimizer of some class that has these, by id, is about to step; in ``step_fn``, that is nothing new."""
        if self._runner.is_inside and self._runner.has_shards and kind in _BY_TENSOR:
            raise ConfigError(
                f"{kind} looks at whole tensors, and with shard_optimizer=True {self._name} gives it parts of them; "
                "take an optimizer that works element by element, such as AdamW, or shard_optimizer=False"
            )
        if self._closed or self._runner.is_inside or not self._gates.board.is_here:
            return
        stepping = [pair for pair in self._pairs if pair.copy is not None and id(pair.copy) in parameters]
        if not stepping and not any(id(pair.parameter) in parameters for pair in self._pairs):
            return
        if self._ranks is not None:
            raise ConfigError(
                f"an optimizer of {self._name} was stepped outside of model.step(...), which averages the gradients "
                "over the ranks of process_group=; put optimizer.step() into a step_fn"
            )
        if inside_optimizer() and self._caller not in (None, threading.get_ident()):
            raise ConfigError(
                f"an optimizer of {self._name} was stepped inside the step_fn of another model, whose updates or "
                "losses run in other threads than calls of this one; give each model a step of its own"
            )
        self._steps.refuse_inside("optimizer.step()")
        self.come_home()
        is_late = self._has_new_gradients and any(self._loop == "steps" or pair.is_unseen for pair in stepping)
        is_late &= not self._first.end()
        mixed = " Do not mix optimizer.step() with model.step(...)" if self._loop == "steps" else ""
        self.is_async, self._loop = False, "copies" if stepping else "own"
        is_quiet = self._updates.is_idle and not self._weights_changed and not self._steps.running()
        if not (is_quiet and all(pair.is_shown for pair in self._pairs)):
            self.synchronize()
        if is_late:
            warn(
                "gradients came to the optimizer's copies only when optimizer.step() was called: if they were clipped "
                f"or unscaled before it, that had no effect.{mixed}"
            )
        if not self._has_told_of_hooks and have_hooks(stepping):
            self._has_told_of_hooks = True
            warn(ABOUT_HOOKS)
        if stepping:
            take_writes(self._pairs.with_copies(), has_update=False)
        self._stepping = stepping
        self.num_steps += self._has_new_gradients
        self._has_new_gradients = False

    def after_plain_step(self, parameters: frozenset[int]) -> None:
        """It has stepped: what it made of the copies goes into the model."""
        stepping, self._stepping = self._stepping, []
        if stepping and not self._runner.is_inside:
            self._updates.run(stepping, self._write_now)
            self._scalers.publish()

    def before_state(self, parameters: frozenset[int]) -> None:
        """The states of an optimizer that has these, by id, are about to be read or written."""
        if self._closed or self._updates.is_idle or self._runner.is_inside or not self._gates.board.is_here:
            return
        if any(id(pair.copy) in parameters for pair in self._pairs):
            self._updates.wait("a read of an optimizer's states")

    def before_plain_clear(self, parameters: frozenset[int], clear: Callable[[], None]) -> bool:
        """An optimizer that has these, by id, is about to clear their gradients; true: done behind the update."""
        if self._closed or self.is_calling or self._runner.is_inside or not self.is_callers:
            return False
        copies = {id(pair.copy): pair for pair in self._pairs if pair.copy is not None}
        cleared = [copies[each] for each in parameters if each in copies]
        is_quiet = self._updates.is_idle and not self._steps.running()
        if self._loop != "steps" and not is_quiet:
            return False
        # a batch that is left out, what is shown, and what other backwards add to the model itself
        is_due = self._has_new_gradients or self._is_settled or self.is_trained_elsewhere
        if cleared and (is_quiet or is_due):
            if is_due and self._loop == "steps":
                self._ready("optimizer.zero_grad()")
            for pair in cleared:
                pair.holder.grad = pair.parameter.grad = None
            self._has_new_gradients &= len(cleared) < len(copies)
            self.is_trained_elsewhere &= len(cleared) < len(copies)
        elif cleared and len(cleared) == len(parameters):
            return self._updates.after_update(clear)
        elif cleared:
            self._updates.wait("optimizer.zero_grad()")
        return False

    def clear_module(self, parameters: Sequence[torch.Tensor], set_to_none: bool) -> bool:
        """Clear gradients of these by `zero_grad`, or behind the update, if updates are made of copies; else false."""
        is_callers = not self.is_calling or self._runner.is_inside
        if self._closed or self._loop not in ("steps", "copies") or not is_callers or not self._gates.board.is_here:
            return False
        given = set(parameters)
        own = [pair for pair in self._pairs if pair.parameter in given]
        if own and own == [*self._pairs]:
            self.zero_grad(set_to_none)
        elif own:
            if not self._runner.is_inside:
                self._ready("zero_grad()")
            clear_gradients((each for pair in own for each in (pair.copy, pair.holder, pair.parameter)), set_to_none)
        return bool(own)
