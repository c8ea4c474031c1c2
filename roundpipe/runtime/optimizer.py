"""The optimizer's side of a model: its parameters, and the thread that updates them one step behind.

The model side (host weights that devices read, gradients that devices bring down into ``.grad``) and the
optimizer side (copies in ``optim_dtype`` with gradients of their own) meet in two places only:

    step k     wait for update k-1
               per parameter: weights W[k-1] into the model, gradients out of it       `_exchange`
               update k: step_fn, which makes W[k] from W[k-1]                        optimizer thread
    round k+1  trains on W[k-1] meanwhile; after a step that is not asynchronous, on W[k]

so that for SGD ``W[k] = W[k-1] - lr * grad(W[max(k-2, 0)])``.

Invariant: a gradient is in one place, the model's ``.grad`` or the copy's, until `synchronize` shows it:
then the model's ``.grad`` is a view of the copy's, taken back at the next call (`begin_call`) with what
the user did to it. Weights are copied in place, never re-bound: devices read the same memory.

Whether ``step_fn`` is running: `inside_optimizer`, also set by the context manager `OptimizerCtx`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from roundpipe.errors import ClosedError, ConfigError, DeadlockError
from roundpipe.runtime.gate import WeightGate
from roundpipe.runtime.grad_scaler import GradScaler, ScalerScope
from roundpipe.runtime.worker import Worker

__all__ = ["GradScaler", "OptimizerCtx", "OptimizerSide", "ParameterPair", "inside_optimizer"]

DEADLINE_S = 1800.0
"""How long a call waits for an update before it gives up."""

_INSIDE: ContextVar[bool] = ContextVar("roundpipe_inside_optimizer", default=False)
_RUNNING: ContextVar[OptimizerSide | None] = ContextVar("roundpipe_running_optimizer", default=None)


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


class ParameterPair(Protocol):
    """A parameter of the model and the optimizer's copy of it, as others see them."""

    @property
    def names(self) -> Sequence[str]:
        """All of the parameter's names, in the model's order."""

    @property
    def parameter(self) -> nn.Parameter:
        """The model's."""

    @property
    def copy(self) -> nn.Parameter | None:
        """The optimizer's, once it was asked for; it stays when the parameter is frozen."""


