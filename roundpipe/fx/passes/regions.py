"""Finds the regions of a layer's graph whose rows can be computed a tile at a time.

The graph runs on fakes of real sizes. A node is row-wise if every operator below it is (`rows`); the others are
boundaries. The stage of a node is the number of boundaries with rows before and behind it on the longest way to it, so
that row-wise nodes of one stage that are connected are a region: no way leaves it and comes back.

Invariant: whatever is not known to be row-wise, or does more than return a value, is a boundary.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from roundpipe.core import trees
from roundpipe.core.tiling import Axes, Rows
from roundpipe.fx.operations import NamedCall
from roundpipe.fx.passes.graph_run import GraphRun, attribute
from roundpipe.fx.passes.row_losses import RowLoss
from roundpipe.fx.passes.row_rules import Found
from roundpipe.fx.passes.rows import RowWatch
from roundpipe.fx.sizes import flat_tensors


@dataclass(frozen=True, slots=True)
class RowSpace:
    """What counts the rows of activations."""

    leading: tuple[int, ...]
    """Their leading sizes: batch and length, or one size."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the row axes: the leading sizes larger than one."""
        return tuple(size for size in self.leading if size > 1)

    @property
    def number(self) -> int:
        return math.prod(self.leading)

    def rows_of(self, tensor: torch.Tensor) -> Rows | None:
        """Where a tensor may have them, by its leading sizes."""
        if not self.sizes:
            return None
        rest: Rows = (None,) * tensor.dim()
        if tuple(tensor.shape[: len(self.leading)]) == self.leading:
            axes: list[Axes | None] = []
            for size in self.leading:
                number = sum(each is not None for each in axes)
                axes.append((number, number + 1) if size > 1 else None)
            return (*axes, *rest[len(axes) :])
        if tensor.dim() and tensor.shape[0] == self.number:
            return ((0, len(self.sizes)), *rest[1:])
        return None


@dataclass(slots=True)
class RowNode:
    """What is known about a row-wise node."""

    found: list[Found]
    """Of each tensor in its value."""
    reads: dict[Node, Rows | None]
    """How each operand is taken; None: whole."""
    made_bytes: int = 0
    draws_random: bool = False
    loss: RowLoss | None = None
    scaled: Node | None = None
    """The sum or mean over all rows that it multiplies or divides by a number known before the rows."""

    def moved(self, other: Mapping[Node, Node]) -> RowNode:
        """The same with other nodes in place of its own."""
        loss = self.loss
        if loss is not None:
            loss = replace(loss, arguments=map_arg(loss.arguments, other.__getitem__))
        reads = {other[node]: rows for node, rows in self.reads.items()}
        return replace(self, reads=reads, loss=loss, scaled=None if self.scaled is None else other[self.scaled])

    @property
    def is_end(self) -> bool:
        """Whether it is a sum or mean over all rows."""
        return isinstance(self.found[0], str)


@dataclass(slots=True)
class RegionNodes:
    """The nodes of a region, in order."""

    nodes: list[Node]
    space: RowSpace


# ---------------------------------------------------------------------------------- rows of nodes


