"""How data flows through a traced graph: shared memory, liveness, what a value needs, values handed through."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.fx.graph.nodes import has_effect, mutated_by, storage_key, value_of
from roundpipe.fx.graph.traced import OutputValue, TracedGraph


def live_before(
    order: Sequence[Node],
    outputs: Iterable[Node],
    reads: Callable[[Node], Iterable[Node]] = lambda node: node.all_input_nodes,
) -> list[frozenset[Node]]:
    """The values live in front of each node of ``order``: made earlier, read by it or later.

    Nodes outside ``order`` that are read (placeholders, attributes) count as made before the first. The last of the
    ``len(order) + 1`` sets is the outputs, which are read behind the last node.
    """
    live = set(outputs)
    sets = [frozenset(live)]
    for node in reversed(order):
        live.discard(node)
        live.update(reads(node))
        sets.append(frozenset(live))
    sets.reverse()
    return sets


def needed_for(order: Sequence[Node], targets: Iterable[Node]) -> list[Node]:
    """The nodes, in order, that determine the targets: these, what they read, and earlier writes to memory of both."""
    needed = set(targets)
    storages = {storage_key(node) for node in needed} - {None}
    result = []
    for node in reversed(order):
        writes = any(storage_key(value) in storages for value in mutated_by(node))
        if node in needed or writes:
            result.append(node)
            needed.update(node.all_input_nodes)
            storages.update(key for key in map(storage_key, node.all_input_nodes) if key is not None)
    return result[::-1]


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
