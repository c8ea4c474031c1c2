"""Where a traced graph may be cut, and which of these cuts are taken.

No cut parts what must stay in one layer: a structure and what takes it apart, a write and what reads the same memory
under an older name, all calls of modules that write the same buffers, a hook and the value it hangs on. Nor may two
values cross that share memory which is written later: behind the cut they would be two copies. Of these legal cuts, as
many are taken as leave every layer worth a task, at narrow places, such as after a residual add.

Invariant: a graph cut at legal positions, each layer working on clones of the carried values that it writes, computes
what the whole graph does.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from itertools import accumulate, pairwise
from math import inf, nan
from operator import itemgetter
from statistics import quantiles
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from roundpipe.core import balance as chain_balance
from roundpipe.core.errors import ConfigError, PartitionError, TraceError, shown
from roundpipe.core.layers import BalanceFunction
from roundpipe.core.module_tree import buffers_in, parameters_in
from roundpipe.fx.graph.nodes import (
    covered_module,
    installs_hook,
    is_accessor,
    mutated_by,
    producer_of,
    storage_key,
    value_bytes,
    value_of,
    writes_buffers,
)
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.passes.cost import NodeCost

Balance = str | BalanceFunction


def check_balance(balance: Any) -> None:
    """Raise `ConfigError` for what layers can't be balanced by."""
    if not (balance in ("time", "size") if isinstance(balance, str) else callable(balance)):
        given = shown(balance)
        raise ConfigError(f"balance={given}; allowed are 'time', 'size' or a function from a module to a weight")


def weight_by(balance: BalanceFunction, module: nn.Module) -> float:
    """What a user's function says that a module weighs."""
    given = balance(module)
    try:
        weight = float(given)
    except (TypeError, ValueError, OverflowError):
        weight = nan
    if not 0 <= weight < inf:
        raise PartitionError(
            f"balance gave {shown(given)} for a {type(module).__name__}; it must give a number of at least 0"
        )
    return weight


NARROW = 1.6
"""A cut is narrow if it carries at most this many times what the narrowest cuts around it do."""
SMALLEST_SHARE = 0.25
"""A layer weighs at least this share of a small block of the model."""
SMALLEST_BLOCK = 0.15
"""Blocks lighter than this share of the heaviest one (a list of norms) don't say what a layer weighs."""
LARGEST_NUM_LAYERS = 8192
"""A layer weighs at least one in so many parts of the model."""


class Memory:
    """Which memory the values of a graph are in, and which nodes write it.

    Memory is known by the parameter or buffer that a get_attr or a leaf has there, else by its storage; a value without
    any is known by its node.
    """

    def __init__(self, traced: TracedGraph) -> None:
        attributes = [node for node in traced.graph.nodes if node.op == "get_attr" and storage_key(node) is not None]
        self._attribute_at = {storage_key(node): traced.attribute(str(node.target)) for node in attributes}
        self.values: dict[Hashable, list[Node]] = defaultdict(list)
        """The values in each, in order."""
        self.users: dict[Hashable, set[Node]] = defaultdict(set)
        """The nodes that touch each."""
        self.last_write: dict[Hashable, Node] = {}
        """The last node to write each that is written."""
        for node in traced.graph.nodes:
            self.values[self.of(node)].append(node)
        for node in traced.body:
            buffers = {*buffers_in(traced.attribute(str(node.target)))} if node.op == "call_module" else set()
            written = set(map(self.of, mutated_by(node)))
            self.last_write.update(dict.fromkeys(written | buffers if writes_buffers(node) else written, node))
            for key in {*map(self.of, node.all_input_nodes), *written, *buffers}:
                self.users[key].add(node)

    def of(self, node: Node) -> Hashable:
        """The memory of a value."""
        key = storage_key(node)
        return node if key is None else self._attribute_at.get(key, key)

    def written_values(self) -> set[Node]:
        """All values whose memory is written in place at some point, buffers that leaves write included."""
        return {node for key in self.last_write for node in self.values.get(key, ())}