@dataclass(slots=True)
class RowGraph:
    """The rows of a graph's nodes in one space, and its regions."""

    run: GraphRun
    space: RowSpace
    row_nodes: dict[Node, RowNode] = field(default_factory=dict)
    why_not: dict[Node, str] = field(default_factory=dict)
    stages: dict[Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seeds: dict[Node, list[Found]] = {}
        order_after = self._order()
        for node in self.run.graph.nodes:
            if node.op == "output":
                continue
            row_node = self._row_node(node, seeds)
            if row_node is not None:
                self.row_nodes[node] = row_node
            tensors = flat_tensors(self.run.values[node])
            is_weight = node.op == "get_attr"
            seeds[node] = [None if is_weight else self.space.rows_of(tensor) for tensor in tensors]
            self.stages[node] = self._stage(node, order_after.get(node, ()))

    def moved(self, graph: Graph) -> RowGraph:
        """The same for the graph of a layer that does the same."""
        other = dict(zip(self.run.graph.nodes, graph.nodes, strict=True))
        clone = object.__new__(RowGraph)
        clone.run, clone.space = self.run.moved(graph), self.space
        clone.row_nodes = {other[node]: row_node.moved(other) for node, row_node in self.row_nodes.items()}
        clone.stages = {other[node]: stage for node, stage in self.stages.items()}
        clone.why_not = {}
        return clone

    def found(self, node: Node, seeds: Mapping[Node, list[Found]]) -> list[Found]:
        return self.row_nodes[node].found if node in self.row_nodes else seeds[node]

    def _order(self) -> dict[Node, list[Node]]:
        """For nodes whose effects have an order, those before them."""
        chains = [self.run.touching[key] for key in self.run.written] + [self.run.stateful]
        before: dict[Node, list[Node]] = {}
        for chain in chains:
            for index, node in enumerate(chain):
                before.setdefault(node, []).extend(chain[:index])
        return before

    def _stage(self, node: Node, before: Iterable[Node]) -> int:
        row_node = self.row_nodes.get(node)
        if row_node is None:
            return max([self.stages[source] for source in (*node.all_input_nodes, *before)], default=0)
        return max(1, *(self.stages[source] + (not self._is_row_edge(source, node)) for source in node.all_input_nodes))

    def _is_row_edge(self, source: Node, node: Node) -> bool:
        """Whether a row-wise node reads another one's rows, or scales its sum over them."""
        made = self.row_nodes.get(source)
        if self.row_nodes[node].scaled is not None:
            return self.row_nodes[node].scaled is source
        return made is not None and self.row_nodes[node].reads.get(source) is not None and not made.is_end

    def _row_node(self, node: Node, seeds: Mapping[Node, list[Found]]) -> RowNode | None:
        run = self.run
        found: list[Found]
        if not node.op.startswith("call_") or node in run.literals:
            return None
        why = run.opaque.get(node, "")
        operands = node.all_input_nodes
        results = flat_tensors(run.values[node])
        if not why and (scaled := self._scaled(node)) is not None:
            found = self.row_nodes[scaled].found
            return RowNode(found, dict.fromkeys(operands), sum(t.nbytes for t in results), scaled=scaled)
        if not why and not self._can_be_in_region(node, results):
            why = "its operands or results are no plain tensors"
        if not why and not any(isinstance(f, tuple) for source in operands for f in self.found(source, seeds)):
            why = "reads no rows"
        if not why and self._is_small(results, operands):
            why = "is small"
        if why:
            self.why_not[node] = why
            return None
        watch = self._watch(operands, seeds)
        loss = RowLoss.of(node, attribute(run.root, node) if node.op == "call_module" else None)
        if loss is not None:
            target = loss.target
            if loss.is_by_weight(run.values.get(target)) and target in self.row_nodes:
                self.why_not[node] = "its target is made of rows"
                return None
            arguments, _ = run.operands(loss.arguments, {})
            with watch:
                losses = loss.per_row(**arguments)
            is_of_rows = isinstance(watch.found(losses), tuple)
            found = [loss.kind(run.values.get(target)) if is_of_rows else None]
        else:
            with watch:
                value = run.run_node(node)
            found = [watch.found(tensor) for tensor in flat_tensors(value)]
        if watch.why_not or None in found or (len(found) > 1 and ("sum" in found or "mean" in found)):
            self.why_not[node] = watch.why_not or "a result has no rows"
            return None
        reads: dict[Node, Rows | None] = {}
        for source in operands:
            value = run.values[source]
            if isinstance(value, torch.Tensor):
                (own,) = self.found(source, seeds)
                reads[source] = watch.taken_in_rows.get(id(value), own if isinstance(own, tuple) else None)
            else:  # an item of a row-wise node's tuple
                rows_of_items = self.row_nodes[source].found if source in self.row_nodes else []
                reads[source] = next((rows for rows in rows_of_items if isinstance(rows, tuple)), None)
        return RowNode(found, reads, watch.made_bytes, watch.draws_random, loss)

    def _scaled(self, node: Node) -> Node | None:
        """The end of a region that a node does nothing but scale, as ``sum / count``.

        Scaled in each tile, its gradients are scaled before whatever rounds them inside, as without tiles.
        """
        target = node.target.function if isinstance(node.target, NamedCall) else node.target
        if node.op == "call_module" or target not in _SCALINGS or node.kwargs or len(node.args) != 2:
            return None
        operands: tuple[Any, ...] = node.args
        for end, factor in (operands, operands[::-1])[: 2 if target in _PRODUCTS else 1]:
            made = self.row_nodes.get(end) if isinstance(end, Node) else None
            if made is None or not made.is_end or len(end.users) != 1 or not self.run.values[end].requires_grad:
                continue
            if not isinstance(factor, Node):
                return end if _is_number(factor) else None
            if _is_number(self.run.values[factor]) and self.stages[factor] < self.stages[end]:
                return end
        return None

    def _watch(self, operands: Sequence[Node], seeds: Mapping[Node, list[Found]]) -> RowWatch:
        rows: list[tuple[torch.Tensor, Rows]] = []
        free = []
        for source in operands:
            tensors = flat_tensors(self.run.values[source])
            for tensor, found in zip(tensors, self.found(source, seeds), strict=True):
                if isinstance(found, tuple):
                    rows.append((tensor, found))
                else:
                    free.append(tensor)
        return RowWatch(self.space.sizes, rows, free)

    def _can_be_in_region(self, node: Node, results: Sequence[torch.Tensor]) -> bool:
        """Whether what a node reads and gives are tensors, plain values, or tuples of row-wise nodes' tensors."""
        value = self.run.values[node]
        if not results or not (isinstance(value, torch.Tensor) or _is_tuple_of_tensors(value)):
            return False
        for source in node.all_input_nodes:
            operand = self.run.values[source]
            is_plain = isinstance(operand, (torch.Tensor, nn.Module, *trees.PLAIN, torch.Size))
            if not is_plain and not (source in self.row_nodes or source in self.run.literals):
                return False
        # a tuple can't be a region's result, but its items can
        is_tensor = isinstance(value, torch.Tensor)
        return is_tensor or all(user.target is operator.getitem for user in node.users)

    def _is_small(self, results: Sequence[torch.Tensor], operands: Iterable[Node]) -> bool:
        """Whether a node is about labels: without gradient, at most one element per row, and not of other rows."""
        tensors = flat_tensors([self.run.values[source] for source in operands])
        return (
            not any(tensor.requires_grad for tensor in results)
            and all(tensor.numel() <= self.space.number for tensor in (*results, *tensors))
            and not any(source in self.row_nodes for source in operands)
        )

    def regions(self) -> list[RegionNodes]:
        """Connected row-wise nodes of one stage."""
        group: dict[Node, list[Node]] = {}
        for node in self.row_nodes:
            merged = [node]
            sources = [s for s in node.all_input_nodes if s in group and self.stages[s] == self.stages[node]]
            for other in {id(group[s]): group[s] for s in sources if self._is_row_edge(s, node)}.values():
                merged = other + merged
            for member in merged:
                group[member] = merged
        order = {node: index for index, node in enumerate(self.run.graph.nodes)}
        distinct = {id(nodes): nodes for nodes in group.values()}.values()
        return [RegionNodes(sorted(nodes, key=order.__getitem__), self.space) for nodes in distinct]

    def saved_bytes(self, region: RegionNodes) -> int:
        """Bytes that a region makes inside, less those of its rows that come in and go out."""
        members = set(region.nodes)
        made = sum(self.row_nodes[node].made_bytes for node in members)
        inputs = {source for node in members for source, rows in self.row_nodes[node].reads.items() if rows} - members
        results = {node for node in members if any(user not in members for user in node.users)}
        return made - 2 * self._bytes_of(results) - self._bytes_of(inputs)

    def _bytes_of(self, nodes: Iterable[Node]) -> int:
        return sum(tensor.nbytes for node in nodes for tensor in flat_tensors(self.run.values[node]))


_PRODUCTS = (operator.mul, torch.mul, torch.multiply, "mul", "multiply")
_SCALINGS = (*_PRODUCTS, operator.truediv, torch.div, torch.divide, torch.true_divide, "div", "divide", "true_divide")


def _is_number(value: Any) -> bool:
    """Whether a value is one number without gradient."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.requires_grad
    return isinstance(value, (int, float))


def _is_tuple_of_tensors(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(item, torch.Tensor) for item in value)


def row_spaces(run: GraphRun) -> list[RowSpace]:
    """By the leading sizes of activations, the largest first."""
    bytes_of: dict[RowSpace, int] = {}
    for node, value in run.values.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and node.op != "get_attr" and value.dim() > 1:
            space = RowSpace(tuple(value.shape[: 1 if value.dim() == 2 else 2]))
            bytes_of[space] = bytes_of.get(space, 0) + value.nbytes
    ordered = sorted(bytes_of, key=lambda space: -bytes_of[space])
    return [space for space in ordered if space.sizes]
