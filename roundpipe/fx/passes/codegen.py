"""Writes a partitioned graph as a chain of carry-to-carry layers.

Each chunk becomes a `torch.fx.GraphModule`. Its ``forward`` takes values out of the carry, calls the user's own modules
and the glue between them, and returns the values made. ``print(layer.code)`` shows it:

    def forward(self, carry):
        input_ids = carry['input_ids'];
        h = carry['h']
        h_1 = getattr(self.model.layers, "1")(h)
        return pass_on(carry, ('input_ids',), {'h_1': h_1})

Invariant: a layer holds the user's modules, parameters and buffers by reference and under their own names. It never
changes a carry or a value in it, and works when the carry holds only what its spec's ``reads`` names.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.core.layers import EXECUTION_DEVICE, Carry, Glue, LayerChain, LayerSpec
from roundpipe.core.tiling import num_tiles
from roundpipe.fx.arguments import Arguments, CallForm
from roundpipe.fx.graph.nodes import (
    draws_random,
    has_effect,
    installs_hook,
    modes_of,
    value_of,
    writes_buffers,
)
from roundpipe.fx.graph.traced import OutputValue, TracedGraph, output_names
from roundpipe.fx.operations import (
    NamedCall,
    assign_buffer,
    call_leaf,
    call_method,
    hang_on,
    is_operator,
    overrides_call,
    pass_on,
    without_size,
)
from roundpipe.fx.passes.cost import NodeCost
from roundpipe.fx.passes.forms import ValueForms
from roundpipe.fx.passes.generated import Generated, sizes_key
from roundpipe.fx.passes.glue import GlueCode, GlueFunctions, made_of, names_of_equal
from roundpipe.fx.passes.partition import Chunk, Partition, layer_costs
from roundpipe.fx.passes.sample_dimensions import symbols_in
from roundpipe.fx.sizes import expression_of


def generate(traced: TracedGraph, partition: Partition, costs: Mapping[Node, NodeCost]) -> LayerChain:
    """The chain of layers that a partition describes; the model's modules are shared, not copied."""
    layers, specs = [], []
    functions: GlueFunctions = {}
    names = names_of_equal(node for chunk in partition.chunks for node in chunk.glue)
    for chunk in partition.chunks:
        writer = _Writer(traced, chunk)
        layers.append(writer.write())
        glue = layers[-1].programs.glue = GlueCode(writer.graph, writer.glue(names), functions)
        specs.append(_spec(partition, chunk, writer.uses_device, tuple(glue.described())))
    form = traced.form or CallForm(traced.model)
    forms = ValueForms(traced, form, {*specs[-1].reads, *output_names(traced.output)})
    exit = OutputExit(traced.output, forms)
    needed = {name for spec in specs for name in spec.reads} | set(exit.reads)
    paths = {name: path for name, path in traced.input_paths.items() if name in needed}
    entry = ArgumentEntry(form, paths, numbers_without_size(traced))
    sums = layer_costs(traced, partition, layers, costs)
    return LayerChain(layers, specs, sums, entry, exit, traced.example_elements, traced.example_size)


def whole_graph(traced: TracedGraph) -> Layer:
    """One layer for a graph: from a carry of its inputs to one of its outputs."""
    placeholders, outputs = tuple(traced.placeholders), tuple(traced.outputs)
    name = type(traced.model).__name__
    return _Writer(traced, Chunk(name, (), tuple(traced.body), placeholders, (), (), outputs, (), 0)).write()


# ---------------------------------------------------------------------------------- ends of the chain


