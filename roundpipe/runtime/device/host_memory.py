"""Host memory that each step walks through from end to end: copies of weights, gradients, packed layers.

Large blocks ask for huge pages before they are touched: 512 times fewer page faults, and fewer misses of the address
cache afterwards. It is advice: where the system has no huge pages left, the memory is ordinary.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

import torch
from torch import nn

HUGE_PAGE_BYTES = 2 * 1024**2
"""Blocks below this size are left alone; the usual size of a huge page."""


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The C library's function, where huge pages can be asked for with it."""
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    with contextlib.suppress(OSError, AttributeError):
        function = ctypes.CDLL(None).madvise
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        function.restype = ctypes.c_int
        return function
    return None


def on_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, dense and not touched yet, after asking for huge pages below it."""
    madvise = _madvise()
    if madvise is None or tensor.nbytes < HUGE_PAGE_BYTES or tensor.device.type != "cpu":
        return tensor
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    stop = (tensor.data_ptr() + tensor.nbytes) // page * page
    if start < stop:
        madvise(start, stop - start, mmap.MADV_HUGEPAGE)  # refused: ordinary pages
    return tensor


def empty_bytes(num_bytes: int) -> torch.Tensor:
    """A byte buffer in host memory, `[num_bytes]`; its contents are arbitrary."""
    return on_huge_pages(torch.empty(num_bytes, dtype=torch.uint8))


def convert(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Give a parameter and its gradient another dtype in place, as ``nn.Module.to`` does."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(dtype)
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the elements that a tensor stores."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return sum(getattr(tensor, name)().nbytes for name in _SPARSE_PARTS[tensor.layout])


_SPARSE_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no subclass and has strided memory, so that it may be packed and copied with others."""
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
