"""The scalars of a loss function's or a model's graph that are sums or means over samples or tokens, of what each has.

Such a sum adds up over microbatches, whatever the function does to each row. What one sample has may be flattened
with the samples, and a mean over it all is one over samples if each has as much. The graph runs on fakes in which sizes
that differ in the example are different primes where they may vary, so that views tell rows from other dimensions.

Invariant: what is not known to be made row by row is not among them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from roundpipe.core.module_tree import modules_in
from roundpipe.core.random_state import preserved_random_state
from roundpipe.core.tiling import Rows
from roundpipe.effects.snapshot import python_restored
from roundpipe.fx.fakes import code_at_other_sizes, static_mode
from roundpipe.fx.graph.nodes import GraphInterpreter, hint, value_of
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.passes.attribute_copies import AttributeCopies, fakes_of
from roundpipe.fx.passes.rows import RowWatch
from roundpipe.fx.passes.sample_dimensions import symbols_in, symbols_of_samples
from roundpipe.fx.sizes import flat_tensors

_SMALLEST = 101
"""Larger than most sizes that are written in code."""
Forms = Mapping[Node, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of arguments."""


@dataclass(frozen=True, slots=True)
class SampleSum:
    """A sum or mean over the samples, or over the elements of their first two dimensions."""

    is_mean: bool
    counted: tuple[tuple[Node, int], ...]
    """Arguments of which some leading sizes are the number of rows, and how many are; the finer rows first.

    Where samples have as many tokens in all microbatches, either number will do.
    """
    number: int | torch.SymInt | None = None
    """Of a mean, how many elements it is of, if samples may have more of these in one microbatch than in others."""


def sample_sums(loss: TracedGraph, outputs: Collection[Node], whole: Collection[Node]) -> dict[Node, SampleSum]:
    """The nodes that are one.

    Args:
        loss: the graph, of a `LossCall` or a model.
        outputs: its arguments of the samples, such as what the model has made of them.
        whole: its arguments that each microbatch has as a whole.
    """
    found, has_run = _found(loss, _forms_of(loss), outputs, whole, (1, 2))
    if not has_run:  # sizes of tokens are those of the example then, and others may be as large
        found = _found(loss, _forms_of(loss, outputs), outputs, whole, (1,))[0] | found
    return found


def _found(
    loss: TracedGraph, forms: Forms, outputs: Collection[Node], whole: Collection[Node], numbers: Collection[int]
) -> tuple[dict[Node, SampleSum], bool]:
    """Those that show in arguments of some forms, over so many leading dimensions; and whether all of it has run."""
    found: dict[Node, SampleSum] = {}
    has_run = True
    for number in numbers:
        for with_rows in _groups(forms, outputs, whole, number):
            watch, values = _run(loss, forms, with_rows, number)
            has_run &= all(node in values for node in loss.graph.nodes if node.op != "output")
            for node, each in _over(watch, values, with_rows, number).items():
                known = found.get(node, SampleSum(each.is_mean, ()))
                if number == 1 and each.is_mean and not _has_alike(node, with_rows):
                    source = _averaged(node)
                    found[node] = replace(known, number=None if source is None else source.numel())
                else:
                    found[node] = replace(known, counted=(*each.counted, *known.counted))
    return found, has_run


def nodes_in_rows(loss: TracedGraph, outputs: Collection[Node], whole: Collection[Node]) -> set[Node]:
    """The nodes whose first dimension is that of the samples, of which each row is made of its own sample alone.

    Those of microbatches make up that of the batch, one behind the other. Arguments: see `sample_sums`.
    """
    forms, found = _forms_of(loss), set[Node]()
    for with_rows in _groups(forms, outputs, whole, 1):
        watch, values = _run(loss, forms, with_rows, 1)
        tensors = {node: value for node, value in values.items() if isinstance(value, torch.Tensor) and value.ndim}
        rows = {node: watch.rows(tensor) for node, tensor in tensors.items()}
        found |= {node for node, (first, *others) in rows.items() if first is not None and not any(others)}
    return found


