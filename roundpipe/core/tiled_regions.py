"""Runs functions that compute every row of their results from the same row of their inputs, a tile of rows at a time.

    results with rows, or several sums   forward in tiles; backward runs each tile again, then its backward
    one sum, as of a loss                each tile's forward and backward at once; the gradients are kept and, in the
                                         backward, multiplied by the one that comes in

Invariant: results and gradients are those of the whole function, to rounding; of what the function holds inside, never
more than one tile exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from roundpipe.core.contexts import contextmanager
from roundpipe.core.modes import Modes
from roundpipe.core.random_state import SeededTorch, default_generator
from roundpipe.core.tiling import Rows, Tile, narrow, present_tiling, tiles_of


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
        tiling = present_tiling()
        tiles = tiles_of(self.sizes, tiling.number)
        if len(tiles) > 1:
            tiling.run.number = max(tiling.run.number, len(tiles))
        if tiling.most is not None:
            tiles = sorted(tiles, key=lambda tile: tile.num_rows)[-tiling.most :]
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
        if tiling.at_once and self._is_one_sum and not _may_underflow((*leaves, *parameters)):
            return (_AtOnce.apply(self, owner, tiles, *values, *parameters),)
        tiling.run.repeats = True
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

    def _run_tile(
        self, owner: Any, tile: Tile, values: Sequence[Any], leaves: Mapping[int, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """``leaves``: in place of values, by position, their rows of the tile."""
        parts = [
            leaves[index] if leaves and index in leaves else self.part(index, value, tile)
            for index, value in enumerate(values)
        ]
        return self.function(owner, tile.sizes, *parts)

    def part(self, index: int, value: Any, tile: Tile) -> Any:
        """A value's rows of a tile, or all of it if it has none."""
        rows = self.inputs[index]
        return value if rows is None else narrow(value, rows, tile, self.sizes)

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

    @property
    def _is_one_sum(self) -> bool:
        """Whether all gradients are those of one number, times the gradient that comes in."""
        kind, *others = self.results
        return isinstance(kind, SumResult) and kind.differentiable and not others

    def run_with_gradients(
        self,
        owner: Any,
        tiles: Sequence[Tile],
        values: Sequence[Any],
        needs_gradient: Sequence[bool],
        parameters: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, list[torch.Tensor | None], list[torch.Tensor]]:
        """The sum that is its only result, and the gradients of values and parameters, tile by tile."""
        (kind,) = self.results
        assert isinstance(kind, SumResult)
        leaves = _Leaves(self, values, needs_gradient)
        of_parameters = list(map(torch.zeros_like, parameters))
        total = torch.zeros(())
        for index, tile in enumerate(tiles):
            own = leaves.of(tile)
            with torch.enable_grad():
                (result,) = self._run_tile(owner, tile, values, own)
                part = self._share_of(result, kind, tile)
            total = total + part.detach() if index else part.detach()
            if part.requires_grad:
                wanted = (*own.values(), *parameters)
                with torch.autocast(part.device.type, enabled=False):
                    gradients = torch.autograd.grad(part, wanted, allow_unused=True)
                leaves.add(tile, dict(zip(own, gradients, strict=False)))
                _add_each(of_parameters, gradients[len(own) :])
                del gradients
            del result, part
        return _cast(total, kind), leaves.gradients, of_parameters

    def backward(
        self,
        owner: Any,
        tiles: Sequence[Tile],
        values: Sequence[Any],
        needs_gradient: Sequence[bool],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Run again with autograd, and backward, tile by tile; the gradients of the values that need one."""
        leaves = _Leaves(self, values, needs_gradient)
        for tile in tiles:
            own = leaves.of(tile)
            with torch.enable_grad():
                results = self._run_tile(owner, tile, values, own)
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
            leaves.add(tile, {index: leaf.grad for index, leaf in own.items()})
        return leaves.gradients


def _add_each(sums: Sequence[torch.Tensor], added: Sequence[torch.Tensor | None]) -> None:
    for whole, part in zip(sums, added, strict=True):
        if part is not None:
            whole.add_(part)


class _Leaves:
    """The values of a region that need gradients, as leaves of each tile's graph; and the sums of their gradients."""

    def __init__(self, region: Region, values: Sequence[Any], needs_gradient: Sequence[bool]) -> None:
        self._region, self._values = region, values
        self._indices = [index for index, needs in enumerate(needs_gradient) if needs]
        self.gradients: list[torch.Tensor | None] = [None] * len(values)

    def of(self, tile: Tile) -> dict[int, torch.Tensor]:
        """By position."""
        parts = {index: self._region.part(index, self._values[index].detach(), tile) for index in self._indices}
        return {index: part.requires_grad_() for index, part in parts.items()}

    def add(self, tile: Tile, gradients: Mapping[int, torch.Tensor | None]) -> None:
        """Take in the gradients of a tile's leaves."""
        for index, gradient in gradients.items():
            if gradient is not None:
                if (whole := self.gradients[index]) is None:
                    whole = self.gradients[index] = torch.zeros_like(self._values[index])
                self._region.part(index, whole, tile).add_(gradient)


def _cast(result: torch.Tensor, kind: RowResult | SumResult) -> torch.Tensor:
    return result if isinstance(kind, RowResult) or kind.dtype is None else result.to(kind.dtype)


def _may_underflow(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether gradients of a loss that is not scaled up may be too small for their dtype."""
    tensors = list(tensors)
    kinds = {tensor.device.type for tensor in tensors}
    dtypes = {torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    return torch.float16 in dtypes.union(tensor.dtype for tensor in tensors)


class _AtOnce(torch.autograd.Function):
    """The gradients of one sum, computed with it; what comes in is a factor. They are used up by the backward."""

    @staticmethod
    def forward(ctx: Any, region: Region, owner: Any, tiles: list[Tile], *tensors: Any) -> torch.Tensor:
        number = len(region.inputs)
        needs = ctx.needs_input_grad[3 : 3 + number]
        with _weights_cast_anew():
            total, of_values, of_parameters = region.run_with_gradients(
                owner, tiles, tensors[:number], needs, tensors[number:]
            )
        ctx.gradients = [*of_values, *of_parameters]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        for gradient in gradients:
            if gradient is not None:  # a tensor with dimensions: the factor keeps its precision
                torch.mul(gradient, factor.reshape([1] * gradient.dim()), out=gradient)
        return None, None, None, *gradients


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