def legal_cuts(traced: TracedGraph, memory: Memory, order: Sequence[Node], live: Sequence[Set[Node]]) -> list[int]:
    """Positions in ``order`` in front of which a cut may be."""
    position = {node: index for index, node in enumerate(order)}
    forbidden = [0] * (len(order) + 1)
    groups = [(producer_of(node), node) for node in order if is_accessor(node)]
    groups += [(producer_of(node.all_input_nodes[0]), node) for node in order if installs_hook(node)]
    attributes = [key for key in memory.last_write if isinstance(key, torch.Tensor)]
    for nodes in (*groups, *(memory.users[key] for key in attributes), *_writes(traced, memory, order, position)):
        places = [position[node] for node in nodes if node in position]
        if places:  # no cut between the first and the last of them
            forbidden[min(places) + 1] += 1
            forbidden[max(places) + 1] -= 1
    parted = list(accumulate(forbidden))
    last_write = {key: position[node] for key, node in memory.last_write.items() if node in position}
    unparted = [cut for cut in range(1, len(order)) if not parted[cut]]
    return [cut for cut in unparted if not _parts_aliases(live[cut], cut, memory, last_write)]


def _writes(
    traced: TracedGraph, memory: Memory, order: Sequence[Node], position: Mapping[Node, int]
) -> Iterable[Iterable[Node]]:
    """Each write with later readers of older names for the memory: to them no new name is known.

    Where the older name is an output, also with what makes that value.
    """
    outputs = set(traced.outputs)
    for node in order:
        for value in mutated_by(node):
            for older in memory.values[memory.of(value)]:
                if older.op != "placeholder" and (older.op == "get_attr" or position.get(older, -1) >= position[node]):
                    continue
                yield node, *(user for user in older.users if position.get(user, -1) > position[node])
                if older not in outputs:
                    continue
                if older.op == "placeholder":
                    raise TraceError(
                        f"the model returns its input {older.name!r}, which {node.name!r} writes in place through "
                        "another tensor; return that tensor, or clone the input first"
                    )
                yield older, node


def _parts_aliases(live: Set[Node], cut: int, memory: Memory, last_write: Mapping[Hashable, int]) -> bool:
    """Whether a cut carries two values that share memory which is written behind it, or one with itself."""
    if not last_write:
        return False
    written = [node for node in live if last_write.get(memory.of(node), -1) >= cut]
    return len(set(map(memory.of, written))) < len(written) or any(map(_overlaps_itself, written))


