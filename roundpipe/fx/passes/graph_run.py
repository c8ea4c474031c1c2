"""Runs a layer's graph on fakes, and sees what its nodes do beside computing."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from roundpipe.core.allocations import TorchDispatchMode
from roundpipe.core.layers import Carry
from roundpipe.core.module_tree import modules_in
from roundpipe.effects.places import has_hooks
from roundpipe.effects.snapshot import ContentsSnapshot
from roundpipe.effects.uses import asks_for_gradients
from roundpipe.fx.graph.nodes import GraphInterpreter
from roundpipe.fx.sizes import flat_tensors

_LAYOUT = ("stride", "storage_offset", "data_ptr")


class LayerRun(GraphInterpreter):
    """Runs nodes of a layer's graph on fakes."""

    def __init__(self, root: nn.Module, carry: Carry) -> None:
        super().__init__()
        self.root = root
        self.carry = carry

    def placeholder(self, node: Node) -> Any:
        return self.carry

    def get_attr(self, node: Node) -> Any:
        return attribute(self.root, node)

    def call_module(self, node: Node, args: Any, kwargs: Any) -> Any:
        return attribute(self.root, node)(*args, **kwargs)


class GraphRun(LayerRun):
    """A layer's graph, run on fakes under autograd, and what its nodes did beside computing."""

    def __init__(self, graph: Graph, root: nn.Module, carry: Carry) -> None:
        super().__init__(root, carry)
        self.graph = graph
        self.literals: dict[Node, Any] = {}
        """Nodes that compute sizes, with these."""
        self.opaque: dict[Node, str] = {}
        """Nodes that do more than compute, and why."""
        self.stateful: list[Node] = []
        """Those whose order matters."""
        self.touching: dict[int, list[Node]] = {}
        """By storage, the nodes that read or make it."""
        self.written: set[int] = set()
        """Storages that a node writes, which has not made them."""
        self._functions: set[Any] = set()
        for node in graph.nodes:
            if node.op != "output":
                self.values[node] = self._run(node)
        for key in self.written:
            self.opaque.update((node, "writes in place") for node in self.touching[key])

    def moved(self, graph: Graph) -> GraphRun:
        """The same for the graph of a layer that does the same; it does not run again."""
        clone = object.__new__(GraphRun)
        other = dict(zip(self.graph.nodes, graph.nodes, strict=True))
        clone.graph = graph
        clone.values = {other[node]: value for node, value in self.values.items()}
        clone.literals = {other[node]: value for node, value in self.literals.items()}
        return clone

    def _run(self, node: Node) -> Any:
        if not node.op.startswith("call_"):
            return self.run_node(node)
        modules = [value for value in map(self.values.get, node.all_input_nodes) if isinstance(value, nn.Module)]
        if node.op == "call_module":
            modules.append(attribute(self.root, node))
        parts = [part for module in modules for part in modules_in(module)]
        before = ContentsSnapshot(parts)
        with OperatorEffects() as writes:
            value = self.run_node(node)
        if before.diff() or before.buffers_written() or before.holds_new_values():
            self.opaque[node] = "sets attributes"
            self.stateful.append(node)
        why = next(filter(None, map(why_opaque, parts)), "")
        if not why and any(tensor._backward_hooks for tensor in writes.made):
            why = "hooks on tensors"
        if not why and has_own_function(flat_tensors(value), self._functions):
            why = "its own backward"
        if why:
            self.opaque.setdefault(node, why)
        is_item = node.target is operator.getitem
        if node.op != "call_module" and not writes.made and _is_size(value) and node.target not in _LAYOUT:
            if not is_item or node.args[0] in self.literals:
                self.literals[node] = value
        inputs = flat_tensors([self.values[source] for source in node.all_input_nodes])
        for tensor in (*inputs, *flat_tensors(value)):
            nodes = self.touching.setdefault(_storage(tensor), [])
            if not nodes or nodes[-1] is not node:
                nodes.append(node)
        for key in writes.written - writes.born:
            self.written.add(key)
            nodes = self.touching.setdefault(key, [])
            if not nodes or nodes[-1] is not node:
                nodes.append(node)
        return value


def has_own_function(tensors: Iterable[torch.Tensor], known: set[Any]) -> bool:
    """Whether a custom autograd function made some tensors, after those known, to which all others are added."""
    found = False
    stack = [tensor.grad_fn for tensor in tensors]
    while stack:
        function = stack.pop()
        if function is not None and function not in known:
            known.add(function)
            found = found or isinstance(function, torch.autograd.function.BackwardCFunction)
            stack += [next_function for next_function, _ in function.next_functions]
    return found


class OperatorEffects(TorchDispatchMode):
    """Sees what operators make and what they write, storages by identity."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []
        self.born: set[int] = set()
        """Storages that were made."""
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        outputs = flat_tensors(out)
        self.made += outputs
        self.born.update(set(map(_storage, outputs)) - set(map(_storage, flat_tensors(args, kwargs))))
        for index, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                self.written.update(map(_storage, flat_tensors(value)))
        return out


def attribute(root: nn.Module, node: Node) -> Any:
    """What a get_attr or call_module node of a layer names."""
    return operator.attrgetter(str(node.target))(root)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def why_opaque(module: nn.Module) -> str:
    """Why a module, its children not looked at, does more than compute, or may do so otherwise in a tile."""
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted"
    if has_hooks(module):
        return "hooks"
    kind = type(module)
    return "asks for gradients" if not kind.__module__.startswith("torch.nn.") and asks_for_gradients(kind) else ""


def _is_size(value: Any) -> bool:
    leaves = list(value) if type(value) in (tuple, list, torch.Size) else [value]
    return bool(leaves) and all(type(leaf) is int for leaf in leaves)
