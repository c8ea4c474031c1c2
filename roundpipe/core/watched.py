"""Parameters that tell before somebody looks at them.

The object stays the same while `watch` and `unwatch` change its class, so that whoever has it goes on to have it. Code
of this library and of torch looks unnoticed, unless a caller's code has asked torch to.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any, ParamSpec, SupportsIndex, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
T = TypeVar("T")
_OURS = __name__.partition(".")[0]
_TENSOR: Any = torch.Tensor
_HARMLESS = frozenset(
    (
        *(getattr(_TENSOR, name).__get__ for name in ("requires_grad", "shape", "dtype", "ndim")),
        *(_TENSOR.size, _TENSOR.numel, _TENSOR.dim),
    )
)
"""What is the same wherever a parameter is."""
_OF_GRADIENT = frozenset((_TENSOR.grad.__get__, _TENSOR.grad.__set__, _TENSOR.grad.__delete__))


class WatchedParameter(nn.Parameter):
    """A parameter that is watched; `unwatch` makes it an ordinary one again."""

    _before_look: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _HARMLESS and _is_callers():
            for each in _watched_in((*args, *(kwargs or {}).values())):
                each._tell()
        return nn.Parameter.__torch_function__(func, types, args, kwargs or {})

    def _tell(self) -> None:
        """Say that it is looked at."""
        if (before_look := self.__dict__.get("_before_look")) is not None:
            before_look()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._tell()
        unwatch([self])
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        self._tell()
        unwatch([self])
        return self.__reduce_ex__(protocol)


class LateGradientParameter(WatchedParameter):
    """A parameter that tells before anybody looks at its gradient, or makes a graph that may add to it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OF_GRADIENT or (torch.is_grad_enabled() and func not in _HARMLESS):
            for each in _watched_in((*args, *(kwargs or {}).values())):
                each._tell()
        return nn.Parameter.__torch_function__(func, types, args, kwargs or {})


def watch(
    parameters: Iterable[nn.Parameter],
    before_look: Callable[[], None],
    kind: type[WatchedParameter] = WatchedParameter,
) -> None:
    """Have ``before_look`` called, in its thread, before code looks at one of these or gives it to an operation."""
    for each in parameters:
        if type(each) is nn.Parameter:
            each.__class__ = kind
            each.__dict__["_before_look"] = before_look


def unwatch(parameters: Iterable[Any]) -> None:
    """End `watch`."""
    for each in parameters:
        if isinstance(each, WatchedParameter):
            each.__class__ = nn.Parameter  # type: ignore[assignment]
            each.__dict__.pop("_before_look", None)


def carry_attributes(original: torch.Tensor, other: torch.Tensor) -> None:
    """Give what stands for a parameter the attributes that code has put onto it, and no others."""
    other.__dict__.clear()
    other.__dict__.update(original.__dict__)
    other.__dict__.pop("_before_look", None)


def unnoticed() -> AbstractContextManager[Any]:
    """A context in which this thread's code has parameters, watched or not, as plain tensors: that is faster."""
    return torch._C.DisableTorchFunctionSubclass()


def unseen() -> AbstractContextManager[Any]:
    """A context in which no mode sees what torch functions are called, attributes of tensors among them."""
    return torch._C.DisableTorchFunction()


def is_watched() -> bool:
    """Whether modes see what this thread calls of torch, as while a model is traced."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


def is_transformed_here() -> bool:
    """Whether this thread is inside a transform of torch.func, such as vmap, whose tensors have no memory."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one that vmap or another function transform made."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def has_views(parameter: torch.Tensor) -> bool:
    """Whether other tensors may lie in a parameter's memory, which they would not follow to another place."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count is None or count(parameter.untyped_storage()._cdata) > 2  # the parameter's own, and the look at it


_AROUND_TORCH: set[CodeType] = set()
"""Of functions that count as torch's."""


def counts_as_torch(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates what is put around a function of torch's: who looks by way of it is the one who called it."""
    _AROUND_TORCH.add(function.__code__)
    return function


def _is_callers() -> bool:
    """Whether code is at it that is neither torch's nor this library's."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "").partition(".")[0]
        if name != "torch" and frame.f_code not in _AROUND_TORCH:
            return bool(name != _OURS)
        frame = frame.f_back  # type: ignore[assignment]
    return True


def _watched_in(values: Iterable[Any]) -> Iterable[WatchedParameter]:
    for value in values:
        if isinstance(value, WatchedParameter):
            yield value
        elif isinstance(value, list | tuple):
            yield from _watched_in(value)
