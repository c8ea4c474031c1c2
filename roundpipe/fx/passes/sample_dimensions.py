"""Where a graph has a batch's samples: a batch is cut, and outputs are concatenated, along dimension 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node

from roundpipe.core.module_tree import puts_time_first
from roundpipe.core.trees import Path
from roundpipe.effects.places import is_layer_of_torch
from roundpipe.fx.graph.nodes import hint, value_of
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.sizes import expression_of

NO_SAMPLES = "has no dimension for the samples"
"""What is odd about an output, in words; see `outputs_without_rows`."""


def outputs_without_rows(traced: TracedGraph) -> dict[Path, str]:
    """By place in the outputs, what is odd about a tensor whose first dimension alone is not that of the samples."""
    return {path: _words(grows) for path, _, grows in _growing(traced) if grows != [0]}


def dims_of_samples(traced: TracedGraph) -> dict[Path, int]:
    """By place in the outputs, which dimension of a tensor is that of the samples, where it is another than the first.

    Such as of a state ``[layers, samples, features]``.
    """
    batch = _batch_symbols(traced)
    single = ((path, value, grows[0]) for path, value, grows in _growing(traced) if len(grows) == 1)
    return {path: dim for path, value, dim in single if dim and expression_of(value.shape[dim]) in batch}


def _growing(traced: TracedGraph) -> Iterator[tuple[Path, torch.Tensor, list[int]]]:
    """Tensors with dimensions among the outputs, by place, and which of these grow with the number of samples."""
    batch = _batch_symbols(traced)
    for path, node in traced.output_places.items() if batch else ():
        value = value_of(node)
        if isinstance(value, torch.Tensor) and value.ndim:
            yield path, value, [dim for dim, size in enumerate(value.shape) if not batch.isdisjoint(_symbols(size))]


def outputs_without_samples(traced: TracedGraph) -> dict[Path, bool]:
    """Places of outputs with dimensions, none of which is for samples, and whether they are made of these.

    A mean over them is, and weights are not.
    """
    batch = _batch_symbols(traced)
    depends = set(arguments_of_samples(traced)) if batch else set()
    for node in traced.graph.nodes:
        if not depends.isdisjoint(node.all_input_nodes):
            depends.add(node)
    tensors = ((path, node in depends, value_of(node)) for path, node in traced.output_places.items() if batch)
    return {
        path: is_made_of_samples
        for path, is_made_of_samples, value in tensors
        if isinstance(value, torch.Tensor) and value.ndim and batch.isdisjoint(symbols_in([value]))
    }


def lacks_samples(traced: TracedGraph) -> str:
    """What says, in words, that no tensor among the outputs has the samples of the first argument; empty if one may."""
    outputs = [value_of(node) for node in traced.output_places.values()]
    tensors = [value for value in outputs if isinstance(value, torch.Tensor) and value.ndim]
    known = symbols_in([value_of(node) for node in traced.placeholders])
    batch, sizes = _batch_symbols(traced), symbols_in(tensors)
    if not batch or not tensors or sizes & batch or sizes - known:  # data may decide how many there are
        return ""
    first, *_ = arguments_of_samples(traced)
    return f"no output has a dimension for the samples of {first.name}"


def symbols_in(values: Iterable[Any]) -> set[Any]:
    """What stands for varying numbers in the sizes of tensors."""
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return {symbol for tensor in tensors for size in tensor.shape for symbol in _symbols(size)}


def takes_samples_as_time(traced: TracedGraph) -> str:
    """A module of torch's that takes dimension 0, where the samples are, as time, in words; empty if there is none.

    That is their default, and then a batch has its samples in dimension 1; or samples attend to each other.
    """
    sizes = [value.shape[0] for value in arguments_of_samples(traced).values()]
    batch = {symbol for size in sizes for symbol in _symbols(size)}
    for node in traced.graph.nodes if sizes else ():
        if node.op != "call_module" or not node.all_input_nodes:
            continue
        leaf, value = traced.attribute(str(node.target)), value_of(node.all_input_nodes[0])
        if not isinstance(value, torch.Tensor) or not value.ndim:
            continue
        if is_layer_of_torch(type(leaf)) and any(map(puts_time_first, leaf.modules())):
            symbols = _symbols(value.shape[0])
            if batch & symbols or not (batch or symbols) and hint(value.shape[0]) in map(hint, sizes):
                return f"{node.target}, a {type(leaf).__name__} with batch_first=False,"
    return ""


def _words(grows: list[int]) -> str:
    if not grows:
        return NO_SAMPLES
    if len(grows) > 1:
        return f"has the samples in dimensions {' and '.join(map(str, grows))}"
    return f"has the samples in dimension {grows[0]}"


def arguments_of_samples(traced: TracedGraph) -> dict[Node, torch.Tensor]:
    """The first argument that has a dimension 0, where its samples are, and all arguments that are as long.

    Those that microbatches are known to have whole are none of them.
    """
    placeholders = (node for node in traced.placeholders if node.name not in traced.uncut)
    tensors = {node: value for node in placeholders if isinstance(value := value_of(node), torch.Tensor)}
    lengths = {node: hint(value.shape[0]) for node, value in tensors.items() if value.ndim}
    return {node: tensors[node] for node, length in lengths.items() if length == next(iter(lengths.values()))}


def symbols_of_samples(samples: Iterable[Node]) -> set[Any]:
    """What stands for their number in the sizes of arguments; none where a graph is for one number of them."""
    values = (value_of(node) for node in samples)
    sizes = (expression_of(value.shape[0]) for value in values if isinstance(value, torch.Tensor))
    return {size for size in sizes if getattr(size, "is_Symbol", False)}


def number_made_for(samples: Iterable[Node]) -> int:
    """The number of samples, where a graph has it as a constant for some of their arguments; else 0."""
    values = (value_of(node) for node in samples if not symbols_of_samples([node]))
    return next((hint(value.shape[0]) for value in values if isinstance(value, torch.Tensor)), 0)


def size_at(size: int | torch.SymInt, symbols: Iterable[Any], number: int) -> int:
    """A size with so many samples, all else as in the example."""
    if not isinstance(size, torch.SymInt):
        return size
    found = size.node.expr.subs(dict.fromkeys(symbols, number))
    return int(found) if found.is_number else hint(size)


def _batch_symbols(traced: TracedGraph) -> set[Any]:
    """What stands for the number of samples."""
    return {symbol for value in arguments_of_samples(traced).values() for symbol in _symbols(value.shape[0])}


def _symbols(size: Any) -> set[Any]:
    return set(getattr(expression_of(size), "free_symbols", ()))
