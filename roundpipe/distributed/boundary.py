"""What passes from one stage to the next: the carry at a cut as a flat tuple of tensors.

`torch.distributed.pipelining` sends tensors, whose shapes it finds out beforehand on a run without data. So a number
travels as the shape of a tensor without elements, and a constant of the trace does not travel at all. Before torch
2.12 each tensor that arrives must be able to have a gradient, so integers and bools travel as floats of the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.fx import Node

from roundpipe.core.errors import ConfigError
from roundpipe.core.layers import Carry
from roundpipe.fx.graph.nodes import value_of

_FLOATS = {1: torch.float8_e5m2, 2: torch.float16, 4: torch.float32, 8: torch.float64}
"""A dtype with gradients for each number of bytes."""


def can_travel(node: Node) -> bool:
    """Whether a value can be sent to another rank: a plain tensor whose sizes follow from the inputs', or a number."""
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and all(map(_is_known, value.shape))
    return isinstance(value, (int, float)) or (isinstance(value, torch.SymInt) and _is_known(value))


def _is_known(size: int | torch.SymInt) -> bool:
    return not isinstance(size, torch.SymInt) or size.node.hint is not None


@dataclass(frozen=True, slots=True)
class Boundary:
    """The values that are live at a cut."""

    tensors: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    """Of the tensors."""
    sizes: tuple[str, ...] = ()
    """Numbers that depend on the inputs' sizes."""
    constants: tuple[tuple[str, Any], ...] = ()
    """Numbers that the trace fixes."""

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> Self:
        """The boundary at which these values are live; all of them can travel."""
        tensors, dtypes, sizes, constants = [], [], [], []
        for node in nodes:
            value = value_of(node)
            if isinstance(value, torch.Tensor):
                tensors.append(node.name)
                dtypes.append(value.dtype)
            elif isinstance(value, torch.SymInt):
                sizes.append(node.name)
            else:
                constants.append((node.name, value))
        return cls(tuple(tensors), tuple(dtypes), tuple(sizes), tuple(constants))

    def pack(self, carry: Carry, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The values as contiguous tensors on a device, those with a gradient as outputs of one autograd node.

        Schedules that split a backward look for the gradients of weights where paths from weights and from inputs
        meet. Of outputs that don't depend on the inputs, such as a decoder's embedding, they would lose them.
        """
        for name, value in self.constants:
            if carry[name] != value:
                raise ConfigError(
                    f"the value {name} between two stages is {carry[name]!r}; it was {value!r} when traced"
                )
        tensors = joined([_as_floats(carry[name].to(device).contiguous()) for name in self.tensors])
        return (*tensors, *(torch.empty(int(carry[name]), 0, device=device) for name in self.sizes))

    def unpack(self, values: Sequence[torch.Tensor]) -> Carry:
        """The carry that `pack` was given; integers may also be there as they are."""
        if len(values) != len(self.tensors) + len(self.sizes):
            expected = len(self.tensors) + len(self.sizes)
            raise ConfigError(f"expected the {expected} tensors that a stage gives, got {len(values)}")
        tensors, sizes = values[: len(self.tensors)], values[len(self.tensors) :]
        originals = map(_from_floats, tensors, self.dtypes)
        carry: Carry = dict(zip(self.tensors, originals, strict=True))
        carry.update((name, size.shape[0]) for name, size in zip(self.sizes, sizes, strict=True))
        carry.update(self.constants)
        return carry


def _as_floats(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if _can_have_gradient(tensor.dtype) else tensor.view(_FLOATS[tensor.dtype.itemsize])


def _from_floats(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if _can_have_gradient(dtype) else tensor.detach().view(dtype)


def _can_have_gradient(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def joined(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, those with a gradient as outputs of one autograd node that makes gradients contiguous.

    None is one of the arguments as it is, or a view of it for autograd: schedules detach what stages give, in place.
    """
    result = [tensor.detach() for tensor in tensors]
    positions = [index for index, tensor in enumerate(tensors) if tensor.requires_grad and torch.is_grad_enabled()]
    if positions:
        joined = _Join.apply(*(tensors[index] for index in positions))
        for index, tensor in zip(positions, joined, strict=True):
            result[index] = tensor
    return result


class _Join(torch.autograd.Function):
    """The identity on several tensors; their gradients are contiguous."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if gradient is None else gradient.contiguous() for gradient in gradients)
