"""What `torch.compile` has made of a module, made again for a copy of it.

A compiled function is bound to the module that it was made of: its call (``module.compile()``), its forward
(``module.forward = torch.compile(module.forward)``), or the call of the module in a wrapper
(``torch.compile(module)``). A copy that took over such an attribute as it is would run the module that it is a copy of.

Dynamo, which compiles, must not meet code that runs on fakes: it would leave that alone for good, on real tensors too.

How torch marks a compiled function, and where that has its options, is private to torch; known here alone.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.contexts import contextmanager

COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module that has its compiled call, if there is one; every class of modules has it, too."""
_ORIGINAL = "_torchdynamo_orig_callable"
_MARKED = "_torchdynamo_wrapper_id"
"""Whose `_ORIGINAL` it is: decorators copy both to functions of their own. Some versions of torch are without."""
_DISABLED = "_torchdynamo_disable"
_CONTEXT = "self"
"""The variable of a compiled function that compiles other functions with the same options."""
_REGION = "_isolate_recompiles_id"
"""Where such a variable says what it shares compiled code with. Versions of torch before 2.13 are without."""


never_compiled = torch._disable_dynamo
"""Decorates what Dynamo must not look into; `torch.compiler.disable` imports Dynamo at once, which takes seconds."""
WRITTEN = "_roundpipe_as_written"
"""An attribute of copies that run as written although torch has compiled the module."""


def is_compiled(module: nn.Module) -> bool:
    """Whether torch has compiled a module's call or its forward, or that of the module that it is a copy of."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    if WRITTEN in module.__dict__:
        return True
    for call in (getattr(module, COMPILED_CALL), module.forward):
        function = getattr(call, "__func__", call)
        if is_made_by_torch(function) and not hasattr(function, _DISABLED):
            return True
    return False


def is_made_by_torch(function: Any) -> bool:
    """Whether a value is what `torch.compile` or `torch.compiler.disable` gave for a function."""
    if type(function) is not types.FunctionType or _ORIGINAL not in function.__dict__:
        return False
    return bool(function.__dict__.get(_MARKED, id(function)) == id(function))


def as_written(function: Any) -> Any:
    """What was compiled: a function, a method bound to a module, or the module itself if that is called."""
    written = inspect.unwrap(getattr(function, _ORIGINAL), stop=lambda inner: type(inner) is not types.FunctionType)
    is_call = isinstance(written, types.MethodType) and written.__func__ is _CALL
    return written.__self__ if is_call else written


def compiled_like(function: Any, other: Callable[..., Any]) -> Callable[..., Any]:
    """Another function, method or module's call, compiled as a compiled function was."""
    if isinstance(other, nn.Module):
        has_frame = type(getattr(function, _ORIGINAL)) is types.FunctionType
        other = _in_frame(other) if has_frame else other.__call__
    if hasattr(function, _DISABLED):
        disabled: Callable[..., Any] = torch.compiler.disable(other)
        return disabled
    context = _variables_of(function).get(_CONTEXT)
    if context is None:
        return other
    if hasattr(context, _REGION):
        options = vars(context)
        context = object.__new__(type(context))  # `copy` would leave out `dynamic`
        vars(context).update({**options, _REGION: _region_beside(options[_REGION])})
    return _compiled_once(context(other), getattr(other, "__self__", None), _KNOWN.setdefault(function, set()))


@functools.cache
def _region_beside(region: int) -> int:
    """Where torch keeps what it compiles for copies: beside what it has for calls of the user's, with an own limit."""
    apart: Any = {"isolate_recompiles": True}
    number: int = getattr(torch.compile(lambda: None, **apart), _REGION)
    return number


_KNOWN: weakref.WeakKeyDictionary[Callable[..., Any], set[Any]] = weakref.WeakKeyDictionary()
"""Per compiled function, what its copies have been called with."""
_LOCK = threading.RLock()


def _compiled_once(function: Callable[..., Any], owner: Any, known: set[Any]) -> Callable[..., Any]:
    """A compiled function whose calls of a new kind run one at a time, in all threads.

    Torch looks for what it has compiled, and only then waits for other threads that compile: what threads call together
    would be compiled by each. What tells kinds apart here may be less than what torch looks at: then that may happen.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # `is_compiling` is true while another thread compiles, too
            return function(*args, **kwargs)
        tensors = [(each.shape, each.dtype, each.device, each.requires_grad) for each in trees.tensors([args, kwargs])]
        kind = torch.is_grad_enabled(), getattr(owner, "training", None), *tensors
        if kind in known:
            return function(*args, **kwargs)
        with _LOCK:
            result = function(*args, **kwargs)
        known.add(kind)
        return result

    return call


_CALL = nn.Module.__call__


def _in_frame(module: nn.Module) -> Callable[..., Any]:
    """A module's call in a frame that can be compiled: those of torch's own modules are left out."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    return call


def _variables_of(function: types.FunctionType) -> Mapping[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if name == _CONTEXT}


class _Running:
    """How many threads, all told, want what is compiled to run as written: torch has one setting for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._stance: Any = None

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """Inside, what torch has compiled runs as written, and nothing is compiled; in other threads too."""
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._stance = torch.compiler.set_stance("force_eager")
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if not self._count:
                    self._stance.__exit__(None, None, None)


nothing_compiled = _Running().as_written


_OF_ONE: dict[int, int] = {}
"""Limits of compilations that were set here, and what they are for one worker."""


def context_for(num_workers: int) -> contextvars.Context:
    """The context variables of this thread; with them, torch compiles a function as often per worker as for one.

    Above its limit it runs code as written, without a word. Each device counts as another variant, and so do those that
    workers compile at the same time. Older versions of torch have one limit for all threads, which stays as it is here.
    """
    context = contextvars.copy_context()
    if num_workers > 1 and "torch._dynamo" in sys.modules:
        config = sys.modules["torch._dynamo"].config
        limit = _OF_ONE.get(config.recompile_limit, config.recompile_limit)
        if limit * num_workers > config.recompile_limit:
            _OF_ONE[limit * num_workers] = limit
            context.run(setattr, config, "recompile_limit", limit * num_workers)
    return context
