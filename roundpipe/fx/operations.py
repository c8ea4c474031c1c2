"""What a graph node calls when Python has no plain function for it.

A ``call_function`` node needs a callable with a name: assignments, size arithmetic, custom autograd
functions and the building of argument objects get theirs here. Generated code calls them too.

Invariant: each is deterministic given its operands and its own constant fields, and deep-copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch import nn

from roundpipe.core import trees
from roundpipe.core.errors import TraceError
from roundpipe.core.layers import Carry
from roundpipe.core.modes import Modes


def call_leaf(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What calling a leaf means: hooks and forward; a ``__call__`` of its class's own around them is glue, traced."""
    if overrides_call(type(module)):
        return nn.Module.__call__(module, *args, **kwargs)
    return module(*args, **kwargs)


def overrides_call(kind: type[nn.Module]) -> bool:
    """Whether calling a module runs code of the user's around what `nn.Module` does."""
    if issubclass(kind, (torch.fx.GraphModule, torch.jit.ScriptModule)):
        return False
    return any("__call__" in vars(owner) for owner in kind.__mro__ if not owner.__module__.startswith("torch."))


def call_method(operand: Any, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """``operand.name(*args, **kwargs)``."""
    return getattr(operand, name)(*args, **kwargs)


def set_item(target: Any, index: Any, value: Any) -> Any:
    """``target[index] = value``, returning the target."""
    target[index] = value
    return target


def set_property(target: Any, name: str, value: Any) -> Any:
    """``target.name = value`` for a tensor's property, returning the target."""
    setattr(target, name, value)
    return target


def with_requires_grad(tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
    """``tensor.requires_grad_(requires_grad)`` as a tensor of its own on the same memory."""
    if tensor.requires_grad is requires_grad or not torch.is_grad_enabled():
        return tensor
    return tensor.detach().requires_grad_(requires_grad)


def assign_buffer(buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The effect of ``module.buffer = value``; the buffer object stays, so that every holder sees it.

    As a node: ``call_function assign_buffer (get_attr of the buffer, value)``, with ``mutates`` the
    get_attr. What the forward reads from the attribute afterwards is ``value`` itself.
    """
    value = value.detach()
    with torch.no_grad():
        if value.shape == buffer.shape and value.dtype == buffer.dtype:
            buffer.copy_(value)
        else:
            buffer.data = value.to(buffer.device, copy=True)
    return buffer


def pass_on(carry: Carry, names: tuple[str, ...], outputs: Carry) -> Carry:
    """The next carry: what a layer made, and those of the values read further on that came with it."""
    for name in names:
        if name in carry:
            outputs[name] = carry[name]
    return outputs


def hang_on(tensor: torch.Tensor, method: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a method that installs a hook, if gradients will flow; without autograd there are none."""
    if tensor.requires_grad:
        return getattr(tensor, method)(*args, **kwargs)
    return None


def as_traced(tensor: torch.Tensor, strides: tuple[int, ...], location: str) -> torch.Tensor:
    """The tensor itself, whose layout the model's code asked for.

    Args:
        strides: those that it was traced with; empty: it is contiguous.
        location: where the code asked.

    Raises:
        TraceError: it lies otherwise, so that the code might go another way.
    """
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=False)
    if all(size <= 1 or stride == expected for size, stride, expected in pairs) if strides else tensor.is_contiguous():
        return tensor
    raise TraceError(
        f"the model's code at {location} asked how a tensor lies in memory, and was traced with strides "
        f"{strides or 'of a contiguous tensor'}; on {tensor.device} its strides are {tuple(tensor.stride())}. Call "
        "contiguous() on the tensor before asking, or keep the code that asks in a submodule"
    )


def take(value: Any, kind: str, key: Any) -> Any:
    """The child of a structure at one step, for children that neither ``[]`` nor ``.`` reaches."""
    return trees.get(value, (trees.Access(kind, key),))


MATH_FUNCTIONS = tuple("exp expm1 log log2 log10 log1p sqrt sin cos tan sinh cosh tanh asin acos atan erf".split())
"""Of one number, which a size or number of a graph may be made by: as ``math_exp`` and so on."""


class Factor(float):
    """A number that is an input of a graph, and of which no size is made: calls that differ in it are of one kind."""

    __slots__ = ()


class Count(int):
    """The same of an integer."""

    __slots__ = ()


def without_size(number: float) -> float:
    """A number of which no size is made."""
    return Factor(number) if isinstance(number, float) else Count(number)


def number_of(value: Any, example: float) -> Any:
    """The number that is an input of a graph; of a fake that stands for it, the example's."""
    if isinstance(value, torch.Tensor):
        return example
    if isinstance(value, (Factor, Count)):
        return float(value) if isinstance(value, float) else int(value)
    return value


class _Named:
    """A callable that prints as a function: code generation asks for these attributes."""

    __module__ = __name__

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name if name.isidentifier() else "call"

    def __repr__(self) -> str:
        return self.__name__


def is_operator(function: Any) -> bool:
    """Whether a function is an operator of the registry, torch's own or another's, and no Python function."""
    return isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


class NamedCall(_Named):
    """A callable that generated code can name, which enters modes around the call if there are any."""

    def __init__(self, name: str, function: Callable[..., Any], modes: Modes | None = None) -> None:
        super().__init__(name)
        self.function = function
        self.modes = modes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.modes is None:
            return self.function(*args, **kwargs)
        with self.modes.enter():
            return self.function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NamedCall:
        return self


class SizeExpression(_Named):
    """Evaluates Python source over ``names``, which are the sizes that it is called with, in order."""

    def __init__(self, source: str, names: tuple[str, ...]) -> None:
        super().__init__("size_expression")
        self.source = source
        self.names = names
        scope = {"math": math, "torch": torch, "min": min, "max": max, "abs": abs, "int": int, "float": float}
        scope |= {f"math_{name}": getattr(math, name) for name in MATH_FUNCTIONS}
        self._function = eval(f"lambda {', '.join(names)}: {source}", scope)  # printed by torch from a size expression

    def __call__(self, *sizes: int) -> Any:
        return self._function(*sizes)

    def __reduce__(self) -> tuple[Any, ...]:
        return SizeExpression, (self.source, self.names)

    def __repr__(self) -> str:
        return f"size_expression({self.source})"


class Hole:
    """A place in a template that a value fills."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Hole()"


class Build(_Named):
    """Builds an object around values, such as a dataclass or cache that a module takes as argument.

    Its template is the object with a `Hole` in place of each value, in the order of `roundpipe.core.trees.walk`.
    """

    def __init__(self, template: Any) -> None:
        super().__init__(f"build_{type(template).__name__}")
        self.template = template

    def __call__(self, *values: Any) -> Any:
        remaining = iter(values)
        return trees.map_leaves(self.template, lambda leaf: next(remaining) if isinstance(leaf, Hole) else leaf)