def _overlaps_itself(node: Node) -> bool:
    """Whether a value was expanded, so that a write to one element is one to several; what is carried is not."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return any(
        isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size <= 1)
        for size, stride in zip(value.shape, value.stride(), strict=True)
    )


class CutChoice:
    """Chooses cuts for one graph.

    Args:
        traced, costs: the graph and what its nodes cost.
        balance: what weighs.
        order, read: the nodes that layers own, and what is there in front of each of them that it or later ones read;
            behind the last, the outputs. What is only returned is carried past all cuts, and tells none from another.
        legal: the positions in front of which a cut may be.

    Raises:
        PartitionError: ``balance`` is not usable.
    """

    def __init__(
        self,
        traced: TracedGraph,
        costs: Mapping[Node, NodeCost],
        balance: Balance,
        order: Sequence[Node],
        read: Sequence[Set[Node]],
        legal: Sequence[int],
    ) -> None:
        self._traced = traced
        self._costs = costs
        self._order = order
        self._legal = legal
        self._weights = self._weights_by(balance)
        self._prefix = [0.0, *accumulate(self._weights)]
        self._edges = [*legal, len(order)]
        # inputs are at hand wherever they are needed
        self._carried = [sum(value_bytes(n) for n in read[cut] if n.op != "placeholder") for cut in self._edges]

    def finest(self) -> list[int]:
        """As many narrow cuts as leave every layer heavy enough; among equals, the narrower, at blocks' edges."""
        prefix, blocks = self._prefix, _blocks(self._traced, self._order)
        least, window = _scale(blocks, self._weights)
        widths = self._widths(window)
        heavy = self._with_parameters()
        candidates = [cut for cut in self._legal if widths[cut] <= NARROW and heavy and heavy[0] < cut <= heavy[-1]]
        # item i: of the chains that end at one of the first i candidates, the best score and its cuts, the last first
        best: list[tuple[float, Any]] = [(0.0, ())]
        for cut in candidates:
            start = bisect_right(prefix, prefix[cut] - least) - 1  # of a layer that is heavy enough
            start = min(start, heavy[bisect_left(heavy, cut) - 1])  # and has parameters
            if start < 0:
                best.append(best[-1])
                continue
            score, before = best[bisect_right(candidates, start)]
            edge = 0.2 if blocks[cut - 1] != blocks[cut] else 0
            score += 1 + edge - 0.5 * (widths[cut] - 1)
            best.append(max((score, (cut, before)), best[-1], key=itemgetter(0)))
        _, chain = best[bisect_right(candidates, bisect_right(prefix, prefix[-1] - least) - 1)]
        cuts: list[int] = []
        while chain:
            cut, chain = chain
            cuts.append(cut)
        return cuts[::-1]

    def between_weights_of(self, layers: Sequence[nn.Module]) -> list[int] | None:
        """Cuts with the weights of these layers between them, each where least is carried.

        None if this graph uses the weights in another order, or there is no place for a cut.
        """
        weights = [set(map(id, parameters_in(layer))) for layer in layers]
        carried = dict(zip(self._edges, self._carried, strict=True))
        current, last = 0, None  # the layer, and the latest node that uses its weights
        cuts: list[int] = []
        for position, node in enumerate(self._order):
            if not (used := set(map(id, self._parameters_used(node)))):
                continue
            following = next((number for number in range(current, len(layers)) if used <= weights[number]), None)
            if following is None:
                return None
            if following > current and last is not None:
                places = self._legal[bisect_right(self._legal, last) : bisect_right(self._legal, position)]
                if not places:
                    return None
                cuts.append(min(reversed(places), key=carried.__getitem__))
            current, last = following, position
        return None if any(weights[current + 1 :]) else cuts

    def within(self, max_layer_bytes: int, cuts: Sequence[int]) -> list[int]:
        """The cuts, with more of them in layers above a limit: narrow ones if they are enough, else any legal ones."""
        loads = [self._bytes_used(node, gradients=True) for node in self._order]
        widths = self._widths(max(self._weights))
        result = list(cuts)
        for start, stop in pairwise([0, *cuts, len(loads)]):
            layer = loads[start:stop]
            if sum(layer) <= max_layer_bytes:
                continue
            legal = [cut - start for cut in self._legal if start < cut < stop]
            narrow = [cut for cut in legal if widths[start + cut] <= NARROW]
            inner = narrow if _heaviest_between(narrow, layer) <= max_layer_bytes else legal
            parts = chain_balance.cut_under(layer, max(max_layer_bytes, _heaviest_between(inner, layer)), inner)
            result += [start + end for _, end in parts[:-1]]
        return sorted(result)

    def _weights_by(self, balance: Balance) -> list[float]:
        """How much each node counts, as a share of the whole model."""
        sizes = _shares([float(self._bytes_used(node)) for node in self._order])
        if balance == "size":
            return sizes
        if callable(balance):
            modules = [self._traced.attribute(str(n.target)) if n.op == "call_module" else None for n in self._order]
            return _shares([0.0 if module is None else weight_by(balance, module) for module in modules])
        if balance != "time":
            raise PartitionError(f"balance is {balance!r}; it can be 'time', 'size' or a function of a module")
        times = _shares([self._costs[node].forward_s + self._costs[node].backward_s for node in self._order])
        return [(time + size) / 2 for time, size in zip(times, sizes, strict=True)]

    def _bytes_used(self, node: Node, gradients: bool = False) -> int:
        """Bytes of the weights that a node uses, directly or through get_attr, and of their gradients."""
        costs = [self._costs[user] for user in (node, *_attributes_read(node))]
        return sum(cost.parameter_bytes + (cost.gradient_bytes if gradients else 0) for cost in costs)

    def _parameters_used(self, node: Node) -> list[nn.Parameter]:
        """The parameters that a node uses, directly or through get_attr."""
        return [each for user in (node, *_attributes_read(node)) for each in self._traced.parameters_of(user)]

    def _with_parameters(self) -> list[int]:
        """Positions of the nodes that use parameters; every layer has one of them."""
        return [index for index, node in enumerate(self._order) if self._parameters_used(node)]

    def _widths(self, window: float) -> dict[int, float]:
        """For each legal cut: bytes carried, over those of the narrowest cut nearby on its wider side.

        The wider side, so that where the carry grows or shrinks for good (a skip connection opens, a
        decoder starts) the step itself is no reason against a cut.
        """
        prefix, edges, carried = self._prefix, self._edges, self._carried
        result = {}
        for index, cut in enumerate(self._legal):
            low = min(bisect_left(edges, bisect_left(prefix, prefix[cut] - window * 1.01)), max(index - 1, 0))
            high = max(bisect_right(edges, bisect_right(prefix, prefix[cut] + window * 1.01) - 1), index + 2)
            before = min(carried[low : index + 1], default=carried[index])
            after = min(carried[index:high], default=carried[index])
            result[cut] = max(carried[index], 1) / max(before, after, 1)
        return result


