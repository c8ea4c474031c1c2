"""Tiles of rows: into how many a thread's calls are cut, and where each lies in tensors.

Rows are counted by axes: those of activations [B, S, D] by two, of sizes B and S. A tile is a rectangle of the axes
that is contiguous in B * S: a range of S in one sample, or several whole samples. Where a dimension of a tensor counts
rows is told by `Rows`, so that [B, heads, S, D], [B * S, V] and [1, S, D] take part as they are.

What runs in tiles: `roundpipe.core.tiled_regions`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from roundpipe.core.contexts import contextmanager


@dataclass(frozen=True, slots=True)
class Tiles:
    """Into how many tiles the rows of a microbatch are cut; 1: they are not."""

    layers: int = 1
    """In each region of the layers."""
    tail: int = 1
    """In those of the tail: the last layer, and the loss behind it."""
    at_once: bool = True
    """Whether a region that ends in a loss has its gradients computed with it: faster, and takes as much memory more as
    they do until the backward."""

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


@dataclass(slots=True)
class Tiling:
    """How a thread's calls of layers run; see `in_tiles`."""

    number: int = 1
    most: int | None = None
    at_once: bool = True
    run: TilesRun = field(default_factory=TilesRun)


class _State(threading.local):
    def __init__(self) -> None:
        self.tiling = Tiling()


_state = _State()


def present_tiling() -> Tiling:
    """That of this thread."""
    return _state.tiling


def num_tiles() -> int:
    """The number of tiles that this thread's calls of layers run in; 1 = they run as they are."""
    return _state.tiling.number


@contextmanager
def in_tiles(number: int, most: int | None = None, at_once: bool = True) -> Iterator[TilesRun]:
    """Inside, this thread's calls of layers run in this number of tiles (at least; never more than there are rows).

    Args:
        most: how many of them run, the largest; results have gaps then, the memory that they take is that of all.
        at_once: see `Tiles`.

    Yields:
        What has run, to be read once it has.
    """
    before, _state.tiling = _state.tiling, Tiling(number, most, at_once)
    try:
        yield _state.tiling.run
    finally:
        _state.tiling = before


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
