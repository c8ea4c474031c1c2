"""The form of a traced model: a `torch.fx.Graph` of modules and glue, with its inputs and outputs.

The tracer writes it; the cost model, the partition and the code generator read it. Grammar (checked by `lint`):

    placeholder     one per tensor leaf of the arguments, first, then one per number that varies, as a tensor of no
                    dimensions; target and name are the input's name
    get_attr        a parameter or buffer of the model, or a constant; anywhere before its readers
    call_module     a leaf: a module of the model that runs as its author wrote it
    call_function   glue; also accessors (`getitem` / `getattr` of a value that is not a tensor)
    call_method     glue
    output          last; its argument is the tuple of the nodes that the output template names, and what is kept

Every node but the output has a ``value``: the fake tensor or symbolic number it stands for, or None
(a structure whose parts are taken out by accessors, an arbitrary object, or nothing).

Invariant: values are in single assignment form and nodes in order of execution. A node that writes
one of its operands in place has it in ``mutates``; what eager code reads afterwards through the same
Python object is the writing node's result, so only true views ever name an older value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import nn
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.core.errors import TraceError
from roundpipe.core.modes import Modes
from roundpipe.core.module_tree import parameters_in
from roundpipe.effects.kept import Kept
from roundpipe.fx.arguments import CallForm
from roundpipe.fx.graph.nodes import (
    draws_random,
    has_effect,
    hint,
    modes_of,
    mutated_by,
    number_of_input,
    value_of,
    writes_buffers,
)
from roundpipe.fx.operations import assign_buffer
from roundpipe.fx.sizes import Symbolic, expression_of


class OutputValue:
    """A leaf of an output template: the value of the node of that name. (`trees` looks into dataclasses.)"""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"OutputValue({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OutputValue) and other.name == self.name

    def __hash__(self) -> int:
        return hash((OutputValue, self.name))


class OutputNumber(OutputValue):
    """The same of a tensor with one element, as a number of Python's."""

    __slots__ = ()


class KeptValue(NamedTuple):
    """What the model's code leaves in Python whenever it runs, which calls of a graph give beside its output."""

    place: Kept
    value: Any
    """A template, as that of the output."""


def output_names(template: Any) -> list[str]:
    """The names in an output template, in the order of `roundpipe.core.trees.walk`."""
    return [leaf.name for leaf in trees.leaves(template) if isinstance(leaf, OutputValue)]


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
    form: CallForm | None = None
    """What brings arguments into the form that they were traced in; None: they are given in it."""
    arguments: Any = None
    """``(args, kwargs)`` in that form, with an `OutputValue` of its placeholder in place of each tensor, and of each
    number that varies."""
    uncut: frozenset[str] = frozenset()
    """Placeholders of tensors that every microbatch has whole, where the example is known to be one of several."""
    output: Any = None
    """The model's output with an `OutputValue` in place of every tensor and symbolic number."""
    kept: Sequence[KeptValue] = ()
    """Of a loss function."""
    added: frozenset[str] = frozenset()
    """Names of values that are kept, and of which those of microbatches add up to that of the batch."""
    in_rows: frozenset[str] = frozenset()
    """Names of values that are kept, and have a row for each sample, made of this sample alone."""
    own_numbers: Mapping[frozenset[str], str] = field(default_factory=dict)
    """Inputs that are numbers, read at one place from data of the arguments, of each piece of a batch its own. And the
    place, if they are made of all samples, else empty."""
    read_numbers: Mapping[float, str] = field(default_factory=dict)
    """Numbers that data of the arguments gave while it was traced, but for those that a whole batch decides. And where,
    if they are made of all samples, else empty."""
    has_own_ratios: bool = False
    """Whether code divides such numbers by sizes, so that each piece of a batch has its own ratio."""
    has_own_numbers: bool = False
    """Whether these are the piece's own where code computes with them, and not those of its batch."""
    of_two: Callable[[], TracedGraph | None] = field(default=lambda: None, repr=False)
    """Gives the graph for two samples if this is for one alone, which does not tell samples from what else is one."""
    example_elements: int = 0
    """Number of elements of the example's tensor inputs, at the sizes the values are hinted at."""
    opaque: dict[str, str] = field(default_factory=dict)
    """Module name -> why its inside was not traced."""
    compiled_by_torch: dict[str, str] = field(default_factory=dict)
    """Modules that torch has compiled, but which were looked into, so that the graph has their code as written; and
    why they can't stay whole, if it is not for their size or the stack that they hold."""

    @property
    def example_size(self) -> str:
        """The size of the example: its tokens, if its first rows are of integers, else its samples."""
        tensors = (value for value in map(value_of, self.placeholders) if isinstance(value, torch.Tensor))
        first = next((tensor for tensor in tensors if tensor.ndim), None)
        if first is None:
            return ""
        shape, dtype = first.shape, first.dtype
        is_text = len(shape) == 2 and not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
        number, thing = (math.prod(map(hint, shape)), "token") if is_text else (hint(shape[0]), "sample")
        return f"{number:,} {thing}{'s' if number != 1 else ''}"

    @property
    def numbers(self) -> dict[str, torch.SymInt | torch.SymFloat]:
        """The inputs that are numbers, by name."""
        numbers = ((node.name, number_of_input(node)) for node in self.placeholders)
        return {name: number for name, number in numbers if number is not None}

    @property
    def opens_values(self) -> bool:
        """Whether values, beside sizes, are inputs that it would not have if they did not vary."""
        return bool(self.numbers) or self.form is not None and bool(self.form.places)

    @property
    def number_hints(self) -> dict[str, float]:
        """By the name of an input that is a number, the example's."""
        return {name: number.node.hint for name, number in self.numbers.items()}

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
        """The nodes that the output template and what is kept name, each once, in their order."""
        by_name = {node.name: node for node in self.graph.nodes}
        return list(dict.fromkeys(by_name[name] for name in self.returned_names))

    @property
    def returned_names(self) -> list[str]:
        """The names in the output template, and in those of what is kept."""
        return output_names((self.output, [value for _, value in self.kept]))

    @property
    def output_places(self) -> dict[trees.Path, Node]:
        """By place in the output, the node whose value is there."""
        nodes = {node.name: node for node in self.graph.nodes}
        leaves = ((path, leaf) for path, leaf in trees.walk(self.output) if isinstance(leaf, OutputValue))
        return {path: nodes[leaf.name] for path, leaf in leaves if leaf.name in nodes}

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
            return parameters_in(self.attribute(str(node.target)))
        if node.op == "get_attr":
            value = self.attribute(str(node.target))
            return [value] if isinstance(value, nn.Parameter) else []
        return []


