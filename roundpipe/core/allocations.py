"""Follows the memory that operators allocate, on any device and on fakes.

This file is the only importer of torch's dispatch mode, which sees every operator below autograd. Torch documents the
class but keeps it in a private module, so that a release may move it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as uncounted

from roundpipe.core import trees

__all__ = ["Allocations", "TorchDispatchMode", "uncounted"]  # the last: no dispatch mode sees what is done inside it

_ATTENTION_WORKSPACES = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default: 2,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 2,  # stands for the one above
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default: 1,
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default: 1,
}
"""Kernels whose workspace is known, in gradients of the query in float32: as many are summed up beside the results."""
_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By number of dimensions, the order in which tensor cores read and write."""
_EMBEDDING_BACKWARD = torch.ops.aten.embedding_dense_backward.default
_MOST_UNSORTED = 3072
"""Indices up to which the backward of an embedding sums up in place."""
_ROWS_PER_SUM = 10
"""Of equal indices, the rows that are summed up in one part, on accelerators."""


class Allocations(TorchDispatchMode):
    """Bytes that operators have allocated while it was entered and that are in use; storages of ``known`` don't count.

    Memory that a kernel takes and gives back by itself is not seen, but for that of the backward of attention and, on
    accelerators, of the backward of embeddings and of convolutions, where it can be the most that a layer takes.

    Args:
        rounding: what sizes are a multiple of.
    """

    supports_higher_order_operators = True

    def __init__(self, known: Iterable[torch.Tensor] = (), rounding: int = 1) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._rounding = rounding
        self._known = {_key(tensor) for tensor in known if tensor.layout is torch.strided}

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count none of their storages, which may be gone before the end."""
        for tensor in tensors:
            if tensor.layout is torch.strided:
                key = _key(tensor)
                self._known.add(key)
                weakref.finalize(tensor.untyped_storage(), self._known.discard, key).atexit = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(result, args, kwargs)
        workspace_bytes = _workspace_bytes(func, args, result)
        self.grow(workspace_bytes)
        self.shrink(workspace_bytes)
        return result

    def count(self, result: Any, *arguments: Any) -> None:
        """Count the storages of an operator's results, but for those of its arguments, as long as they live."""
        for tensor in trees.tensors(result):
            if tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._known or any(_key(t) == key for t in trees.tensors(arguments) if t.layout is torch.strided):
                continue
            size = -(-int(storage.nbytes()) // self._rounding) * self._rounding
            self.grow(size)
            self._known.add(key)
            weakref.finalize(storage, self._forget, key, size).atexit = False

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.shrink(size)

    def grow(self, num_bytes: int) -> None:
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def shrink(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes


def _workspace_bytes(func: Any, args: tuple[Any, ...], result: Any) -> int:
    if func is _EMBEDDING_BACKWARD:
        return _embedding_bytes(*args[:3])
    if func is _CONVOLUTION:
        return _convolution_bytes((args[0], result), args[8])
    if func is _CONVOLUTION_BACKWARD:
        return _convolution_bytes(args[:2], args[9])
    if (number := _ATTENTION_WORKSPACES.get(func)) is None:
        return 0
    _, query, key, *_ = args
    expanded = 0 if key.shape == query.shape else 2 * query.nbytes  # keys and values, for each query's head
    return int(number * query.numel() * torch.float32.itemsize + expanded)


def _embedding_bytes(gradient: torch.Tensor, indices: torch.Tensor, num_weights: int) -> int:
    """Of parts of sums, in float32 at least, of the rows for each distinct index; and of the indices, sorted."""
    if gradient.device.type == "cpu" or indices.numel() <= _MOST_UNSORTED:
        return 0
    number = indices.numel()
    parts = number // _ROWS_PER_SUM + min(number, num_weights)
    part_bytes = gradient.shape[-1] * max(gradient.itemsize, torch.float32.itemsize)
    return int(parts * part_bytes + 2 * indices.nbytes)


def _convolution_bytes(tensors: Iterable[torch.Tensor], groups: int) -> int:
    """Of copies with the channels last, of what a convolution in 16 bits reads and makes with the channels first."""
    if groups > 1:
        return 0
    copied = [
        tensor
        for tensor in tensors
        if tensor.device.type != "cpu"
        and tensor.itemsize == 2
        and (order := _CHANNELS_LAST.get(tensor.dim())) is not None
        and not tensor.is_contiguous(memory_format=order)
    ]
    return sum(tensor.nbytes for tensor in copied)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
