"""Where a traced model may be cut, and the finest chain of layers worth having.

A layer is a contiguous run of nodes in order of execution. What crosses a cut is its *carry*: the
values made before it and read after it. Three steps:

    recomputed   glue that depends on nothing but inputs (masks, rotary tables) is no layer's own: each
                 layer that needs it makes it again, unless carrying it is cheaper
    legal        no cut parts what must stay in one layer: what writes memory and what else touches it,
                 all calls of modules that write the same buffers, a hook and the value it hangs on
    taken        of the legal cuts, as many as leave every layer worth a task, at narrow places (after
                 a residual add one tensor crosses, in the middle of a block two or more)

Invariant: every body node belongs to one chunk or is recomputed; a chunk reads only inputs and what
earlier chunks make; a value is made once, under its node's name.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import quantiles

import torch
from torch import nn
from torch.fx import Node

from roundpipe.core import balance as chain_balance
from roundpipe.core.errors import PartitionError
from roundpipe.core.layers import BalanceFunction, is_differentiable
from roundpipe.fx.graph.dataflow import live_before, merge_same_values, needed_for
from roundpipe.fx.graph.nodes import (
    draws_random,
    has_effect,
    is_accessor,
    modes_of,
    module_of,
    mutated_by,
    producer_of,
    storage_key,
    value_bytes,
    value_of,
    writes_buffers,
)
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.passes.cost import NodeCost
from roundpipe.fx.passes.legal_cuts import HOOK_METHODS, legal_cuts, written_memory

Balance = str | BalanceFunction

DETACHING = frozenset({"detach", "detach_", "data"})
NARROW = 1.6
"""A cut is narrow if it carries at most this many times what the narrowest cuts around it do."""
SMALLEST_SHARE = 0.25
"""A layer weighs at least this share of a small block of the model."""
SMALLEST_BLOCK = 0.15
"""Blocks lighter than this share of the heaviest one (a list of norms) don't say what a layer weighs."""
LARGEST_NUM_LAYERS = 8192
"""A layer weighs at least one in so many parts of the model."""


@dataclass(frozen=True, slots=True)
class RecomputeLimits:
    """When glue is made again rather than carried."""

    link_bytes_per_s: float = 25e9
    allowance_s: float = 3e-4
    """Time that recomputing a value may take beyond what carrying it would: a carried value costs
    copies, events and host memory in every stage."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The nodes of one layer."""

    name: str
    module_names: tuple[str, ...]
    nodes: tuple[Node, ...]
    """What it runs, in order; recomputed nodes, of which it has its own, among them."""
    own: frozenset[Node]
    """Those of ``nodes`` that no other chunk runs."""
    reads: tuple[Node, ...]
    """Inputs and values of earlier chunks that it uses."""
    clones: tuple[Node, ...]
    """Those of ``reads`` that it would write in place, and clones first."""
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
    num_layers: int | None = None,
    max_layer_bytes: int | None = None,
    limits: RecomputeLimits = RecomputeLimits(),
) -> Partition:
    """Cuts a graph into the finest chain of sensible layers.

    Args:
        traced: a linted graph; values handed through unchanged are merged in it.
        costs: of its nodes, from `roundpipe.fx.passes.cost.measure`.
        balance: what weighs: ``"time"``, ``"size"`` (bytes of weights) or a function of a leaf module.
        num_layers: at most so many layers, evenly weighted, instead of the finest chain.
        max_layer_bytes: layers with more bytes of weights and gradients are cut wherever that is legal; None: a layer
            may be of any size.
        limits: when glue is carried instead of recomputed.

    Raises:
        TraceError: an input is written in place and returned under its old name.
        PartitionError: ``balance`` or ``num_layers`` is not usable, or there is nothing to cut.
    """
    merge_same_values(traced)
    recomputed = _recomputed(traced, costs, limits)
    order = _order(traced, recomputed)
    if not order:
        order, recomputed = _order(traced, frozenset()), frozenset()
    if not order:
        raise PartitionError("the model computes nothing from its inputs, so there are no layers to make")
    weights = _weights(traced, order, costs, balance)
    live = _live(order, traced, recomputed)
    legal = legal_cuts(traced, order, live)
    if num_layers is None:
        cuts = _finest(traced, order, weights, live, legal)
        if max_layer_bytes is not None:
            cuts = _within(max_layer_bytes, cuts, _loads(order, costs), _widths(weights, live, legal, max(weights)))
    else:
        parts = chain_balance.cut_into(weights, num_layers, _narrow(weights, live, legal, max(weights)))
        cuts = [stop for _, stop in parts[:-1]]
    chunks = _chunks(traced, order, cuts, live, recomputed)
    return Partition(chunks, recomputed, _differentiable(traced), balance)


