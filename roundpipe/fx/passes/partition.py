"""Where a traced model is cut, and what its layers then read, make and cost.

Glue that depends on nothing but inputs (masks, rotary tables) is no layer's own: each layer that needs it makes it
again, or is given what another layer of its stage has made, unless carrying it is cheaper. Between all other nodes,
`cuts` says where a cut may be and which are taken.

Invariant: every body node belongs to one chunk or is recomputed; a chunk reads only inputs and what earlier chunks
make; a value is made once, under its node's name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.core.errors import PartitionError
from roundpipe.core.layers import ESTIMATED_LINK_BYTES_PER_S, LayerCost, is_differentiable
from roundpipe.core.module_tree import common_path, parameters_in, weight_bytes_of
from roundpipe.core.shared_weights import shared_weights
from roundpipe.fx.graph.nodes import (
    covered_module,
    draws_random,
    has_effect,
    installs_hook,
    is_accessor,
    live_before,
    modes_of,
    mutated_by,
    needed_for,
    producer_of,
    storage_key,
    value_bytes,
    value_of,
    writes_buffers,
)
from roundpipe.fx.graph.traced import OutputValue, TracedGraph
from roundpipe.fx.passes.cost import NodeCost
from roundpipe.fx.passes.cuts import Balance, CutChoice, Memory, legal_cuts, weight_by

ALLOWANCE_S = 3e-4
"""Time that recomputing a value may take beyond what carrying it would: a carried value costs copies, events and host
memory in every stage."""
SIZE_BYTES_PER_S = 1e12
"""Turns weight bytes into the seconds that the planner balances, under ``balance="size"``."""
DETACHING = frozenset({"detach", "detach_", "data"})


@dataclass(frozen=True, slots=True)
class Chunk:
    """The nodes of one layer."""

    name: str
    module_names: tuple[str, ...]
    nodes: tuple[Node, ...]
    """What it runs, in order; recomputed nodes, which other chunks run too, among them."""
    reads: tuple[Node, ...]
    """Inputs and values of earlier chunks that it uses."""
    clones: tuple[Node, ...]
    """Those of ``reads`` that it would write in place, and clones first."""
    glue: tuple[Node, ...]
    """Tensors of recomputed nodes that its own nodes read and the model does not return."""
    makes: tuple[Node, ...]
    """Its values that later chunks or the outputs read."""
    passes: tuple[Node, ...]
    """Values in front of it that are read behind it."""
    carry_bytes: int
    """Bytes of everything that is live behind it."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A traced graph as a chain of chunks."""

    chunks: tuple[Chunk, ...]
    recomputed: frozenset[Node]
    """Glue that each chunk makes for itself."""
    differentiable: frozenset[Node]
    """Nodes through which a gradient can flow."""
    balance: Balance = "time"


def partition(
    traced: TracedGraph,
    costs: Mapping[Node, NodeCost],
    *,
    balance: Balance = "time",
    max_layer_bytes: int | None = None,
    earlier: Sequence[nn.Module] = (),
) -> Partition:
    """Cuts a graph into the finest chain of sensible layers.

    Args:
        traced, costs: a linted graph, in which values handed through unchanged are merged, and its nodes' costs.
        balance, max_layer_bytes: see `roundpipe.fx.passes.lower.LowerOptions`.
        earlier: see `roundpipe.fx.passes.lower.lower`.

    Raises:
        TraceError: an input is written in place and returned under its old name.
        PartitionError: ``balance`` is not usable, or there is nothing to cut.
    """
    merge_same_values(traced)
    memory = Memory(traced)
    recomputed = _recomputed_glue(traced, memory, costs)
    order = _order(traced, recomputed)
    if not order:
        order, recomputed = _order(traced, frozenset()), frozenset()
    if not order:
        raise PartitionError("the model computes nothing from its inputs, so there are no layers to make")
    live = _live(order, traced, recomputed)
    read = live_before(order, (), lambda node: _sources(node, recomputed))
    choice = CutChoice(traced, costs, balance, order, [*read[:-1], live[-1]], legal_cuts(traced, memory, order, live))
    cuts = choice.between_weights_of(earlier) if earlier else None
    cuts = choice.finest() if cuts is None else cuts
    if max_layer_bytes is not None:
        cuts = choice.within(max_layer_bytes, cuts)
    return Partition(_chunks(traced, order, cuts, live, recomputed), recomputed, _differentiable(traced), balance)


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


