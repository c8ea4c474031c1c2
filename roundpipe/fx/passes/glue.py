"""Glue that each layer makes for itself, such as masks and rotary tables, instead of it being carried over the cuts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from torch.fx import Node

from roundpipe.core.layers import ESTIMATED_LINK_BYTES_PER_S
from roundpipe.fx.graph.nodes import draws_random, has_effect, installs_hook, value_bytes, value_of, writes_buffers
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.passes.cost import NodeCost
from roundpipe.fx.passes.legal_cuts import written_memory

ALLOWANCE_S = 3e-4
"""Time that recomputing a value may take beyond what carrying it would: a carried value costs copies, events and host
memory in every stage."""


def recomputed_glue(traced: TracedGraph, costs: Mapping[Node, NodeCost]) -> frozenset[Node]:
    """Glue on inputs and constants that is cheaper to make again than to carry."""
    nodes = [node for node in traced.graph.nodes if node.op != "output"]
    dear = written_memory(traced) | {node for node in nodes if not _is_plain(traced, node)}
    dear |= {node.all_input_nodes[0] for node in nodes if installs_hook(node)}
    closures: dict[Node, frozenset[Node]] = {}
    for node in nodes:
        sources = node.all_input_nodes
        if node not in dear and all(source in closures for source in sources):
            closure = frozenset((node,)).union(*(closures[source] for source in sources))
            if not node.op.startswith("call_") or _is_cheap(node, closure, costs):
                closures[node] = closure
    return frozenset(node for node in closures if node.op.startswith("call_"))


def glue_of(nodes: Iterable[Node], recomputed: Set[Node]) -> set[Node]:
    """The recomputed nodes that these depend on."""
    glue: set[Node] = set()
    pending = list(nodes)
    while pending:
        for source in pending.pop().all_input_nodes:
            if source in recomputed and source not in glue:
                glue.add(source)
                pending.append(source)
    return glue


def sources(node: Node, recomputed: Set[Node]) -> set[Node]:
    """What a node reads that some layer or the caller must have made, recomputed glue looked through."""
    readers = (node, *glue_of([node], recomputed))
    reads = {source for reader in readers for source in reader.all_input_nodes}
    return {source for source in reads if source not in recomputed and source.op != "get_attr"}


def _is_cheap(node: Node, closure: frozenset[Node], costs: Mapping[Node, NodeCost]) -> bool:
    """Whether making a value again takes less time than moving it, give or take the allowance."""
    if value_of(node) is None:
        return True  # decided at its parts
    seconds = sum(costs[item].forward_s for item in closure)
    moved = sum(value_bytes(item) for item in closure if item.op == "placeholder")
    carried = value_bytes(node)
    return seconds + moved / ESTIMATED_LINK_BYTES_PER_S <= carried / ESTIMATED_LINK_BYTES_PER_S + ALLOWANCE_S


def _is_plain(traced: TracedGraph, node: Node) -> bool:
    """Whether a node is an input, a constant, or glue without parameters, random numbers or effects."""
    if traced.parameters_of(node) or draws_random(node) or has_effect(node) or writes_buffers(node):
        return False
    return node.op != "call_module" or str(node.target) not in traced.opaque
