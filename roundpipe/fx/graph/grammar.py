"""The grammar of traced graphs, rule by rule; `roundpipe.fx.graph.traced` states it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.fx import Node

from roundpipe.core.errors import TraceError
from roundpipe.core.modes import Modes
from roundpipe.fx.graph.nodes import draws_random, has_effect, modes_of, mutated_by, value_of, writes_buffers
from roundpipe.fx.graph.traced import TracedGraph, output_names
from roundpipe.fx.operations import assign_buffer


def lint(traced: TracedGraph) -> None:
    """Raises a TraceError that names the first node to break the grammar, and the rule."""
    for node, problem in _violations(traced):
        raise TraceError(f"traced graph breaks its grammar at {node.format_node()}: {problem}")


def _violations(traced: TracedGraph) -> Iterator[tuple[Node, str]]:
    """Every broken rule with the node that breaks it, in order."""
    seen: set[Node] = set()
    names: set[str] = set()
    nodes = list(traced.graph.nodes)
    for index, node in enumerate(nodes):
        if node.name in names:
            yield node, f"the name {node.name!r} is given twice"
        if node.op == "placeholder" and any(earlier.op != "placeholder" for earlier in nodes[:index]):
            yield node, "a placeholder comes after another node"
        for source in node.all_input_nodes:
            if source not in seen:
                yield node, f"it reads {source.name!r}, which no earlier node makes"
        if node.op == "output":
            if index + 1 != len(nodes):
                yield node, "nodes follow the output"
            yield from _output_violations(traced, node)
        else:
            yield from _kind_violations(traced, node)
            yield from _meta_violations(node, seen)
        seen.add(node)
        names.add(node.name)
    if not nodes or nodes[-1].op != "output":
        raise TraceError("traced graph breaks its grammar: it has no output node")
    unbound = sorted(set(traced.input_paths) - {node.name for node in traced.placeholders})
    if unbound:
        raise TraceError(f"traced graph breaks its grammar: input paths without a placeholder: {unbound}")


def _kind_violations(traced: TracedGraph, node: Node) -> Iterator[tuple[Node, str]]:
    if node.op == "placeholder":
        if node.name not in traced.input_paths:
            yield node, "the placeholder has no input path"
    elif node.op in ("get_attr", "call_module"):
        try:
            attribute = traced.attribute(str(node.target))
        except AttributeError:
            yield node, f"the target {node.target!r} is neither in the model nor a constant"
            return
        if node.op == "call_module" and not isinstance(attribute, nn.Module):
            yield node, f"the target {node.target!r} is a {type(attribute).__name__}, not a module"
    elif node.op == "call_function":
        if not callable(node.target):
            yield node, f"the target {node.target!r} can't be called"
        if node.target is assign_buffer and mutated_by(node) != node.args[:1]:
            yield node, "an assignment to a buffer must have the buffer, and nothing else, in mutates"
    elif node.op == "call_method":
        if not isinstance(node.target, str) or not node.args or not isinstance(node.args[0], Node):
            yield node, "a method needs a name and a node to be called on"
    else:
        yield node, f"{node.op!r} is no kind of node"


def _meta_violations(node: Node, earlier: set[Node]) -> Iterator[tuple[Node, str]]:
    if "value" not in node.meta:
        yield node, "meta has no 'value'"
    value = value_of(node)
    kinds = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool, type(None))
    if not isinstance(value, kinds):
        yield node, f"meta['value'] is a {type(value).__name__}, not a tensor, a number or None"
    if node.op == "placeholder" and not isinstance(value, torch.Tensor):
        yield node, "the value of a placeholder must be a tensor"
    for key in ("random", "effect", "buffers_written"):
        if not isinstance(node.meta.get(key, False), bool):
            yield node, f"meta[{key!r}] is {node.meta[key]!r}, not a bool"
    if not isinstance(node.meta.get("module", ""), str):
        yield node, f"meta['module'] is {node.meta['module']!r}, not a qualified name"
    modes = modes_of(node)
    if modes is not None and not isinstance(modes, Modes):
        yield node, f"meta['modes'] is a {type(modes).__name__}, not Modes"
    mutates = node.meta.get("mutates", ())
    if not isinstance(mutates, tuple) or not all(isinstance(item, Node) for item in mutates):
        yield node, f"meta['mutates'] is {mutates!r}, not a tuple of nodes"
        return
    if node.op in ("placeholder", "get_attr") and (has_effect(node) or mutates or draws_random(node)):
        yield node, "an input or attribute has no effects"
    if mutates and not has_effect(node):
        yield node, "it writes values in place but meta['effect'] is not set"
    for item in mutates:
        if item not in earlier:
            yield node, f"it writes {item.name!r}, which no earlier node makes"
    if writes_buffers(node) and node.op != "call_module":
        yield node, "only a leaf module can have meta['buffers_written']"


def _output_violations(traced: TracedGraph, node: Node) -> Iterator[tuple[Node, str]]:
    values = node.args[0] if node.args else ()
    if not isinstance(values, (tuple, list)) or not all(isinstance(item, Node) for item in values):
        yield node, "its argument must be a tuple of nodes"
        return
    names = [item.name for item in values if isinstance(item, Node)]
    if names != output_names(traced.output):
        yield node, f"it returns {names}, the output template names {output_names(traced.output)}"
