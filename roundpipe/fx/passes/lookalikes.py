"""Keys that are equal for nodes that cost the same, such as those of a transformer's blocks.

What can't be compared (an argument of a class unknown here, a structure's maker) is equal to itself alone.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.fx.graph.nodes import is_accessor, modes_of, mutated_by, value_of
from roundpipe.fx.graph.traced import TracedGraph


class Lookalikes:
    """Keys of the nodes of one graph."""

    def __init__(self, traced: TracedGraph) -> None:
        self._traced = traced
        self._module_keys: dict[Any, Hashable] = {}

    def key(self, node: Node) -> Hashable:
        """Equal for nodes that do the same to values of the same kind."""
        target: Any = node.target
        if node.op == "call_module":
            if target not in self._module_keys:
                self._module_keys[target] = _module_key(self._traced.attribute(target))
            target = self._module_keys[target]
        elif node.op == "call_function":
            target = (id(target), getattr(target, "__name__", ""))
        arguments = _argument_key((node.args, node.kwargs), {})
        return node.op, target, arguments, _value_key(node), id(modes_of(node)), bool(mutated_by(node))


def _module_key(module: nn.Module) -> Hashable:
    weights = tuple(
        (name, tensor.shape, tensor.dtype, tensor.requires_grad)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    )
    return tuple(map(type, module.modules())), weights, module.training


def _value_key(node: Node) -> Hashable:
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        return tuple(map(_size_key, value.shape)), value.dtype, value.requires_grad
    if value is None:
        return id(node) if node.op == "call_function" and not is_accessor(node) else None
    return _size_key(value)


def _size_key(size: Any) -> Hashable:
    return size.node.hint if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else size


def _argument_key(argument: Any, seen: dict[Node, int]) -> Hashable:
    """An argument without names; of nodes, their kind of value and which of them are one."""
    if isinstance(argument, Node):
        return argument.op == "get_attr", _value_key(argument), seen.setdefault(argument, len(seen))
    if isinstance(argument, (*trees.PLAIN, torch.Size, torch.memory_format)):
        return type(argument), argument
    if isinstance(argument, (list, tuple, dict, slice)):
        return tuple((step, _argument_key(item, seen)) for step, item in trees.children(argument) or ())
    return id(argument)
