"""Reads of data by traced code: evaluated on the example, burned in, and guarded.

``if mask.all():`` asks for data. When what is asked depends only on inputs and buffers, the example
has the answer, and replaying the few nodes it depends on tells for other inputs whether the answer is
still the same. What depends on parameters or random numbers is never read.

Invariant: a value read while tracing is one that `ValueProgram.failures` reads again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.fx import Node

from roundpipe import structure
from roundpipe.fx.graph import ambient_of, draws_random, has_effect, storage_key

UNKNOWN = object()
"""What `ValueReader.read` returns when the data can't be known."""


@dataclass(frozen=True, slots=True)
class ValueRead:
    """One read of data by traced code."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: Any
    """The answer that is burned in; the shape if it is a tensor."""
    location: str
    """Where the model's code asked."""


class Replay:
    """Evaluates nodes on real inputs, on the CPU and without autograd.

    Args:
        model, constants: where get_attr nodes are looked up.
        inputs: placeholder name -> its value, asked for when needed.
    """

    def __init__(self, model: nn.Module, constants: dict[str, Any], inputs: Callable[[str], torch.Tensor]) -> None:
        self._model = model
        self._constants = constants
        self._inputs = inputs
        self._values: dict[Node, Any] = {}

    def value(self, node: Node) -> Any:
        """The node's value; what it depends on is evaluated first."""
        if node not in self._values:
            for source in node.all_input_nodes:
                self.value(source)
            self._values[node] = self._evaluate(node)
        return self._values[node]

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``function`` on arguments whose nodes are replaced by their values."""
        with torch.no_grad():
            return function(*self._real(args), **self._real(kwargs))

    def _real(self, arguments: Any) -> Any:
        return plain(torch.fx.node.map_arg(arguments, self.value))

    def _evaluate(self, node: Node) -> Any:
        if node.op == "placeholder":
            return _on_cpu(self._inputs(node.name))
        if node.op == "get_attr":
            target = str(node.target)
            if target in self._constants:
                return _on_cpu(self._constants[target])
            owner, _, name = target.rpartition(".")
            return _on_cpu(getattr(self._model.get_submodule(owner), name))
        ambient = ambient_of(node)
        with ambient.enter() if ambient is not None else contextlib.nullcontext():
            if node.op == "call_method":
                self_value, *args = self._real(node.args)
                with torch.no_grad():
                    return getattr(self_value, str(node.target))(*args, **self._real(node.kwargs))
            assert callable(node.target)
            return self.call(node.target, node.args, node.kwargs)


def _on_cpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_meta:
        raise ValueError("a tensor on the meta device has no data")
    return value.detach().cpu()


def plain(value: Any) -> Any:
    """Arguments as they were given: `torch.fx` stores lists and dicts as immutable ones."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if type(value) is tuple:
        return tuple(plain(item) for item in value)
    return value