# ---------------------------------------------------------------------------------- recomputed glue


def _recomputed(traced: TracedGraph, costs: Mapping[Node, NodeCost], limits: RecomputeLimits) -> frozenset[Node]:
    """Glue on inputs and constants that is cheaper to make again than to carry."""
    nodes = [node for node in traced.graph.nodes if node.op != "output"]
    dear = written_memory(traced) | {node for node in nodes if not _is_plain(traced, node)}
    dear |= {node.all_input_nodes[0] for node in nodes if node.op == "call_method" and node.target in HOOK_METHODS}
    closures: dict[Node, frozenset[Node]] = {}
    for node in nodes:
        if node in dear:
            continue
        sources = node.all_input_nodes
        if all(source in closures for source in sources):
            closure = frozenset((node,)).union(*(closures[source] for source in sources))
            if not node.op.startswith("call_") or _is_cheap(node, closure, costs, limits):
                closures[node] = closure
    return frozenset(node for node in closures if node.op.startswith("call_"))


def _is_cheap(node: Node, closure: frozenset[Node], costs: Mapping[Node, NodeCost], limits: RecomputeLimits) -> bool:
    """Whether making a value again takes less time than moving it, give or take the allowance."""
    if value_of(node) is None:
        return True  # decided at its parts
    seconds = sum(costs[item].forward_s for item in closure)
    moved = sum(value_bytes(item) for item in closure if item.op == "placeholder")
    carried = value_bytes(node)
    return seconds + moved / limits.link_bytes_per_s <= carried / limits.link_bytes_per_s + limits.allowance_s


def _is_plain(traced: TracedGraph, node: Node) -> bool:
    """Whether a node is an input, a constant, or glue without parameters, random numbers or effects."""
    if traced.parameters_of(node) or draws_random(node) or has_effect(node) or writes_buffers(node):
        return False
    return node.op != "call_module" or str(node.target) not in traced.opaque


# ---------------------------------------------------------------------------------- order and liveness


def _order(traced: TracedGraph, recomputed: frozenset[Node]) -> list[Node]:
    """Body nodes that chunks own, in order of execution, accessors right behind their producers."""
    riders: dict[Node, list[Node]] = {}
    main = []
    for node in _used(traced):
        if node in recomputed:
            continue
        if is_accessor(node) and producer_of(node) not in recomputed:
            riders.setdefault(producer_of(node), []).append(node)
        else:
            main.append(node)
    return [item for node in main for item in (node, *riders.get(node, ()))]


def _used(traced: TracedGraph) -> list[Node]:
    """The body without glue that has no effect and that nothing reads; modules stay, since hooks may hang on them."""
    roots = [node for node in traced.body if node.op == "call_module" or has_effect(node) or draws_random(node)]
    return needed_for(traced.body, [*roots, *traced.outputs])


def _sources(node: Node, recomputed: frozenset[Node]) -> set[Node]:
    """What a node reads that some layer or the caller must have made, glue looked through."""
    found: set[Node] = set()
    pending, seen = list(node.all_input_nodes), set()
    while pending:
        source = pending.pop()
        if source in recomputed:
            if source not in seen:
                seen.add(source)
                pending.extend(source.all_input_nodes)
        elif source.op != "get_attr":
            found.add(source)
    return found


def _live(order: Sequence[Node], traced: TracedGraph, recomputed: frozenset[Node]) -> list[frozenset[Node]]:
    """Item ``i``: what is carried in front of ``order[i]``, inputs included; the last item the outputs."""
    outputs: set[Node] = set()
    for node in traced.outputs:
        outputs |= _sources(node, recomputed) if node in recomputed else {node} - _attributes(node)
    return live_before(order, outputs, lambda node: _sources(node, recomputed))


def _attributes(node: Node) -> set[Node]:
    return {node} if node.op == "get_attr" else set()


# ---------------------------------------------------------------------------------- taken cuts


