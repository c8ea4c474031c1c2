"""Which cuts of a traced graph keep what it computes.

No cut parts what must stay in one layer: a structure and what takes it apart, a write and what reads the same memory
under an older name, all calls of modules that write the same buffers, a hook and the value it hangs on. Nor may two
values cross that share memory which is written later: behind the cut they would be two copies.

Invariant: a graph cut at legal positions, each layer working on clones of the carried values that it writes, computes
what the whole graph does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from itertools import accumulate

import torch
from torch.fx import Node

from roundpipe.core.errors import TraceError
from roundpipe.fx.graph.nodes import (
    installs_hook,
    is_accessor,
    mutated_by,
    producer_of,
    storage_key,
    value_of,
    writes_buffers,
)
from roundpipe.fx.graph.traced import TracedGraph


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
            buffers = {*traced.attribute(str(node.target)).buffers()} if node.op == "call_module" else set()
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
