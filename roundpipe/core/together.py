"""Many tensors in one call: what is a launch per tensor otherwise is a few for all of them on an accelerator. On the
host it is one call in which other threads run Python, not hundreds between which they take turns with this one.
Or, the other way round, a large tensor in pieces, where torch would make another as large of it.

The values are those of one call per tensor. Only this file names torch's functions for lists of tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from roundpipe.core.storages import is_plain

PIECE_ELEMENTS = 2**18
"""Of a piece that caches hold."""
T = TypeVar("T")
Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""Tensors that are written, each with the one that is read."""


class Together:
    """What is noted inside of its context is done at the end of it, also where something else is raised."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sums: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> Together:
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Do what is noted so far."""
        copies, sums, self._copies, self._sums = self._copies, self._sums, [], []
        copy_all(copies)
        add_all(sums)

    def copy(self, written: torch.Tensor, read: torch.Tensor) -> None:
        """Copy the second tensor into the first, which may have another dtype."""
        if is_plain(written) and is_plain(read):
            self._copies.append((written, read))
        else:
            written.copy_(read)

    def add(self, written: torch.Tensor, read: torch.Tensor) -> None:
        """Add the second tensor, which may have another dtype, to the first."""
        is_whole = written.dtype == read.dtype or written.device.type != "cpu" or written.numel() <= PIECE_ELEMENTS
        if is_whole and is_plain(written) and is_plain(read):
            self._sums.append((written, read))
        else:
            add_converted(written, read)


def copy_all(pairs: Pairs, *, non_blocking: bool = False) -> None:
    """Copy each pair's second tensor into the first, which may have another dtype and be elsewhere."""
    for written, read in _alike(pairs):
        torch._foreach_copy_(written, read, non_blocking)


def add_all(pairs: Pairs) -> None:
    """Add each pair's second tensor to the first."""
    for written, read in _alike(pairs):
        torch._foreach_add_(written, read)


def scale_all(tensors: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply each by a number; on the host in one call."""
    here: list[torch.Tensor] = []
    for tensor in tensors:
        if is_plain(tensor) and tensor.device.type == "cpu" and tensor.dim():
            here.append(tensor)
        else:
            tensor.mul_(factor)
    if here:  # a number would be rounded to the tensors' dtype
        torch._foreach_mul_(here, torch.tensor(factor, dtype=torch.float64))


def add_converted(written: torch.Tensor, read: torch.Tensor) -> None:
    """Add a tensor that may have another dtype, which torch converts as a whole first, into new memory."""
    tensors = written, read
    is_wider = written.dtype != read.dtype and torch.promote_types(written.dtype, read.dtype) == written.dtype
    if not (is_wider and all(each.device.type == "cpu" and each.is_contiguous() for each in tensors)):
        written.add_(read)
        return
    memory = written.new_empty(min(PIECE_ELEMENTS, written.numel()))
    pieces = (each.detach().view(-1).split(PIECE_ELEMENTS) for each in tensors)
    for of_written, of_read in zip(*pieces, strict=True):
        of_written.add_(memory[: of_read.numel()].copy_(of_read))


def in_groups(items: Iterable[T], bytes_of: Callable[[T], int], most_bytes: int) -> Iterator[list[T]]:
    """The items in order, in groups that end as soon as they have so many bytes."""
    group: list[T] = []
    group_bytes = 0
    for item in items:
        group.append(item)
        group_bytes += bytes_of(item)
        if group_bytes >= most_bytes:
            yield group
            group, group_bytes = [], 0
    if group:
        yield group


def _alike(pairs: Pairs) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Lists whose tensors have one device and one dtype each, as fast kernels need them."""
    lists: defaultdict[tuple[object, ...], tuple[list[torch.Tensor], list[torch.Tensor]]]
    lists = defaultdict(lambda: ([], []))
    for written, read in pairs:
        of_written, of_read = lists[written.device, written.dtype, read.device, read.dtype]
        of_written.append(written)
        of_read.append(read)
    yield from lists.values()
