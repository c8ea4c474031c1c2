"""The last layer, the chain's exit and a loss function as one graph, in which outputs that nobody reads are gone.

    carry --last layer--> carry --exit--> outputs, label --loss function--> losses        as it is without a tail
    carry, label -------------------------------------------------------> losses          the tail

The graph's root has the layer and the loss as attributes, so that it runs with any copy of the layer. Its regions can
run in tiles, as those of layers can (`roundpipe.fx.passes.tiles`): then nothing that has a row for each token exists as
a whole behind the carry, but for what is not computed row by row.
"""

from __future__ import annotations

import copy
import linecache
import operator
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.core.layers import EXECUTION_DEVICE, Carry
from roundpipe.core.tiling import num_tiles
from roundpipe.effects.kept import Kept, KeptLeaf
from roundpipe.fx.fakes import is_fake
from roundpipe.fx.graph.traced import OutputNumber, OutputValue, TracedGraph
from roundpipe.fx.operations import pass_on, without_size
from roundpipe.fx.passes.codegen import Layer, OutputExit, numbers_without_size, whole_graph
from roundpipe.fx.passes.generated import Generated, sizes_key
from roundpipe.fx.passes.loss_numbers import LABEL, OUTPUTS
from roundpipe.fx.passes.loss_terms import sources
from roundpipe.fx.passes.tiles import TiledProgram, tiled_program

NoteKept = Callable[[int, Sequence[Kept], list[Any]], None]
"""Takes the position of a microbatch in its call, and what the loss function leaves of it where."""


