"""Whether losses change what they compute with, such as a queue of earlier outputs."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from roundpipe.fx.graph.nodes import called_name, mutated_by

_OVERWRITING = ("copy_", "fill_", "zero_")


def has_state(scalars: Iterable[Node]) -> bool:
    """Whether scalars of one graph depend on what is in buffers before it runs, and it changes that."""
    pending = list(scalars)
    read: set[Node] = set()
    while pending:
        node = pending.pop()
        if node not in read:
            read.add(node)
            is_whole = called_name(node) in _OVERWRITING
            pending += [source for source in node.all_input_nodes if not is_whole or source not in mutated_by(node)]
    graph = next((node.graph for node in read), None)
    written = {source for node in (graph.nodes if graph else ()) for source in mutated_by(node)}
    return any(node.op == "get_attr" for node in read & written)
