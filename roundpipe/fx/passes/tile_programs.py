"""Writes programs that run a layer's regions in tiles.

A program is the layer's graph with a call in place of each region (`roundpipe.core.tiled_regions.Region`), whose
function is generated from the region's nodes. It takes the layer as an argument, so that it serves all copies of it.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from roundpipe.core.errors import said
from roundpipe.core.layers import Carry
from roundpipe.core.tiled_regions import Region, RowResult, SumResult
from roundpipe.core.tiling import Rows
from roundpipe.fx.operations import NamedCall
from roundpipe.fx.passes.generated import GeneratedFunction
from roundpipe.fx.passes.glue import erase_unread, made_of, taken
from roundpipe.fx.passes.inner_tiles import TiledLeaf
from roundpipe.fx.passes.regions import RegionNodes, RowGraph, RowNode
from roundpipe.fx.passes.row_losses import RowLoss, weight_of
from roundpipe.fx.passes.shifts import RESHAPES, function_name
from roundpipe.fx.passes.tile_check import difference

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TiledProgram:
    """A layer's code with regions in tiles."""

    function: GeneratedFunction
    regions: tuple[Region, ...]
    leaves: tuple[TiledLeaf, ...] = ()
    """Modules parts of which run in tiles."""

    def __call__(self, root: nn.Module, carry: Carry) -> Any:
        return self.function(root, root, carry)


@dataclass(slots=True)
class TilePlan:
    """Which nodes of a graph run in tiles."""

    rows: RowGraph
    regions: list[RegionNodes]
    saved_bytes: int
    leaves: dict[Node, TiledLeaf] = field(default_factory=dict)
    """Nodes that call modules parts of which run in tiles."""

    def moved(self, graph: Graph) -> TilePlan:
        """The same for the graph of a layer that does the same."""
        other = dict(zip(self.rows.run.graph.nodes, graph.nodes, strict=True))
        regions = [RegionNodes([other[node] for node in region.nodes], region.space) for region in self.regions]
        leaves = {other[node]: leaf for node, leaf in self.leaves.items()}
        return TilePlan(self.rows.moved(graph), regions, self.saved_bytes, leaves)

    def check(self, root: nn.Module) -> bool:
        """Drop the regions that do something else in tiles; whether any are left."""
        if not self.regions:
            return False
        writer = _ProgramWriter(self, root)
        writer.write()
        self.regions = [region for region, made, body in writer.written if _holds(region, made, root, body.examples)]
        return bool(self.regions)

    def write(self, root: nn.Module, glue: Mapping[Node, str] = MappingProxyType({})) -> TiledProgram:
        """The program.

        Args:
            root: where the graph's targets are.
            glue: nodes whose values the program takes from its carry, by these names, where it reads them whole.
        """
        writer = _ProgramWriter(self, root, glue)
        function = writer.write()
        return TiledProgram(function, tuple(made for _, made, _ in writer.written), tuple(self.leaves.values()))


def _holds(region: RegionNodes, made: Region, root: nn.Module, examples: list[Any]) -> bool:
    try:
        why_not = difference(made, root, examples)
    except Exception as error:  # whatever the user's code raises in a tile
        why_not = f"{type(error).__name__}: {said(error)}"
    if why_not:
        logger.info("%s to %s runs untiled: %s", region.nodes[0], region.nodes[-1], why_not)
    return not why_not


class _ProgramWriter:
    def __init__(self, plan: TilePlan, root: nn.Module, glue: Mapping[Node, str] = MappingProxyType({})) -> None:
        self.rows = plan.rows
        self.source = plan.rows.run.graph
        self.root = root
        self.graph = Graph()
        self.values: dict[Node, Any] = dict(plan.rows.run.literals)
        self.leaves = plan.leaves
        self.glue = glue
        self.region_of = {node: region for region in plan.regions for node in region.nodes}
        self.owner = self.graph.placeholder("owner")
        self.carry: Any = None
        self.written: list[tuple[RegionNodes, Region, _BodyWriter]] = []

    def write(self) -> GeneratedFunction:
        position = {node: index for index, node in enumerate(self.source.nodes)}
        first = {node: position[self.region_of[node].nodes[0]] if node in self.region_of else position[node]
                 for node in position}  # fmt: skip
        stages, row_nodes = self.rows.stages, self.rows.row_nodes
        *body, output = self.source.nodes
        body.sort(key=lambda node: (stages[node], node not in row_nodes, first[node], position[node]))
        done: set[int] = set()
        for node in body:
            region = self.region_of.get(node)
            if region is None:
                self._copy(node)
            elif id(region) not in done:
                done.add(id(region))
                self._write_region(region)
        self.graph.output(map_arg(output.args[0], self._operand))
        written = (self.values.get(node) for node in made_of(self.glue))
        erase_unread(self.graph, (node for node in written if isinstance(node, Node)))
        return GeneratedFunction.of(self.root, self.graph)

    def _operand(self, node: Node) -> Any:
        return self.values[node]

    def _copy(self, node: Node) -> None:
        if node not in self.values:
            op, target = node.op, node.target
            if node in self.glue:
                self.values[node] = taken(self.graph, self.carry, self.glue[node])
                return
            args, kwargs = map_arg((node.args, node.kwargs), self._operand)
            if node in self.leaves:
                if op == "call_module":
                    args = (self.graph.get_attr(str(target)), *args)
                modes = target.modes if isinstance(target, NamedCall) else None
                op, target = "call_function", NamedCall("leaf_in_tiles", self.leaves[node], modes)
            self.values[node] = self.graph.create_node(op, target, args, kwargs, name=node.name)
            if op == "placeholder":
                self.carry = self.values[node]

    def _write_region(self, region: RegionNodes) -> None:
        body = _BodyWriter(self, region)
        body.write()
        made = Region(
            function=GeneratedFunction.of(self.root, body.graph),
            sizes=region.space.sizes,
            inputs=tuple(rows for _, rows in body.inputs),
            results=tuple(self._kind(node) for node in body.results),
            parameters=_Parameters(tuple(dict.fromkeys(body.targets))),
            draws_random=any(self.rows.row_nodes[node].draws_random for node in region.nodes),
        )
        call = NamedCall(f"region_{len(self.written)}", made)
        self.written.append((region, made, body))
        results = self.graph.call_function(call, (self.owner, *(value for value, _ in body.inputs)))
        for index, node in enumerate(body.results):
            item = (results, index)
            self.values[node] = self.graph.create_node("call_function", operator.getitem, item, name=node.name)

    def _kind(self, node: Node) -> RowResult | SumResult:
        (found,) = self.rows.row_nodes[node].found
        value = self.rows.run.values[node]
        if isinstance(found, tuple):
            return RowResult.like(value, found)
        return SumResult(found == "mean", value.dtype, value.requires_grad)


