"""Which layers do the same with weights of the same kind, so that what is found out about one holds for all.

A transformer's blocks are such layers, though their modules have other names.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from roundpipe.core import trees
from roundpipe.core.layers import LayerSpec
from roundpipe.effects.places import has_hooks
from roundpipe.fx.operations import NamedCall, SizeExpression, pass_on
from roundpipe.fx.passes.graph_run import attribute


def layer_key(layer: nn.Module, spec: LayerSpec) -> Hashable:
    """Equal for layers that do the same with weights of the same kind."""
    if not isinstance(layer, GraphModule):
        return type(layer), tuple(module_key(child, name) for name, child in layer.named_children())
    *nodes, output = layer.graph.nodes
    index = {node: f"%{position}" for position, node in enumerate(nodes)}
    results = output.args[0]
    if isinstance(results, Node) and results.target is pass_on:  # what is handed on as it is does not count
        nodes.remove(results)
        results = results.args[2]

    def operands(value: Any) -> str:
        return repr(map_aggregate(value, lambda leaf: _argument(leaf, index)))

    calls = tuple((node.op, _target_key(layer, node), operands((node.args, node.kwargs))) for node in nodes)
    return calls, operands(_values(results))


def _values(arg: Any) -> Any:
    """What a carry holds, whose keys are names."""
    return [*arg.values()] if isinstance(arg, dict) else arg


def _argument(leaf: Any, index: Mapping[Node, str]) -> Any:
    if isinstance(leaf, Node):
        return index[leaf]
    return None if isinstance(leaf, str) else leaf  # names of carried values


def _target_key(layer: GraphModule, node: Node) -> Hashable:
    target = node.target
    if node.op == "call_function":
        if isinstance(target, NamedCall):
            return target.__name__, target.function, target.modes
        return (target.source, target.names) if isinstance(target, SizeExpression) else target
    if node.op not in ("call_module", "get_attr"):
        return str(target) if node.op == "call_method" else None
    value = attribute(layer, node)
    return module_key(value, str(target)) if isinstance(value, nn.Module) else value_key(value)


def module_key(module: nn.Module, name: str) -> Hashable:
    """Classes, weights, attributes and hooks of a tree of modules; its name and number in a list do not count."""
    numbers = {int(part) for part in name.split(".") if part.isdigit()}
    return tuple(
        (
            path,
            type(part),
            part.training,
            has_hooks(part),
            tuple((key, value_key(tensor)) for key, tensor in (*part._parameters.items(), *part._buffers.items())),
            tuple(
                (key, _plain(value, numbers, f"{name}.{path}".rstrip(".")))
                for key, value in part.__dict__.items()
                if key not in _OF_MODULES
            ),
        )
        for path, part in module.named_modules()
    )


class _Number:
    """An attribute that may be a module's number in a list: equal to the same one, and to the other's own number.

    The fourth block has other attributes that are 4; so equal keys don't tell which of them are its number.
    """

    __slots__ = ("_is_own", "_value")

    def __init__(self, value: int, is_own: bool) -> None:
        self._value = value
        self._is_own = is_own

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Number) and (self._value == other._value or (self._is_own and other._is_own))

    def __hash__(self) -> int:
        return hash(_Number)


def _plain(value: Any, numbers: Container[int], name: str) -> Hashable:
    if type(value) is int:
        return _Number(value, value in numbers)
    if isinstance(value, trees.PLAIN):
        return _without_name(value, name)
    return repr(_without_name(value, name)) if _is_plain(value) else id(value)


def _without_name(value: Any, name: str) -> Any:
    """A plain value in which a module's own name, the end of it, or that in a larger model is the same for all."""
    if isinstance(value, str) and "." in value:
        if f".{name}".endswith(f".{value}"):
            return "name"
        return value.removesuffix(name) if f".{value}".endswith(f".{name}") else value
    if isinstance(value, dict):
        return {key: _without_name(item, name) for key, item in value.items()}
    return [_without_name(item, name) for item in value] if isinstance(value, (tuple, list)) else value


def _is_plain(value: Any) -> bool:
    """Whether a value is made of nothing but numbers, names and the like."""
    if isinstance(value, dict):
        return all(isinstance(key, trees.PLAIN) and _is_plain(item) for key, item in value.items())
    return isinstance(value, trees.PLAIN) or (isinstance(value, (tuple, list, set)) and all(map(_is_plain, value)))


_OF_MODULES = frozenset(nn.Module().__dict__)


def value_key(value: Any) -> Hashable:
    """Equal for values whose tensors are of the same kind, and whose integers, which may be sizes, are the same."""
    leaves = trees.leaves(value)
    return tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else leaf
        if type(leaf) is int
        else type(leaf)
        for leaf in leaves
    )
