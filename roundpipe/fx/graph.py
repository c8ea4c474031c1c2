"""The form of a traced model: a `torch.fx.Graph` of modules and glue, its grammar and its analysis.

The tracer writes it, the cost model, the partition and the code generator read it. Grammar:

    placeholder     one per tensor leaf of the arguments, first; target and name are the input's name
    get_attr        a parameter or buffer of the model, or a constant; anywhere before its readers
    call_module     a leaf: a module of the model that runs as its author wrote it
    call_function   glue; also accessors (`getitem` / `getattr` of a value that is not a tensor)
    call_method     glue
    output          last; its argument is the tuple of the nodes that the output template names

Every node but the output has a ``value``: the fake tensor or symbolic number it stands for, or None
(a structure whose parts are taken out by accessors, an arbitrary object, or nothing).

Invariant: values are in single assignment form and nodes in order of execution. A node that writes
one of its operands in place has it in ``mutates``; what eager code reads afterwards through the same
Python object is the writing node's result, so only true views ever name an older value.

This file is the only user of networkx.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import networkx
import torch
import torch.fx
from torch import nn
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.core.errors import TraceError
from roundpipe.core.modes import Modes
from roundpipe.fx.operations import take

FakeValue = torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool | None

META_DEFAULTS: dict[str, Any] = {
    "value": None,
    "modes": None,
    "random": False,
    "effect": False,
    "mutates": (),
    "buffers_written": False,
    "module": "",
}
"""Every key that a node's ``meta`` may hold for the compiler, with what it means when absent."""


ACCESSORS = (operator.getitem, getattr, take)
"""What takes a part out of a structure."""


class CallCheck(Protocol):
    """Tells for which calls a trace is valid."""

    @property
    def grad_matters(self) -> bool:
        """Whether traced code asked if something requires grad, or if gradients are recorded."""
        ...

    @property
    def written(self) -> list[str]:
        """Arguments that the graph writes into, in words."""
        ...

    @property
    def not_kept(self) -> list[str]:
        """What the forward changes in Python at every call, and the graph does not, in words."""
        ...

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """None if the trace serves these arguments, otherwise what fails."""
        ...


class OutputValue:
    """A leaf of an output template: the value of the node of that name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"OutputValue({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OutputValue) and other.name == self.name

    def __hash__(self) -> int:
        return hash((OutputValue, self.name))


@dataclass
class TracedGraph:
    """A model as a graph, with what turns arguments into its inputs and its values into outputs."""

    graph: torch.fx.Graph
    model: nn.Module
    """Where the targets of call_module and get_attr are looked up; the user's own object."""
    constants: dict[str, Any] = field(default_factory=dict)
    """Targets of get_attr that are not attributes of the model, such as ``_constant_0``."""
    input_paths: dict[str, trees.Path] = field(default_factory=dict)
    """Placeholder name -> path into ``(args, kwargs)`` normalised to the forward's signature."""
    output: Any = None
    """The model's output with an `OutputValue` in place of every tensor and symbolic number."""
    example_elements: int = 0
    """Number of elements of the example's tensor inputs, at the sizes the values are hinted at."""
    opaque: dict[str, str] = field(default_factory=dict)
    """Module name -> why its inside was not traced."""
    guards: CallCheck | None = None

    @property
    def placeholders(self) -> list[Node]:
        """The input nodes, in order."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def body(self) -> list[Node]:
        """The nodes that compute something, in order of execution."""
        return [node for node in self.graph.nodes if node.op.startswith("call_")]

    @property
    def outputs(self) -> list[Node]:
        """The nodes that the output template names, each once, in the template's order."""
        by_name = {node.name: node for node in self.graph.nodes}
        return list(dict.fromkeys(by_name[name] for name in output_names(self.output)))

    def attribute(self, target: str) -> Any:
        """What a get_attr or call_module target stands for; `AttributeError` if nothing."""
        if target in self.constants:
            return self.constants[target]
        value: Any = self.model
        for part in target.split("."):
            value = getattr(value, part)
        return value

    def parameters_of(self, node: Node) -> list[nn.Parameter]:
        """The parameters that a node uses by itself: a leaf's, or the one a get_attr names; each once."""
        if node.op == "call_module":
            return list(self.attribute(str(node.target)).parameters())
        if node.op == "get_attr":
            value = self.attribute(str(node.target))
            return [value] if isinstance(value, nn.Parameter) else []
        return []

    def lint(self) -> None:
        """Checks the grammar; raises `TraceError` that names the node and the rule it breaks."""
        for node, problem in _violations(self):
            raise TraceError(f"traced graph breaks its grammar at {node.format_node()}: {problem}")


