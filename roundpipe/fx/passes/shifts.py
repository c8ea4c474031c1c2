"""Moves slices of rows, such as ``logits[:, :-1]`` in front of a loss, up to where the rows come from.

What is computed of a slice of rows is the slice of what is computed of all, so that the slice of a layer's input does,
and the logits in between have the same rows as the loss.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from roundpipe.core.tiling import Rows
from roundpipe.fx.operations import NamedCall
from roundpipe.fx.passes.regions import RowGraph

RESHAPES = frozenset("view reshape unflatten expand broadcast_to".split())
"""Functions and methods that are told sizes, which are others where there are fewer rows."""


@dataclass(frozen=True, slots=True)
class _Slice:
    axis: int
    kept: slice

    def dim_of(self, rows: Rows | None) -> int | None:
        """The dimension that counts the axis alone."""
        return None if rows is None else next((d for d, axes in enumerate(rows) if axes == self._axes), None)

    def leaves(self, rows: Rows | None) -> bool:
        """Whether a tensor with these rows is the same for all rows of the axis."""
        return rows is None or not any(axes and axes[0] <= self.axis < axes[1] for axes in rows)

    @property
    def _axes(self) -> tuple[int, int]:
        return (self.axis, self.axis + 1)


def shifts_moved(rows: RowGraph) -> Graph | None:
    """The graph with its slices of rows moved up; None if there are none that can be."""
    mover = _Mover(rows)
    return mover.moved() if mover.slices else None


@dataclass(slots=True)
class _Mover:
    rows: RowGraph
    slices: dict[Node, _Slice] = field(default_factory=dict)
    gone: set[Node] = field(default_factory=set)
    """Nodes that only a slice reads, to be computed of the slice."""
    graph: Graph = field(default_factory=Graph)
    values: dict[Node, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.rows.run.graph.nodes:
            found = self._slice(node)
            if found is not None and self._can_move(node.args[0], found):
                self.slices[node] = found
                self._mark(node.args[0], found)

    def _slice(self, node: Node) -> _Slice | None:
        """What a node slices, if it is a range of one axis of a row-wise node's result."""
        if node.target is not operator.getitem or not isinstance(node.args[0], Node):
            return None
        made = self.rows.row_nodes.get(node.args[0])
        value = self.rows.run.values[node.args[0]]
        if made is None or made.is_end or not isinstance(value, torch.Tensor) or node in self.rows.row_nodes:
            return None
        index: Any = node.args[1]
        items = list(index) if isinstance(index, tuple) else [index]
        if items.count(...) == 1:
            place = items.index(...)
            items[place : place + 1] = [slice(None)] * (value.dim() - len(items) + 1)
        if not all(isinstance(item, slice) and _is_plain(item) for item in items):
            return None
        cut = [dim for dim, item in enumerate(items) if range(value.shape[dim])[item] != range(value.shape[dim])]
        (rows,) = made.found
        if len(cut) != 1 or items[cut[0]].step not in (None, 1) or not isinstance(rows, tuple):
            return None
        axes = rows[cut[0]]
        return _Slice(axes[0], items[cut[0]]) if axes is not None and axes[1] == axes[0] + 1 else None

    def _can_move(self, node: Any, by: _Slice) -> bool:
        """Whether a node, which one other reads, can be computed of sliced operands."""
        made = self.rows.row_nodes.get(node)
        if made is None or len(node.users) != 1 or made.is_end or made.draws_random or node in self.gone:
            return False
        if function_name(node) in RESHAPES or not isinstance(self.rows.run.values[node], torch.Tensor):
            return False
        return all(by.leaves(rows) or by.dim_of(rows) is not None for rows in made.reads.values())

    def _mark(self, node: Node, by: _Slice) -> None:
        self.gone.add(node)
        for source in node.all_input_nodes:
            if not by.leaves(self.rows.row_nodes[node].reads[source]) and self._can_move(source, by):
                self._mark(source, by)

    def moved(self) -> Graph:
        for node in self.rows.run.graph.nodes:
            if node in self.slices:
                self.values[node] = self._sliced(node.args[0], None, self.slices[node])
            elif node not in self.gone:
                self.values[node] = self.graph.node_copy(node, self.values.__getitem__)
        return self.graph

    def _sliced(self, node: Any, rows: Rows | None, by: _Slice) -> Node:
        if node in self.gone:
            reads = self.rows.row_nodes[node].reads

            def operand(source: Node) -> Node:
                left = by.leaves(reads[source])
                return self.values[source] if left else self._sliced(source, reads[source], by)

            args, kwargs = map_arg((node.args, node.kwargs), operand)
            return self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        dim = by.dim_of(rows)
        assert dim is not None
        return self.graph.call_function(operator.getitem, (self.values[node], (slice(None),) * dim + (by.kept,)))


def _is_plain(item: slice) -> bool:
    return all(part is None or type(part) is int for part in (item.start, item.stop, item.step))


def function_name(node: Node) -> str:
    """Of the function or method that a node calls."""
    target = node.target.function if isinstance(node.target, NamedCall) else node.target
    return target if isinstance(target, str) and node.op == "call_method" else str(getattr(target, "__name__", ""))
