"""Tries on fakes whether a region does the same with a tile of rows as with all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.allocations import TorchDispatchMode
from roundpipe.core.tiled_regions import Region, RowResult
from roundpipe.core.tiling import each_tile, in_tiles, narrow, rows_in
from roundpipe.fx.sizes import flat_tensors

_LAYOUT = frozenset("clone view _unsafe_view _reshape_alias reshape alias detach expand".split())
"""Operators that differ where a tile lies otherwise in memory; sizes are all that they are told."""
_SIZED = frozenset("empty zeros ones new_empty new_zeros new_ones empty_strided new_empty_strided".split())


def difference(region: Region, owner: Any, values: Sequence[Any]) -> str:
    """What a region does otherwise with a tile, in words; empty if nothing.

    Args:
        values: what it is called with, on fakes of real sizes.

    Raises:
        Exception: whatever a tile's code raises.
    """
    values = [_leaf(value) for value in values]
    dense = list(map(_contiguous, values))  # torch chooses operators by layout, too
    whole = _Numbers()
    with whole:
        expected = region.function(owner, region.sizes, *dense)
    rows = math.prod(region.sizes)
    for number in sorted({2, 2 * region.sizes[0], rows}):
        tile = next(each_tile(region.sizes, number))
        parts = [
            value if dims is None else _contiguous(narrow(value, dims, tile, region.sizes))
            for value, dims in zip(dense, region.inputs, strict=True)
        ]
        part = _Numbers()
        with part:
            results = region.function(owner, tile.sizes, *parts)
        if part.calls != whole.calls:
            pairs = zip(part.calls, whole.calls, strict=False)
            first = next((f"{a} instead of {b}" for a, b in pairs if a != b), "another number of operators")
            return f"a tile of {tile.sizes} runs {first}"
        for kind, result, all_rows in zip(region.results, results, expected, strict=True):
            shape = list(all_rows.shape)
            for dim, _, size in rows_in(kind.rows, tile, region.sizes) if isinstance(kind, RowResult) else ():
                shape[dim] = size
            if list(result.shape) != shape or result.dtype != all_rows.dtype:
                return f"a result of a tile of {tile.sizes} is {list(result.shape)}, not {shape}"
    with in_tiles(2):
        results = region(owner, *values)
    roots = [result for result in results if result.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
    return ""


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, torch.Tensor) else value


class _Numbers(TorchDispatchMode):
    """The operators that run, with the numbers that they are told."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._opname
        if not flat_tensors(out) or name in _LAYOUT:
            return out
        if name in _SIZED or name == "slice" and _is_whole(*args):
            self.calls.append((name,))
        else:
            plain = [leaf for leaf in trees.leaves((args, kwargs)) if isinstance(leaf, trees.PLAIN)]
            self.calls.append((name, *plain))
        return out


def _is_whole(
    tensor: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> bool:
    """Whether a slice is all of a tensor."""
    return (start or 0) == 0 and (end is None or end >= tensor.shape[dim]) and step == 1
