"""Where torch's kernels for fakes do other than those for data."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from roundpipe.core.contexts import contextmanager

TAKEN = torch.bfloat16
"""What kernels for fakes take that refuse other floating-point types."""


@functools.cache
def _strict() -> frozenset[Any]:
    """Operators whose kernels for fakes take one type only, and those for data others too."""
    grouped = getattr(torch.ops.aten, "_grouped_mm", None)
    return frozenset() if grouped is None else frozenset({grouped.default})


def dtype_refused(func: Any, args: Sequence[Any]) -> torch.dtype | None:
    """The type of an operator's floating-point arguments if its kernel for fakes refuses it; else None."""
    if func not in _strict():
        return None
    dtypes = {arg.dtype for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()}
    (dtype,) = dtypes if len(dtypes) == 1 else (TAKEN,)
    return None if dtype is TAKEN else dtype


@functools.cache
def _dropout_for_fakes() -> dict[Any, Any]:
    """Torch's own Python for dropout, by dispatch key."""
    return dict(torch.ops.aten.dropout.default.py_kernels)


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    return torch.ops.aten.native_dropout(input, p, train)[0] if train and p != 0 else input


@contextmanager
def dropout_as_compiled() -> Iterator[None]:
    """Inside, dropout that drops nothing returns its input, as it does on real tensors; torch's Python returns a copy.

    Who writes the result in place writes the input.
    """
    operator, original = torch.ops.aten.dropout.default, _dropout_for_fakes()
    operator.py_kernels.update(dict.fromkeys(original, _dropout))
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        operator.py_kernels.update(original)
        operator._dispatch_cache.clear()
