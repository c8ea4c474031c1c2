"""Reads of data by traced code: evaluated on the example, specialized, and guarded.

``if mask.all():`` asks for data. If what is asked depends only on inputs and buffers, the example has the answer, and
replaying the few nodes it depends on tells whether other inputs give the same. What depends on parameters or random
numbers is never read.

Invariant: a value read while tracing is one that `ValueProgram` reads again.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.fx.graph.nodes import (
    GraphInterpreter,
    mutated_by,
    needed_for,
    picks_samples,
)
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.guards.batch_decisions import is_decision
from roundpipe.fx.varying import MOST_NUMBERS, FoundName, NumberRead


@dataclass(frozen=True, slots=True)
class ValueRead:
    """One read of data by traced code."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    after: Node
    """The last node recorded before the read: later writes in place are not seen by it."""
    expected: Any = None
    """The answer that the graph is specialized to; the shape if it is a tensor."""
    location: str = ""
    """Where the model's code asked."""
    module: str = ""
    """Qualified name of the module whose code it was; the root is ``""``."""
    is_of_batch: bool = False
    """Whether a whole batch gives the answer for its pieces."""
    may_be_of_batch: bool = False
    """Whether nobody knows which of both: there was no batch, or the answers were equal."""
    is_of_data: bool = False
    """Whether it depends on more of the inputs than their sizes, or on a buffer."""
    place: NumberRead | None = None
    """Of numbers that can be inputs of the graph."""

    @property
    def gives_value(self) -> bool:
        """Whether data give more than True or False."""
        return self.is_of_data and type(self.expected) is not bool

    @property
    def nodes(self) -> list[Node]:
        nodes: list[Node] = []
        torch.fx.node.map_arg((self.args, self.kwargs), nodes.append)
        return nodes


def needed_for_reads(order: list[Node], reads: list[ValueRead]) -> list[Node]:
    """The nodes, in order, that determine what some reads give; none that comes after its read."""
    position = {node: index for index, node in enumerate(order)}
    needed: set[Node] = set()
    for read in reads:
        needed.update(needed_for(order[: position[read.after] + 1], read.nodes))
    return [node for node in order if node in needed]


class HostRun(GraphInterpreter):
    """Evaluates nodes on real arguments, on the CPU and without autograd; see `ValueReader`."""

    def __init__(self, traced: TracedGraph, arguments: Any) -> None:
        super().__init__()
        self._traced = traced
        self._arguments = arguments
        self._writes = False

    def answers(self, nodes: list[Node], reads: list[ValueRead]) -> list[Any]:
        """What each read gives: it happens right after the last of ``nodes`` that is not behind it.

        Both are in order, and the reads depend on these nodes only.
        """
        self._writes = any(mutated_by(node) for node in nodes)
        pending = deque(reads)
        answers: list[Any] = []
        with torch.no_grad():
            for node in nodes:
                while pending and pending[0].after < node:
                    answers.append(self._answer(pending.popleft()))
                self.values[node] = self.run_node(node)
            answers += map(self._answer, pending)
        return answers

    def _answer(self, read: ValueRead) -> Any:
        args, kwargs = self.operands(read.args, read.kwargs)
        return read.function(*args, **kwargs)

    def placeholder(self, node: Node) -> Any:
        return self._own(trees.get(self._arguments, self._traced.input_paths[node.name]))

    def get_attr(self, node: Node) -> Any:
        return self._own(self._traced.attribute(str(node.target)))

    def _own(self, value: Any) -> Any:
        """The value on the CPU, which may be written if a node writes."""
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_meta:
            raise ValueError("a tensor on the meta device has no data")
        value = value.detach().cpu()
        return value.clone() if self._writes else value