@dataclass(slots=True, eq=False)
class _Pair:
    """A parameter of the model and the optimizer's copy of it."""

    names: list[str]
    parameter: nn.Parameter
    copy: nn.Parameter | None = None
    spare: torch.Tensor | None = None
    """Memory for the copy's gradient, kept from step to step where dtypes differ."""
    shown: tuple[torch.Tensor, int, torch.Tensor] | None = None
    """What `synchronize` put into the model's ``.grad``, its version, and the copy's gradient then."""

    def make_copy(self, optim_dtype: torch.dtype | None) -> None:
        """Start the copy from the model's weights."""
        source = self.parameter.detach()
        if source.is_meta:
            raise ConfigError(
                f"parameter {self.names[0]} is on the meta device, so the optimizer can't start from it; "
                "load the model's weights (model.to_empty, from_pretrained) before"
            )
        dtype = source.dtype if optim_dtype is None or not source.is_floating_point() else optim_dtype
        self.copy = nn.Parameter(source.to("cpu", dtype, copy=True))

    def copy_in(self) -> None:
        """The optimizer's weights into the model's."""
        if self.copy is not None:
            self.parameter.copy_(self.copy)

    def take_gradient(self) -> None:
        """The model's gradient into the copy's, added to what is there."""
        gradient, self.parameter.grad = self.parameter.grad, None
        if gradient is None or self.copy is None:
            return
        if self.copy.grad is None:
            self.copy.grad = self._converted(gradient)
        elif self.copy.grad.layout is torch.strided:
            self.copy.grad.add_(gradient.to(self.copy.device))
        else:
            self.copy.grad = self.copy.grad + gradient.to(self.copy.device, self.copy.dtype)

    def _converted(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient of the model as one of the copy: itself if it can be, else in the spare memory."""
        assert self.copy is not None
        gradient = gradient.detach()
        if gradient.dtype == self.copy.dtype and gradient.device == self.copy.device:
            return gradient
        if gradient.layout is not torch.strided:
            return gradient.to(self.copy.device, self.copy.dtype)
        if self.spare is None:
            self.spare = torch.empty_like(self.copy.detach())
        return self.spare.copy_(gradient)

    def show_gradient(self) -> None:
        """The copy's gradient as the model's."""
        if self.copy is None or self.copy.grad is None:
            return
        of_copy = self.copy.grad
        shown = of_copy.to(self.parameter.device, self.parameter.dtype)
        self.parameter.grad = shown
        self.shown = shown, shown._version, of_copy

    def take_back(self) -> None:
        """End what `show_gradient` began; what the user did to the model's ``.grad`` holds for the copy's."""
        if self.shown is None or self.copy is None:
            return
        (shown, version, of_copy), self.shown = self.shown, None
        gradient, self.parameter.grad = self.parameter.grad, None
        if gradient is None:
            self.copy.grad = None
        elif gradient is not shown:
            self.copy.grad = self._converted(gradient)
        elif self.copy.grad is of_copy and shown is not of_copy and shown._version != version:
            self.copy.grad = self._converted(gradient)


@dataclass(slots=True)
class _Update:
    """One asynchronous update: set by the optimizer thread, awaited by the next call that needs it."""

    step_index: int
    started_s: float
    done: threading.Event = field(default_factory=threading.Event)


class OptimizerSide:
    """Copies of a model's trainable parameters, and the updates of them.

    All methods are called from the training thread. ``step_fn`` may do anything with the copies, and
    should leave the rest of the model alone; optimizers that evaluate the loss themselves (LBFGS)
    need a step that is not asynchronous, in which the model may be called after `synchronize`.

    Args:
        named_parameters: names and parameters of the model, in order; a shared parameter may come under
            each of its names and has one copy.
        optim_dtype: dtype of the copies of floating-point parameters; None keeps each parameter's.
        name: of the model, for messages.
        gate: lets an asynchronous step hand over in the optimizer's thread, parameter by parameter; None hands
            all over before `step` returns. Either way the caller starts no step while a round is running.
        deadline_s: how long to wait for an update.

    Raises:
        ConfigError: ``optim_dtype`` is not a floating-point dtype.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        optim_dtype: torch.dtype | None = None,
        *,
        name: str = "model",
        gate: WeightGate | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        if not isinstance(optim_dtype, torch.dtype | None) or not (
            optim_dtype is None or optim_dtype.is_floating_point
        ):
            raise ConfigError(f"optim_dtype is {optim_dtype!r}; give a floating-point torch.dtype, or None")
        self._pairs, self._by_name = _make_pairs(named_parameters)
        self._optim_dtype = optim_dtype
        self._name = name
        self._gate = gate
        self._deadline_s = deadline_s
        self._scalers = ScalerScope()
        self._worker = Worker(f"roundpipe-optimizer-{name}")
        self._finalizer = weakref.finalize(self, self._worker.close)
        self._num_steps = 0
        self._update: _Update | None = None
        self._error: BaseException | None = None
        self._weights_changed = False
        self._gradients_due = False
        self._closed = False

    # ---------------------------------------------------------------------------------- parameters

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """The optimizer's copies of the parameters that are trainable now."""
        for _, parameter in self.optim_named_parameters():
            yield parameter

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The copies with the original names.

        Args:
            prefix: put before each name, with a dot.
            remove_duplicate: give a shared parameter once, under its first name.
        """
        chosen = self._trainable()
        names = {pair.names[0]: pair for pair in chosen}
        if not remove_duplicate:
            names = {name: pair for name, pair in self._by_name.items() if pair.parameter.requires_grad}
        for name, pair in names.items():
            assert pair.copy is not None
            yield (f"{prefix}.{name}" if prefix else name), pair.copy

    def parameter_pairs(self) -> Sequence[ParameterPair]:
        """Every parameter once, frozen ones too; makes no copies, and shows those that are made later."""
        return tuple(self._pairs)

    def _trainable(self) -> list[_Pair]:
        """The pairs of trainable parameters; those that had no copy get one."""
        chosen = [pair for pair in self._pairs if pair.parameter.requires_grad]
        for pair in chosen:
            if pair.copy is None:
                pair.make_copy(self._optim_dtype)
        return chosen

    # --------------------------------------------------------------------------------------- steps

    def step(
        self,
        step_fn: Callable[..., Any],
        is_async: bool = True,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Hand the gradients to the optimizer and update its parameters.

        Args:
            step_fn: does the update; its arguments are ``args`` and ``kwargs``.
            is_async: return at once and let the next round train on the weights before this update; False
                runs ``step_fn`` in this thread and copies its result into the model.

        Raises:
            ConfigError: called inside a ``step_fn``, or ``step_fn`` can't be called.
            ClosedError: the model was closed.
            Exception: whatever the previous asynchronous ``step_fn`` raised, before anything of this step
                happens; whatever this one raises, if it is not asynchronous.
        """
        if not callable(step_fn):
            raise ConfigError(f"step_fn is {step_fn!r}; give a function that does one optimizer step")
        if _RUNNING.get() is self:
            raise ConfigError("step() was called inside step_fn; a step can't contain another one")
        self._ready("step()")
        pairs = self._trainable()
        for pair in self._pairs:
            if pair.copy is not None and not pair.parameter.requires_grad:
                pair.copy.grad = None
        self._scalers.begin_step()
        self._gradients_due = False
        self._num_steps += 1
        if is_async:
            exchanged = None
            if self._gate is None:
                self._exchange(pairs)
            else:
                self._gate.close(pair.parameter for pair in pairs)
                exchanged = pairs
            update = self._update = _Update(self._num_steps, time.monotonic())
            self._worker.submit(lambda: self._run_update(update, exchanged, step_fn, args, kwargs or {}))
            return
        self._exchange(pairs)
        try:
            self._call(step_fn, self._num_steps, args, kwargs or {})
        finally:
            self._copy_in(pairs)
            self._scalers.publish()

    def _run_update(
        self,
        update: _Update,
        exchanged: list[_Pair] | None,
        step_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """One asynchronous update, in the optimizer thread."""
        try:
            if exchanged is not None:
                self._exchange(exchanged)
            self._call(step_fn, update.step_index, args, kwargs)
        except BaseException as error:  # raised again in the training thread
            self._error = error
        finally:
            update.done.set()

    def _call(
        self, step_fn: Callable[..., Any], step_index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        token = _RUNNING.set(self)
        self._weights_changed = True
        try:
            with OptimizerCtx(), self._scalers.running():
                step_fn(*args, **kwargs)
        except BaseException as error:
            error.add_note(f"raised in step_fn of step {step_index} of {self._name}")
            raise
        finally:
            _RUNNING.reset(token)

    @torch.no_grad()
    def _exchange(self, pairs: list[_Pair]) -> None:
        """Latest weights into the model, gradients out of it; opens each parameter as it is done."""
        changed, self._weights_changed = self._weights_changed, False
        try:
            for pair in pairs:
                if changed:
                    pair.copy_in()
                pair.take_gradient()
                if self._gate is not None:
                    self._gate.open([pair.parameter])
        finally:
            if self._gate is not None:
                self._gate.open(pair.parameter for pair in pairs)

    @torch.no_grad()
    def _copy_in(self, pairs: list[_Pair]) -> None:
        self._weights_changed = False
        for pair in pairs:
            pair.copy_in()

    # --------------------------------------------------------------------------------------- calls

    def begin_call(self, adds_gradients: bool = True) -> None:
        """A call into the model begins: raise what ``step_fn`` raised, take back gradients that were shown.

        Args:
            adds_gradients: False leaves gradients shown, for a call that brings no new ones.

        Raises:
            ClosedError: the model was closed.
            Exception: whatever the previous asynchronous ``step_fn`` raised.
        """
        if self._closed:
            raise ClosedError(f"{self._name} was closed; make a new one to go on")
        self.raise_pending()
        for pair in self._pairs if adds_gradients else ():
            pair.take_back()

    def raise_pending(self) -> None:
        """Raise, once, what the previous asynchronous ``step_fn`` raised; does not wait for it."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self, waiter: str = "wait()") -> None:
        """Return when no update is running.

        Args:
            waiter: who waits, for the message.

        Raises:
            DeadlockError: the update did not finish before the deadline.
            ConfigError: called inside an asynchronous ``step_fn``, which would wait for itself.
        """
        update = self._update
        if update is None:
            return
        if _RUNNING.get() is self and not update.done.is_set():
            raise ConfigError(f"{waiter} was called inside an asynchronous step_fn; use step(..., is_async=False)")
        if not update.done.wait(self._deadline_s):
            running_s = time.monotonic() - update.started_s
            raise DeadlockError(
                f"{waiter} of {self._name} waits for update {update.step_index} in thread "
                f"{self._worker.name}, which has been running for {running_s:.0f} s "
                f"(deadline {self._deadline_s:.0f} s)"
            )
        self._update = None

    def _ready(self, waiter: str) -> None:
        if not self._closed:
            self.wait(waiter)
        self.begin_call()

    def synchronize(self) -> None:
        """Wait for everything; then the model holds the latest weights and shows all gradients in ``.grad``.

        Gradients that no step has seen yet stay due for the next one. Inside a ``step_fn`` that is not
        asynchronous it hands over the copies' present values, so that the model can be called on them.
        """
        self._ready("synchronize()")
        if _RUNNING.get() is self:
            self._weights_changed = True
        pairs = [pair for pair in self._pairs if pair.copy is not None and pair.parameter.requires_grad]
        self._gradients_due |= any(pair.parameter.grad is not None for pair in pairs)
        self._exchange(pairs)
        if not self._gradients_due:
            self._scalers.publish()
        for pair in pairs:
            pair.show_gradient()

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, those on the model's side too."""
        self._ready("zero_grad()")
        for pair in self._pairs:
            for holder in (pair.parameter, pair.copy):
                if holder is not None and holder.grad is not None:
                    holder.grad = None if set_to_none else holder.grad.detach().zero_()
        self._gradients_due = False

    @torch.no_grad()
    def refresh(self) -> None:
        """Start the copies again from the model's weights, as after ``load_state_dict``.

        Call `synchronize` before the weights are changed, or an update that is not in the model is lost.
        """
        self._ready("refresh()")
        for pair in self._pairs:
            if pair.copy is not None:
                pair.copy.copy_(pair.parameter)
        self._weights_changed = False

    def rebind(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Follow parameters that were replaced by others of the same names; call it before `refresh`."""
        for name, parameter in named_parameters:
            pair = self._by_name.get(name)
            if pair is not None and pair.parameter is not parameter:
                pair.parameter, pair.shown = parameter, None

    def close(self) -> None:
        """Wait for the running update and end the thread; safe to call twice.

        Raises:
            Exception: whatever an asynchronous ``step_fn`` raised that nobody has seen yet.
        """
        if not self._closed:
            self.wait("close()")
            self._closed = True
            self._finalizer()
        self.raise_pending()


def _make_pairs(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
) -> tuple[list[_Pair], dict[str, _Pair]]:
    """One pair per parameter object, and the pair of each name."""
    pairs: dict[nn.Parameter, _Pair] = {}
    by_name: dict[str, _Pair] = {}
    for name, parameter in named_parameters:
        pair = pairs.setdefault(parameter, _Pair([], parameter))
        pair.names.append(name)
        by_name[name] = pair
    return list(pairs.values()), by_name
