"""Values of a graph that are made from its arguments alone, and what they are for the arguments of a microbatch.

A size is one of the arguments', whichever tensor it was asked of, if its expression is of sizes that they have.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.fx.graph.nodes import (
    GraphInterpreter,
    draws_random,
    has_effect,
    hint,
    mutated_by,
    number_of_input,
    storage_key,
    value_of,
    writes_buffers,
)
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.passes.sample_dimensions import arguments_of_samples, symbols_of_samples
from roundpipe.fx.passes.sample_sums import SampleSum
from roundpipe.fx.varying import NUMBER

Count = Callable[[Any], float]
"""From a microbatch's arguments, in normal form, what it counts for in a mean."""
Divisor = Callable[[float], float]
"""What a sum is divided by, given what counts for in it."""


class ArgumentValues:
    """What is made from some arguments of a graph, those whose placeholders are ``allowed``, by plain calls.

    Those ``of_weights`` were made from weights alone.
    """

    def __init__(
        self,
        traced: TracedGraph,
        allowed: Callable[[str], bool] = lambda name: True,
        of_weights: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._traced = traced
        self._of_weights = {node for node in traced.placeholders if of_weights(node.name)}
        self._placeholders = {node for node in traced.placeholders if allowed(node.name)}
        self._writers: dict[Any, list[Node]] = {}
        """By memory that the graph writes in place, the nodes that write it."""
        for node in traced.graph.nodes:
            for key in {storage_key(each) for each in mutated_by(node)} - {None}:
                self._writers.setdefault(key, []).append(node)
        self._sizes: dict[sympy.Basic, tuple[trees.Path, int]] = {}
        """By symbol, an argument that has it as the size of a dimension, or that is this number."""
        for node in self._placeholders:
            number = number_of_input(node)
            if isinstance(number, torch.SymInt):
                self._sizes[number.node.expr] = traced.input_paths[node.name], NUMBER
            value = value_of(node)
            for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    self._sizes[size.node.expr] = (traced.input_paths[node.name], dim)

    def has(self, node: Node) -> bool:
        """Whether a value is one of these."""
        return all(map(self._is_allowed, _behind(node)))

    def has_data_of(self, node: Node) -> bool:
        """Whether it has more of the arguments than their sizes, as a range of numbers has."""
        return self.has(node) and any(one.op == "placeholder" for one in _behind(node))

    def is_alike(self, node: Node) -> bool:
        """Whether a value is the same for every microbatch: one that is made from weights."""
        return all(map(self._is_of_weights, _behind(node, self._writers)))

    def is_constant(self, node: Node) -> bool:
        """Whether a value is also the same before and after an update."""
        behind = set(_behind(node, self._writers))
        is_of_weights = not behind.isdisjoint(self._of_weights) or any(map(self._traced.parameters_of, behind))
        return self.is_alike(node) and not is_of_weights

    def counter(
        self, target: Node, ignored: Any = None, weight: Node | Callable[[], torch.Tensor] | None = None
    ) -> Count:
        """What a microbatch counts for in a mean over a target.

        That is how many of its elements are not ``ignored``, or what these weigh, each by its class's ``weight``.
        """

        def count(arguments: Any) -> float:
            found = self._values([each for each in (target, ignored, weight) if isinstance(each, Node)], arguments)
            other = found[ignored] if isinstance(ignored, Node) else ignored
            counted = found[target] if other is None else found[target][found[target] != other]
            if weight is None:
                return float(counted.numel())
            by_class = found[weight] if isinstance(weight, Node) else weight()
            return float(by_class.detach().cpu().double()[counted].sum())

        return count

    def number(self, node: Node) -> Count:
        """The number that a node computes."""
        return lambda arguments: float(self._values([node], arguments)[node])

    def rows(self, rows: SampleSum) -> Count | None:
        """How many rows a microbatch has that are summed up, if one of these arguments tells."""
        node, num_axes = next((each for each in rows.counted if self.has(each[0])), (None, 0))
        if node is None:
            return self._told(rows.number)
        place = self._traced.input_paths[node.name]
        return lambda arguments: float(math.prod(trees.get(arguments, place).shape[:num_axes]))

    def samples(self) -> Count | None:
        """How many samples a microbatch has, if one of these arguments tells."""
        node = next((node for node in arguments_of_samples(self._traced) if node in self._placeholders), None)
        if node is None:
            return None
        place = self._traced.input_paths[node.name]
        return lambda arguments: float(trees.get(arguments, place).shape[0])

    def fixed(self, number: float) -> Count | None:
        """What each microbatch counts for if a number is that of the samples, tokens or elements it must have.

        Code that makes a plain number of a size, as ``float(len(label))`` does, has this number in a graph that serves
        no other size.
        """
        for tensor in arguments_of_samples(self._traced).values():
            shape: Any = tensor.shape
            is_fixed = isinstance(shape[0], torch.SymInt) and not symbols_of(shape[0])
            if is_fixed and number > 1 and number in itertools.accumulate(map(hint, shape), operator.mul):
                return lambda arguments: float(number)
        return None

    def first_size(self, tensor: torch.Tensor) -> Count | None:
        """How many samples or tokens a tensor has in its first dimension, if these arguments tell.

        A size that is not in proportion to the number of samples is none of theirs.
        """
        size: Any = tensor.shape[0] if tensor.ndim else 0
        samples = symbols_of_samples(arguments_of_samples(self._traced))
        return self._told(size) if isinstance(size, torch.SymInt) and is_in_proportion(size, samples) else None

    def _told(self, size: Any) -> Count | None:
        """A size, if it is made of those of these arguments."""
        is_told = isinstance(size, torch.SymInt) and symbols_of(size) <= self._sizes.keys()
        return (lambda arguments: float(self._size(size, arguments))) if is_told else None

    def divisor(self, node: Node, sums: Mapping[Node, SampleSum]) -> tuple[Count, Divisor | None] | None:
        """What a microbatch counts for if a sum is divided by a number, and what the divisor is for all of them.

        That number is a sum over samples, their number, or made of one by some calls, such as a ``clamp``.
        """
        if not self.has(node):
            return None
        chain = [node]
        while not self._adds_up(chain[-1], sums):
            if len(sources := chain[-1].all_input_nodes) != 1:
                return None
            chain += sources
        *calls, base = chain

        def of_all(total: float) -> float:
            run = _ArgumentRun(self._traced, None)
            run.values[base] = torch.tensor(total, dtype=torch.float64)
            for each in reversed(calls):
                run.values[each] = run.run_node(each)
            return float(run.values[node])

        return self.number(base), of_all if calls else None

    def _adds_up(self, node: Node, sums: Mapping[Node, SampleSum]) -> bool:
        """Whether numbers of microbatches make up that of the batch: sums over samples do, and sizes by the number."""
        size: Any = value_of(node)
        if not _is_size(node):
            return node in sums and not sums[node].is_mean
        return is_in_proportion(size, [symbol for symbol, (_, dim) in self._sizes.items() if dim == 0])

    def _is_allowed(self, node: Node) -> bool:
        if _is_size(node):
            return symbols_of(value_of(node)) <= self._sizes.keys()
        if node.op == "placeholder" and node not in self._placeholders:
            return False
        return node.op not in ("call_module", "get_attr") and self._is_plain(node)

    def _is_plain(self, node: Node) -> bool:
        return not draws_random(node) and not has_effect(node) and storage_key(node) not in self._writers

    def _is_of_weights(self, node: Node) -> bool:
        """Whether a node reads weights, or computes with what it is given; it may write memory of the graph's own."""
        if node in self._of_weights:
            return True
        if node.op == "placeholder" or _is_size(node) or draws_random(node) or writes_buffers(node):
            return False
        is_own = node.op != "get_attr" or storage_key(node) not in self._writers
        return is_own and (not has_effect(node) or bool(mutated_by(node)))

    def _values(self, nodes: Sequence[Node], arguments: Any) -> dict[Node, Any]:
        needed = {each for node in nodes for each in _behind(node)}
        run = _ArgumentRun(self._traced, arguments)
        with torch.no_grad():
            for node in self._traced.graph.nodes:
                if node in needed:
                    run.values[node] = self._size(value_of(node), arguments) if _is_size(node) else run.run_node(node)
        return run.values

    def _size(self, size: Any, arguments: Any) -> int:
        places = {symbol: self._sizes[symbol] for symbol in symbols_of(size)}
        values = {symbol: (trees.get(arguments, path), dim) for symbol, (path, dim) in places.items()}
        sizes = {symbol: value if dim == NUMBER else value.shape[dim] for symbol, (value, dim) in values.items()}
        return int(size.node.expr.subs(sizes))


def symbols_of(size: Any) -> set[sympy.Basic]:
    """The sizes of arguments that a size is made of, as symbols."""
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def is_in_proportion(size: Any, numbers: Iterable[sympy.Basic]) -> bool:
    """Whether a size is twice as large if these numbers of samples are."""
    expression = size.node.expr
    return bool(expression.subs({number: 2 * number for number in numbers}, simultaneous=True) == 2 * expression)


def _is_size(node: Node) -> bool:
    return isinstance(value_of(node), torch.SymInt)


def _behind(node: Node, writers: Mapping[Any, Sequence[Node]] = MappingProxyType({})) -> Iterator[Node]:
    """A node and all that it is made from, each once; sizes are made from nothing.

    Args:
        writers: by memory, nodes that write it, of which what is in it is made, too.
    """
    pending, seen = [node], set()
    while pending:
        if (one := pending.pop()) not in seen:
            seen.add(one)
            yield one
            pending += () if _is_size(one) else (*one.all_input_nodes, *writers.get(storage_key(one), ()))


class _ArgumentRun(GraphInterpreter):
    """Runs nodes on the host."""

    def __init__(self, traced: TracedGraph, arguments: Any) -> None:
        super().__init__()
        self._traced, self._arguments = traced, arguments

    def placeholder(self, node: Node) -> Any:
        value = trees.get(self._arguments, self._traced.input_paths[node.name])
        return value.detach().cpu() if isinstance(value, torch.Tensor) else value

    def get_attr(self, node: Node) -> Any:
        return self._traced.attribute(str(node.target))
