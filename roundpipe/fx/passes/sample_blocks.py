"""In which order an operator leaves the rows of a batch's samples.

A model that puts two views of a batch one behind the other (``torch.cat([a, b])``) has rows of all samples, and then
again rows of all samples: two blocks. What the microbatches give there makes up the batch block by block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from roundpipe.fx.passes.dependence_rules import DependenceCall

Blocks = tuple[int, ...]
"""Rows per sample in each block; empty: the rows of a sample lie side by side."""


def blocks_made(call: DependenceCall, number: int, blocks_of: Callable[[torch.Tensor], Blocks]) -> Blocks:
    """The blocks that an operator makes.

    Args:
        call: its call.
        number: how many samples there are.
        blocks_of: those of a tensor that it takes.
    """

    def blocks_at(tensor: torch.Tensor, dim: int) -> Blocks:
        if tensor.shape[dim] % number:
            return ()
        return blocks_of(tensor) or (tensor.shape[dim] // number,)

    if call.name == "cat" and len(call.inputs) > 1:
        dim = call.values["dim"] % call.output.dim()
        parts = [blocks_at(tensor, dim) for tensor in call.inputs if tensor.dim() > dim]
        return sum(parts, ()) if all(parts) else ()
    if call.name == "repeat":
        times = call.values["repeats"]
        added = len(times) - call.first.dim()
        repeated = (blocks_at(call.first, dim) * times[dim + added] for dim in range(call.first.dim()))
        return next((blocks for blocks in repeated if len(blocks) > 1), ())
    if call.name in ("view", "_unsafe_view", "reshape"):
        return _merged(call.first.shape, call.output.shape, number)
    return ()


def _merged(old: Sequence[int], new: Sequence[int], number: int) -> Blocks:
    """Blocks that come from merging a dimension of samples with one in front of it."""
    start = 0
    for size in new:
        end, product = start, 1
        while end < len(old) and product < size:
            product *= old[end]
            end += 1
        if product != size:
            return ()  # it also splits
        merged = list(old[start:end])
        samples = next((at for at, each in enumerate(merged) if each and each % number == 0), 0)
        if (times := math.prod(merged[:samples])) > 1:
            rows = merged[samples] // number * math.prod(merged[samples + 1 :])
            return (rows,) * times
        start = end
    return ()