def _weights(
    traced: TracedGraph, order: Sequence[Node], costs: Mapping[Node, NodeCost], balance: Balance
) -> list[float]:
    """How much each node counts, as a share of the whole model."""

    def shares(amounts: Sequence[float]) -> list[float]:
        total = sum(amounts)
        return [amount / total if total else 0.0 for amount in amounts]

    sizes = shares([float(_weight_bytes(traced, node, costs)) for node in order])
    if balance == "size":
        return sizes
    if callable(balance):
        modules = [traced.attribute(str(n.target)) if n.op == "call_module" else None for n in order]
        return shares([0.0 if module is None else float(balance(module)) for module in modules])
    if balance != "time":
        raise PartitionError(f"balance is {balance!r}; it can be 'time', 'size' or a function of a module")
    times = shares([costs[node].forward_s + costs[node].backward_s for node in order])
    return [(time + size) / 2 for time, size in zip(times, sizes, strict=True)]


def _weight_bytes(traced: TracedGraph, node: Node, costs: Mapping[Node, NodeCost]) -> int:
    """Bytes of the weights that a node uses, directly or through get_attr."""
    return costs[node].parameter_bytes + sum(
        costs[source].parameter_bytes for source in node.all_input_nodes if source.op == "get_attr"
    )


def _finest(
    traced: TracedGraph,
    order: Sequence[Node],
    weights: Sequence[float],
    live: Sequence[Set[Node]],
    legal: Sequence[int],
) -> list[int]:
    """As many narrow cuts as leave every layer heavy enough; among equals, the narrower, at blocks' edges.

    ``best[j] = score(j) + max of best[i]`` over the cuts ``i`` that leave enough weight between ``i`` and ``j``.
    """
    blocks = _blocks(traced, order)
    least, window = _scale(blocks, weights)
    widths = _widths(weights, live, legal, window)
    heavy = _with_weights(traced, order)
    candidates = [cut for cut in legal if widths[cut] <= NARROW and heavy and heavy[0] < cut <= heavy[-1]]
    prefix = [0.0, *accumulate(weights)]
    best: list[tuple[float, int]] = []  # for each candidate: score of the chain up to it, previous candidate
    leading: list[tuple[float, int]] = []  # running maximum of best
    for index, cut in enumerate(candidates):
        allowed = bisect_right(prefix, prefix[cut] - least) - 1  # items before which a layer may start
        allowed = min(allowed, heavy[bisect_left(heavy, cut) - 1])  # so that it has weights
        if allowed < 0 or prefix[cut] < least:
            score, previous = float("-inf"), -1
        else:
            before = bisect_right(candidates, allowed) - 1
            score, previous = leading[before] if before >= 0 else (0.0, -1)
            if score < 0:
                score, previous = 0.0, -1
        edge = 0.2 if blocks[cut - 1] != blocks[cut] else 0.05 / (1 + _depth_in_common(order, cut))
        score += 1 + edge - 0.5 * (widths[cut] - 1)
        best.append((score, previous))
        leading.append(max(leading[-1], (score, index)) if leading else (score, index))
    last = bisect_right(candidates, bisect_right(prefix, prefix[-1] - least) - 1) - 1
    cuts: list[int] = []
    index = leading[last][1] if last >= 0 and leading[last][0] > 0 else -1
    while index >= 0:
        cuts.append(candidates[index])
        index = best[index][1]
    return cuts[::-1]


def _loads(order: Sequence[Node], costs: Mapping[Node, NodeCost]) -> list[int]:
    """For each node the bytes of the weights that it uses, directly or through get_attr, and of their gradients."""

    def load(node: Node) -> int:
        return costs[node].parameter_bytes + costs[node].gradient_bytes

    return [load(n) + sum(load(source) for source in n.all_input_nodes if source.op == "get_attr") for n in order]


def _within(limit: int, cuts: Sequence[int], loads: Sequence[int], widths: Mapping[int, float]) -> list[int]:
    """The cuts, with more of them in layers above a limit: narrow ones if they are enough, else any legal ones."""
    result = list(cuts)
    for start, stop in pairwise([0, *cuts, len(loads)]):
        layer = loads[start:stop]
        if sum(layer) <= limit:
            continue
        legal = [cut - start for cut in widths if start < cut < stop]
        narrow = [cut for cut in legal if widths[start + cut] <= NARROW]
        inner = narrow if _heaviest_between(narrow, layer) <= limit else legal
        parts = chain_balance.cut_under(layer, max(limit, _heaviest_between(inner, layer)), inner)
        result += [start + end for _, end in parts[:-1]]
    return sorted(result)