class JoinedTail:
    """A `Tail` for one last layer and one traced loss.

    Args:
        layer: the last layer, or a copy of it.
        loss: the graph of a `LossCall`.
    """

    def __init__(self, layer: Layer, exit: OutputExit, loss: TracedGraph) -> None:
        self._loss: nn.Module = (joined := whole_graph(loss))
        self._template = loss.output
        self._kept, self._added, self._in_rows = loss.kept, loss.added, loss.in_rows
        self._note_kept: NoteKept | None = None
        self._first_microbatch = 0
        self._arguments = dict(loss.input_paths)
        self._labels: dict[str, trees.Path] = {}
        """By name in the carry, the path into the label."""
        self._places = {} if loss.form is None else loss.form.places
        self._numbers: dict[str, float] = {}
        """By name in the carry, numbers that the function finds now: those of the example until a call comes."""
        free = numbers_without_size(loss)
        self._free = {f"{LABEL} {name}" for name in free} | {loss.input_paths[name][1].key for name in free}
        """Names in the carry of numbers of which no size is made."""
        self._loss_names: set[str] = set()
        self.first_loss: tuple[trees.Path, ...] = ()
        self.graph = torch.fx.Graph()
        self._join(layer, exit, loss, joined.graph)
        _without_dead_code(self.graph)
        self.graph.lint()
        getters = [node.args for node in self.graph.nodes if node.target is operator.getitem]
        self._reads = [str(name) for source, name in getters if isinstance(source, Node) and source.op == "placeholder"]
        self._programs: dict[Hashable, TiledProgram | None] = {}
        """By sizes of what it reads; None: it has no region that can be tiled."""
        self._forward = type(Generated(self.root(layer), self.graph, class_name="Tail")).forward

    def root(self, layer: nn.Module, device: torch.device | None = None) -> nn.Module:
        """What the generated code runs on: a copy of the layer, and the loss on the layer's device."""
        root, loss = nn.Module(), self._loss
        if device is not None and hasattr(loss, EXECUTION_DEVICE):
            loss = copy.copy(loss)
            setattr(loss, EXECUTION_DEVICE, device)
        root.layer, root.loss = layer, loss
        return root

    def with_loss(self, replace: Callable[[nn.Module], nn.Module]) -> JoinedTail:
        """The same with another module in the place of the loss, such as one with fakes as weights."""
        other = copy.copy(self)
        other._loss = replace(self._loss)
        return other

    def values(self, carry: Carry, label: Any) -> Carry:
        """The carry of the joined graph."""

        def value(name: str) -> Any:
            if name in self._numbers:
                return self._numbers[name]
            if name not in self._labels:
                return carry[name]
            found = trees.get(label, self._labels[name])
            return without_size(found) if name in self._free else found

        return {name: value(name) for name in self._reads}

    def add_tiles(self, layer: nn.Module, carry: Carry, label: Any) -> None:
        """Let it run in tiles on values of these sizes; those of the carry may be without data, and some be missing."""
        if not carry.keys() >= set(self._reads) - self._labels.keys() - self._numbers.keys():
            return
        values = self.values(carry, label)
        key = sizes_key(values.values())
        if key not in self._programs:
            self._programs[key] = tiled_program(self.graph, self.root(layer), values)

    def for_call(self, note_kept: NoteKept, first_microbatch: int) -> JoinedTail:
        """The same for a step that begins with one of a call's microbatches; it tells what the loss function leaves."""
        if not self._kept and not self._numbers:
            return self
        other = copy.copy(self)
        other._note_kept, other._first_microbatch = note_kept, first_microbatch
        other._numbers = {name: self._number(name, place.read()) for name, place in self._places.items()}
        return other

    def _number(self, name: str, number: float) -> float:
        return without_size(number) if name in self._free else number

    def __call__(self, layer: nn.Module, carry: Carry, label: Any, microbatch: int | None = None) -> Any:
        values = self.values(carry, label)
        device = next((tensor.device for tensor in trees.tensors(values)), None)
        program = self._programs.get(sizes_key(values.values())) if num_tiles() > 1 else None
        made = (program or self._forward)(self.root(layer, device), values)
        return self._filled(made, microbatch)

    def _filled(self, made: Carry, microbatch: int | None) -> Any:
        """What the loss function returns; what it leaves of a microbatch is noted."""

        def kept(leaf: Any) -> Any:
            if not isinstance(leaf, OutputValue):
                return leaf
            is_number, name = isinstance(leaf, OutputNumber), leaf.name
            is_added, is_in_rows = name in self._added, name in self._in_rows
            return KeptLeaf(made[name], is_number=is_number, is_added=is_added, is_in_rows=is_in_rows)

        if microbatch is not None and self._note_kept is not None:
            values = [trees.map_leaves(value, kept) for _, value in self._kept]
            places = [place for place, _ in self._kept]
            self._note_kept(self._first_microbatch + microbatch, places, values)
        return trees.map_leaves(self._template, lambda leaf: _returned(leaf, made))

    def loss(self, microbatch: int, outputs: Any, label: Any) -> Any:
        """The same from the model's outputs, as the loss function's graph is."""
        arguments = {OUTPUTS: outputs, LABEL: label}
        paths = {name: tuple(path) for name, (_, *path) in self._arguments.items()}
        given = {name: path[0].key for name, path in paths.items() if path[0].key in self._numbers}
        carry = {name: trees.get(arguments, path) for name, path in paths.items() if name not in given}
        carry |= {name: self._numbers[place] for name, place in given.items()}
        device = next((tensor.device for tensor in trees.tensors(carry)), None)
        function: Any = self.root(nn.Module(), device).loss
        return self._filled(function(carry), microbatch)

    def is_of_loss(self, error: BaseException) -> bool:
        """Whether an error was raised by what was the loss function: by the line of generated code that ran."""
        trace, name = error.__traceback__, ""
        while trace is not None:
            code = trace.tb_frame.f_code
            if code.co_filename.startswith("<eval_with_key>"):
                found = re.match(r"\s*(\w+)", linecache.getline(code.co_filename, trace.tb_lineno))
                name = found[1] if found else name
            trace = trace.tb_next
        return name in self._loss_names

    def _join(self, layer: Layer, exit: OutputExit, loss: TracedGraph, loss_graph: torch.fx.Graph) -> None:
        carry = self.graph.placeholder("carry")
        made = self._copy(layer.graph, carry, "layer", {})
        given: dict[str, Node] = {}
        for name, (_, (_, argument), *path) in loss.input_paths.items():  # (args, kwargs) -> keyword -> inside
            if argument in self._places:
                self._numbers[argument] = self._number(argument, loss.number_hints[name])
                given[name] = self.graph.call_function(operator.getitem, (carry, argument))
                continue
            if argument == LABEL:
                key = f"{LABEL} {name}"
                self._labels[key] = tuple(path)
                given[name] = self.graph.call_function(operator.getitem, (carry, key))
                continue
            output = trees.get(exit.template, tuple(path)).name
            if output not in made:
                made[output] = self.graph.call_function(operator.getitem, (carry, output))
            given[name] = made[output]
        before = set(self.graph.nodes)
        results = self._copy(loss_graph, carry, "loss", given)
        self._loss_names = {node.name for node in self.graph.nodes if node not in before}
        self.graph.output(results)
        self._find_first_loss(exit, made, results)

    def _find_first_loss(self, exit: OutputExit, made: dict[str, Node], results: dict[str, Node]) -> None:
        leaves = [(path, leaf) for path, leaf in trees.walk(exit.template) if isinstance(leaf, OutputValue)]
        names = [leaf.name for leaf in trees.leaves(self._template) if isinstance(leaf, OutputValue)]
        if names:
            first = set(sources(results[names[0]]))
            self.first_loss = tuple(path for path, leaf in leaves if made.get(leaf.name) in first)

    def _copy(self, graph: torch.fx.Graph, carry: Node, prefix: str, given: dict[str, Node]) -> dict[str, Node]:
        """Copies a layer's graph, its reads those ``given`` or of the carry; what it makes, by name."""
        copies: dict[Node, Node] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                copies[node] = carry
            elif node.op == "output":
                made = node.args[0]
                if isinstance(made, Node):  # pass_on
                    assert made.target is pass_on
                    made = made.args[2]
                return {name: copies[value] for name, value in made.items()}
            elif node.target is operator.getitem and copies.get(node.args[0]) is carry and node.args[1] in given:
                copies[node] = given[node.args[1]]
            elif node.target is not pass_on:
                copies[node] = self.graph.node_copy(node, copies.__getitem__)
                if node.op in ("get_attr", "call_module"):
                    copies[node].target = f"{prefix}.{node.target}"
        raise AssertionError("a graph without output")


def _returned(leaf: Any, made: Carry) -> Any:
    """What a loss function returns for a leaf; a number is one, for whoever checks what may be a loss."""
    if not isinstance(leaf, OutputValue):
        return leaf
    value = made[leaf.name]
    return value.item() if isinstance(leaf, OutputNumber) and not is_fake(value) else value


def _without_dead_code(graph: torch.fx.Graph) -> None:
    """Takes out what nothing reads, but for modules, whose hooks fire, and what has an effect or draws."""
    for node in reversed(list(graph.nodes)):
        stays = node.op in ("placeholder", "output", "call_module")
        if not stays and not node.users and not node.meta.get("effect") and not node.meta.get("random"):
            graph.erase_node(node)
