"""Runs the nodes of a traced graph, one by one; subclasses say on what.

`torch.fx.Interpreter` does the same for plain graphs. It knows no modes of nodes, hands `torch.fx`'s immutable
containers to what it calls, and needs a module in which it looks everything up.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from roundpipe.fx.graph.nodes import entered_modes


class GraphInterpreter:
    """Calls nodes with the values of their operands, in their modes."""

    def __init__(self) -> None:
        self.values: dict[Node, Any] = {}
        """What the nodes gave so far; for the subclass to fill."""

    def run_node(self, node: Node) -> Any:
        if node.op == "placeholder":
            return self.placeholder(node)
        if node.op == "get_attr":
            return self.get_attr(node)
        args, kwargs = self.operands(node.args, node.kwargs)
        with entered_modes(node):
            if node.op == "call_module":
                return self.call_module(node, args, kwargs)
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            assert callable(node.target)
            return node.target(*args, **kwargs)

    def operands(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return plain(map_arg((args, kwargs), self.value))

    def value(self, node: Node) -> Any:
        return self.values[node]

    def placeholder(self, node: Node) -> Any:
        raise NotImplementedError

    def get_attr(self, node: Node) -> Any:
        raise NotImplementedError

    def call_module(self, node: Node, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


def plain(value: Any) -> Any:
    """Arguments as they were given: `torch.fx` stores lists and dicts as immutable ones."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if type(value) is tuple:
        return tuple(plain(item) for item in value)
    return value