class _BodyWriter:
    """Writes what a region does with one tile."""

    def __init__(self, outer: _ProgramWriter, region: RegionNodes) -> None:
        self.outer = outer
        self.rows = outer.rows
        self.region = region
        self.members = set(region.nodes)
        self.results = [node for node in region.nodes if any(user not in self.members for user in node.users)]
        self.graph = Graph()
        self.graph.placeholder("sizes")
        self.inputs: list[tuple[Any, Rows | None]] = []
        """Nodes and literals of the program, and how they are taken."""
        self.examples: list[Any] = []
        """Their values on fakes."""
        self.targets: list[str] = []
        """Of the layer's modules and weights inside."""
        self.values: dict[Any, Any] = {}
        self.sizes: dict[tuple[int, int], Any] = {}

    def write(self) -> None:
        for node in self.region.nodes:  # placeholders come first
            row_node = self.rows.row_nodes[node]
            for source in node.all_input_nodes:
                self._declare(source, row_node)
            if row_node.loss is not None and row_node.loss.is_by_weight(self._value(row_node.loss.target)):
                self._input_weight(node, row_node.loss)
        for node in self.region.nodes:
            self.values[node] = self._write(node, self.rows.row_nodes[node])
        self.graph.output(tuple(self.values[node] for node in self.results))

    def _declare(self, source: Node, row_node: RowNode) -> None:
        """Make what a node reads from outside an input, unless it is a literal or a weight taken whole."""
        rows = row_node.reads[source]
        if source in self.members or source in self.rows.run.literals:
            return
        if source.op == "get_attr" and rows is None:
            return
        self._input((source, rows), self.outer.values[source], rows, self._value(source))

    def _input_weight(self, node: Node, loss: RowLoss) -> None:
        arguments = map_arg(loss.weight_arguments, self.outer._operand)
        value = self.outer.graph.call_function(weight_of, (), arguments)
        example, _ = self.rows.run.operands(loss.weight_arguments, {})
        self._input(("weight", node), value, None, weight_of(**example))

    def _input(self, key: Any, value: Any, rows: Rows | None, example: Any) -> None:
        if key not in self.values:
            self.values[key] = self.graph.placeholder(f"value_{len(self.inputs)}")
            self.inputs.append((value, rows))
            self.examples.append(example)

    def _value(self, node: Any) -> Any:
        return self.rows.run.values.get(node) if isinstance(node, Node) else node

    def _write(self, node: Node, row_node: RowNode) -> Node:
        def operand(source: Node) -> Any:
            if source in self.members:
                return self.values[source]
            if source in self.rows.run.literals:
                return self.rows.run.literals[source]
            rows = row_node.reads[source]
            if source.op == "get_attr" and rows is None:
                self.targets.append(str(source.target))
                return self.graph.get_attr(str(source.target))
            return self.values[source, rows]

        if row_node.loss is not None:
            loss = row_node.loss
            total = self.values.get(("weight", node))
            if loss.reduction == "batchmean":
                total = self._value(loss.arguments["input"]).shape[0]
            return loss.write(self.graph, map_arg(loss.arguments, operand), total, node.name)
        args, kwargs = map_arg((node.args, node.kwargs), operand)
        if node.op == "call_module":
            self.targets.append(str(node.target))
        name = function_name(node)
        if name in RESHAPES and not any(isinstance(arg, torch.dtype) for arg in node.args):
            method = "expand" if name in ("expand", "broadcast_to") else "reshape"
            return self.graph.create_node("call_method", method, (args[0], *self._shape(node)), {}, name=node.name)
        return self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)

    def _shape(self, node: Node) -> list[Any]:
        """A result's sizes in a tile."""
        (rows,) = self.rows.row_nodes[node].found
        shape = self._value(node).shape
        assert isinstance(rows, tuple)
        return [size if axes is None else self._size(axes) for size, axes in zip(shape, rows, strict=True)]

    def _size(self, axes: tuple[int, int]) -> Any:
        if axes not in self.sizes:
            sizes = next(iter(self.graph.nodes))
            size = self.graph.call_function(operator.getitem, (sizes, axes[0]))
            for axis in range(axes[0] + 1, axes[1]):
                size = self.graph.call_function(operator.mul, (size, self._size((axis, axis + 1))))
            self.sizes[axes] = size
        return self.sizes[axes]


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The parameters at some targets, of any copy of a layer."""

    targets: tuple[str, ...]

    def __call__(self, owner: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for target in self.targets:
            value = operator.attrgetter(target)(owner)
            if isinstance(value, nn.Module):
                found += value.parameters()
            elif isinstance(value, torch.Tensor):
                found.append(value)
        return found