def lint(traced: TracedGraph) -> None:
    """Raises a TraceError that names the first node to break the grammar, and the rule."""
    earlier: dict[str, Node] = {}
    kinds: set[str] = set()
    for node in traced.graph.nodes:
        for problem in _problems(traced, node, earlier, kinds):
            raise TraceError(f"traced graph breaks its grammar at {node.format_node()}: {problem}")
        earlier[node.name] = node
        kinds.add(node.op)
    if "output" not in kinds:
        raise TraceError("traced graph breaks its grammar: it has no output node")
    unbound = sorted(set(traced.input_paths) - {node.name for node in traced.placeholders})
    if unbound:
        raise TraceError(f"traced graph breaks its grammar: input paths without a placeholder: {unbound}")


def _problems(traced: TracedGraph, node: Node, earlier: dict[str, Node], kinds: set[str]) -> Iterator[str]:
    """Every rule that a node breaks; ``earlier`` are the nodes in front of it by name, of these kinds."""
    if node.name in earlier:
        yield f"the name {node.name!r} is given twice"
    if "output" in kinds:
        yield "it follows the output"
    if node.op == "placeholder" and kinds - {"placeholder"}:
        yield "a placeholder comes after another node"
    for source in node.all_input_nodes:
        if earlier.get(source.name) is not source:
            yield f"it reads {source.name!r}, which no earlier node makes"
    if node.op == "output":
        yield from _problems_of_output(traced, node)
    else:
        yield from _problems_of_kind(traced, node)
        yield from _problems_of_meta(node, earlier)


def _problems_of_kind(traced: TracedGraph, node: Node) -> Iterator[str]:
    if node.op == "placeholder":
        if node.name not in traced.input_paths:
            yield "the placeholder has no input path"
    elif node.op in ("get_attr", "call_module"):
        try:
            attribute = traced.attribute(str(node.target))
        except AttributeError:
            yield f"the target {node.target!r} is neither in the model nor a constant"
            return
        if node.op == "call_module" and not isinstance(attribute, nn.Module):
            yield f"the target {node.target!r} is a {type(attribute).__name__}, not a module"
    elif node.op == "call_function":
        if not callable(node.target):
            yield f"the target {node.target!r} can't be called"
        if node.target is assign_buffer and mutated_by(node) != node.args[:1]:
            yield "an assignment to a buffer must have the buffer, and nothing else, in mutates"
    elif node.op == "call_method":
        if not isinstance(node.target, str) or not node.args or not isinstance(node.args[0], Node):
            yield "a method needs a name and a node to be called on"
    else:
        yield f"{node.op!r} is no kind of node"