@dataclass(frozen=True, slots=True)
class ArgumentEntry:
    """Takes the inputs that the layers read out of a call's arguments."""

    form: CallForm
    paths: dict[str, trees.Path]
    """Input name -> path into the arguments' normal form."""
    numbers: frozenset[str]
    """Names of those that are numbers of which no size is made."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Carry:
        arguments = self.form.normalise(args, kwargs)
        carry = {name: trees.get(arguments, path) for name, path in self.paths.items()}
        return carry | {name: without_size(carry[name]) for name in self.numbers & carry.keys()}

    def completed(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Arguments | None) -> dict[str, Any]:
        """See `CallForm.completed`."""
        return self.form.completed(args, kwargs, batch)

    def __deepcopy__(self, memo: dict[int, Any]) -> ArgumentEntry:
        return self


def numbers_without_size(traced: TracedGraph) -> frozenset[str]:
    """Names of inputs that are numbers, and of which no size is made."""
    numbers = traced.numbers
    sizes = symbols_in(map(value_of, traced.graph.nodes)) if numbers else ()
    return frozenset(name for name, number in numbers.items() if expression_of(number) not in sizes)


class OutputExit:
    """Refills an output template (`TracedGraph.output`) from the last carry; containers are new at each call."""

    def __init__(self, template: Any, forms: ValueForms | None = None) -> None:
        self.template = template
        self.forms = forms
        """Of what it and the last layer read; None where nothing was traced."""
        self.reads: tuple[str, ...] = tuple(dict.fromkeys(output_names(template)))

    def __call__(self, carry: Carry) -> Any:
        return trees.map_leaves(self.template, lambda leaf: carry[leaf.name] if isinstance(leaf, OutputValue) else leaf)

    def __deepcopy__(self, memo: dict[int, Any]) -> OutputExit:
        return self


class Programs:
    """Other ways to run a layer: in tiles, by the sizes of what it reads, or with glue given; shared by its copies."""

    def __init__(self) -> None:
        self.reads: tuple[str, ...] = ()
        self.by_sizes: dict[Hashable, Callable[[nn.Module, Carry], Carry] | None] = {}
        """None: it has no region that can be tiled at these sizes."""
        self.glue: GlueCode | None = None

    def for_carry(self, carry: Carry) -> Callable[[nn.Module, Carry], Carry] | None:
        return self.by_sizes.get(self.key(carry)) if self.by_sizes else None

    def key(self, carry: Carry) -> Hashable:
        """Equal for carries of the same sizes."""
        return sizes_key(carry[name] for name in self.reads)

    def __deepcopy__(self, memo: dict[int, Any]) -> Programs:
        return self


class Layer(Generated):
    """A generated layer, which runs in tiles where the caller asks for it and its rows allow it.

    Glue that its carry has is taken from there.
    """

    programs: Programs

    def make_glue(self, name: str, carry: Carry) -> Any:
        """One of its values of glue, for its carry and for those of other layers."""
        assert self.programs.glue is not None
        return self.programs.glue.make(self, name, carry)

    def recompile(self) -> Any:
        """Writes ``forward`` from the graph, with the switch to other programs in front."""
        code = super().recompile()
        self.__dict__.setdefault("programs", Programs())
        kind = type(self)
        as_written: Callable[[Any, Carry], Carry] = kind.forward

        def forward(self: Layer, carry: Carry) -> Carry:
            programs, glue = self.programs, self.programs.glue
            if num_tiles() > 1 and (program := programs.for_carry(carry)) is not None:
                return program(self, carry if glue is None else glue.complete(self, carry))
            if glue is not None and glue.all_in(carry):
                made: Carry = glue.run_rest(self, carry)
                return made
            return as_written(self, carry)

        kind.forward = forward
        return code


# ---------------------------------------------------------------------------------- writing one layer

LITERALS = (*trees.PLAIN, type(Ellipsis), torch.layout, torch.memory_format)
"""Types, not counting their subclasses, whose values generated code can spell out."""


class _Writer:
    def __init__(self, traced: TracedGraph, chunk: Chunk) -> None:
        self.traced = traced
        self.chunk = chunk
        self.graph = torch.fx.Graph()
        self.values: dict[Node, Node] = {}
        self.attributes: dict[str, Any] = {}
        self.objects: dict[int, str] = {}
        self.uses_device = False
        buffers = [node.args[0] for node in chunk.nodes if node.target is assign_buffer]
        self.assigned = {buffer.target for buffer in buffers if isinstance(buffer, Node)}

    def write(self) -> Layer:
        """The layer, with the user's modules and weights in it."""
        carry = self.graph.placeholder("carry")
        for node in self.chunk.reads:
            item = (carry, node.name)
            self.values[node] = self.graph.create_node("call_function", operator.getitem, item, name=node.name)
        for node in self.chunk.clones:
            self.values[node] = self.graph.call_method("clone", (self.values[node],))
        for node in self._assigned_buffers():
            self._read_attribute(node)
        for node in self.chunk.nodes:
            self.values[node] = self._write(node)
        outputs = {node.name: self._operand(node) for node in self.chunk.makes}
        passed = tuple(node.name for node in self.chunk.passes)
        self.graph.output(self.graph.call_function(pass_on, (carry, passed, outputs)) if passed else outputs)
        return Layer(self._root(), self.graph, class_name="Layer")

    def glue(self, names: Mapping[Node, str]) -> dict[str, Node]:
        """By name, the values of glue that are made in the same way by every layer that has them.

        ``names`` are those of equal values; the layer's second one of a name has its own.
        """
        found: dict[str, Node] = {}
        for node in self.chunk.glue:
            found[node.name if names[node] in found else names[node]] = self.values[node]
        own = set(self.objects.values())  # numbered layer by layer
        return {
            name: node
            for name, node in found.items()
            if not any(each.op == "call_module" or each.target in own for each in made_of([node]))
        }

    def _assigned_buffers(self) -> list[Node]:
        """Buffers that this layer assigns to, whose value from before is read first."""
        sources = dict.fromkeys(source for node in self.chunk.nodes for source in node.all_input_nodes)
        return [source for source in sources if source.op == "get_attr" and source.target in self.assigned]

    def _write(self, node: Node) -> Node:
        op, target, modes = node.op, node.target, modes_of(node)
        args, kwargs = self._argument(node.args), self._argument(node.kwargs)
        label = target if isinstance(target, str) else getattr(target, "__name__", "call")
        if installs_hook(node):
            op, target, args, modes = "call_function", hang_on, (args[0], target, *args[1:]), None
        elif op == "call_module":
            module = self.traced.attribute(str(target))
            target = name = self._install(str(target), module)
            if modes is not None or overrides_call(type(module)):
                op, target, args, label = "call_function", call_leaf, (self.graph.get_attr(name), *args), "call_leaf"
        elif op == "call_method" and modes is not None:
            op, target, args = "call_function", call_method, (args[0], target, *args[1:])
        elif target is assign_buffer:
            args = (self._attribute(node.args[0]), *args[1:])  # type: ignore[arg-type]
        if op == "call_function":
            assert callable(target)
            target = _named(target) if modes is None else NamedCall(f"{label}_in_context", target, modes)
        written = self.graph.create_node(op, target, args, kwargs, name=node.name)
        written.meta.update(random=draws_random(node), effect=has_effect(node) or writes_buffers(node))
        return written

    # -- operands

    def _argument(self, value: Any) -> Any:
        """An argument with this layer's nodes, and an attribute for what has no literal."""
        if isinstance(value, Node):
            return self._operand(value)
        if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
            return {key: self._argument(item) for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self._argument, value))
        if isinstance(value, (tuple, list)):
            items = map(self._argument, value)
            return tuple(items) if isinstance(value, tuple) else [*items]
        if isinstance(value, slice):
            return slice(*map(self._argument, (value.start, value.stop, value.step)))
        if isinstance(value, torch.device) and value.type != "meta":
            self.uses_device = True
            return self.graph.get_attr(self._install(EXECUTION_DEVICE, torch.device("cpu")))
        if type(value) in LITERALS:
            return value
        name = self.objects.setdefault(id(value), f"_object_{len(self.objects)}")
        return self.graph.get_attr(self._install(name, value))

    def _operand(self, node: Node) -> Node:
        if node not in self.values:
            assert node.op == "get_attr", f"{node.name} is neither read nor made by layer {self.chunk.name}"
            self._read_attribute(node)
        return self.values[node]

    def _read_attribute(self, node: Node) -> None:
        value = self._attribute(node)
        if node.target in self.assigned:  # the assignment overwrites the tensor that was read
            value = self.graph.call_method("clone", (value,))
        self.values[node] = value

    def _attribute(self, node: Node) -> Node:
        return self.graph.get_attr(self._install(str(node.target), self.traced.attribute(str(node.target))))

    # -- attributes of the layer

    def _install(self, target: str, value: Any) -> str:
        """Notes an attribute of the layer; its name, which gives way to those that torch.fx needs."""
        first, dot, rest = target.partition(".")
        if hasattr(torch.fx.GraphModule, first) or first in ("training", "meta"):
            target = f"{first}_{dot}{rest}"
        self.attributes[target] = value
        return target

    def _root(self) -> nn.Module:
        """A module tree with just the attributes that this layer uses, at their own places."""
        root = nn.Module()
        root.training = self.traced.model.training
        for target in sorted(self.attributes, key=lambda name: name.count(".")):
            *path, name = target.split(".")
            holder, prefix, inside_leaf = root, "", False
            for part in path:
                prefix = f"{prefix}.{part}" if prefix else part
                inside_leaf = inside_leaf or prefix in self.attributes
                if inside_leaf:  # part of a user's module that is there already
                    break
                if part not in holder._modules:
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            if not inside_leaf:
                _set(holder, name, self.attributes[target])
        return root


