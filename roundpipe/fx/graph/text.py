"""A traced graph as text that is equal for two runs of a forward that do the same.

Names of nodes and symbols differ from run to run, sizes are found equal at different times, and what a forward makes
and drops is no part of what it computes: none of that is in the text.
"""

from __future__ import annotations

import re

import torch
from torch.fx import Node

from roundpipe.fx.graph.nodes import draws_random, has_effect, mutated_by, value_of
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.sizes import Symbolic, expression_of


def printed_graph(traced: TracedGraph) -> str:
    """A graph in words, sizes by what they are: a second run in a world knows which are equal from the start.

    What a forward makes and drops, as the weights of a module that gets those of another at once, is left out.
    """
    idle = _idle(traced.graph)
    nodes = [node for node in traced.graph.nodes if node not in idle and not isinstance(value_of(node), Symbolic)]
    number = {node: f"%{index}" for index, node in enumerate(nodes)}

    def word(node: Node) -> _Word:
        value = value_of(node)
        return _Word(expression_of(value) if isinstance(value, Symbolic) else number[node])

    lines = []
    for node in nodes:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), word)
        lines.append(f"{number[node]} = {node.op} {node.target} {args} {kwargs}")
    sizes: dict[str, str] = {}  # those that data decides have other names in every run
    return re.sub(r"\bu\d+\b", lambda name: sizes.setdefault(name[0], f"size {len(sizes)}"), "\n".join(lines))


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