class ValueProgram:
    """The reads of one trace with all they depend on, to be asked again for other inputs.

    The graph is as it was recorded, with nothing removed yet.
    """

    def __init__(
        self, traced: TracedGraph, reads: list[ValueRead], inputs: Mapping[FoundName, ValueRead] = MappingProxyType({})
    ) -> None:
        self._traced = traced
        own = torch.fx.Graph()
        copies: dict[Node, Node] = {}
        for node in traced.graph.nodes:
            copies[node] = own.node_copy(node, copies.__getitem__)
            copies[node].meta["mutates"] = tuple(copies[value] for value in mutated_by(node))

        def copied(read: ValueRead) -> ValueRead:
            args, kwargs = torch.fx.node.map_arg((read.args, read.kwargs), copies.__getitem__)
            return replace(read, args=args, kwargs=kwargs, after=copies[read.after])

        self.inputs = {name: copied(read) for name, read in inputs.items()}
        self.reads: list[ValueRead] = []
        self._places = dict.fromkeys(read.place for read in reads if read.place is not None)
        seen: list[tuple[Any, ...]] = []
        for read in map(copied, reads):
            key = (read.function, read.args, read.kwargs, read.is_of_batch)
            if key not in seen:
                seen.append(key)
                self.reads.append(read)
        order = list(own.nodes)
        self._needed_by = [needed_for_reads(order, [read]) for read in self.reads]
        self._needed_by_inputs = {name: needed_for_reads(order, [read]) for name, read in self.inputs.items()}
        data = [read for read in self.reads if read.is_of_data]
        self._of_sizes, self._of_batch, self._of_data, self._of_both = (
            (part, needed_for_reads(order, part))
            for part in (
                [read for read in self.reads if not read.is_of_data],
                [read for read in data if read.is_of_batch],
                [read for read in data if not read.is_of_batch],
                [read for read in data if read.may_be_of_batch],
            )
        )
        used = {node.name for node in traced.graph.nodes if node.users}
        names = {name: {node for node, path in traced.input_paths.items() if path[1].key == name} for name in inputs}
        self._used = {name for name, nodes in names.items() if nodes & used}
        self.buffers: dict[str, ValueRead] = {}
        """Names of the buffers that reads depend on, with the first that does."""
        needed = [*zip(self.reads, self._needed_by, strict=True)]
        needed += [(self.inputs[name], nodes) for name, nodes in self._needed_by_inputs.items()]
        for read, nodes in needed:
            for name in (str(node.target) for node in nodes if node.op == "get_attr"):
                if name not in traced.constants:
                    self.buffers.setdefault(name, read)

    def read_inputs(self, arguments: Any, batch: Any = None) -> dict[FoundName, Any]:
        """The inputs that are read from data, for some arguments and the batch that they are a piece of.

        Those that can't be read are missing.
        """
        own, whole = with_own_keywords(arguments), with_own_keywords(batch)
        found: dict[FoundName, Any] = {}
        for name, read in self.inputs.items():
            nodes, of_both = self._needed_by_inputs[name], []
            for each in (own, whole) if whole is not None else (own,):
                with contextlib.suppress(Exception):
                    answer = HostRun(self._traced, each).answers(nodes, [read])[0]
                    each[1][name] = answer
                    of_both.append(answer)
            if of_both:
                found[name] = of_both[-1 if read.is_of_batch else 0]
                own[1][name] = found[name]
        return found

    def own_inputs(self, paths: Mapping[str, trees.Path]) -> dict[frozenset[str], str]:
        """See `TracedGraph.own_numbers`."""
        found: dict[frozenset[str], str] = {}
        for name, read in self.inputs.items():
            if not read.is_of_batch and not read.may_be_of_batch:
                nodes = frozenset(node for node, path in paths.items() if path[1].key == name)
                is_one = type(read.expected) is list and len(nodes) == 1  # sample, whose number is its own
                is_of_all = not is_one and not any(map(picks_samples, self._needed_by_inputs[name]))
                found[nodes] = read.location if is_of_all else ""
        return found

    @property
    def openable(self) -> tuple[NumberRead, ...]:
        """What numbers the graph has that could be inputs; none if there are too many: its code goes by the data."""
        numbers = (len(trees.leaves(read.expected)) for read in self.reads if read.place is not None)
        return tuple(self._places) if sum(numbers) <= MOST_NUMBERS else ()

    def size_failure(self, arguments: Any) -> tuple[ValueRead, Any] | None:
        """The first read that sizes determine whose answer differs now, with the answer or the error."""
        return self._first_failure(*self._of_sizes, arguments)

    def data_failure(self, arguments: Any, batch: Any = None) -> tuple[ValueRead, Any] | None:
        """The same of the others; ``batch`` as for `ValueReader`."""
        by_batch = self._first_failure(*self._of_batch, batch or arguments)
        if by_batch is None and batch is not None:
            by_batch = self._first_failure(*self._of_both, batch)
        return by_batch or self._first_failure(*self._of_data, arguments)

    def _first_failure(self, reads: list[ValueRead], nodes: list[Node], arguments: Any) -> tuple[ValueRead, Any] | None:
        if not reads:
            return None
        try:
            answers = HostRun(self._traced, arguments).answers(nodes, reads)
        except Exception as error:
            return reads[0], error
        for read, answer in zip(reads, answers, strict=True):
            if not _same_answer(read.expected, answer):
                return read, answer
        return None

    def other_data(self, arguments: Any) -> ValueRead | None:
        """The first read, other than a decision, of data that are others in these arguments."""
        inputs = self.read_inputs(arguments)
        for name, read in self.inputs.items():
            if name not in inputs or _form_of(inputs[name]) != _form_of(read.expected):
                return read
        reads = ((r, nodes) for r, nodes in zip(self.reads, self._needed_by, strict=True) if r.gives_value)
        return next((read for read, nodes in reads if self._first_failure([read], nodes, arguments) is not None), None)

    @property
    def decides(self) -> bool:
        """Whether a batch decides something for its pieces."""
        return bool(self._of_batch[0] or self._of_both[0])

    @property
    def computes_with_batch(self) -> bool:
        """Whether a batch gives numbers, other than decisions, with which code computes."""
        of_inputs = (read.is_of_batch for name, read in self.inputs.items() if name in self._used)
        return any(of_inputs) or any(not is_decision(read.nodes, read.expected) for read in self._of_batch[0])

    @property
    def numbers(self) -> dict[float, str]:
        """Those that data give, of each piece of a batch its own, and what code makes of a list of them as a rule.

        And where they are read, if they are made of all samples, else empty.
        """
        found: dict[float, str] = {}
        lists: dict[str, list[float]] = {}
        for read, nodes in zip(self.reads, self._needed_by, strict=True):
            is_list = type(read.expected) is list
            if not (is_list or type(read.expected) in (int, float)) or read.is_of_batch or not read.is_of_data:
                continue
            is_of_all = not is_list and not read.may_be_of_batch and not any(map(picks_samples, nodes))
            numbers = [leaf for leaf in trees.leaves(read.expected) if type(leaf) in (int, float)]
            found |= dict.fromkeys(numbers, read.location if is_of_all else "")
            lists.setdefault(read.location, []).extend(numbers)  # some read each by itself
        for place, numbers in lists.items():
            if len(numbers) > 1:
                found |= dict.fromkeys((sum(numbers), sum(numbers) / len(numbers)), place)
        return found

    def inputs_of(self, read: ValueRead) -> list[str]:
        """Names of the inputs that a read depends on."""
        known = [*zip(self.reads, self._needed_by, strict=True)]
        known += [(self.inputs[name], nodes) for name, nodes in self._needed_by_inputs.items()]
        needed = next(nodes for each, nodes in known if each is read)
        return sorted(node.name for node in needed if node.op == "placeholder")