def _forms_of(loss: TracedGraph, outputs: Collection[Node] | None = None) -> Forms:
    """Those of a graph's arguments, with a prime in place of each size that may be another one.

    Or only of those that the ``outputs`` have in their first dimension, where code fits no other sizes.
    """
    tensors = {node: value for node in loss.placeholders if isinstance(value := value_of(node), torch.Tensor)}
    shapes = {node: tuple(map(hint, tensor.shape)) for node, tensor in tensors.items()}
    fixed = {size for tensor in tensors.values() for size in tensor.shape if isinstance(size, int)}
    primes = (int(sympy.prime(position)) for position in itertools.count(int(sympy.primepi(_SMALLEST))))
    leading = [shapes[node][:1] for node in shapes if node in outputs] if outputs is not None else shapes.values()
    varying = {size for shape in leading for size in shape if size > 1} - fixed
    sizes = dict(zip(sorted(varying), primes, strict=False))
    return {
        node: (tuple(sizes.get(size, size) for size in shape), tensors[node].dtype) for node, shape in shapes.items()
    }


def _groups(
    forms: Forms, outputs: Collection[Node], whole: Collection[Node], num_axes: int
) -> Iterator[tuple[Node, ...]]:
    """Arguments that are as long in their leading dimensions as some of the samples."""
    values = ((node, value_of(node)) for node in outputs)
    tensors = [(node, value) for node, value in values if isinstance(value, torch.Tensor)]
    shapes = [forms[node][0] for node, value in tensors if isinstance((*value.shape, 0)[0], torch.SymInt)]
    for axes in {shape[:num_axes]: None for shape in shapes if len(shape) >= num_axes and min(shape[:num_axes]) > 1}:
        yield tuple(node for node, (shape, _) in forms.items() if shape[:num_axes] == axes and node not in whole)


def _over(
    watch: RowWatch, values: Mapping[Node, Any], with_rows: tuple[Node, ...], num_axes: int
) -> dict[Node, SampleSum]:
    """Those over the rows of some arguments, which are counted by their leading dimensions."""
    of_calls = ((node, flat_tensors(value)) for node, value in values.items() if node.op.startswith("call_"))
    found = {node: watch.found(tensors[0]) for node, tensors in of_calls if len(tensors) == 1}
    counted = tuple((node, num_axes) for node in with_rows)
    return {node: SampleSum(kind == "mean", counted) for node, kind in found.items() if isinstance(kind, str)}


def _run(
    loss: TracedGraph, forms: Forms, with_rows: tuple[Node, ...], num_axes: int
) -> tuple[RowWatch, Mapping[Node, Any]]:
    """Runs a graph on fakes: what is known of rows, and the values, as far as it came."""
    mode = static_mode()
    inside = modules_in(loss.model)
    with code_at_other_sizes(), mode, torch.no_grad(), preserved_random_state(), python_restored(inside):
        arguments = {node: torch.empty(shape, dtype=dtype) for node, (shape, dtype) in forms.items()}
        leading: Rows = tuple((axis, axis + 1) for axis in range(num_axes))
        tensors = [arguments[node] for node in with_rows]
        rows = [(tensor, (*leading, *(None,) * (tensor.ndim - num_axes))) for tensor in tensors]
        run = _FakeRun(AttributeCopies(loss, fakes_of(mode)), arguments)
        watch = RowWatch(tensors[0].shape[:num_axes], rows, (), is_outermost=num_axes == 1)
        with suppress(Exception), watch:  # these sizes may not fit the code behind
            for node in loss.graph.nodes:
                if node.op != "output":
                    run.values[node] = run.run_node(node)
    return watch, run.values


def _has_alike(mean: Node, with_rows: tuple[Node, ...]) -> bool:
    """Whether all microbatches have as many elements of each sample, such as tokens, in what is averaged."""
    source = _averaged(mean)
    sizes = map(value_of, with_rows) if source is None else [source]
    return symbols_in(sizes) <= symbols_of_samples(with_rows)


def _averaged(mean: Node) -> torch.Tensor | None:
    """What a node takes the mean of, as traced."""
    value = value_of(mean.args[0]) if mean.args and isinstance(mean.args[0], Node) else None
    return value if isinstance(value, torch.Tensor) else None


class _FakeRun(GraphInterpreter):
    def __init__(self, attributes: AttributeCopies, arguments: Mapping[Node, torch.Tensor]) -> None:
        super().__init__()
        self._attributes, self._arguments = attributes, arguments

    def placeholder(self, node: Node) -> Any:
        return self._arguments.get(node)

    def get_attr(self, node: Node) -> Any:
        return self._attributes.at(node.target)

    def call_module(self, node: Node, args: Any, kwargs: Any) -> Any:
        return self._attributes.at(node.target)(*args, **kwargs)
