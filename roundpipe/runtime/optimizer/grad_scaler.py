"""Loss scaling that is safe with an optimizer that runs one step behind.

torch's scaler has one scale. Here the losses of step k+1 are scaled while ``step_fn`` of step k may be changing it, so
there are three. They change hands only between two steps: in `ScalerScope.begin_step`, in the training thread.

    latest     result of the last ``update()``               written in step_fn
    published  multiplies losses, the same in a whole call   := latest   at each step
    unscaling  divides the gradients of the running step     := published, before it changes

Invariant: a gradient is divided by the scale that its loss was multiplied with. Where steps are not asynchronous the
three agree, and the scales are those of ``torch.amp.GradScaler``.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from roundpipe.core.checks import check_count, check_flag, check_type, is_number
from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import ConfigError, shown


class ScalerScope:
    """The scalers that the ``step_fn``s of one model have used."""

    def __init__(self, agree: Callable[[float], Sequence[float]] | None = None) -> None:
        """``agree`` gives the numbers of all ranks that have a part of the gradients."""
        self.agree = agree or (lambda value: [value])
        self.adopt: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None
        """Gives an optimizer the parameters that have gradients in ``step_fn``."""
        self._scalers: weakref.WeakSet[GradScaler] = weakref.WeakSet()

    @property
    def in_use(self) -> bool:
        return bool(self._scalers)

    @contextmanager
    def running(self) -> Iterator[None]:
        """While open, scalers used in this thread belong to the scope."""
        token = _SCOPE.set(self)
        try:
            yield
        finally:
            _SCOPE.reset(token)
            for scaler in list(self._scalers):
                with scaler._lock:
                    scaler._in_step = False
                    if scaler._deferred_update is not None:
                        scaler._apply_update(*scaler._deferred_update)

    def begin_step(self) -> None:
        """A step begins; the previous one has finished."""
        for scaler in list(self._scalers):
            with scaler._lock:
                scaler._forget_step()
                scaler._unscaling, scaler._published, scaler._in_step = scaler._published, scaler._latest, True

    def state(self) -> list[tuple[GradScaler, tuple[float | None, float, bool]]]:
        """What `begin_step` changes, for `restore`."""
        return [(each, (each._unscaling, each._published, each._in_step)) for each in list(self._scalers)]

    def restore(self, state: list[tuple[GradScaler, tuple[float | None, float, bool]]]) -> None:
        """Undo a `begin_step` whose update could not be begun."""
        for scaler, values in state:
            with scaler._lock:
                scaler._unscaling, scaler._published, scaler._in_step = values

    def publish(self) -> None:
        """No gradient is under way: losses may be scaled by the latest scale."""
        for scaler in list(self._scalers):
            with scaler._lock:
                scaler._published = scaler._latest


_SCOPE: ContextVar[ScalerScope | None] = ContextVar("roundpipe_scaler_scope", default=None)


class GradScaler:
    """``torch.amp.GradScaler`` for `RoundPipe.step`, asynchronous or not.

    Use ``scale`` in ``loss_fn`` and ``unscale_``, ``step`` and ``update`` in ``step_fn``; ``update`` may also
    follow ``model.step(...)`` in the training loop. A gradient that overflowed skips ``optimizer.step``.

    Args:
        device: accepted because torch's class has it; losses and gradients may be on any device.
        init_scale: scale of the first losses.
        growth_factor: the scale grows by this after ``growth_interval`` steps without overflow.
        backoff_factor: an overflow makes the scale this times the scale that overflowed.
        growth_interval: steps without overflow before the scale grows.
        enabled: False makes everything but ``optimizer.step`` do nothing.

    Raises:
        ConfigError: a factor that does not grow or back off; also a `ValueError`.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        check_type("device", device, str | torch.device | None, "the name of a device, or None")
        _check_between("init_scale", init_scale, 0.0, math.inf)
        _check_between("growth_factor", growth_factor, 1.0, math.inf)
        _check_between("backoff_factor", backoff_factor, 0.0, 1.0)
        check_count("growth_interval", growth_interval, "a number of steps, at least 1")
        check_flag("enabled", enabled)
        self._growth_factor = float(growth_factor)
        self._backoff_factor = float(backoff_factor)
        self._growth_interval = growth_interval
        self._enabled = enabled
        self._latest = self._published = float(init_scale)
        self._unscaling: float | None = None
        self._growth_tracker = 0
        self._overflowed: dict[torch.optim.Optimizer, bool] = {}
        self._stepped: set[torch.optim.Optimizer] = set()
        self._scoped = self._in_step = False
        self._deferred_update: tuple[float | None] | None = None
        self._lock = threading.Lock()

    def scale(self, outputs: Any) -> Any:
        """A loss, or a list or tuple of losses, times the scale of this step."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            return outputs * torch.full((), self._published, dtype=torch.float32, device=outputs.device)
        if isinstance(outputs, list | tuple):
            return type(outputs)([self.scale(output) for output in outputs])
        raise ConfigError(f"scale(outputs) got a {type(outputs).__name__}; give a tensor, or a list or tuple of them")

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer's parameters by the scale of their losses.

        Raises:
            ConfigError: called twice in one step, or the gradients are float16.
        """
        _check_optimizer(optimizer)
        if not self._enabled:
            return
        self._enter_scope()
        if optimizer in self._overflowed:
            raise ConfigError("unscale_() was called twice for this optimizer since the last update()")
        inverse, scope = 1.0 / self._scale_used, _SCOPE.get()
        if scope is not None:
            scope.adopt(optimizer)
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        overflows = [_unscale(parameter, inverse) for parameter in parameters if parameter.grad is not None]
        self._overflowed[optimizer] = any(overflows if scope is None else scope.agree(any(overflows)))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(*args, **kwargs)`` on unscaled gradients, or nothing if they overflowed.

        Returns:
            What ``optimizer.step`` returned; None if it was skipped.

        Raises:
            ConfigError: called twice in one step, or with a closure that is not None.
        """
        _check_optimizer(optimizer)
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if any(each is not None for each in (*args, kwargs.pop("closure", None))):
            raise ConfigError("GradScaler.step() takes no closure; evaluate the loss before the step")
        self._enter_scope()
        if optimizer in self._stepped:
            raise ConfigError("step() was called twice for this optimizer since the last update()")
        if optimizer not in self._overflowed:
            self.unscale_(optimizer)
        self._stepped.add(optimizer)
        return None if self._overflowed[optimizer] else optimizer.step(**kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale to whether this step's gradients overflowed, or set it.

        Called while ``step_fn`` runs in another thread, or has yet to, it takes effect when that is done.
        """
        if not self._enabled:
            return
        if isinstance(new_scale, torch.Tensor) and new_scale.numel() == 1:
            new_scale = new_scale.item()
        if new_scale is not None:
            _check_between("new_scale", new_scale, 0.0, math.inf)
        value = None if new_scale is None else float(new_scale)
        inside = _SCOPE.get() is not None
        with self._lock:
            if not inside and (self._in_step or (not self._overflowed and value is None)):
                self._deferred_update = (value,)
            else:
                self._apply_update(value)

    @property
    def _scale_used(self) -> float:
        """What the losses were multiplied with whose gradients are the optimizer's now."""
        return self._published if self._unscaling is None else self._unscaling

    def _apply_update(self, new_scale: float | None) -> None:
        if new_scale is not None:
            self._latest = new_scale
        elif any(self._overflowed.values()):
            # A later loss may have been scaled, and have overflowed, before this was known: back off once.
            self._latest = min(self._latest, self._scale_used * self._backoff_factor)
            self._growth_tracker = 0
        elif self._overflowed:
            self._growth_tracker += 1
            if self._growth_tracker >= self._growth_interval:
                self._latest *= self._growth_factor
                self._growth_tracker = 0
        self._forget_step()
        if not self._scoped:
            self._published = self._latest

    def _forget_step(self) -> None:
        self._overflowed.clear()
        self._stepped.clear()
        self._deferred_update = None

    def _enter_scope(self) -> None:
        scope = _SCOPE.get()
        if scope is not None and self not in scope._scalers:
            scope._scalers.add(self)
            with self._lock:
                self._scoped = self._in_step = True

    def get_scale(self) -> float:
        """The latest scale inside ``step_fn``, elsewhere the scale of the losses of this step."""
        if not self._enabled:
            return 1.0
        return self._published if _SCOPE.get() is None else self._latest

    def get_growth_factor(self) -> float:
        """Factor by which the scale grows."""
        return self._growth_factor

    def get_backoff_factor(self) -> float:
        """Factor by which the scale backs off."""
        return self._backoff_factor

    def get_growth_interval(self) -> int:
        """Steps without overflow before the scale grows."""
        return self._growth_interval

    def is_enabled(self) -> bool:
        """Whether losses are scaled."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """The state, with the keys of ``torch.amp.GradScaler``; call ``model.synchronize()`` before."""
        if not self._enabled:
            return {}
        return {
            "scale": self._latest,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, of this class or of ``torch.amp.GradScaler``.

        Raises:
            ConfigError: the state is that of a disabled scaler, or of something else.
        """
        if not self._enabled:
            return
        check_type("state_dict", state_dict, Mapping, "the state of a GradScaler")
        if not state_dict:
            raise ConfigError("load_state_dict(state_dict) got an empty state, as a disabled GradScaler gives it")
        missing = [key for key in self.state_dict() if key not in state_dict]
        if missing:
            raise ConfigError(f"state_dict is without {', '.join(missing)}; give one of a GradScaler")
        for key in self.state_dict():
            if not is_number(state_dict[key]):
                raise ConfigError(f"state_dict[{key!r}] is {shown(state_dict[key])}; give the state of a GradScaler")
        with self._lock:
            self._latest = self._published = float(state_dict["scale"])
            self._unscaling = None
            self._growth_factor = float(state_dict["growth_factor"])
            self._backoff_factor = float(state_dict["backoff_factor"])
            self._growth_interval = int(state_dict["growth_interval"])
            self._growth_tracker = int(state_dict["_growth_tracker"])
            self._forget_step()


def _check_between(name: str, value: Any, least: float, most: float) -> None:
    if not (is_number(value) and least < value < most):
        raise ConfigError(f"GradScaler: {name}={shown(value)}; give a number between {least:g} and {most:g}")


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        raise ConfigError(f"optimizer is {type(optimizer).__name__}; give a torch.optim.Optimizer")


def _unscale(parameter: torch.Tensor, inverse: float) -> bool:
    """Scale one gradient in place; whether it holds an infinity or a NaN."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.dtype == torch.float16:
        raise ConfigError(
            "unscale_() got float16 gradients, which would underflow; keep the optimizer's parameters in "
            "float32: RoundPipe(..., optim_dtype=torch.float32)"
        )
    if gradient.is_sparse:
        gradient = parameter.grad = gradient.coalesce()
        gradient = gradient.values()
    gradient.mul_(inverse)
    return gradient.numel() > 0 and not torch.isfinite(torch.linalg.vector_norm(gradient, ord=float("inf"))).item()
