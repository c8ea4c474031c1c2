"""Outputs in microbatches that are put together only when somebody looks.

What one part of a model gives and the next one takes need not be merged in between. Host code around the parts sees
a tensor like any other: shape, dtype and place in the autograd graph are there at once, the data when first used.

    pieces --Merge--> MergedLater --Pieces--> the same pieces, for another part
                           `--------------> whatever host code does, on the pieces put together

Both directions are nodes of autograd, so hooks, ``retain_grad`` and gradients are those of one tensor. This file is
the only user of torch's wrapper subclasses.

Invariant: whatever is done with a `MergedLater` gives what the merged tensor would give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from roundpipe import structure
from roundpipe.runtime.microbatch_merge import merge_value
from roundpipe.runtime.microbatch_spec import RoundPipePackedData, holds_tensor, with_children


class MergedLater(torch.Tensor):
    """A batch that still is in pieces; made by `merged_later`."""

    _pieces: list[torch.Tensor]
    _events: list[Any]
    _whole: torch.Tensor | None
    _version_merged: int

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(pieces: list[torch.Tensor], events: list[Any]) -> MergedLater:
        """The tensor that these pieces make up along dim 0, not yet in the autograd graph."""
        form = torch.cat(
            [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta") for one in pieces]
        )
        first = pieces[0]
        tensor: MergedLater = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            MergedLater, form.shape, form.stride(), dtype=first.dtype, device=first.device
        )
        tensor._pieces, tensor._events = [one.detach() for one in pieces], list(events)
        tensor._whole, tensor._version_merged = None, 0
        return tensor

    @property
    def num_pieces(self) -> int:
        """Microbatches that it consists of."""
        return len(self._pieces)

    @property
    def piece_sizes(self) -> list[int]:
        """Samples of each."""
        return [len(one) for one in self._pieces]

    @property
    def is_merged(self) -> bool:
        """Whether somebody looked."""
        return self._whole is not None

    def is_written(self) -> bool:
        """Whether somebody wrote into it, so that the pieces are out of date."""
        return self._whole is not None and self._whole._version != self._version_merged

    def whole(self) -> torch.Tensor:
        """The data of all, without gradients."""
        if self._whole is None:
            packed = RoundPipePackedData(self._pieces, self._events)
            packed.synchronize()
            with torch.no_grad():
                self._whole = torch.cat(self._pieces)
            self._version_merged = self._whole._version
        return self._whole

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(one.whole()): one for one in structure.tensors((args, kwargs)) if isinstance(one, MergedLater)}
        args, kwargs = structure.map_tensors((args, kwargs or {}), _whole_of)
        result = func(*args, **kwargs)
        return structure.map_tensors(result, lambda one: given.get(id(one), one))  # what was written in place

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(settled(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().requires_grad_(False).__reduce_ex__(protocol)


def _whole_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.whole() if isinstance(tensor, MergedLater) else tensor


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor in place of a `MergedLater`, in the same autograd graph; other tensors as they are."""
    return tensor.view_as(tensor) if isinstance(tensor, MergedLater) else tensor
