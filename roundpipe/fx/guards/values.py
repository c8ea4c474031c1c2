"""Reads of data by traced code: evaluated on the example, specialized, and guarded.

``if mask.all():`` asks for data. If what is asked depends only on inputs and buffers, the example has the answer, and
replaying the few nodes it depends on tells whether other inputs give the same. What depends on parameters or random
numbers is never read.

Invariant: a value read while tracing is one that `ValueProgram` reads again.

Of a microbatch that is a piece of a batch, decisions are asked of the whole batch, if that is known: they are those of
eager mode. What gives True or False is one, and so is the largest or smallest of some numbers, such as the length of
the longest sample, and a number with a fraction, which is no size. Whether there are any of something is not: a piece
that has none would average over nothing. Nor is whether there are as many of something as code expects, such as places
for images: a piece has to have its own. What an integer is, what code does with it tells (`NumberOfPiece`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.fx.graph.nodes import (
    GraphInterpreter,
    called_name,
    draws_random,
    has_effect,
    mutated_by,
    needed_for,
    past_calls,
    picks_samples,
    storage_key,
    value_of,
)
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.guards.piece_numbers import NumberOfPiece
from roundpipe.fx.sizes import expression_of

_EXTREMES = frozenset("max amax min amin".split())
_CASTS = frozenset("to bool int long float double cpu squeeze".split())
_MORE, _COUNTS = frozenset("gt ne".split()), frozenset("sum count_nonzero".split())
"""Ways to ask whether there are any."""
_EQUALITIES = frozenset("eq ne".split())
_OF_ONE_ANSWER = _CASTS | frozenset("all is_all_true logical_not".split())
_OF_ONE_COUNT = _CASTS | frozenset("mul div floordiv add sub".split())
"""What a count goes through before it is compared."""
UNKNOWN = object()
"""What `ValueReader.read` returns when the data can't be known."""


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

    @property
    def gives_value(self) -> bool:
        """Whether data give more than True or False."""
        return self.is_of_data and type(self.expected) is not bool

    @property
    def nodes(self) -> list[Node]:
        nodes: list[Node] = []
        torch.fx.node.map_arg((self.args, self.kwargs), nodes.append)
        return nodes


def _needed_for_reads(order: list[Node], reads: list[ValueRead]) -> list[Node]:
    """The nodes, in order, that determine what some reads give; none that comes after its read."""
    position = {node: index for index, node in enumerate(order)}
    needed: set[Node] = set()
    for read in reads:
        needed.update(needed_for(order[: position[read.after] + 1], read.nodes))
    return [node for node in order if node in needed]


class _HostRun(GraphInterpreter):
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


