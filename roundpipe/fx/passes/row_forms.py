"""Rewrites calls into ones that do the same row by row, for programs in tiles; the graph that runs whole stays.

    x.expand_as(logits)            x.expand(3, 7, 32): only the sizes of the other tensor are read, not its rows
    cross_entropy(logits[mask],    cross_entropy of all rows, the targets of those that the mask leaves out ignored, and
                  labels[mask])    their logits zeros: how many a mask picks depends on data, and nothing ran on fakes

Invariant: values and gradients are the same up to rounding, also where a mask picks nothing, or leaves out what is not
finite.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from roundpipe.core.layers import Carry
from roundpipe.fx.fakes import NO_FAKE_KERNEL
from roundpipe.fx.passes.graph_run import GraphRun, LayerRun, attribute
from roundpipe.fx.passes.row_losses import BY_WEIGHT, RowLoss
from roundpipe.fx.passes.shifts import function_name

_LIKE_ANOTHER = {"expand_as": "expand", "view_as": "view", "reshape_as": "reshape"}
"""Methods that take their sizes from another tensor, and those that are told them."""
_CASTS = frozenset("to float double half bfloat16 long int contiguous clone".split())
_SCALES = frozenset("mul truediv div tanh".split())
"""Of logits, by a number: finite, with finite derivatives, at the zeros of rows that are left out."""
_IGNORED = -100


def run_in_rows(graph: Graph, root: nn.Module, carry: Carry) -> GraphRun:
    """The run of a graph, rewritten where something of it is known to do the same row by row.

    Raises:
        Exception: whatever the graph's nodes raise on fakes.
    """
    try:
        run = GraphRun(graph, root, carry)
    except NO_FAKE_KERNEL:
        if (without := _without_picks(graph, root, carry)) is None:
            raise
        run = GraphRun(without, root, carry)
    told = _with_sizes(run)
    return run if told is None else GraphRun(told, root, carry)


def _with_sizes(run: GraphRun) -> Graph | None:
    """The graph with sizes in place of tensors that only tell them; None if there are none."""
    if not any(_tells_sizes(node, run) for node in run.graph.nodes):
        return None
    graph, copies = Graph(), dict[Node, Node]()
    for node in run.graph.nodes:
        if _tells_sizes(node, run):
            sizes = run.values[node.args[1]].shape
            method = _LIKE_ANOTHER[function_name(node)]
            copies[node] = graph.call_method(method, (copies[node.args[0]], *sizes))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return graph


def _tells_sizes(node: Node, run: GraphRun) -> bool:
    if not node.op.startswith("call_") or function_name(node) not in _LIKE_ANOTHER or node.kwargs:
        return False
    return len(node.args) == 2 and all(
        isinstance(arg, Node) and isinstance(run.values[arg], torch.Tensor) for arg in node.args
    )


# ---------------------------------------------------------------------------------- rows that a mask picks


class _KnownRun(LayerRun):
    """Runs what can run on fakes, and notes what a mask picks: the node, what it picks from, and the mask."""

    def __init__(self, graph: Graph, root: nn.Module, carry: Carry) -> None:
        super().__init__(root, carry)
        self.picks: dict[Node, tuple[Node, Node]] = {}
        for node in graph.nodes:
            if node.op == "output" or any(source not in self.values for source in node.all_input_nodes):
                continue
            try:
                self.values[node] = self.run_node(node)
            except NO_FAKE_KERNEL:
                if not self._is_pick(node):
                    raise

    def _is_pick(self, node: Node) -> bool:
        if node.target is not operator.getitem:
            return False
        source, index = node.args
        mask = index[0] if isinstance(index, tuple) and len(index) == 1 else index
        if not isinstance(source, Node) or not isinstance(mask, Node):
            return False
        value, picked = self.values[mask], self.values[source]
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.bool or not value.dim():
            return False
        self.picks[node] = source, mask
        return isinstance(picked, torch.Tensor) and picked.shape[: value.dim()] == value.shape


def _without_picks(graph: Graph, root: nn.Module, carry: Carry) -> Graph | None:
    """The graph in which losses ignore the rows that a mask leaves out; None if it picks for something else, too."""
    if any(node.meta.get("effect") for node in graph.nodes):
        return None  # a mask may be another one later
    run = _KnownRun(graph, root, carry)
    ignored: dict[Node, int | None] = {}
    """Picks of losses, and for targets the value that is ignored."""
    for node in graph.nodes:
        loss = RowLoss.of(node, attribute(root, node) if node.op == "call_module" else None)
        if loss is not None:
            ignored.update(_picks_of(loss, run))
    if ignored.keys() != run.picks.keys():
        return None
    other, copies = Graph(), dict[Node, Node]()
    left_out: dict[Node, Node] = {}
    for node in graph.nodes:
        if node not in ignored:
            copies[node] = other.node_copy(node, copies.__getitem__)
            continue
        source, mask = run.picks[node]
        if mask not in left_out:
            left_out[mask] = other.call_function(operator.invert, (copies[mask],))
        where, fill = left_out[mask], ignored[node]
        if fill is None:
            where = other.call_method("unsqueeze", (where, -1))
        rows = other.call_method("masked_fill", (copies[source], where, fill or 0))
        copies[node] = other.call_method("flatten", (rows, 0, run.values[mask].dim() - 1))
    return other


def _picks_of(loss: RowLoss, run: _KnownRun) -> dict[Node, int | None]:
    """The picks that a loss reads, of its logits and of its target by the same mask, if it can ignore others."""
    ignored = loss.arguments.get("ignore_index", _IGNORED)
    logits = _picked(loss.arguments.get("input"), run, _CASTS | _SCALES)
    target = _picked(loss.target, run, _CASTS)
    if loss.function not in BY_WEIGHT or type(ignored) is not int or logits is None or target is None:
        return {}
    (source, mask), (classes, other_mask) = run.picks[logits], run.picks[target]
    values, mask_dim = run.values, run.values[mask].dim()
    is_of_rows = values[source].dim() == mask_dim + 1 and values[classes].dim() == mask_dim
    is_index = not values[classes].is_floating_point() and values[classes].dtype is not torch.bool
    if not (is_of_rows and is_index and _is_same(mask, other_mask)):
        return {}
    return {logits: None, target: ignored}


def _picked(node: Any, run: _KnownRun, allowed: frozenset[str]) -> Node | None:
    """What a mask picks, of which nothing is read but the node, made of each element alone."""
    while isinstance(node, Node) and len(node.users) == 1 and node not in run.picks:
        name, rest = function_name(node), node.args[1:]
        is_flat = name in ("view", "reshape") and rest and rest[0] == -1 and len(rest) <= 2
        is_number = all(not isinstance(arg, Node) for arg in (*rest, *node.kwargs.values()))
        if not (is_flat or (name in allowed and is_number and node.op != "call_module")):
            return None
        node = node.args[0]
    return node if isinstance(node, Node) and len(node.users) == 1 else None


def _is_same(one: Any, other: Any) -> bool:
    """Whether two nodes compute the same, such as ``labels != -100`` twice."""
    if one is other or not isinstance(one, Node) or not isinstance(other, Node):
        return type(one) is type(other) and bool(one == other)
    if one.op not in ("call_function", "call_method") or one.meta.get("random"):
        return False
    if (one.op, one.target, one.kwargs) != (other.op, other.target, other.kwargs) or len(one.args) != len(other.args):
        return False
    return all(map(_is_same, one.args, other.args))