def _set(holder: nn.Module, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        holder.register_buffer(name, value, persistent=False)
    else:
        setattr(holder, name, value)


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function if generated code can refer to it by name, otherwise a callable that can be."""
    if is_operator(function):
        return function
    name = getattr(function, "__name__", "")
    module = getattr(function, "__module__", None)
    if not name.isidentifier() or not hasattr(function, "__qualname__"):
        return NamedCall(name, function)
    if getattr(torch.Tensor, name, None) is function or getattr(torch, name, None) is function:
        return function
    if module is None or module.split(".")[0] == "torch":  # written as its path, so the path must lead to it
        return function if getattr(sys.modules.get(module or ""), name, None) is function else NamedCall(name, function)
    return function


def _spec(partition: Partition, chunk: Chunk, uses_device: bool, glue: tuple[Glue, ...]) -> LayerSpec:
    return LayerSpec(
        name=chunk.name,
        module_names=chunk.module_names,
        reads=tuple(node.name for node in chunk.reads),
        makes=tuple(node.name for node in chunk.makes),
        differentiable=frozenset(node.name for node in chunk.makes if node in partition.differentiable),
        draws_random=any(map(draws_random, chunk.nodes)),
        may_write_reads=False,
        execution_device=uses_device,
        glue=glue,
    )