def _shares(amounts: Sequence[float]) -> list[float]:
    total = sum(amounts)
    return [amount / total if total else 0.0 for amount in amounts]


def _attributes_read(node: Node) -> list[Node]:
    return [source for source in node.all_input_nodes if source.op == "get_attr"]


def _heaviest_between(cuts: Sequence[int], loads: Sequence[int]) -> int:
    """The heaviest stretch without a cut."""
    return max(sum(loads[start:stop]) for start, stop in pairwise([0, *cuts, len(loads)]))


def _scale(blocks: Sequence[str], weights: Sequence[float]) -> tuple[float, float]:
    """The least weight of a layer, and the weight of a typical block."""
    block_weights: dict[str, float] = defaultdict(float)
    for block, weight in zip(blocks, weights, strict=True):
        if block:
            block_weights[block] += weight
    largest = max(block_weights.values(), default=0.0)
    typical = sorted(weight for weight in block_weights.values() if weight > SMALLEST_BLOCK * largest)
    small_block = quantiles(typical, n=4)[0] if len(typical) > 1 else max(largest, 1 / 4)
    least = max(min(SMALLEST_SHARE * small_block, 1 / 16), 1 / LARGEST_NUM_LAYERS)
    return least, typical[len(typical) // 2] if typical else 1 / 16


def _blocks(traced: TracedGraph, order: Sequence[Node]) -> list[str]:
    """For each node the innermost repeated block it belongs to, such as ``model.layers.3``, or ``""``.

    Blocks are children of one class of a list of modules. Where there are none with children of their
    own, plain layers with weights count (a `Sequential` of `Linear`s).
    """

    @functools.cache
    def is_block(path: str, may_be_plain: bool) -> bool:
        container, block = (
            traced.attribute(name) if name else traced.model for name in (path.rpartition(".")[0], path)
        )
        if not isinstance(container, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            return False
        kinds = Counter(map(type, container.children()))
        has_peers = kinds[type(block)] > 1 or len(kinds) == 1
        may_be = may_be_plain or next(block.children(), None) is not None
        return has_peers and may_be and next(block.parameters(), None) is not None

    def innermost(node: Node, may_be_plain: bool) -> str:
        path = covered_module(node)
        while path and not is_block(path, may_be_plain):
            path = path.rpartition(".")[0]
        return path

    blocks = [innermost(node, may_be_plain=False) for node in order]
    return blocks if any(blocks) else [innermost(node, may_be_plain=True) for node in order]