def _heaviest_between(cuts: Sequence[int], loads: Sequence[int]) -> int:
    """The heaviest stretch without a cut."""
    return max(sum(loads[start:stop]) for start, stop in pairwise([0, *cuts, len(loads)]))


def _scale(blocks: Sequence[str], weights: Sequence[float]) -> tuple[float, float]:
    """The least weight of a layer, and the weight of a typical block."""
    block_weights: dict[str, float] = {}
    for block, weight in zip(blocks, weights, strict=True):
        if block:
            block_weights[block] = block_weights.get(block, 0.0) + weight
    largest = max(block_weights.values(), default=0.0)
    typical = sorted(weight for weight in block_weights.values() if weight > SMALLEST_BLOCK * largest)
    small_block = quantiles(typical, n=4)[0] if len(typical) > 1 else max(largest, 1 / 4)
    least = max(min(SMALLEST_SHARE * small_block, 1 / 16), 1 / LARGEST_NUM_LAYERS)
    return least, typical[len(typical) // 2] if typical else 1 / 16


def _narrow(weights: Sequence[float], live: Sequence[Set[Node]], legal: Sequence[int], window: float) -> list[int]:
    widths = _widths(weights, live, legal, window)
    return [cut for cut in legal if widths[cut] <= NARROW]


def _widths(
    weights: Sequence[float], live: Sequence[Set[Node]], legal: Sequence[int], window: float
) -> dict[int, float]:
    """For each legal cut: bytes carried, over those of the narrowest cut nearby on its wider side.

    The wider side, so that where the carry grows or shrinks for good (a skip connection opens, a
    decoder starts) the step itself is no reason against a cut.
    """
    prefix = [0.0, *accumulate(weights)]
    edges = [*legal, len(weights)]
    carried = [_carried_bytes(live[cut]) for cut in edges]
    result = {}
    for index, cut in enumerate(legal):
        low = min(bisect_left(edges, bisect_left(prefix, prefix[cut] - window * 1.01)), max(index - 1, 0))
        high = max(bisect_right(edges, bisect_right(prefix, prefix[cut] + window * 1.01) - 1), index + 2)
        before = min(carried[low : index + 1], default=carried[index])
        after = min(carried[index:high], default=carried[index])
        result[cut] = max(carried[index], 1) / max(before, after, 1)
    return result


def _carried_bytes(live: Iterable[Node]) -> int:
    """Bytes of carried values that some layer made; inputs are at hand wherever they are needed."""
    return sum(value_bytes(node) for node in live if node.op != "placeholder")


def _with_weights(traced: TracedGraph, order: Sequence[Node]) -> list[int]:
    """Positions of the nodes that use parameters; every layer has one of them."""
    return [
        index
        for index, node in enumerate(order)
        if traced.parameters_of(node)
        or any(source.op == "get_attr" and traced.parameters_of(source) for source in node.all_input_nodes)
    ]


def _covered(node: Node) -> str:
    """Qualified name of the module that a node is part of."""
    return str(node.target) if node.op == "call_module" else module_of(node)


def _blocks(traced: TracedGraph, order: Sequence[Node]) -> list[str]:
    """For each node the innermost repeated block it belongs to, such as ``model.layers.3``, or ``""``.

    Blocks are children of one class of a list of modules. Where there are none with children of their
    own, plain layers with weights count (a `Sequential` of `Linear`s).
    """
    repeated: dict[str, dict[str, bool]] = {}  # container -> repeated child -> has children of its own
    for name, container in traced.model.named_modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            kinds = Counter(type(child) for child in container.children())
            repeated[name] = {
                key: next(child.children(), None) is not None
                for key, child in container.named_children()
                if (kinds[type(child)] > 1 or len(kinds) == 1) and next(child.parameters(), None) is not None
            }

    def innermost(node: Node, composite: bool) -> str:
        parts = _covered(node).split(".")
        for end in range(len(parts), 0, -1):
            children = repeated.get(".".join(parts[: end - 1]), {})
            if children.get(parts[end - 1]) in ((True,) if composite else (True, False)):
                return ".".join(parts[:end])
        return ""

    blocks = [innermost(node, composite=True) for node in order]
    return blocks if any(blocks) else [innermost(node, composite=False) for node in order]


def _depth_in_common(order: Sequence[Node], cut: int) -> int:
    """How deep the innermost module is that holds both nodes at a cut."""
    depth = 0
    for left, right in zip(_covered(order[cut - 1]).split("."), _covered(order[cut]).split("."), strict=False):
        if left != right or not left:
            break
        depth += 1
    return depth


# ---------------------------------------------------------------------------------- chunks


def _chunks(
    traced: TracedGraph,
    order: Sequence[Node],
    cuts: Sequence[int],
    live: Sequence[Set[Node]],
    recomputed: frozenset[Node],
) -> tuple[Chunk, ...]:
    rank = {node: index for index, node in enumerate(traced.graph.nodes)}
    bounds = [0, *cuts, len(order)]
    late = [node for node in traced.outputs if node in recomputed or node.op == "get_attr"]
    writes = _mutations_of(traced)
    chunks = []
    for index, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        own = order[start:stop]
        is_last = index + 2 == len(bounds)
        needed = [*own, *(late if is_last else ())]
        nodes = sorted({*needed, *_glue_of(needed, recomputed)}, key=rank.__getitem__)
        nodes = [node for node in nodes if node.op.startswith("call_")]
        inside = set(nodes)
        reads = {s for node in nodes for s in node.all_input_nodes if s not in inside and s.op != "get_attr"}
        behind = live[stop]
        makes = [node for node in own if node in behind] + (late if is_last else [])
        passes = [node for node in behind if node not in set(makes) and node in live[start]]
        written = {key for node in own for key in writes.get(node, ())}
        chunks.append(
            Chunk(
                name=_name_of(own),
                module_names=_module_names(own),
                nodes=tuple(nodes),
                own=frozenset(own),
                reads=tuple(sorted(reads, key=rank.__getitem__)),
                clones=tuple(n for n in sorted(reads, key=rank.__getitem__) if storage_key(n) in written),
                makes=tuple(makes),
                passes=tuple(sorted(passes, key=rank.__getitem__)),
                carry_bytes=sum(map(value_bytes, behind)),
            )
        )
    return tuple(chunks)


def _mutations_of(traced: TracedGraph) -> dict[Node, list[int]]:
    """For each node that writes in place, the storages it writes."""
    return {
        node: [key for value in mutated_by(node) if (key := storage_key(value)) is not None]
        for node in traced.body
        if mutated_by(node)
    }


def _glue_of(nodes: Iterable[Node], recomputed: frozenset[Node]) -> set[Node]:
    """The recomputed nodes that these depend on."""
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        for source in pending.pop().all_input_nodes:
            if source in recomputed and source not in found:
                found.add(source)
                pending.append(source)
    return found


def _module_names(nodes: Sequence[Node]) -> tuple[str, ...]:
    """Qualified names of the leaves and of the modules whose own glue runs, as few as cover them."""
    leaves = [str(node.target) for node in nodes if node.op == "call_module"]
    names = leaves or [_covered(node) for node in nodes]
    return tuple(name for name in dict.fromkeys(names) if name)


def _name_of(nodes: Sequence[Node]) -> str:
    """A short name: the module that holds all of a layer, or the first and last that it covers."""
    names = _module_names(nodes)
    if not names:
        return nodes[0].name
    if len(names) == 1:
        return names[0]
    paths = [name.split(".") for name in names]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    if common and common[-1].isdigit():
        return f"{'.'.join(common)} ({names[0].rsplit('.', 1)[-1]} .. {names[-1].rsplit('.', 1)[-1]})"
    return f"{names[0]} .. {names[-1]}"


# ---------------------------------------------------------------------------------- gradients


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
    return frozenset(node for node in result if value_of(node) is None or _is_tensor(node))


def _is_tensor(node: Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)


def _stops_gradients(node: Node) -> bool:
    modes = modes_of(node)
    if modes is not None and modes.grad is False:
        return True
    return _detaches(node)


def _detaches(node: Node) -> bool:
    if node.op == "call_method":
        return str(node.target) in DETACHING
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        return name in DETACHING or node.target is getattr and node.args[1] in DETACHING
    return False