# ---------------------------------------------------------------------------------- order and liveness


def _order(traced: TracedGraph, recomputed: Set[Node]) -> list[Node]:
    """Body nodes that chunks own, in order of execution, accessors right behind their producers."""
    riders: dict[Node, list[Node]] = defaultdict(list)
    main = []
    for node in _used(traced):
        if is_accessor(node) and producer_of(node) not in recomputed:
            riders[producer_of(node)].append(node)
        elif node not in recomputed:
            main.append(node)
    return [item for node in main for item in (node, *riders[node])]


def _used(traced: TracedGraph) -> list[Node]:
    """The body without glue that has no effect and that nothing reads; modules stay, since hooks may hang on them."""
    roots = [node for node in traced.body if node.op == "call_module" or has_effect(node) or draws_random(node)]
    return needed_for(traced.body, [*roots, *traced.outputs])


def _live(order: Sequence[Node], traced: TracedGraph, recomputed: Set[Node]) -> list[frozenset[Node]]:
    """Item ``i``: what is carried in front of ``order[i]``, inputs included; the last item the outputs."""
    outputs = {node for node in traced.outputs if node not in recomputed and node.op != "get_attr"}
    outputs.update(*(_sources(node, recomputed) for node in traced.outputs if node in recomputed))
    return live_before(order, outputs, lambda node: _sources(node, recomputed))


# ---------------------------------------------------------------------------------- glue that each layer makes


def _recomputed_glue(traced: TracedGraph, memory: Memory, costs: Mapping[Node, NodeCost]) -> frozenset[Node]:
    """Glue on inputs and constants that is cheaper to make again than to carry."""
    nodes = [node for node in traced.graph.nodes if node.op != "output"]
    dear = memory.written_values() | {node for node in nodes if not _is_plain(traced, node)}
    dear |= {node.all_input_nodes[0] for node in nodes if installs_hook(node)}
    closures: dict[Node, frozenset[Node]] = {}
    for node in nodes:
        sources = node.all_input_nodes
        if node not in dear and all(source in closures for source in sources):
            closure = frozenset((node,)).union(*(closures[source] for source in sources))
            if not node.op.startswith("call_") or _is_cheap(node, closure, costs):
                closures[node] = closure
    return frozenset(node for node in closures if node.op.startswith("call_"))


def _glue_of(nodes: Iterable[Node], recomputed: Set[Node]) -> set[Node]:
    """The recomputed nodes that these depend on."""
    glue: set[Node] = set()
    pending = list(nodes)
    while pending:
        for source in pending.pop().all_input_nodes:
            if source in recomputed and source not in glue:
                glue.add(source)
                pending.append(source)
    return glue


def _sources(node: Node, recomputed: Set[Node]) -> set[Node]:
    """What a node reads that some layer or the caller must have made, recomputed glue looked through."""
    readers = (node, *_glue_of([node], recomputed))
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


def _chunks(
    traced: TracedGraph,
    order: Sequence[Node],
    cuts: Sequence[int],
    live: Sequence[Set[Node]],
    recomputed: frozenset[Node],
) -> tuple[Chunk, ...]:
    rank = {node: index for index, node in enumerate(traced.graph.nodes)}
    in_order = partial(sorted, key=rank.__getitem__)
    late = [node for node in traced.outputs if node in recomputed or node.op == "get_attr"]
    given = {storage_key(node) for node in traced.placeholders}
    chunks = []
    for start, stop in pairwise([0, *cuts, len(order)]):
        own, behind = order[start:stop], live[stop]
        made_last = late if stop == len(order) else []
        needed = {*own, *made_last} | _glue_of([*own, *made_last], recomputed)
        nodes = in_order(node for node in needed if node.op.startswith("call_"))
        sources = {source for node in nodes for source in node.all_input_nodes if source.op != "get_attr"}
        reads = in_order(sources.difference(nodes))
        own_glue = {source for node in own for source in node.all_input_nodes if source in recomputed}.difference(late)
        makes = [node for node in own if node in behind] + made_last
        written = {storage_key(value) for node in own for value in mutated_by(node)} - {None}
        chunks.append(
            Chunk(
                name=_name_of(own),
                module_names=_module_names(own),
                nodes=tuple(nodes),
                reads=tuple(reads),
                clones=tuple(node for node in reads if storage_key(node) in written),
                glue=tuple(in_order(node for node in own_glue if _is_made(node, given))),
                makes=tuple(makes),
                passes=tuple(in_order((behind & live[start]) - set(makes))),
                carry_bytes=sum(map(value_bytes, behind)),
            )
        )
    return tuple(chunks)


