"""Host memory for large values that wait there between stages: of nearly their own size, and used over and over.

Torch's allocator of pinned memory rounds what it gives to a power of two, up to twice what was asked for. Values of
long sequences are most of what the host holds, so theirs comes from here, in sizes that are a few percent apart.

    in use    a tensor's storage has the pages
    idle      the storage is gone; copies that were given to a device may still read or write the pages
    again     all that was given to the lanes before the storage went is done: the next value may have them

Only values that nobody outside of the runtime gets may lie here: of copies on other streams nothing is known.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from roundpipe.runtime.device.backend import Event
from roundpipe.runtime.device.host_memory import Pages

SMALLEST_BYTES = 16 * 1024**2
"""Smaller values are left to torch's allocator."""
SIZES_PER_OCTAVE = 32
"""How many sizes of pages there are between two powers of two."""
LARGEST_FACTOR = 2
"""Pages may be so many times as large as the value that they are used for again, no larger."""


class ValuePages:
    """Those of a process. ``new`` takes pages of a size; ``ends`` marks what all lanes were given so far."""

    def __init__(self, new: Callable[[int], Pages], ends: Callable[[], Sequence[Event]]) -> None:
        self._new = new
        self._ends = ends
        self._lock = threading.Lock()
        self._idle: list[tuple[Pages, Sequence[Event]]] = []
        self._given_back: deque[tuple[Pages, Sequence[Event]]] = deque()
        """By storages that went, at whatever moment and in whatever thread."""

    def take(self, num_bytes: int, check: Callable[[int], None] = lambda num_bytes: None) -> torch.Tensor:
        """A byte buffer whose pages come back when its storage goes; ``check`` is told what the host must have anew."""
        pages = self._take_idle(num_bytes)
        if pages is None:
            size_bytes = rounded(num_bytes)
            check(size_bytes)
            pages = self._new(size_bytes)
        buffer = pages.tensor(num_bytes)
        weakref.finalize(buffer.untyped_storage(), self._give_back, pages).atexit = False
        return buffer

    @property
    def idle_bytes(self) -> int:
        """Of pages that no value has."""
        with self._lock:
            self._collect()
            return sum(pages.num_bytes for pages, _ in self._idle)

    def release(self) -> int:
        """Give idle pages back to the system, those that no copy uses any more; how many bytes."""
        with self._lock:
            self._collect()
            idle, self._idle = self._idle, []
            self._idle = [(pages, events) for pages, events in idle if not _are_done(events)]
            return sum(pages.num_bytes for pages, _ in idle) - sum(pages.num_bytes for pages, _ in self._idle)

    def _take_idle(self, num_bytes: int) -> Pages | None:
        """The smallest that suit, of these the ones used last, if there are any."""
        with self._lock:
            self._collect()
            sizes = [
                (pages.num_bytes, -position)
                for position, (pages, _) in enumerate(self._idle)
                if num_bytes <= pages.num_bytes <= LARGEST_FACTOR * num_bytes
            ]
            for _, before in sorted(sizes):
                if _are_done(self._idle[-before][1]):
                    return self._idle.pop(-before)[0]
        return None

    def _collect(self) -> None:
        while self._given_back:
            self._idle.append(self._given_back.popleft())

    def _give_back(self, pages: Pages) -> None:
        self._given_back.append((pages, self._ends()))


def suits(value: torch.Tensor) -> bool:
    """Whether a value is one that such pages are for."""
    return type(value) is torch.Tensor and value.nbytes >= SMALLEST_BYTES


def rounded(num_bytes: int) -> int:
    """The least size of pages that a value fits into."""
    step = max(1 << max(num_bytes.bit_length() - 1, 0), SIZES_PER_OCTAVE) // SIZES_PER_OCTAVE
    return -(-num_bytes // step) * step


def _are_done(events: Sequence[Event]) -> bool:
    return all(event.is_done() for event in events)