@dataclass(frozen=True, slots=True)
class NodeCost:
    """What one node costs at the example's sizes."""

    num_parameters: int = 0
    parameter_bytes: int = 0
    """Bytes of its parameters and buffers."""
    gradient_bytes: int = 0
    """Bytes of the gradients of its trainable parameters."""
    forward_flops: int = 0
    backward_flops: int = 0
    forward_bytes: int = 0
    """Bytes that its kernels read and write in forward."""
    backward_bytes: int = 0
    saved_bytes: int = 0
    """Bytes of what autograd keeps that no other node makes or names."""
    saved_values: tuple[Node, ...] = ()
    """Those of its operands and itself that autograd keeps for its backward."""
    workspace_bytes: int = 0
    """Peak of what its forward allocates without autograd, its result included."""
    value_bytes: int = 0
    """Bytes of its result."""
    forward_s: float = 0.0
    backward_s: float = 0.0
    estimated: bool = False
    """Whether it could not be run on fakes, so that its cost was guessed from its sizes."""


# ---------------------------------------------------------------------------------- node meta


def value_of(node: Node) -> FakeValue:
    """The fake tensor or symbolic number that a node stands for; None for structures and objects."""
    return node.meta.get("value")


def modes_of(node: Node) -> Modes | None:
    """The modes to enter around the node's call; None = those around the whole model."""
    return node.meta.get("modes")


def draws_random(node: Node) -> bool:
    """Whether the node may draw random numbers."""
    return bool(node.meta.get("random", False))


def has_effect(node: Node) -> bool:
    """Whether the node does more than return a value: writes in place, installs a hook, sets a buffer."""
    return bool(node.meta.get("effect", False))


def mutated_by(node: Node) -> tuple[Node, ...]:
    """The values that the node writes in place."""
    return tuple(node.meta.get("mutates", ()))


def writes_buffers(node: Node) -> bool:
    """Whether the node is a leaf that changes buffers of its own."""
    return bool(node.meta.get("buffers_written", False))


def module_of(node: Node) -> str:
    """Qualified name of the module whose forward the node belongs to; the root is ``""``."""
    return str(node.meta.get("module", ""))


# ---------------------------------------------------------------------------------- kinds of nodes