class ValueReader:
    """Reads data while a graph is being recorded.

    Args:
        model: the user's model, for its buffers.
        constants: tensors that traced code used and that are no part of the model.
        arguments: the example, real.
        input_paths: placeholder name -> path into ``arguments``.
        written_storages: storages that recorded nodes wrote in place.
    """

    def __init__(
        self,
        model: nn.Module,
        constants: dict[str, Any],
        arguments: Any,
        input_paths: dict[str, structure.Path],
        written_storages: set[int],
    ) -> None:
        self._model = model
        self._constants = constants
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._written_storages = written_storages
        self._known: dict[Node, bool] = {}
        self._replay = Replay(model, constants, lambda name: structure.get(arguments, input_paths[name]))
        self.reads: list[ValueRead] = []

    def depends_on_inputs_only(self, node: Node) -> bool:
        """Whether inputs, buffers and constants determine a node's value."""
        if node not in self._known:
            self._known[node] = self._find_out(node)
        return self._known[node] and storage_key(node) not in self._written_storages

    def _find_out(self, node: Node) -> bool:
        if node.op == "placeholder":
            return True
        if node.op == "get_attr":
            return node.target not in self._parameters
        if node.op == "call_module" or has_effect(node) or draws_random(node):
            return False
        return all(self.depends_on_inputs_only(source) for source in node.all_input_nodes)

    def value(self, node: Node) -> Any:
        """The node's value for the example."""
        return self._replay.value(node)

    def read(self, function: Callable[..., Any], args: Any, kwargs: Any, location: str) -> Any:
        """The answer for the example, remembered for `ValueProgram`; `UNKNOWN` if there is none.

        Args:
            args, kwargs: as arguments of a node.
        """
        nodes: list[Node] = []
        torch.fx.node.map_arg((args, kwargs), nodes.append)
        if not nodes or not all(self.depends_on_inputs_only(node) for node in nodes):
            return UNKNOWN
        try:
            answer = self._replay.call(function, args, kwargs)
        except Exception:  # the data are not there (meta) or eager would fail too: the caller's own way fails
            return UNKNOWN
        expected = tuple(answer.shape) if isinstance(answer, torch.Tensor) else answer
        self.reads.append(ValueRead(function, args, kwargs, expected, location))
        return answer


class ValueProgram:
    """The reads of one trace with all they depend on, to be asked again for other inputs.

    Args:
        reads: what was read.
        model, constants: where get_attr nodes are looked up.
        input_paths: placeholder name -> path into the arguments.
    """

    def __init__(
        self,
        reads: list[ValueRead],
        model: nn.Module,
        constants: dict[str, Any],
        input_paths: dict[str, structure.Path],
    ) -> None:
        self._model = model
        self._constants = constants
        self._input_paths = input_paths
        self._graph = torch.fx.Graph()
        self._copies: dict[Node, Node] = {}
        self.reads: list[ValueRead] = []
        seen: list[tuple[Any, ...]] = []
        for read in reads:
            args, kwargs = torch.fx.node.map_arg((read.args, read.kwargs), self._copy)
            key = (read.function, args, kwargs)
            if key not in seen:
                seen.append(key)
                self.reads.append(ValueRead(read.function, args, kwargs, read.expected, read.location))

    @property
    def buffers(self) -> set[str]:
        """Names of the buffers that the reads depend on."""
        return {str(copy.target) for copy in self._copies.values() if copy.op == "get_attr"} - set(self._constants)

    def first_failure(self, arguments: Any) -> tuple[ValueRead, Any] | None:
        """The first read whose answer differs for these arguments, with the answer."""
        if not self.reads:
            return None
        replay = Replay(self._model, self._constants, lambda name: structure.get(arguments, self._input_paths[name]))
        for read in self.reads:
            answer = replay.call(read.function, read.args, read.kwargs)
            if not _same_answer(read.expected, answer):
                return read, answer
        return None

    def inputs_of(self, read: ValueRead) -> list[str]:
        """Names of the inputs that a read depends on."""
        pending: list[Node] = []
        torch.fx.node.map_arg((read.args, read.kwargs), pending.append)
        found: dict[Node, None] = {}
        while pending:
            node = pending.pop()
            if node not in found:
                found[node] = None
                pending.extend(node.all_input_nodes)
        return sorted(node.name for node in found if node.op == "placeholder")

    def _copy(self, node: Node) -> Node:
        if node not in self._copies:
            for source in node.all_input_nodes:
                self._copy(source)
            copy = self._graph.node_copy(node, self._copies.__getitem__)
            copy.name = node.name
            self._copies[node] = copy
        return self._copies[node]


def _same_answer(expected: Any, answer: Any) -> bool:
    if isinstance(answer, torch.Tensor):
        return tuple(answer.shape) == expected
    if isinstance(expected, float) and isinstance(answer, float):
        return expected == answer or (math.isnan(expected) and math.isnan(answer))
    same = expected == answer
    return bool(same.all()) if hasattr(same, "all") else bool(same)