def _is_made(node: Node, given: Collection[int | None]) -> bool:
    """Whether a node makes a tensor, other than as a view of memory that was given, which costs each layer nothing."""
    return isinstance(value_of(node), torch.Tensor) and storage_key(node) not in given


def _module_names(nodes: Sequence[Node]) -> tuple[str, ...]:
    """Qualified names of the leaves and of the modules whose own glue runs, as few as cover them."""
    leaves = [str(node.target) for node in nodes if node.op == "call_module"]
    names = leaves or [covered_module(node) for node in nodes]
    return tuple(name for name in dict.fromkeys(names) if name)


def _name_of(nodes: Sequence[Node]) -> str:
    """A short name: the module that holds all of a layer, or the first and last that it covers."""
    names = _module_names(nodes)
    if len(names) < 2:
        return names[0] if names else nodes[0].name
    common = common_path(names)
    if common and common[-1].isdigit():
        return f"{'.'.join(common)} ({names[0].rsplit('.', 1)[-1]} .. {names[-1].rsplit('.', 1)[-1]})"
    return f"{names[0]} .. {names[-1]}"


def _differentiable(traced: TracedGraph) -> frozenset[Node]:
    """Nodes through which a gradient can flow: floating point, from a parameter or a floating input."""
    result: set[Node] = set()
    for node in traced.graph.nodes:
        value = value_of(node)
        if node.op == "output" or isinstance(value, torch.Tensor) and not is_differentiable(value):
            continue
        if node.op == "placeholder" or node.op == "get_attr" and traced.parameters_of(node):
            result.add(node)
        elif node.op.startswith("call_") and not _stops_gradients(node):
            if traced.parameters_of(node) or any(source in result for source in node.all_input_nodes):
                result.add(node)
        elif any(value in result for value in mutated_by(node)) and not _detaches(node):
            result.add(node)  # written without autograd, it flows as before
    return frozenset(node for node in result if value_of(node) is None or isinstance(value_of(node), torch.Tensor))


def _stops_gradients(node: Node) -> bool:
    modes = modes_of(node)
    return modes is not None and modes.grad is False or _detaches(node)


def _detaches(node: Node) -> bool:
    if node.op == "call_method":
        return str(node.target) in DETACHING
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        return name in DETACHING or node.target is getattr and node.args[1] in DETACHING
    return False


def layer_costs(
    traced: TracedGraph, partition: Partition, layers: Iterable[nn.Module], costs: Mapping[Node, NodeCost]
) -> tuple[LayerCost, ...]:
    """The costs of a partition's layers, from those of the nodes; shared weights and saved values once in a layer."""
    layers = list(layers)
    parts = zip(partition.chunks, layers, shared_weights(layers), strict=True)
    return tuple(
        replace(_layer_cost(traced, partition.balance, chunk, layer, costs), shared=shared)
        for chunk, layer, shared in parts
    )


def _layer_cost(
    traced: TracedGraph, balance: Balance, chunk: Chunk, layer: nn.Module, costs: Mapping[Node, NodeCost]
) -> LayerCost:
    parameters, inside = parameters_in(layer), [costs[node] for node in chunk.nodes]
    weight_bytes = weight_bytes_of(layer)
    forward_s, backward_s = sum(cost.forward_s for cost in inside), sum(cost.backward_s for cost in inside)
    if balance == "size":
        forward_s = weight_bytes / SIZE_BYTES_PER_S
        backward_s = 2 * forward_s
    elif callable(balance):
        modules = [traced.attribute(str(n.target)) for n in chunk.nodes if n.op == "call_module"]
        forward_s = sum(weight_by(balance, module) for module in modules)
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