def _problems_of_meta(node: Node, earlier: dict[str, Node]) -> Iterator[str]:
    if "value" not in node.meta:
        yield "meta has no 'value'"
    value = value_of(node)
    kinds = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool, type(None))
    if not isinstance(value, kinds):
        yield f"meta['value'] is a {type(value).__name__}, not a tensor, a number or None"
    if node.op == "placeholder" and not isinstance(value, torch.Tensor):
        yield "the value of a placeholder must be a tensor"
    for key in ("random", "effect", "buffers_written"):
        if not isinstance(node.meta.get(key, False), bool):
            yield f"meta[{key!r}] is {node.meta[key]!r}, not a bool"
    if not isinstance(node.meta.get("module", ""), str):
        yield f"meta['module'] is {node.meta['module']!r}, not a qualified name"
    modes = modes_of(node)
    if modes is not None and not isinstance(modes, Modes):
        yield f"meta['modes'] is a {type(modes).__name__}, not Modes"
    mutates = node.meta.get("mutates", ())
    if not isinstance(mutates, tuple) or not all(isinstance(item, Node) for item in mutates):
        yield f"meta['mutates'] is {mutates!r}, not a tuple of nodes"
        return
    if node.op in ("placeholder", "get_attr") and (has_effect(node) or mutates or draws_random(node)):
        yield "an input or attribute has no effects"
    if mutates and not has_effect(node):
        yield "it writes values in place but meta['effect'] is not set"
    for item in mutates:
        if earlier.get(item.name) is not item:
            yield f"it writes {item.name!r}, which no earlier node makes"
    if writes_buffers(node) and node.op != "call_module":
        yield "only a leaf module can have meta['buffers_written']"


def _problems_of_output(traced: TracedGraph, node: Node) -> Iterator[str]:
    values = node.args[0] if node.args else ()
    if not isinstance(values, (tuple, list)) or not all(isinstance(item, Node) for item in values):
        yield "its argument must be a tuple of nodes"
        return
    names = [item.name for item in values if isinstance(item, Node)]
    if names != traced.returned_names:
        yield f"it returns {names}, the output template names {traced.returned_names}"


def printed_graph(traced: TracedGraph, *, in_order: bool = True) -> str:
    """A graph in words, sizes by the example's numbers: a second run in a world has some as numbers, and others not.

    What a forward makes and drops, as the weights of a module that gets those of another at once, is left out.
    ``in_order``: else the words are the same wherever something is computed, and how often, before it is used.
    """
    idle = _idle(traced.graph)
    nodes = [node for node in traced.graph.nodes if node not in idle and not isinstance(value_of(node), Symbolic)]
    nodes = nodes if in_order else _as_used(nodes)
    number: dict[Node, str] = {}
    printed: dict[str, str] = {}

    def word(node: Node) -> _Word:
        value = value_of(node)
        if not isinstance(value, Symbolic):
            return _Word(number[node])
        return _Word(expression_of(value) if value.node.hint is None else value.node.hint)

    lines: list[str] = []
    for node in nodes:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), word)
        line, name = f"{node.op} {node.target} {args} {kwargs}", f"%{len(lines)}"
        number[node] = name if in_order or _is_anchored(node) else printed.setdefault(line, name)
        if number[node] == name:
            lines.append(f"{name} = {line}")
    sizes: dict[str, str] = {}  # those that data decides have other names in every run
    return re.sub(r"\bu\d+\b", lambda name: sizes.setdefault(name[0], f"size {len(sizes)}"), "\n".join(lines))


def _is_anchored(node: Node) -> bool:
    """Whether it matters where a node is, and that it is there."""
    return node.op not in ("call_function", "call_method") or draws_random(node) or has_effect(node)


def _as_used(nodes: list[Node]) -> list[Node]:
    """The nodes in another order: each behind what it reads, right in front of the first that needs it."""
    among, found = set(nodes), dict[Node, None]()
    for anchored in filter(_is_anchored, nodes):
        behind = [anchored]
        while behind:
            missing = [each for each in behind[-1].all_input_nodes if each in among and each not in found]
            if missing:
                behind.append(missing[0])
            else:
                found[behind.pop()] = None
    return [*found]


class _Word(str):
    """Printed without quotes, so that a size that became a number looks like one."""

    def __repr__(self) -> str:
        return str(self)


def _idle(graph: torch.fx.Graph) -> set[Node]:
    """Calls that don't matter.

    Those that do nothing and that only sizes are taken of, which other tensors have, too; and those that, with all they
    are connected with, neither read what the model has or gets nor reach its output.
    """
    glue = {node for node in graph.nodes if node.op in ("call_function", "call_method")}
    idle: set[Node] = set()
    for node in reversed(graph.nodes):
        is_pure = not (has_effect(node) or mutated_by(node) or draws_random(node))
        if node in glue and is_pure and node.users:
            if all(user in idle or isinstance(value_of(user), Symbolic) for user in node.users):
                idle.add(node)
    waiting = [node for node in graph.nodes if node not in glue]
    while waiting:
        node = waiting.pop()
        connected = glue.intersection((*node.all_input_nodes, *node.users))
        glue -= connected
        waiting += connected
    return idle | glue
