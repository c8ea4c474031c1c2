"""Whether views of one memory have elements in common: a write into the one then changes the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

MAX_STEPS = 10_000
"""How many combinations of indices are looked at."""


def share_elements(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two strided tensors have an element of memory in common; True as well where that takes long to tell."""
    if not tensor.numel() or not other.numel() or _memory(tensor) != _memory(other):
        return False
    if tensor.element_size() != other.element_size():
        return True
    # an index for each dimension of both, such that the sum of stride * index is the distance of the first elements
    lowest: dict[int, int] = {}
    highest: dict[int, int] = {}
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        highest[stride] = highest.get(stride, 0) + size - 1
    for size, stride in zip(other.shape, other.stride(), strict=True):
        lowest[stride] = lowest.get(stride, 0) - (size - 1)
    strides = sorted((lowest.keys() | highest.keys()) - {0}, reverse=True)
    ranges = [(stride, lowest.get(stride, 0), highest.get(stride, 0)) for stride in strides]
    below = [*itertools.accumulate((stride * low for stride, low, _ in reversed(ranges)), initial=0)][::-1]
    above = [*itertools.accumulate((stride * high for stride, _, high in reversed(ranges)), initial=0)][::-1]
    pending = [(other.storage_offset() - tensor.storage_offset(), 0)]
    for _ in range(MAX_STEPS):
        if not pending:
            return False
        distance, depth = pending.pop()
        if depth == len(ranges):
            if distance == 0:
                return True
            continue
        stride, low, high = ranges[depth]
        first = max(low, -((above[depth + 1] - distance) // stride))
        last = min(high, (distance - below[depth + 1]) // stride)
        pending += [(distance - stride * index, depth + 1) for index in range(first, min(last, first + MAX_STEPS) + 1)]
    return True


def overlapping(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Pairs of strided tensors, by their positions, that have an element of memory in common; see `share_elements`."""
    by_memory: dict[tuple[torch.device, int], list[int]] = {}
    for position, tensor in enumerate(tensors):
        by_memory.setdefault(_memory(tensor), []).append(position)
    for positions in by_memory.values():
        spans = sorted((*_span(tensors[position]), position) for position in positions) if len(positions) > 1 else ()
        reaching: list[tuple[int, int]] = []
        for first, last, position in spans:
            reaching = [(end, other) for end, other in reaching if end >= first]
            for _, other in reaching:
                if share_elements(tensors[position], tensors[other]):
                    yield min(position, other), max(position, other)
            reaching.append((last, position))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first and the last byte of its memory that a tensor reaches."""
    steps = sum(int(size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.element_size()
    return first, first + (steps + 1) * tensor.element_size() - 1


def _memory(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, address_of(tensor)


def address_of(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins; of fakes and tensors on meta, which have none, a number of its own for each."""
    storage = tensor.untyped_storage()
    return storage._cdata if storage.device.type == "meta" else storage.data_ptr()
