"""Runs functions that compute every row of their results from the same row of their inputs, a tile of rows at a time.

Rows are counted by axes: those of activations [B, S, D] by two, of sizes B and S. A tile is a rectangle of the axes
that is contiguous in B * S: a range of S in one sample, or several whole samples. Where a dimension of a tensor counts
rows is told by `Rows`, so that [B, heads, S, D], [B * S, V] and [1, S, D] take part as they are.

Invariant: results and gradients are those of the whole function, to rounding; of what the function holds inside, never
more than one tile exists. Gradients of parameters are added to their ``.grad``, once per tile.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from roundpipe.core.contexts import contextmanager
from roundpipe.core.modes import Modes
from roundpipe.core.random_state import SeededTorch, default_generator


@dataclass(frozen=True, slots=True)
class Tiles:
    """Into how many tiles the rows of a microbatch are cut; 1: they are not."""

    layers: int = 1
    """In each region of the layers."""
    tail: int = 1
    """In those of the tail: the last layer, and the loss behind it."""

    def of(self, layer_index: int, num_layers: int) -> int:
        """Into how many tiles a layer's rows are cut."""
        return self.tail if layer_index == num_layers - 1 else self.layers


UNTILED = Tiles()


@dataclass(slots=True)
class TilesRun:
    """What ran in tiles inside `in_tiles`."""

    number: int = 0
    """The most tiles of any region; 0: none ran in any."""
    repeats: bool = False
    """Whether a backward will run a region's forward again."""


class _State(threading.local):
    number = 1
    most: int | None = None
    run = TilesRun()


_state = _State()


def num_tiles() -> int:
    """The number of tiles that this thread's calls of layers run in; 1 = they run as they are."""
    return _state.number


@contextmanager
def in_tiles(number: int, most: int | None = None) -> Iterator[TilesRun]:
    """Inside, this thread's calls of layers run in this number of tiles (at least; never more than there are rows).

    Args:
        most: how many of them run, the largest; results have gaps then, the memory that they take is that of all.

    Yields:
        What has run, to be read once it has.
    """
    before = _state.number, _state.most, _state.run
    _state.number, _state.most, _state.run = number, most, TilesRun()
    try:
        yield _state.run
    finally:
        _state.number, _state.most, _state.run = before


# ---------------------------------------------------------------------------------- rows and tiles

Axes = tuple[int, int]
"""A half-open range of row axes that one dimension counts: ``(0, 1)``, ``(1, 2)``, or ``(0, 2)`` for B * S."""
Rows = tuple[Axes | None, ...]
"""For each dimension of a tensor, the row axes that it counts; None: it is no dimension of rows."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of rows: where it begins on each axis, and its size there."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return math.prod(self.sizes)


def tiles_of(sizes: Sequence[int], number: int) -> list[Tile]:
    """Tiles of nearly the same size, in the rows' order, none with more than a ``number``-th of all rows.

    Args:
        sizes: of the row axes, one or two.
    """
    return list(each_tile(sizes, number))


def each_tile(sizes: Sequence[int], number: int) -> Iterator[Tile]:
    """The same, one after the other."""
    most = max(-(-math.prod(sizes) // max(number, 1)), 1)
    last = sizes[-1]
    if len(sizes) == 1:
        yield from (Tile((start,), (size,)) for start, size in _ranges(last, most))
    elif most >= last:
        yield from (Tile((start, 0), (size, last)) for start, size in _ranges(sizes[0], most // last))
    else:
        yield from (Tile((row, start), (1, size)) for row in range(sizes[0]) for start, size in _ranges(last, most))


def _ranges(total: int, most: int) -> Iterator[tuple[int, int]]:
    number, start = -(-total // most), 0
    for index in range(1, number + 1):
        end = total * index // number
        yield start, end - start
        start = end


def rows_in(rows: Rows, tile: Tile, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """For each dimension of rows: which it is, where a tile begins there, and the tile's size."""
    found = []
    for dim, axes in enumerate(rows):
        if axes is not None:
            first, end = axes
            start = 0
            for axis in range(first, end):
                start = start * sizes[axis] + tile.starts[axis]
            found.append((dim, start, math.prod(tile.sizes[first:end])))
    return found


def narrow(tensor: torch.Tensor, rows: Rows, tile: Tile, sizes: Sequence[int]) -> torch.Tensor:
    """The part of a tensor with a tile's rows, a view."""
    for dim, start, size in rows_in(rows, tile, sizes):
        tensor = tensor.narrow(dim, start, size)
    return tensor