def assign_buffer(buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The effect of ``module.buffer = value``; the buffer object stays, so that every holder sees it.

    As a node: ``call_function assign_buffer (get_attr of the buffer, value)``, with ``mutates`` the
    get_attr. What the forward reads from the attribute afterwards is ``value`` itself.
    """
    value = value.detach()
    with torch.no_grad():
        if value.shape == buffer.shape and value.dtype == buffer.dtype:
            buffer.copy_(value)
        else:
            buffer.data = value.to(buffer.device, copy=True)
    return buffer


def is_accessor(node: Node) -> bool:
    """Whether the node only takes a part out of a structure made by another node."""
    if node.op != "call_function" or node.target not in ACCESSORS or not node.args:
        return False
    source = node.args[0]
    return isinstance(source, Node) and source.op.startswith("call_") and value_of(source) is None


def producer_of(node: Node) -> Node:
    """The node that computes a value: the node itself, or what an accessor takes a part of."""
    while is_accessor(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def output_names(template: Any) -> list[str]:
    """The names in an output template, in the order of `roundpipe.core.trees.walk`."""
    return [leaf.name for leaf in trees.leaves(template) if isinstance(leaf, OutputValue)]


UNKNOWN_SIZE = 16
"""Stands for a size that depends on data, such as the number of true elements of a mask."""


def hint(size: Any) -> int:
    """The example's value of a size that may be symbolic; `UNKNOWN_SIZE` if the example has none."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    known = size.node.hint
    return UNKNOWN_SIZE if known is None else int(known)


def value_bytes(node: Node) -> int:
    """Bytes of a node's tensor at the example's sizes; 0 for anything else."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return 0
    total = value.element_size()
    for size in value.shape:
        total *= hint(size)
    return total


# ---------------------------------------------------------------------------------- analysis


def storage_key(node: Node) -> int | None:
    """Equal for values that share memory; None for values that are no plain tensors."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return value.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # layouts without a storage
        return None


def alias_groups(traced: TracedGraph) -> dict[Node, tuple[Node, ...]]:
    """For every tensor node, all nodes in order whose values share its storage, itself among them."""
    groups: dict[int, list[Node]] = {}
    for node in traced.graph.nodes:
        key = None if node.op == "output" else storage_key(node)
        if key is not None:
            groups.setdefault(key, []).append(node)
    return {node: tuple(group) for group in groups.values() for node in group}


def operands(node: Node) -> Iterable[Node]:
    """The nodes that a node reads."""
    return node.all_input_nodes


def live_before(
    order: Sequence[Node],
    outputs: Iterable[Node],
    reads: Callable[[Node], Iterable[Node]] = operands,
) -> list[frozenset[Node]]:
    """The values live in front of each node of ``order``: made earlier, read by it or later.

    One reverse walk. Nodes outside ``order`` that are read (placeholders, attributes) count as made
    before the first.

    Args:
        order: nodes in order of execution.
        outputs: what is read behind the last one.
        reads: what a node reads.

    Returns:
        ``len(order) + 1`` sets; the last one the outputs.
    """
    live = set(outputs)
    sets = [frozenset(live)]
    for node in reversed(order):
        live.discard(node)
        live.update(reads(node))
        sets.append(frozenset(live))
    sets.reverse()
    return sets


def dependencies(traced: TracedGraph) -> networkx.DiGraph:
    """All orderings that an execution must keep, as a graph over nodes, edges from first to second.

    Edge attribute ``kind``: ``"data"`` (the second reads the first) or ``"effect"`` (one of them
    writes memory that the other touches, or both have effects that no operand shows).
    """
    result = networkx.DiGraph()
    aliases = alias_groups(traced)
    touched: dict[Node, list[Node]] = {}  # first node of an alias group -> nodes that touched it so far
    last_write: dict[Node, Node] = {}
    previous_hidden: Node | None = None
    for node in traced.graph.nodes:
        if node.op == "output":
            continue
        result.add_node(node)
        for source in node.all_input_nodes:
            result.add_edge(source, node, kind="data")
        written = {aliases[value][0] for value in mutated_by(node) if value in aliases}
        for group in {aliases[source][0] for source in node.all_input_nodes if source in aliases} | written:
            earlier = touched.setdefault(group, []) if group in written else [last_write.get(group, node)]
            for other in earlier:
                if other is not node and not result.has_edge(other, node):
                    result.add_edge(other, node, kind="effect")
            if group in written:
                last_write[group] = node
            touched.setdefault(group, []).append(node)
        if has_effect(node) and not mutated_by(node):
            if previous_hidden is not None and not result.has_edge(previous_hidden, node):
                result.add_edge(previous_hidden, node, kind="effect")
            previous_hidden = node
    return result


def reachable_from(graph: networkx.DiGraph, sources: Iterable[Node]) -> set[Node]:
    """The sources and everything that depends on them."""
    found = {node for node in sources if node in graph}
    pending = list(found)
    while pending:
        for following in graph.successors(pending.pop()):
            if following not in found:
                found.add(following)
                pending.append(following)
    return found


def merge_same_values(traced: TracedGraph) -> None:
    """Makes readers of a value that a leaf only hands through read what it was handed.

    A block that takes a mask or position bias and returns it would otherwise give it a new name in every
    layer. Values are the same if tracing found the very same tensor; never those that are written in place.
    """
    written = {item for node in traced.body for value in mutated_by(node) for item in (value, node)}
    written_memory = {storage_key(node) for node in written} - {None}
    first: dict[torch.Tensor, Node] = {}
    renamed: dict[str, str] = {}
    for node in traced.graph.nodes:
        value = None if node.op == "output" else value_of(node)
        if not isinstance(value, torch.Tensor) or node in written or storage_key(node) in written_memory:
            continue
        if value not in first:
            first[value] = node
        elif not node.op.startswith("call_"):
            written_memory.add(storage_key(node))  # one tensor given as two inputs: the next call may give two
        elif not has_effect(node):
            node.replace_all_uses_with(first[value])
            renamed[node.name] = first[value].name
    if renamed:
        traced.output = trees.map_leaves(
            traced.output,
            lambda leaf: OutputValue(renamed.get(leaf.name, leaf.name)) if isinstance(leaf, OutputValue) else leaf,
        )


# ---------------------------------------------------------------------------------- grammar


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
    given = node.args[0] if node.args else ()
    if not isinstance(given, (tuple, list)) or not all(isinstance(item, Node) for item in given):
        yield node, "its argument must be a tuple of nodes"
        return
    names = [item.name for item in given if isinstance(item, Node)]
    if names != output_names(traced.output):
        yield node, f"it returns {names}, the output template names {output_names(traced.output)}"