class ValueReader:
    """Reads data while a graph is being recorded.

    Args:
        traced: what is recorded so far.
        arguments: the example, real.
        batch: those of the batch that the example is a piece of; None: it is no piece.
        takes_numbers: whether the batch gives numbers, too, with which code computes.
    """

    def __init__(self, traced: TracedGraph, arguments: Any, batch: Any = None, *, takes_numbers: bool = True) -> None:
        self._traced = traced
        self._arguments = arguments
        self._batch = batch
        self._takes_numbers = takes_numbers
        self._known: dict[Node, bool] = {}
        self._tainted: set[int] = set()
        self.reads: list[ValueRead] = []

    def taint(self, tensors: Iterable[torch.Tensor]) -> None:
        """Something that can't be replayed wrote these tensors."""
        self._tainted.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def depends_on_inputs_only(self, node: Node) -> bool:
        """Whether inputs, buffers and constants determine a node's value."""
        if node not in self._known:
            self._known[node] = self._find_out(node)
        return self._known[node] and storage_key(node) not in self._tainted

    def _find_out(self, node: Node) -> bool:
        if node.op == "placeholder":
            return True
        if node.op == "get_attr":
            return not self._traced.parameters_of(node)
        if node.op == "call_module" or draws_random(node) or (has_effect(node) and not mutated_by(node)):
            return False
        return all(self.depends_on_inputs_only(source) for source in node.all_input_nodes)

    def value(self, node: Node) -> Any:
        """The node's value for the example."""
        read = ValueRead(lambda value: value, (node,), {}, self._last())
        return self._answer(read, self._needed_for(read))

    def read(self, function: Callable[..., Any], args: Any, kwargs: Any, location: str, module: str) -> Any:
        """The answer for the example, remembered for `ValueProgram`; `UNKNOWN` if there is none."""
        read = ValueRead(function, args, kwargs, self._last(), location=location, module=module)
        if not read.nodes or not all(self.depends_on_inputs_only(node) for node in read.nodes):
            return UNKNOWN
        needed, whole = self._needed_for(read), UNKNOWN
        read = replace(read, is_of_data=_reads_data(read, needed))
        try:
            answer = self._answer(read, needed)
        except Exception:  # the data are not there (meta) or eager would fail too: the caller's own way fails
            return UNKNOWN
        takes = self._takes_numbers and type(answer) in (int, float) and not any(map(picks_samples, needed))
        may_be_size = type(answer) is int
        # what others give than item() must be a plain number
        may_be_either = takes and may_be_size and getattr(function, "__name__", "") == "item"
        is_of_batch = _is_decision(read, answer) or takes and not may_be_size
        if self._batch is not None and (is_of_batch or may_be_either) and read.is_of_data:
            with contextlib.suppress(Exception):  # a graph that serves no batch decides by pieces
                whole = self._answer(read, needed, self._batch)
        if is_of_batch and whole is not UNKNOWN:
            answer = whole
        read = replace(read, expected=trees.map_tensors(answer, _shape), is_of_batch=is_of_batch)
        if is_of_batch or type(whole) is not int or whole == answer:
            self.reads.append(replace(read, may_be_of_batch=may_be_either and not is_of_batch))
            return answer
        self.reads.append(read)
        return NumberOfPiece(answer, whole, functools.partial(self._note_whole, read, whole))

    def _note_whole(self, read: ValueRead, number: int) -> None:
        read = replace(read, expected=number, is_of_batch=True)
        if read not in self.reads:
            self.reads.append(read)

    def _last(self) -> Node:
        return next(iter(reversed(self._traced.graph.nodes)))

    def _answer(self, read: ValueRead, needed: list[Node], arguments: Any = None) -> Any:
        return _HostRun(self._traced, arguments or self._arguments).answers(needed, [read])[0]

    def _needed_for(self, read: ValueRead) -> list[Node]:
        return _needed_for_reads(list(self._traced.graph.nodes), [read])


