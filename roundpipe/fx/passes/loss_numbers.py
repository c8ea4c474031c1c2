"""Whether the losses of microbatches make up that of the batch, by numbers: a function's graph, or the function itself
if it has none, is run on a call's microbatches, or on two of them if they are large, and on all of these as one.

Labels are the call's own; the model's outputs, which there are none of yet, are drawn. So whatever a function does to a
batch as a whole shows, if it makes a difference: a norm or a sort over all samples, or the choice of the first of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import isclose, isfinite
from typing import Any, Literal

import torch
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.fx.fakes import code_at_other_sizes
from roundpipe.fx.graph.nodes import GraphInterpreter, draws_random, has_effect
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.passes.attribute_copies import AttributeCopies

MOST_ELEMENTS = 2**22
"""Of outputs and labels; with more, nothing is tried."""
TOLERANCE = 1e-3
LABEL, OUTPUTS = "label", "outputs"
"""The arguments of a `LossCall`."""
Arguments = tuple[Any, Any]
"""Outputs without data, and the label."""


Program = Callable[[Arguments], Sequence[float]]
"""Gives the losses of a `LossCall` for outputs and labels with data."""
Made = Literal["mean", "sum", "differs"]
"""What the loss of a batch is, given its microbatches': their mean by samples, their sum, or neither of both."""


def made_by_graph(
    trace: Callable[[Arguments], TracedGraph],
    scalars_of: Callable[[TracedGraph], Sequence[Node]],
    examples: Sequence[Arguments],
    sizes: Sequence[int],
) -> Made | None:
    """What the loss of all samples is, given those of microbatches.

    Args:
        trace: gives the graph of a `LossCall` for some arguments.
        scalars_of: tells which nodes of it are losses.
        examples: what it is called with for each microbatch.
        sizes: of the microbatches, in samples.

    Returns None if that can't be tried: a graph doesn't run, or something is neither split nor shared.
    """

    def program_for(arguments: Arguments) -> Program:
        graph = trace(arguments)
        if any(draws_random(node) or has_effect(node) for node in graph.graph.nodes):
            raise ValueError("it does more than compute")
        scalars = scalars_of(graph)
        return lambda numbers: [*_NumberRun(graph, numbers).losses(scalars)]

    return _tried(program_for, examples, sizes)


def made_by_calls(program: Program, examples: Sequence[Arguments], sizes: Sequence[int]) -> Made | None:
    """The same of a loss that has no graph: ``program`` calls it."""
    return _tried(lambda _: program, examples, sizes)


def tried_on_numbers(test: Callable[[Any, Any], bool], example: Arguments) -> bool | None:
    """What a test gives for a microbatch with drawn outputs; None if it takes none of them."""
    generator = torch.Generator().manual_seed(0)
    for draw in _DRAWS:
        with suppress(Exception), torch.no_grad(), code_at_other_sizes():
            _check(example)
            return test(*_with_numbers(example, draw, generator))
    return None


def _tried(
    program_for: Callable[[Arguments], Program], examples: Sequence[Arguments], sizes: Sequence[int]
) -> Made | None:
    if len(sizes) < 2:
        return None
    if _num_elements(examples) > MOST_ELEMENTS:
        examples, sizes = examples[:2], sizes[:2]
    possible = {"mean", "sum"}
    num_answers = 0
    generator = torch.Generator().manual_seed(0)
    with suppress(Exception), code_at_other_sizes(), torch.no_grad():
        _check(*examples)
        programs = [program_for(arguments) for arguments in (*examples, _joined(examples, sizes))]
        for draw in _DRAWS:
            with suppress(Exception):  # the numbers may be none that it takes
                pieces = [_with_numbers(arguments, draw, generator) for arguments in examples]
                runs = zip(programs, [*pieces, _joined(pieces, sizes)], strict=True)
                losses = [program(arguments) for program, arguments in runs]
                for *each, total in zip(*losses, strict=True):
                    possible &= _possible(each, total, sizes)
                    num_answers += 1
    order: tuple[Made, ...] = ("mean", "sum")
    return next((made for made in order if made in possible), "differs") if num_answers else None


def _normal(scale: float) -> Callable[[torch.Size, torch.Generator], torch.Tensor]:
    return lambda shape, generator: scale * torch.randn(shape, generator=generator)


def _share(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator)


_DRAWS = (_normal(1.0), _normal(0.1), _normal(10.0), _share)
"""Some functions have a kink, and some take shares only."""


def _check(*examples: Arguments) -> None:
    if (number := _num_elements(examples)) > MOST_ELEMENTS:
        raise ValueError(f"{number:,} elements take too long")


def _num_elements(examples: Sequence[Arguments]) -> int:
    return sum(tensor.numel() for tensor in trees.tensors(examples))


def _with_numbers(arguments: Arguments, draw: Any, generator: torch.Generator) -> Arguments:
    outputs, label = arguments

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            raise TypeError("what a model gives as integers can be anything")
        return draw(tensor.shape, generator)

    return trees.map_tensors(outputs, drawn), trees.map_tensors(label, lambda tensor: tensor.detach().cpu())


def _joined(pieces: Sequence[Arguments], sizes: Sequence[int]) -> Arguments:
    """Those of all samples."""
    each = [list(trees.leaves(piece)) for piece in pieces]
    return trees.rebuild(pieces[0], [_join(leaves, sizes) for leaves in zip(*each, strict=True)])


def _join(leaves: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = leaves[0]
    if not isinstance(first, torch.Tensor):
        return first
    if all(leaf.dim() and len(leaf) == size for leaf, size in zip(leaves, sizes, strict=True)):
        return torch.cat([*leaves])
    if any(leaf.shape != first.shape or not torch.equal(leaf, first) for leaf in leaves):
        raise ValueError("it is neither split nor shared")
    return first


def _possible(terms: Sequence[float], total: float, sizes: Sequence[int]) -> set[str]:
    """What the loss of all may be, given those of microbatches."""
    mean = sum(size * term for size, term in zip(sizes, terms, strict=True)) / sum(sizes)
    made = {"mean": mean, "sum": sum(terms)}
    if not all(map(isfinite, (mean, total))):
        return {*made}  # nothing is known
    scale = max(map(abs, terms))
    return {kind for kind, each in made.items() if isclose(total, each, rel_tol=TOLERANCE, abs_tol=TOLERANCE * scale)}


class _NumberRun(GraphInterpreter):
    """Runs a graph on real numbers; what it writes is its own."""

    def __init__(self, loss: TracedGraph, arguments: Arguments) -> None:
        super().__init__()
        outputs, label = arguments
        self._loss, self._arguments = loss, ((), {OUTPUTS: outputs, LABEL: label})
        self._attributes = AttributeCopies(loss, lambda tensor: tensor.detach().cpu().clone())

    def losses(self, scalars: Sequence[Node]) -> Iterator[float]:
        nodes = self._loss.graph.nodes
        for node in itertools.takewhile(lambda node: node.op != "output", nodes):
            self.values[node] = self.run_node(node)
        return (float(self.values[node]) for node in scalars)

    def placeholder(self, node: Node) -> Any:
        return trees.get(self._arguments, self._loss.input_paths[node.name])

    def get_attr(self, node: Node) -> Any:
        return self._attributes.at(node.target)

    def call_module(self, node: Node, args: Any, kwargs: Any) -> Any:
        return self._attributes.at(node.target)(*args, **kwargs)
