"""Glue that several layers make for themselves, such as masks and rotary tables, as values that they can be given.

A layer's graph makes its glue itself, so that it runs alone. Beside it there is a function for each value of glue, and
the layer's code without what makes it; both are written when they are first needed.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from roundpipe.core import trees
from roundpipe.core.layers import Carry, Glue
from roundpipe.fx.graph.nodes import modes_of
from roundpipe.fx.passes.generated import GeneratedFunction

_SIZES = frozenset({"size", "dim", "numel"})
_ATTRIBUTES_OF_SIZE = frozenset({"shape", "ndim", "dtype", "device"})

GlueFunctions = dict[str, GeneratedFunction]
"""By name of a value, what makes it; the same in all layers of a chain."""


class GlueCode:
    """A layer's glue that it can be given; shared by its copies.

    Args:
        graph: the layer's.
        nodes: by name, the nodes whose values can be given. What they are made of has no effect and draws nothing.
        functions: those of the chain.
    """

    def __init__(self, graph: Graph, nodes: Mapping[str, Node], functions: GlueFunctions) -> None:
        self.nodes = dict(nodes)
        self._graph = graph
        self._functions = functions
        self._rest: GeneratedFunction | None = None

    def described(self) -> Iterator[Glue]:
        """The values, and what each is made of."""
        for name, node in self.nodes.items():
            inside = made_of([node])
            reads = [each for each in self._graph.nodes if each in inside and _is_read(each)]
            sizes = (each for each in reads if all(_asks_size(user) for user in each.users if user in inside))
            yield Glue(name, tuple(str(each.args[1]) for each in reads), frozenset(str(each.args[1]) for each in sizes))

    def make(self, layer: nn.Module, name: str, carry: Carry) -> Any:
        """One of the values."""
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = GeneratedFunction.of(layer, self._alone(name))
        return function(layer, carry)

    def all_in(self, carry: Carry) -> bool:
        """Whether there is any, and a carry has all of it."""
        return bool(self.nodes) and all(name in carry for name in self.nodes)

    def complete(self, layer: nn.Module, carry: Carry) -> Carry:
        """A carry that has all of it."""
        missing = [name for name in self.nodes if name not in carry]
        return {**carry, **{name: self.make(layer, name, carry) for name in missing}} if missing else carry

    def run_rest(self, layer: nn.Module, carry: Carry) -> Any:
        """What the layer's code returns; it takes its glue from the carry."""
        if self._rest is None:
            self._rest = GeneratedFunction.of(layer, self._without())
        return self._rest(layer, carry)

    def _alone(self, name: str) -> Graph:
        node, graph, copies = self.nodes[name], Graph(), dict[Node, Node]()
        inside = made_of([node])
        for each in self._graph.nodes:
            if each in inside or each.op == "placeholder":
                copies[each] = graph.node_copy(each, copies.__getitem__)
        graph.output(copies[node])
        return graph

    def _without(self) -> Graph:
        graph, copies = Graph(), dict[Node, Node]()
        names = {node: name for name, node in self.nodes.items()}
        for node in self._graph.nodes:
            if node.op == "placeholder":
                carry = copies[node] = graph.node_copy(node)
            elif node.op == "output":
                graph.output(map_arg(node.args[0], copies.__getitem__))
            elif node in names:
                copies[node] = taken(graph, carry, names[node])
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        erase_unread(graph, (copies[node] for node in made_of(self.nodes.values())))
        return graph


def names_of_equal(values: Iterable[Node]) -> dict[Node, str]:
    """Values of glue, each by the name of the first one that is made in the same way of the same."""
    values = [*values]
    firsts: dict[Hashable, Node] = {}
    found: dict[Node, Node] = {}
    inside = made_of(values)
    for node in values[0].graph.nodes if values else ():
        if node in inside:
            operands = _as_key((node.args, node.kwargs), found)
            found[node] = firsts.setdefault((node.op, node.target, operands, modes_of(node)), node)
    return {node: found[node].name for node in values}


def _as_key(value: Any, firsts: Mapping[Node, Node]) -> Hashable:
    """Equal for operands that are the same."""
    if isinstance(value, Node):
        return firsts.get(value, value)
    if isinstance(value, dict):
        return dict, tuple((key, _as_key(item, firsts)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_as_key(item, firsts) for item in value)
    if isinstance(value, slice):
        return slice, _as_key((value.start, value.stop, value.step), firsts)
    return type(value), repr(value) if isinstance(value, trees.PLAIN) else id(value)


def made_of(nodes: Iterable[Node]) -> set[Node]:
    """The nodes, and all that they are made of but for the carry."""
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node.op != "placeholder" and node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def taken(graph: Graph, carry: Any, name: str) -> Node:
    """A value taken out of a carry."""
    return graph.create_node("call_function", operator.getitem, (carry, name), name=name)


def erase_unread(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erase those of the nodes that nothing reads any more."""
    candidates = set(nodes)
    for node in reversed(list(graph.nodes)):
        if node in candidates and not node.users:
            graph.erase_node(node)


def _is_read(node: Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, Node) and source.op == "placeholder"


def _asks_size(node: Node) -> bool:
    if node.op == "call_method":
        return node.target in _SIZES
    return node.target is getattr and node.args[1] in _ATTRIBUTES_OF_SIZE