class ValueProgram:
    """The reads of one trace with all they depend on, to be asked again for other inputs.

    The graph is as it was recorded, with nothing removed yet.
    """

    def __init__(self, traced: TracedGraph, reads: list[ValueRead]) -> None:
        self._traced = traced
        own = torch.fx.Graph()
        copies: dict[Node, Node] = {}
        for node in traced.graph.nodes:
            copies[node] = own.node_copy(node, copies.__getitem__)
            copies[node].meta["mutates"] = tuple(copies[value] for value in mutated_by(node))
        self.reads: list[ValueRead] = []
        seen: list[tuple[Any, ...]] = []
        for read in reads:
            args, kwargs = torch.fx.node.map_arg((read.args, read.kwargs), copies.__getitem__)
            key = (read.function, args, kwargs, read.is_of_batch)
            if key not in seen:
                seen.append(key)
                self.reads.append(replace(read, args=args, kwargs=kwargs, after=copies[read.after]))
        order = list(own.nodes)
        self._needed_by = [_needed_for_reads(order, [read]) for read in self.reads]
        data = [read for read in self.reads if read.is_of_data]
        self._of_sizes, self._of_batch, self._of_data, self._of_both = (
            (part, _needed_for_reads(order, part))
            for part in (
                [read for read in self.reads if not read.is_of_data],
                [read for read in data if read.is_of_batch],
                [read for read in data if not read.is_of_batch],
                [read for read in data if read.may_be_of_batch],
            )
        )
        self.buffers: dict[str, ValueRead] = {}
        """Names of the buffers that reads depend on, with the first that does."""
        for read, nodes in zip(self.reads, self._needed_by, strict=True):
            for name in (str(node.target) for node in nodes if node.op == "get_attr"):
                if name not in traced.constants:
                    self.buffers.setdefault(name, read)

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
            answers = _HostRun(self._traced, arguments).answers(nodes, reads)
        except Exception as error:
            return reads[0], error
        for read, answer in zip(reads, answers, strict=True):
            if not _same_answer(read.expected, answer):
                return read, answer
        return None

    def other_data(self, arguments: Any) -> ValueRead | None:
        """The first read, other than a decision, of data that are others in these arguments."""
        reads = ((r, nodes) for r, nodes in zip(self.reads, self._needed_by, strict=True) if r.gives_value)
        return next((read for read, nodes in reads if self._first_failure([read], nodes, arguments) is not None), None)

    @property
    def decides(self) -> bool:
        """Whether a batch decides something for its pieces."""
        return bool(self._of_batch[0] or self._of_both[0])

    @property
    def computes_with_batch(self) -> bool:
        """Whether a batch gives numbers, other than decisions, with which code computes."""
        return any(not _is_decision(read, read.expected) for read in self._of_batch[0])

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
        needed = self._needed_by[next(i for i, known in enumerate(self.reads) if known is read)]
        return sorted(node.name for node in needed if node.op == "placeholder")


def _reads_data(read: ValueRead, nodes: list[Node]) -> bool:
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


def _is_decision(read: ValueRead, answer: Any) -> bool:
    """Whether a read gives what a whole batch decides for its pieces."""
    if len(read.nodes) != 1 or not isinstance(answer, int | float):
        return isinstance(answer, bool)
    (node,) = read.nodes
    if _equates_counts(node):
        return False
    node = past_calls(node, _CASTS)
    if not isinstance(answer, bool):
        return called_name(node) in _EXTREMES
    counted = node.args[0] if called_name(node) in _MORE and len(node.args) == 2 and node.args[1] == 0 else None
    return called_name(node) != "any" and not (isinstance(counted, Node) and called_name(counted) in _COUNTS)


def _equates_counts(node: Node) -> bool:
    """Whether it tells if a count is a certain number, other than that of all that were counted."""
    node = past_calls(node, _OF_ONE_ANSWER)
    operands = node.args if called_name(node) in _EQUALITIES else ()
    for operand, other in zip(operands, operands[::-1], strict=True):
        if isinstance(operand, Node) and called_name(past_calls(operand, _OF_ONE_COUNT)) in _COUNTS:
            return not _is_number_of_all(past_calls(operand, _CASTS), other)
    return False


def _is_number_of_all(count: Node, other: Any) -> bool:
    """Whether something is the number of elements that a node counts."""
    counted = value_of(count.all_input_nodes[0]) if called_name(count) in _COUNTS else None
    number = value_of(other) if isinstance(other, Node) else other
    if not isinstance(counted, torch.Tensor) or isinstance(number, torch.Tensor):
        return False
    return bool(expression_of(counted.numel()) == expression_of(number))


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _same_answer(expected: Any, answer: Any) -> bool:
    if isinstance(expected, float) and isinstance(answer, float):
        return expected == answer or (math.isnan(expected) and math.isnan(answer))
    try:
        same = expected == trees.map_tensors(answer, _shape)
        return bool(same.all()) if hasattr(same, "all") else bool(same)
    except Exception:  # arrays of other sizes, say, can't be compared
        return False
