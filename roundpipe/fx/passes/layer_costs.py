"""What a layer costs, from what its nodes cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.fx import Node

from roundpipe.core.layers import LayerCost
from roundpipe.core.module_tree import weight_bytes_of
from roundpipe.fx.graph.nodes import storage_key, value_bytes
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.passes.cost import NodeCost
from roundpipe.fx.passes.cuts import Balance
from roundpipe.fx.passes.partition import Chunk, Partition

SIZE_BYTES_PER_S = 1e12
"""Turns weight bytes into the seconds that the planner balances, under ``balance="size"``."""


def layer_costs(
    traced: TracedGraph, partition: Partition, layers: Iterable[nn.Module], costs: Mapping[Node, NodeCost]
) -> tuple[LayerCost, ...]:
    """The costs of a partition's layers, from those of the nodes; shared weights and saved values once in a layer."""
    pairs = zip(partition.chunks, layers, strict=True)
    return tuple(_layer_cost(traced, partition.balance, chunk, layer, costs) for chunk, layer in pairs)


def _layer_cost(
    traced: TracedGraph, balance: Balance, chunk: Chunk, layer: nn.Module, costs: Mapping[Node, NodeCost]
) -> LayerCost:
    parameters, inside = list(layer.parameters()), [costs[node] for node in chunk.nodes]
    weight_bytes = weight_bytes_of(layer)
    forward_s, backward_s = sum(cost.forward_s for cost in inside), sum(cost.backward_s for cost in inside)
    if balance == "size":
        forward_s = weight_bytes / SIZE_BYTES_PER_S
        backward_s = 2 * forward_s
    elif callable(balance):
        modules = [traced.attribute(str(n.target)) for n in chunk.nodes if n.op == "call_module"]
        forward_s = sum(float(balance(module)) for module in modules)
        backward_s = 2 * forward_s
    kept = sorted((value for cost in inside for value in cost.saved_values), key=value_bytes)
    saved = {storage_key(value): value_bytes(value) for value in kept}  # of values that share memory, the largest
    return LayerCost(
        forward_s=forward_s,
        backward_s=backward_s,
        forward_flops=sum(cost.forward_flops for cost in inside),
        backward_flops=sum(cost.backward_flops for cost in inside),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        weight_bytes=weight_bytes,
        gradient_bytes=sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
        activation_bytes=sum(saved.values()) + sum(cost.saved_bytes for cost in inside),
        workspace_bytes=_workspace_bytes(chunk, costs),
        carry_bytes=chunk.carry_bytes,
    )


def _workspace_bytes(chunk: Chunk, costs: Mapping[Node, NodeCost]) -> int:
    """The peak over its nodes of what it holds: values made and still needed, and the node's own."""
    last_use = {source: index for index, node in enumerate(chunk.nodes) for source in node.all_input_nodes}
    last_use.update(dict.fromkeys(chunk.makes, len(chunk.nodes)))
    live: dict[Any, tuple[int, int]] = {}  # memory -> bytes, index of its last use
    outside = {storage_key(node) for node in chunk.reads} - set(map(storage_key, chunk.clones))
    peak = 0
    for index, node in enumerate(chunk.nodes):
        live = {key: item for key, item in live.items() if item[1] >= index}
        peak = max(peak, sum(size for size, _ in live.values()) + costs[node].workspace_bytes)
        key = storage_key(node)
        if key is not None and key not in outside:
            size, until = live.get(key, (0, -1))
            live[key] = (max(size, value_bytes(node)), max(until, last_use.get(node, -1)))
    return max(peak, sum(size for size, _ in live.values()))
