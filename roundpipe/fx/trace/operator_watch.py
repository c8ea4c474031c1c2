"""Sees the operators below the torch functions of one attempt: random draws, writes, what runs below transforms, and
how they lay out activations, for traced code that asks.

Not every real kernel lays its output as its fake does (batch norms, convolutions, fused attention). A layout is
*settled* if it follows from the kind of every operator it rests on. `roundpipe.fx.operations.as_traced` checks it again
when the graph runs, since a leaf may run other operators on another device.

Invariant: an operator that is not listed here settles nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from roundpipe.core.allocations import TorchDispatchMode
from roundpipe.fx.fakes import is_of_no_world, real_world
from roundpipe.fx.sizes import expression_of, flat_tensors

QUESTIONS = frozenset("stride is_contiguous dim_order".split())
"""Names of methods whose answer follows from a tensor's sizes and strides."""
PLACES = frozenset("storage_offset data_ptr".split())
"""Names of methods that tell where a tensor lies, which is another place after every copy."""

_KEEPING = frozenset("clone _to_copy _unsafe_view".split())
"""Operators that lay their output as their input, or as they are told."""
_ALWAYS_CONTIGUOUS = frozenset("mm addmm bmm baddbmm embedding".split())
_CONTIGUOUS_OF_CONTIGUOUS = frozenset(
    "native_layer_norm _fused_rms_norm _softmax _log_softmax native_dropout cat index_select gather sum mean amax amin"
    " cumsum".split()
)
"""Besides pointwise operators and those that take no tensors."""


class OperatorWatch(TorchDispatchMode):
    """Sees every operator that runs; ``on_transformed`` is called with those below a function transform in glue."""

    def __init__(self, on_transformed: Callable[..., None], layouts: LayoutLog | None = None) -> None:
        super().__init__()
        self.layouts = layouts
        self.num_random_draws = 0
        self.below_transform = 0
        self.originals: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """What tensors with data, which are no part of the model, held before the forward wrote them."""
        self._on_transformed = on_transformed

    def undo_real_writes(self) -> None:
        for storage, original in self.originals.values():
            storage.copy_(original)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        random = _draws(func, args, kwargs)
        self.num_random_draws += random
        for tensor in filter(is_of_no_world, written_by(func, args, kwargs) if func._schema.is_mutable else ()):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.originals:
                with real_world():
                    self.originals[storage._cdata] = storage, storage.clone()
        out = func(*args, **kwargs)
        if self.below_transform:
            self._on_transformed(func, args, kwargs, out, random)
        if self.layouts is not None:
            self.layouts.note(func, flat_tensors(args, kwargs), flat_tensors(out))
        return out


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Each argument in an operator's schema, with its value in a call."""
    for index, argument in enumerate(func._schema.arguments):
        yield argument, args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a call of an operator writes in place."""
    aliases = ((argument.alias_info, value) for argument, value in _arguments(func, args, kwargs))
    return flat_tensors([value for alias, value in aliases if alias is not None and alias.is_write])


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator draws random numbers when called like this."""
    return torch.Tag.nondeterministic_seeded in func.tags and not any(
        argument.name in ("dropout_p", "dropout", "p")
        and value == 0
        or argument.name in ("train", "training")
        and value is False
        for argument, value in _arguments(func, args, kwargs)
    )


class LayoutLog:
    """The operator that made each tensor of one run, and its inputs, in order."""

    def __init__(self) -> None:
        self._sources: dict[torch.Tensor, tuple[Any, list[torch.Tensor]]] = {}

    def note(self, func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        for tensor in outputs:
            if not any(tensor is value for value in inputs):
                self._sources[tensor] = (func, inputs)

    def is_settled(self, tensor: torch.Tensor, known: Collection[torch.Tensor]) -> bool:
        """Whether a fake has the real tensor's strides whatever kernels run, as weights and contiguous inputs have."""
        settled = set(known)
        for output, (func, inputs) in self._sources.items():
            if _settles(func, inputs, output, settled):
                settled.add(output)
            if output is tensor:
                break
        return tensor in settled


def _settles(func: Any, inputs: list[torch.Tensor], output: torch.Tensor, settled: set[torch.Tensor]) -> bool:
    name = func._opname if func.namespace == "aten" else ""
    if name in _ALWAYS_CONTIGUOUS:
        return is_contiguous(output)
    if not all(tensor in settled for tensor in inputs):
        return False
    aliases = [value.alias_info for value in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    if name in _KEEPING or name and is_view:
        return True
    is_plain = name in _CONTIGUOUS_OF_CONTIGUOUS or (name and torch.Tag.pointwise in func.tags) or (name and not inputs)
    return bool(is_plain) and all(map(is_contiguous, (*inputs, output)))


def dense_strides(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """The strides of a fake, symbols where they depend on sizes; empty if it is contiguous, None if it has gaps.

    Asks nothing about symbolic sizes, and so takes nothing for granted.
    """
    sizes = [expression_of(size) for size in tensor.shape]
    strides = [expression_of(stride) for stride in tensor.stride()]
    left = [dim for dim, size in enumerate(sizes) if size != 1]
    order: list[int] = []
    expected: Any = 1
    while left:
        dim = next((dim for dim in reversed(left) if strides[dim] == expected), None)
        if dim is None:
            return None
        left.remove(dim)
        order.append(dim)
        expected = expected * sizes[dim]
    return () if order == sorted(order, reverse=True) else tuple(tensor.stride())


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether a fake is contiguous at every size."""
    return dense_strides(tensor) == ()
