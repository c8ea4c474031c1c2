"""Which cuts of a traced graph keep what it computes.

No cut parts what must stay in one layer: a structure and what takes it apart, a write and what reads the same memory
under an older name, all calls of modules that write the same buffers, a hook and the value it hangs on. Nor may two
values cross that share memory which is written later: behind the cut they would be two copies.

Invariant: a graph cut at legal positions, each layer working on clones of the carried values that it writes, computes
what the whole graph does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import accumulate
from typing import Any

import torch
from torch.fx import Node

from roundpipe.core.errors import TraceError
from roundpipe.fx.graph.dataflow import alias_groups
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


def legal_cuts(traced: TracedGraph, order: Sequence[Node], live: Sequence[Set[Node]]) -> list[int]:
    """Positions in ``order`` in front of which a cut may be."""
    position = {node: index for index, node in enumerate(order)}
    forbidden = [0] * (len(order) + 1)

    def together(nodes: Iterable[Node]) -> None:
        """No cut between the first and the last of these."""
        places = [position[node] for node in nodes if node in position]
        if places and min(places) < max(places):
            forbidden[min(places) + 1] += 1
            forbidden[max(places) + 1] -= 1

    for node in order:
        if is_accessor(node):
            together((producer_of(node), node))
        if installs_hook(node):
            together((producer_of(node.args[0]), node))  # type: ignore[arg-type]
    for users in _buffer_users(traced).values():
        together(users)
    _keep_writes(traced, order, position, together)
    parted = list(accumulate(forbidden))
    mutations = _last_writes(traced, order, position)
    return [cut for cut in range(1, len(order)) if not parted[cut] and not _parts_aliases(live[cut], cut, mutations)]


def _buffer_users(traced: TracedGraph) -> dict[int, list[Node]]:
    """For each buffer that is written, every node that touches it."""
    users: dict[int, list[Node]] = {buffer: [] for buffer in _written_buffers(traced)}
    if not users:
        return users
    owners = _attribute_memory(traced)
    for node in traced.body:
        if node.op == "call_module":
            for buffer in traced.attribute(str(node.target)).buffers():
                if id(buffer) in users:
                    users[id(buffer)].append(node)
        for source in (*node.all_input_nodes, *mutated_by(node)):
            buffer = owners.get(storage_key(source))
            if buffer is not None and id(buffer) in users:
                users[id(buffer)].append(node)
    return users


def _attribute_memory(traced: TracedGraph) -> dict[int | None, Any]:
    """Storage -> the buffer or parameter that a get_attr names there; views of it have the same."""
    owners: dict[int | None, Any] = {
        storage_key(node): traced.attribute(str(node.target)) for node in traced.graph.nodes if node.op == "get_attr"
    }
    owners.pop(None, None)
    return owners


def _keep_writes(
    traced: TracedGraph,
    order: Sequence[Node],
    position: Mapping[Node, int],
    together: Callable[[Iterable[Node]], None],
) -> None:
    """A write stays with later readers of older names for the memory: to them no new name is known.

    Where the older name is an output, it stays with what makes that value.
    """
    aliases = alias_groups(traced)
    outputs = set(traced.outputs)
    for node in order:
        for value in mutated_by(node):
            for older in aliases.get(value, (value,)):
                made_at = position.get(older, -1)
                if older.op != "placeholder" and (older.op == "get_attr" or made_at >= position[node]):
                    continue
                readers = [user for user in older.users if position.get(user, -1) > position[node]]
                together((node, *readers))
                if older in outputs and older.op == "placeholder":
                    raise TraceError(
                        f"the model returns its input {older.name!r}, which {node.name!r} writes in place through "
                        "another tensor; return that tensor, or clone the input first"
                    )
                if older in outputs:
                    together((older, node))


def _last_writes(traced: TracedGraph, order: Sequence[Node], position: Mapping[Node, int]) -> dict[int, int]:
    """Storage -> position of the last node that writes it in place."""
    last: dict[int, int] = {}
    for node in order:
        for value in mutated_by(node):
            if (key := storage_key(value)) is not None:
                last[key] = position[node]
    return last


def _parts_aliases(live: Set[Node], cut: int, mutations: Mapping[int, int]) -> bool:
    """Whether a cut carries two values that share memory which is written behind it, or one with itself."""
    if not mutations:
        return False
    seen: set[int] = set()
    for node in live:
        key = storage_key(node)
        if key is None or mutations.get(key, -1) < cut:
            continue
        if key in seen or _overlaps_itself(node):
            return True
        seen.add(key)
    return False


def _overlaps_itself(node: Node) -> bool:
    """Whether a value was expanded, so that a write to one element is one to several; what is carried is not."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return any(
        isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size <= 1)
        for size, stride in zip(value.shape, value.stride(), strict=True)
    )


def written_memory(traced: TracedGraph) -> set[Node]:
    """All values whose memory is written in place at some point, buffers that leaves write included."""
    aliases = alias_groups(traced)
    result: set[Node] = set()
    for node in traced.body:
        for value in mutated_by(node):
            result.update(aliases.get(value, (value,)))
    written = _written_buffers(traced)
    for node in traced.graph.nodes:
        if node.op == "get_attr" and id(traced.attribute(str(node.target))) in written:
            result.update(aliases.get(node, (node,)))
    return result


def _written_buffers(traced: TracedGraph) -> set[int]:
    """Identities of the buffers that a leaf or glue writes."""
    result: set[int] = set()
    owners = _attribute_memory(traced)
    for node in traced.body:
        if writes_buffers(node):
            result.update(map(id, traced.attribute(str(node.target)).buffers()))
        result.update(id(owners[key]) for key in map(storage_key, mutated_by(node)) if key in owners)
    return result
