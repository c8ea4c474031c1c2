"""Reads of data while a graph is being recorded: the answers for the example, and which of them are inputs."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.fx.graph.nodes import draws_random, has_effect, mutated_by, picks_samples, storage_key
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.guards.batch_decisions import is_decision
from roundpipe.fx.guards.piece_numbers import NumberOfPiece, SymbolOfPiece
from roundpipe.fx.guards.values import HostRun, ValueRead, needed_for_reads, reads_data, shape_of, with_own_keywords
from roundpipe.fx.varying import FoundName, NumberRead, may_be_opened

UNKNOWN = object()
"""What `ValueReader.read` returns when the data can't be known."""


class ValueReader:
    """Reads data while a graph is being recorded.

    Args:
        traced: what is recorded so far.
        arguments: the example, real.
        batch: those of the batch that the example is a piece of; None: it is no piece.
        takes_numbers: whether the batch gives numbers, too, with which code computes.
        open_input: makes a symbolic number, or a list of them, of what is read, under a name; and whether it is the
            piece's own.
        refuse: raises where code divides a number of a piece of a batch by a size of the piece's.
        varying: what is to be opened.
    """

    def __init__(
        self,
        traced: TracedGraph,
        arguments: Any,
        batch: Any = None,
        *,
        takes_numbers: bool = True,
        open_input: Callable[[FoundName, Any, bool], Any] = lambda name, value, is_own: value,
        refuse: Callable[[], None] = lambda: None,
        varying: Container[Any] = (),
    ) -> None:
        self._traced = traced
        self._arguments, self._batch = with_own_keywords(arguments), with_own_keywords(batch)
        self._takes_numbers = takes_numbers
        self._open_input, self._refuse, self._varying = open_input, refuse, varying
        self._num_at = Counter[tuple[str, str]]()
        self._opened: dict[tuple[Any, Any], Any] = {}
        """By what is called on which nodes, what code got."""
        self.inputs: dict[FoundName, ValueRead] = {}
        """What became inputs of the graph."""
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
        read = replace(read, is_of_data=reads_data(read, needed))
        try:
            answer = self._answer(read, needed)
        except Exception:  # the data are not there (meta) or eager would fail too: the caller's own way fails
            return UNKNOWN
        read = replace(read, place=self._place(read, answer))
        is_open = read.place in self._varying
        takes = self._takes_numbers and type(answer) in (int, float) and not any(map(picks_samples, needed))
        may_be_size = type(answer) is int
        # what others give than item() must be a plain number
        may_be_either = takes and may_be_size and getattr(function, "__name__", "") == "item"
        is_of_batch = is_decision(read.nodes, answer) or takes and not may_be_size
        if self._batch is not None and (is_of_batch or may_be_either) and read.is_of_data:
            with contextlib.suppress(Exception):  # a graph that serves no batch decides by pieces
                whole = self._answer(read, needed, self._batch)
        if is_open:
            key = function, args  # of one value, they are the same numbers each time
            if key not in self._opened:
                self._opened[key] = self._open(read, answer, whole, is_of_batch, may_be_either)
            return trees.map_leaves(self._opened[key], lambda number: number)  # a list is the code's own
        if is_of_batch and whole is not UNKNOWN:
            answer = whole
        read = replace(read, expected=trees.map_tensors(answer, shape_of), is_of_batch=is_of_batch)
        if is_of_batch or type(whole) is not int or whole == answer:
            self.reads.append(replace(read, may_be_of_batch=may_be_either and not is_of_batch))
            return answer
        self.reads.append(read)
        return NumberOfPiece(answer, whole, functools.partial(self._note_whole, read, whole), self._refuse)

    def _place(self, read: ValueRead, answer: Any) -> NumberRead | None:
        """Where it is read, if that can be an input: what must be a number of Python's can't."""
        function = getattr(read.function, "__name__", "")
        self._num_at[function, read.location] += 1
        if function not in ("item", "tolist") or not read.is_of_data or not may_be_opened(answer):
            return None
        return NumberRead(function, read.location, self._num_at[function, read.location])

    def _open(self, read: ValueRead, own: Any, whole: Any, is_of_batch: bool, may_be_either: bool) -> Any:
        """Symbols for what the piece gives, or its batch; for both, if only what code does with it tells."""
        if whole is UNKNOWN:
            whole = own
        if is_of_batch or not may_be_either:
            return self._input(replace(read, is_of_batch=is_of_batch), whole if is_of_batch else own, whole)
        of_batch = self._input(replace(read, is_of_batch=True), whole, whole)
        return SymbolOfPiece(self._input(replace(read, may_be_of_batch=True), own, whole), of_batch, self._refuse)

    def _input(self, read: ValueRead, value: Any, whole: Any) -> Any:
        assert read.place is not None
        name = FoundName.free(read.place.words, self.inputs)
        self.inputs[name] = replace(read, expected=value)
        self._arguments[1][name] = value
        if self._batch is not None:
            self._batch[1][name] = whole
        return self._open_input(name, value, not read.is_of_batch)

    def _note_whole(self, read: ValueRead, number: int) -> None:
        read = replace(read, expected=number, is_of_batch=True)
        if read not in self.reads:
            self.reads.append(read)

    def _last(self) -> Node:
        return next(iter(reversed(self._traced.graph.nodes)))

    def _answer(self, read: ValueRead, needed: list[Node], arguments: Any = None) -> Any:
        return HostRun(self._traced, arguments or self._arguments).answers(needed, [read])[0]

    def _needed_for(self, read: ValueRead) -> list[Node]:
        return needed_for_reads(list(self._traced.graph.nodes), [read])
