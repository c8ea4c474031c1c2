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


def _dropout(torchs: Any, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout that drops nothing returns its input, as it does on real tensors; torch's Python returns a copy.

    Who writes the result in place writes the input.
    """
    return torch.ops.aten.native_dropout(input, p, train)[0] if train and p != 0 else input


def _lstm(torchs: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """States ``[layers, samples, features]``; the Python of torch before 2.13 has a dimension of one before samples."""
    output, *states = torchs(*args, **kwargs)
    return output, *(state.squeeze(1) if state.ndim > 3 else state for state in states)


@functools.cache
def _kernels() -> list[tuple[Any, dict[Any, Any], dict[Any, Any]]]:
    """Operators with torch's own Python for them by dispatch key, and with what takes its place."""
    ours: dict[Any, Any] = {torch.ops.aten.dropout.default: _dropout, torch.ops.aten.lstm.input: _lstm}
    return [
        (each, dict(each.py_kernels), {key: functools.partial(own, torchs) for key, torchs in each.py_kernels.items()})
        for each, own in ours.items()
    ]


@contextmanager
def kernels_as_compiled() -> Iterator[None]:
    """Inside, these operators do on fakes what torch's compiled code does on real tensors."""
    try:
        for operator, _, own in _kernels():
            operator.py_kernels.update(own)
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, torchs, _ in _kernels():
            operator.py_kernels.update(torchs)
            operator._dispatch_cache.clear()
