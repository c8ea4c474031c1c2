"""Outputs in microbatches that are put together only when somebody looks.

Shape, dtype and place in the autograd graph are there at once, the data when first used:

    pieces --Merge--> LazyBatch --Pieces--> the same pieces, for another part
                           `--------------> whatever host code does, on the pieces put together

Both directions are nodes of autograd, so hooks, ``retain_grad`` and gradients are those of one tensor. This file is
the only user of torch's wrapper subclasses.

Invariant: whatever is done with a `LazyBatch` gives what the merged tensor would give.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.storages import without_memory
from roundpipe.runtime.microbatch.merge import RoundPipePackedData, merge_value


class LazyBatch(torch.Tensor):
    """A batch that still is in pieces; made by `merge_lazily`."""

    _pieces: list[torch.Tensor]
    events: list[Any]
    """End of the transfer of each piece."""
    _whole: torch.Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(pieces: Sequence[torch.Tensor], events: Sequence[Any]) -> LazyBatch:
        """The tensor that these pieces make up along dim 0, in no autograd graph."""
        form = torch.cat(
            [torch.empty_strided(piece.shape, piece.stride(), dtype=piece.dtype, device="meta") for piece in pieces]
        )
        first = pieces[0]
        tensor: LazyBatch = without_memory(LazyBatch, form.shape, form.stride(), dtype=first.dtype, device=first.device)
        tensor._pieces, tensor.events = [piece.detach() for piece in pieces], list(events)
        tensor._whole = None
        return tensor

    @property
    def sizes(self) -> list[int]:
        """Samples of each piece."""
        return [len(piece) for piece in self._pieces]

    def pieces(self) -> list[torch.Tensor]:
        """What it consists of, without gradients; see ``events`` for when they may be read."""
        return [piece.detach() for piece in self._pieces]

    def whole(self) -> torch.Tensor:
        """The data of all, without gradients."""
        if self._whole is None:
            packed = RoundPipePackedData(self._pieces, self.events)
            packed.synchronize()
            with torch.no_grad(), torch.inference_mode(False):
                self._whole = torch.cat(self._pieces)
                self._pieces = list(self._whole.split(self.sizes))  # what is written into the one, the others have too
        return self._whole

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        lazy = [tensor for tensor in trees.tensors((args, kwargs)) if isinstance(tensor, LazyBatch)]
        by_whole = {id(tensor.whole()): tensor for tensor in lazy}
        args, kwargs = trees.map_tensors((args, kwargs or {}), _whole_of)
        result = func(*args, **kwargs)
        return trees.map_tensors(result, lambda tensor: by_whole.get(id(tensor), tensor))  # what was written in place

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return repr(materialize(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return materialize(self).detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    # what reads memory, or gives other memory, without calling an operation

    @property
    def data(self) -> torch.Tensor:
        return self.whole().detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        value = _whole_of(value).detach()
        form = LazyBatch.of([value], [None])
        torch.Tensor.data.__set__(self, form)  # type: ignore[attr-defined]  # shape and dtype
        self._whole, self._pieces, self.events = value, [value], [None]

    def tolist(self) -> Any:
        return self.whole().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return materialize(self).numpy(force=force)

    def data_ptr(self) -> int:
        return self.whole().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.whole().untyped_storage()


def _whole_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.whole() if isinstance(tensor, LazyBatch) else tensor


def materialize(tensor: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor in place of a `LazyBatch`, in the same autograd graph; other tensors as they are."""
    return tensor.view_as(tensor) if isinstance(tensor, LazyBatch) else tensor


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, events: Sequence[Any], *pieces: torch.Tensor) -> torch.Tensor:
        ctx.sizes = [len(piece) for piece in pieces]
        return LazyBatch.of(pieces, events)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if isinstance(gradient, LazyBatch) and gradient.sizes == ctx.sizes:
            return None, *gradient.pieces()
        return None, *gradient.split(ctx.sizes)


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: LazyBatch) -> tuple[torch.Tensor, ...]:
        return tuple(batch.pieces())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return LazyBatch.of(gradients, [None] * len(gradients))


def merge_lazily(value: Any, depth: int = 0) -> Any:
    """An output of ``merge_output=False``: packed tensors put together when somebody looks, other values at once.

    Raises:
        MicrobatchError: the values of the microbatches can't be put together.
    """
    if isinstance(value, RoundPipePackedData):
        if len(value) > 1 and _are_pieces(value):
            return _Merge.apply(value.events, *value)
        value.synchronize()
        return value[0] if len(value) == 1 else merge_value(list(value), None, ())
    old = [child for _, child in (trees.children(value) if depth < trees.MAX_DEPTH else None) or ()]
    new = [merge_lazily(child, depth + 1) for child in old]
    return value if all(map(operator.is_, old, new)) else trees.with_children(value, new)


def _are_pieces(values: Sequence[Any]) -> bool:
    """Whether these are tensors that differ in their number of samples at most."""
    if not all(type(value) is torch.Tensor and value.ndim > 0 for value in values):
        return False
    return len({(value.dtype, value.device, value.shape[1:]) for value in values}) == 1


def repack(value: Any, sizes: list[int] | None) -> Any:
    """Arguments with each `LazyBatch` as its pieces if they have these sizes, and as an ordinary tensor if not."""

    def replacement(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, LazyBatch) and tensor.sizes == sizes:
            return RoundPipePackedData(_Pieces.apply(tensor), tensor.events)
        return materialize(tensor)

    return trees.map_tensors(value, replacement) if holds_lazy(value) else value


def holds_lazy(value: Any) -> bool:
    """Whether anything in a structure is still in pieces."""
    return any(isinstance(tensor, LazyBatch) for tensor in trees.tensors(value))


def materialize_all(value: Any) -> Any:
    """A structure with ordinary tensors only."""
    return trees.map_tensors(value, materialize) if holds_lazy(value) else value
