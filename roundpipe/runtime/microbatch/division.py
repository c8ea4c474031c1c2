"""How many microbatches a call has, and of how many samples each.

Decided once per call, by the first of these that says it: a function of the user's, packed data among the inputs, the
batch size (fewer samples than asked for microbatches give fewer), the run config.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.errors import MicrobatchError
from roundpipe.core.trees import Path
from roundpipe.runtime.config import ResolvedConfig
from roundpipe.runtime.microbatch.spec import (
    RoundPipePackedData,
    checked_dim_size,
    input_name,
    is_function,
    is_spec,
    is_spec_of,
    shape_of,
    spec_children,
)

logger = logging.getLogger(__name__)

Inputs = tuple[Any, Any]
"""``(args, kwargs)``; also their specs."""


@dataclass(frozen=True, slots=True)
class Division:
    """Into which pieces the samples of one call are cut."""

    num_microbatches: int
    sizes: list[int] | None
    """Samples of each microbatch; None where the batch size is not known."""
    num_missing: int = 0
    """Microbatches asked for but not there, since there are fewer samples."""
    labels_decide: bool = False
    """Whether the inputs don't tell the batch size for sure, so that the labels' own is taken for them."""

    @property
    def batch_size(self) -> int | None:
        return None if self.sizes is None else sum(self.sizes)

    def sizes_for(self, size: int) -> list[int]:
        """Sizes of the pieces of a dimension: those of the batch if it is as long, else even ones."""
        if self.sizes is not None and size == sum(self.sizes):
            return self.sizes
        return _even_sizes(size, self.num_microbatches)


def divide(inputs: Inputs, specs: Inputs, num_microbatch: int) -> Division:
    """The division of inputs that the automatic rule or specs split."""
    size = _batch_size(inputs, specs)
    packed = [leaf for leaf in packed_leaves(inputs) if len(leaf) > 1]
    if packed:
        number = len(packed[0])
        if number != num_microbatch:
            logger.debug("packed inputs run as %d microbatches, not %d", number, num_microbatch)
        candidates = (_sizes_of(leaf, size) for leaf in packed if len(leaf) == number)
        sizes = next((sizes for sizes in candidates if sizes), None)
        if sizes is None and size is not None:
            sizes = _even_sizes(size, number)
        return Division(number, sizes)
    if size is None:
        return Division(1 if specs == (None, None) else num_microbatch, None, labels_decide=True)
    number = min(num_microbatch, size)
    return Division(number, _even_sizes(size, number), num_missing=num_microbatch - number)


def division_of_pieces(pieces: Sequence[Inputs]) -> Division:
    """The division that the user's own pieces follow, for the labels beside them."""
    leaves = [leaf for piece in pieces if isinstance(leaf := batched_leaf(piece), torch.Tensor)]
    sizes = [leaf.shape[0] for leaf in leaves] if len(leaves) == len(pieces) else None
    return Division(len(pieces), sizes, labels_decide=True)


def batch_size(args: tuple[Any, ...], kwargs: Mapping[str, Any], config: ResolvedConfig) -> int | None:
    """Samples in a batch, if its number of microbatches is free to choose; None if it is not, or not known."""
    inputs = (tuple(args), dict(kwargs))
    if is_function(config.split_input) or packed_leaves(inputs):
        return None
    return _batch_size(inputs, specs_of(config))


def is_empty(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the first tensor of a call that has a dim 0 has no samples."""
    first = batched_leaf((tuple(args), dict(kwargs)))
    return isinstance(first, torch.Tensor) and first.shape[0] == 0


def automatic_sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any], config: ResolvedConfig) -> list[int] | None:
    """Samples of each microbatch that the automatic rule makes of tensors; None if others decide, or nothing tells."""
    if config.split_input is not None or "num_microbatch" in config.auto:
        return None
    size = batch_size(args, kwargs, config)
    return None if size is None else _even_sizes(size, min(config.num_microbatch, size))


def specs_of(config: ResolvedConfig) -> Inputs:
    """The specs of args and kwargs where no function splits them; None stands for the automatic rule."""
    rule = config.split_input
    if is_spec(rule):
        raise MicrobatchError(
            f"split_input is {rule!r}; give a pair (args_spec, kwargs_spec), such as ((TensorChunkSpec(0),), None)"
        )
    if rule is None:
        return None, None
    assert not callable(rule)
    args_spec, kwargs_spec = rule
    return args_spec, kwargs_spec


def packed_leaves(value: Any) -> list[RoundPipePackedData]:
    """The packed data of a structure, in order."""
    return [leaf for leaf in _array_leaves(value) if isinstance(leaf, RoundPipePackedData)]


def batched_leaf(value: Any) -> torch.Tensor | RoundPipePackedData | None:
    """The first tensor with a dim 0, or packed data of such; None if there is none."""
    for leaf in _array_leaves(value):
        parts = leaf if isinstance(leaf, RoundPipePackedData) else [leaf]
        if parts and all(isinstance(part, torch.Tensor) and part.ndim for part in parts):
            return leaf
    return None


def _array_leaves(value: Any, depth: int = 0) -> Iterator[torch.Tensor | RoundPipePackedData]:
    if isinstance(value, torch.Tensor | RoundPipePackedData):
        yield value
    elif depth < trees.MAX_DEPTH:
        for _, child in trees.children(value) or ():
            yield from _array_leaves(child, depth + 1)


def _even_sizes(size: int, num_pieces: int) -> list[int]:
    """Sizes that differ by at most one, larger ones first."""
    return [size // num_pieces + (index < size % num_pieces) for index in range(num_pieces)]


def _batch_size(inputs: Inputs, specs: Inputs) -> int | None:
    """Number of samples of a call; None if nothing tells; an error if there are none."""
    first = batched_leaf(inputs)
    size, where = None, "dim 0 of the first tensor given"
    if first is not None:
        size = sum(part.shape[0] for part in first) if isinstance(first, list) else first.shape[0]
    if chunked := _chunked_sizes(inputs, specs, ()):
        size, where = min(chunked)
    if size == 0:
        shape = "" if first is None else f" (shape {shape_of(first)})"
        raise MicrobatchError(f"the batch is empty: {where}{shape} has no samples; give at least one")
    return size


def _sizes_of(values: Sequence[Any], batch_size: int | None) -> list[int] | None:
    """Samples of each of these values, if they are tensors that make up the batch together."""
    if not all(isinstance(value, torch.Tensor) and value.ndim for value in values):
        return None
    sizes = [value.shape[0] for value in values]
    return sizes if sum(sizes) == batch_size else None


def _chunked_sizes(value: Any, spec: Any, path: Path) -> list[tuple[int, str]]:
    """Length along the dimension to split, and name, of each tensor that a spec says to split."""
    if spec is None or isinstance(value, RoundPipePackedData):
        return []
    if is_spec_of(spec, "TensorChunkSpec"):
        where = input_name(path)
        return [(checked_dim_size(value, spec, where), where)] if isinstance(value, torch.Tensor) else []
    below = trees.children(value)
    if below is None:
        return []
    specs = spec_children(spec, below, input_name(path))
    return [
        size
        for (access, child), child_spec in zip(below, specs, strict=True)
        for size in _chunked_sizes(child, child_spec, (*path, access))
    ]