# ---------------------------------------------------------------------------------- regions


@dataclass(frozen=True, slots=True)
class RowResult:
    """A result with rows."""

    rows: Rows
    order: tuple[int, ...] = ()
    """Its dimensions as they lie in memory, the slowest first; empty: as they are counted."""
    differentiable: bool = True

    @classmethod
    def like(cls, result: torch.Tensor, rows: Rows) -> RowResult:
        """One that lies in memory as a result that was not made in tiles."""
        strides = result.stride()
        order = sorted(range(result.dim()), key=lambda dim: (-strides[dim], dim))
        return cls(rows, tuple(order), result.requires_grad)


@dataclass(frozen=True, slots=True)
class SumResult:
    """A result that is the sum over all rows, or their mean."""

    is_mean: bool = False
    dtype: torch.dtype | None = None
    """What the sum is cast to; None: that of the function's results."""
    differentiable: bool = True


@dataclass(frozen=True, slots=True)
class Region:
    """A function of rows that can run in tiles.

    Called as ``region(owner, *values)``; calls ``function(owner, sizes, *values)`` with a tile's sizes of the row axes
    and its rows of the values, and expects a tuple.
    """

    function: Callable[..., tuple[torch.Tensor, ...]]
    sizes: tuple[int, ...]
    """Of the row axes."""
    inputs: tuple[Rows | None, ...]
    """Of each value; None: it is taken whole."""
    results: tuple[RowResult | SumResult, ...]
    parameters: Callable[[Any], list[torch.Tensor]] = lambda owner: []
    """The parameters of an owner that the function uses."""
    draws_random: bool = False

    def __call__(self, owner: Any, *values: Any) -> tuple[torch.Tensor, ...]:
        tiles = tiles_of(self.sizes, num_tiles())
        if len(tiles) > 1:
            _state.run.number = max(_state.run.number, len(tiles))
        if _state.most is not None:
            tiles = sorted(tiles, key=lambda tile: tile.num_rows)[-_state.most :]
        parameters = [parameter for parameter in self.parameters(owner) if parameter.requires_grad]
        # a hook expects the whole gradient
        if len(tiles) == 1 or (torch.is_grad_enabled() and any(tensor._backward_hooks for tensor in parameters)):
            results = self.function(owner, self.sizes, *values)
            return tuple(map(_cast, results, self.results))
        if not torch.is_grad_enabled():
            return self.run(owner, tiles, values)
        leaves = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
        if not parameters and not leaves:
            return self.run(owner, tiles, values)
        _state.run.repeats = True
        anchor = torch.empty(0, requires_grad=True)  # results require grad if only a parameter does
        results = _InTiles.apply(self, owner, tiles, anchor, *values)
        return tuple(results)

    def run(self, owner: Any, tiles: Sequence[Tile], values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """All results, without autograd."""
        whole: list[torch.Tensor] = []
        for tile in tiles:
            results = self._run_tile(owner, tile, values)
            if not whole:
                whole = [self._whole(*pair) for pair in zip(results, self.results, strict=True)]
            for index, (result, kind) in enumerate(zip(results, self.results, strict=True)):
                if isinstance(kind, RowResult):
                    part = narrow(whole[index], kind.rows, tile, self.sizes)
                    assert part.shape == result.shape, f"a tile of {part.shape} has a result of {result.shape}"
                    part.copy_(result)
                else:
                    whole[index] += self._share_of(result, kind, tile)
            del results, result
        return tuple(map(_cast, whole, self.results))

    def _run_tile(self, owner: Any, tile: Tile, values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        parts = [
            value if rows is None else narrow(value, rows, tile, self.sizes)
            for value, rows in zip(values, self.inputs, strict=True)
        ]
        return self.function(owner, tile.sizes, *parts)

    def _whole(self, result: torch.Tensor, kind: RowResult | SumResult) -> torch.Tensor:
        """Where the tiles' results go; the first tile's says what size the other dimensions have."""
        if isinstance(kind, SumResult):
            return torch.zeros_like(result)
        shape = [
            size if axes is None else math.prod(self.sizes[slice(*axes)])
            for size, axes in zip(result.shape, kind.rows, strict=True)
        ]
        strides, stride = [0] * len(shape), 1
        for dim in reversed(kind.order or range(len(shape))):
            strides[dim] = stride
            stride *= shape[dim]
        return torch.empty_strided(shape, strides, dtype=result.dtype, device=result.device)

    def _share_of(self, result: torch.Tensor, kind: SumResult, tile: Tile) -> torch.Tensor:
        return result * (tile.num_rows / math.prod(self.sizes)) if kind.is_mean else result

    def backward(
        self,
        owner: Any,
        tiles: Sequence[Tile],
        values: Sequence[Any],
        needs_gradient: Sequence[bool],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Run again with autograd, and backward, tile by tile; the gradients of the values that need one."""
        whole: list[torch.Tensor | None] = [None] * len(values)
        shared = {
            index: value.detach().requires_grad_()
            for index, (value, rows) in enumerate(zip(values, self.inputs, strict=True))
            if needs_gradient[index] and rows is None
        }
        for tile in tiles:
            leaves = dict(shared)
            for index, rows in enumerate(self.inputs):
                if needs_gradient[index] and rows is not None:
                    part = narrow(values[index].detach(), rows, tile, self.sizes)
                    leaves[index] = part.requires_grad_()
            self._backward_tile(owner, tile, values, leaves, gradients)
            for index, leaf in leaves.items():
                if index not in shared and leaf.grad is not None:
                    if (sum_of_tiles := whole[index]) is None:
                        whole[index] = sum_of_tiles = torch.zeros_like(values[index])
                    rows = self.inputs[index]
                    assert rows is not None
                    narrow(sum_of_tiles, rows, tile, self.sizes).add_(leaf.grad)
        for index, leaf in shared.items():
            whole[index] = leaf.grad
        return whole

    def _backward_tile(
        self,
        owner: Any,
        tile: Tile,
        values: Sequence[Any],
        leaves: dict[int, torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        parts = [
            leaves[index] if index in leaves else value if rows is None else narrow(value, rows, tile, self.sizes)
            for index, (value, rows) in enumerate(zip(values, self.inputs, strict=True))
        ]
        with torch.enable_grad():
            results = self.function(owner, tile.sizes, *parts)
        del parts
        roots, root_gradients = [], []
        for result, kind, gradient in zip(results, self.results, gradients, strict=True):
            if gradient is not None and result.requires_grad:
                roots.append(result)
                if isinstance(kind, RowResult):
                    part = narrow(gradient, kind.rows, tile, self.sizes)
                else:
                    part = self._share_of(gradient.to(result.dtype), kind, tile)
                root_gradients.append(part)
        del results, result
        if roots:
            torch.autograd.backward(roots, root_gradients)


def _cast(result: torch.Tensor, kind: RowResult | SumResult) -> torch.Tensor:
    return result if isinstance(kind, RowResult) or kind.dtype is None else result.to(kind.dtype)


class _InTiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, region: Region, owner: Any, tiles: list[Tile], anchor: torch.Tensor, *values: Any
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.region, ctx.owner, ctx.tiles = region, owner, tiles
        ctx.autocast = replace(Modes.current(), grad=None, attention_kernels=None)
        ctx.is_tensor = [isinstance(value, torch.Tensor) for value in values]
        ctx.plain = [None if is_tensor else value for value, is_tensor in zip(values, ctx.is_tensor, strict=True)]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.random = []
        if region.draws_random:
            devices = dict.fromkeys([torch.device("cpu"), *(tensor.device for tensor in tensors)])
            ctx.random = [(device, default_generator(device).get_state()) for device in devices]
        with _weights_cast_anew():
            results = region.run(owner, tiles, values)
        pairs = zip(results, region.results, strict=True)
        ctx.mark_non_differentiable(*(result for result, kind in pairs if not kind.differentiable))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        tensors = iter(ctx.saved_tensors)
        pairs = zip(ctx.is_tensor, ctx.plain, strict=True)
        values = [next(tensors) if is_tensor else value for is_tensor, value in pairs]
        with ExitStack() as stack:
            stack.enter_context(ctx.autocast.enter())
            stack.enter_context(_weights_cast_anew())
            for device, state in ctx.random:
                stack.enter_context(SeededTorch(state, device))
            needs_gradient = ctx.needs_input_grad[4:]
            return None, None, None, None, *ctx.region.backward(ctx.owner, ctx.tiles, values, needs_gradient, gradients)


def _weights_cast_anew() -> AbstractContextManager[object]:
    """Autocast without its cache: what it keeps of a weight without autograd would be taken with it."""
    if not torch.is_autocast_cache_enabled():
        return nullcontext()
    return _without_cache()


@contextmanager
def _without_cache() -> Iterator[None]:
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(True)
