"""Memory that the ranks of one host share: what travels is written once, and read by the others where it lies.

Each rank has two slots, which all of them map. What travels goes in pieces as large as a slot, with all threads of an
operator; a connection would take one thread, and the system's. Each piece takes the slot that the piece before did not:

    write into the own slot | meet the others | read from theirs

Invariant: nobody writes a slot that another rank still reads, since between two uses of a slot all have met for the
piece between them, and before that meeting each has read the piece before.
Source: Linux; anonymous files (memfd) are opened by the other processes below ``/proc``. Where that can't be, there is
no such memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from roundpipe.runtime.weights.shard import Shard

SLOT_BYTES = 16 * 1024**2


@dataclass(frozen=True, slots=True)
class Address:
    """Where other processes of this host find a rank's file."""

    host: str
    process: int
    descriptor: int
    name: str

    def open(self) -> mmap.mmap | None:
        """The file of another process, or of this one; None: it can't be opened from here."""
        path = f"/proc/{self.process}/fd/{self.descriptor}"
        with contextlib.suppress(OSError):
            if self.host == _host() and self.name in os.readlink(path):
                with Path(path).open("r+b", buffering=0) as file:
                    return mmap.mmap(file.fileno(), 2 * SLOT_BYTES)
        return None


class SlotFile:
    """The slots of this rank, until the others have opened them."""

    def __init__(self) -> None:
        self.address: Address | None = None
        """None: this system has no such files."""
        if hasattr(os, "memfd_create") and _host():
            name = f"roundpipe-{uuid.uuid4().hex}"
            with contextlib.suppress(OSError):
                descriptor = os.memfd_create(name)
                weakref.finalize(self, os.close, descriptor)
                os.ftruncate(descriptor, 2 * SLOT_BYTES)
                self.address = Address(_host(), os.getpid(), descriptor, name)


def open_all(addresses: Sequence[Address | None]) -> list[mmap.mmap] | None:
    """The slots of all ranks; None: some are of another host, or can't be opened."""
    found = [None if address is None else address.open() for address in addresses]
    return None if None in found else [each for each in found if each is not None]


class SharedMemory:
    """Transfers between ranks of one host; all ranks make the same ones in the same order."""

    def __init__(self, slots: Sequence[mmap.mmap], rank: int, meet: Callable[[], object]) -> None:
        """``meet`` returns once all ranks have called it, and raises if one has ended."""
        self._slots = slots
        self._rank = rank
        self._meet = meet
        self._turn = 0

    def add_up(self, flats: Sequence[torch.Tensor], divisor: int = 1) -> None:
        """Make tensors of one dimension and one dtype the sums of all ranks' over a divisor, as if they were one.

        It goes in pieces as large as a slot, of each of which each rank adds up a part.
        """
        length, room = sum(map(len, flats)), SLOT_BYTES // flats[0].itemsize
        for start in range(0, length, room):
            slots, stop = self._next_slots(flats[0].dtype), min(start + room, length)
            for part, place in _parts(flats, start, stop):
                slots[self._rank][place].copy_(part)
            self._meet()
            shares = [Shard(rank, len(slots)).bounds(stop - start) for rank in range(len(slots))]
            own = slots[self._rank][shares[self._rank]]
            for rank, slot in enumerate(slots):
                if rank != self._rank:
                    own.add_(slot[shares[self._rank]])
            if divisor != 1:
                own.div_(divisor)
            self._meet()
            for slot, share in zip(slots, shares, strict=True):
                for part, place in _parts(flats, start + share.start, start + share.stop):
                    part.copy_(slot[share][place])

    def swap(self, received: torch.Tensor, sent: torch.Tensor, lengths: Sequence[int]) -> None:
        """Send each rank its part of one dimension, of these lengths; receive a row from each, as long as its own."""
        parts = sent.split(list(lengths))
        room = SLOT_BYTES // sent.itemsize // len(parts)
        for start in range(0, max(lengths), room):
            slots, window = self._next_slots(sent.dtype), slice(start, start + room)
            for part, place in zip(parts, slots[self._rank].split(room), strict=False):
                place[: len(part[window])].copy_(part[window])
            self._meet()
            for row, slot in zip(received, slots, strict=True):
                row[window].copy_(slot[self._rank * room :][: len(row[window])])

    def collect(self, found: torch.Tensor, own: torch.Tensor) -> None:
        """A row from each rank, equally long."""
        room = SLOT_BYTES // own.itemsize
        for start in range(0, len(own), room):
            slots, piece = self._next_slots(own.dtype), own[start : start + room]
            slots[self._rank][: len(piece)].copy_(piece)
            self._meet()
            for row, slot in zip(found, slots, strict=True):
                row[start : start + room].copy_(slot[: len(piece)])

    def _next_slots(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Of all ranks."""
        self._turn = 1 - self._turn
        count, offset = SLOT_BYTES // dtype.itemsize, self._turn * SLOT_BYTES
        return [torch.frombuffer(slots, dtype=dtype, count=count, offset=offset) for slots in self._slots]


def _parts(flats: Sequence[torch.Tensor], start: int, stop: int) -> Iterator[tuple[torch.Tensor, slice]]:
    """What of tensors, one after the other, lies between two elements of theirs, each with its place there."""
    begin = 0
    for flat in flats:
        first, last = max(start - begin, 0), min(stop - begin, len(flat))
        if first < last:
            yield flat[first:last], slice(begin + first - start, begin + last - start)
        begin += len(flat)


def _host() -> str:
    """Which start of which machine this is; empty: not known."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