def with_own_keywords(arguments: Any) -> Any:
    """Arguments in normal form to which numbers can be added."""
    return None if arguments is None else (arguments[0], dict(arguments[1]))


def reads_data(read: ValueRead, nodes: list[Node]) -> bool:
    """Whether a read, or what it needs, uses more of the inputs than their sizes, or a buffer."""
    inside = set(nodes)
    return any(node.op == "placeholder" for node in read.nodes) or any(
        node.op == "get_attr"
        or node.op == "placeholder"
        and any(user in inside and (user.op, user.target) != ("call_method", "size") for user in node.users)
        for node in nodes
    )


def readers_of(reads: Iterable[ValueRead]) -> tuple[str, ...]:
    """Names of the modules whose code reads data, other than for decisions."""
    return tuple(dict.fromkeys(read.module for read in reads if read.gives_value))


def _form_of(numbers: Any) -> Any:
    """The same for lists that have numbers of the same types at the same places."""
    return trees.map_leaves(numbers, type)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """What a graph is specialized to in a tensor that is read."""
    return tuple(tensor.shape)


def _same_answer(expected: Any, answer: Any) -> bool:
    if isinstance(expected, float) and isinstance(answer, float):
        return expected == answer or (math.isnan(expected) and math.isnan(answer))
    try:
        same = expected == trees.map_tensors(answer, shape_of)
        return bool(same.all()) if hasattr(same, "all") else bool(same)
    except Exception:  # arrays of other sizes, say, can't be compared
        return False
