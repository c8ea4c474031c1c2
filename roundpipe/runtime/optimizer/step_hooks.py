"""torch tells of every optimizer's step: hooks and wrapped methods, which ask each model's `PlainSteps`.

torch has no hook for ``zero_grad()`` of an optimizer or a module, so they are wrapped; so are the functions that clip
gradients, which take less time if nobody looks at what they do (`as_on_host.py`), and the methods that read and write
an optimizer's states, which wait for the update.

The hooks stay for the process: another thread may be in the middle of a step, which goes through them one by one.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from roundpipe.core.compiled_modules import never_compiled
from roundpipe.core.errors import ConfigError
from roundpipe.core.watched import counts_as_torch, unseen
from roundpipe.runtime.optimizer.as_on_host import begin_torchs_own, end_torchs_own, torchs_own
from roundpipe.runtime.optimizer.clipping import clip_grad_norm_ as clip_whole_gradients
from roundpipe.runtime.optimizer.pieces import has_hooks
from roundpipe.runtime.optimizer.plain_loop import PlainSteps
from roundpipe.runtime.optimizer.update import UpdateRunner
from roundpipe.runtime.weights.pairs import clear_gradients
from roundpipe.runtime.weights.parameter_pair import original_of

_LOCK = threading.Lock()
_watching: tuple[weakref.ref[PlainSteps], ...] | None = None
"""None: torch has no hooks yet."""


def watch(side: PlainSteps) -> None:
    """Tell it of steps as long as it lives, or until `unwatch`."""
    global _watching
    with _LOCK:
        if _watching is None:
            register_optimizer_step_pre_hook(_before)
            register_optimizer_step_post_hook(_after)
            setattr(torch.optim.Optimizer, "zero_grad", _clear)  # noqa: B010 - not a method of ours, says mypy
            setattr(nn.Module, "zero_grad", _clear_module)  # noqa: B010
            for name in ("state_dict", "load_state_dict"):
                setattr(torch.optim.Optimizer, name, _behind_updates(getattr(torch.optim.Optimizer, name)))
            for name in _CLIPPING:
                setattr(torch.nn.utils, name, _clipping(getattr(torch.nn.utils, name)))
        _watching = (*(each for each in _watching or () if each() is not None), weakref.ref(side))


def unwatch(side: PlainSteps) -> None:
    """Tell it of no more steps."""
    global _watching
    with _LOCK:
        _watching = tuple(each for each in _watching or () if each() not in (None, side))


def _sides() -> Iterator[PlainSteps]:
    return (side for reference in _watching or () if (side := reference()) is not None)


def _ids(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    return frozenset(id(parameter) for group in optimizer.param_groups for parameter in group["params"])


@never_compiled  # it may wait for threads
def _before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if (runner := UpdateRunner.running()) is not None:
        runner.adopt(optimizer)
    parameters = _ids(optimizer) if _watching else frozenset[int]()
    sides = [*_sides()]
    _refuse_copies_of_others(optimizer, sides)
    for side in sides:
        with unseen():
            side.before_step_of(optimizer)
        side.before_plain_step(parameters, type(optimizer).__name__)
    if runner is not None:
        has_closure = any(each is not None for each in (*args[1:], *kwargs.values()))
        runner.before_step(parameters, has_closure=has_closure)
        if not has_closure and type(optimizer).__module__.startswith("torch.optim.") and not has_hooks(optimizer):
            begin_torchs_own()
        runner.pieces.before_step(optimizer, has_closure)


@never_compiled  # it may wait for threads
def _after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    parameters = _ids(optimizer) if _watching else frozenset[int]()
    if (runner := UpdateRunner.running()) is not None:
        end_torchs_own()
        runner.pieces.after_step()
    for side in _sides():
        side.after_plain_step(parameters)


def _refuse_copies_of_others(optimizer: torch.optim.Optimizer, sides: Sequence[PlainSteps]) -> None:
    """An optimizer with copies that a model which is gone or closed has made would leave its successor untrained."""
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]] if sides else []
    originals = ((copy, original_of(copy)) for copy in given)
    left = [(copy, original) for copy, original in originals if original is not None and copy.shape == original.shape]
    left = [each for each in left if not any(side.has_copy(*each) for side in sides)]
    for side in sides if left else ():
        num_due = sum(side.has_new_gradient(original) for _, original in left)
        if num_due:
            raise ConfigError(
                f"{num_due} of the {len(given)} parameters of the optimizer are copies that an earlier compile of the "
                "model has made. They get no gradients any more, so nothing would train these. Make the optimizer "
                "again from model.optim_parameters(), with its state: new.load_state_dict(old.state_dict())"
            )


_clip_grad_norm = torch.nn.utils.clip_grad_norm_
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")


def _clipping(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's for gradients, each where it is, which is not looked at in ``step_fn``."""

    @functools.wraps(function)
    @counts_as_torch
    def clip(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if args and not isinstance(args[0], torch.Tensor):
            args = list(args[0]), *args[1:]
        given = args[0] if args else kwargs.get("parameters")
        if isinstance(given, list) and (runner := UpdateRunner.running()) is not None:
            given = runner.copies_of(given)
            args, kwargs = ((given, *args[1:]), kwargs) if args else (args, {**kwargs, "parameters": given})
            if function is _clip_grad_norm and runner.has_shards:
                return clip_whole_gradients(*args[:4], **{name: kwargs[name] for name in kwargs if name != "foreach"})
            if (late := runner.late_of(given)) is not None:
                if function is _clip_grad_norm:
                    return late.clip(*args, **kwargs)
                late.look(map(id, given))
        elif isinstance(given, (list, torch.Tensor)):
            parameters = frozenset(map(id, given if isinstance(given, list) else [given]))
            for side in _sides():
                side.before_plain_clipping(parameters)
        with torchs_own():
            return function(*args, **kwargs)

    return clip


def _behind_updates(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method by which an optimizer's states are read or written, after the update that is under way."""

    @functools.wraps(method)
    @never_compiled  # it may wait for threads
    def behind(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        parameters = _ids(optimizer) if _watching else frozenset[int]()
        for side in _sides():
            side.before_state(parameters)
        return method(optimizer, *args, **kwargs)

    return behind


_zero_grad = torch.optim.Optimizer.zero_grad


@functools.wraps(_zero_grad)
@never_compiled  # it may wait for threads
def _clear(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    parameters = _ids(optimizer) if _watching else frozenset[int]()
    clear = functools.partial(_zero_grad, optimizer, set_to_none)
    if (runner := UpdateRunner.running()) is not None:
        (runner.late.drop if set_to_none else runner.late.look)(parameters)
    if not any(side.before_plain_clear(parameters, clear) for side in _sides()):
        with torchs_own():
            clear()


_zero_grad_of_module = nn.Module.zero_grad


@functools.wraps(_zero_grad_of_module)
@never_compiled  # it may wait for threads
def _clear_module(module: nn.Module, set_to_none: bool = True) -> None:
    parameters = list(module.parameters()) if _watching else []
    are_cleared = [side.clear_module(parameters, set_to_none) for side in _sides()]
    if not any(are_cleared):
        return _zero_grad_of_module(module, set_to_none)
    others = (parameter for parameter in parameters if not any(side.has(parameter) for side in _sides()))
    clear_gradients(others, set_to_none)
