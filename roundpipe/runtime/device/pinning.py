"""Pinning host memory where it lies, and what happens where the system refuses.

A driver pins whole pages. Tensors that share a page are registered together, since a page can be registered once, and
a copy must lie in one registration. What is registered stays the user's: nothing here keeps it alive, and its pages are
given back before the memory is, whoever frees it.

    pages     0         1         2         3         4         5
    tensors      [--- a ----][- b -]             [------ c ------]
    pinned    [===========================]   [====================]

Invariant: no page is in two registrations. Whatever is refused stays as it was, which only makes its uploads slower;
the first refusal of a process warns, with the limit of locked memory.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from roundpipe.core.caller import warn

logger = logging.getLogger(__name__)

MIN_REGISTERED_BYTES = 64 * 1024
"""Tensors below this size are packed into a buffer instead: many registrations and copies would cost more."""

Pin = Callable[[int, int], str | None]
"""``f(address, num_bytes)``: pins whole pages; None, or why not."""
Unpin = Callable[[int], None]
"""``f(address)``: undoes a `Pin`."""

_refused = threading.Event()
"""Whether this process has warned."""


def locked_memory_limit() -> str:
    """The process's limit of locked memory, in words."""
    try:
        import resource  # not on Windows
    except ImportError:
        return "not known on this system"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,} bytes"


def warn_unpinned(num_bytes: int, reason: str) -> None:
    """Say that host memory stays unpinned: a warning at the first time, a log line at each."""
    text = f"could not pin {num_bytes:,} bytes of host memory ({reason})"
    logger.info("%s", text)
    if not _refused.is_set():
        _refused.set()
        warn(
            f"{text}: it stays unpinned, and copies between it and the devices are slower. The limit of locked memory "
            f"is {locked_memory_limit()}; raise it (ulimit -l, or memlock in /etc/security/limits.conf or the "
            "container's settings), or pass pin_model='off'. Further refusals are only logged",
            RuntimeWarning,
        )


@dataclass(slots=True, eq=False)
class _Range:
    """Whole pages that are registered together."""

    start: int
    stop: int
    storages: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)


class Registrar:
    """Registers tensors' memory in place.

    Args:
        pin: pins a range of pages; its calls and those of ``unpin`` come from any thread, one at a time.
        unpin: undoes it.
    """

    def __init__(self, pin: Pin, unpin: Unpin) -> None:
        self._pin = pin
        self._unpin = unpin
        self._ranges: list[_Range] = []
        self._lock = threading.RLock()
        self._closed = False
        self.has_lost = False
        """Whether memory was freed since the last `register` that was pinned, perhaps together with other tensors'."""
        weakref.finalize(self, _unpin_all, self._ranges, unpin, self._lock)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages that are registered now."""
        return sum(one.stop - one.start for one in self._ranges)

    @staticmethod
    def suits(tensor: torch.Tensor) -> bool:
        """Whether a tensor is to be pinned where it lies."""
        return tensor.device.type == "cpu" and _extent(tensor) is not None and tensor.nbytes >= MIN_REGISTERED_BYTES

    def is_registered(self, tensor: torch.Tensor) -> bool:
        """Whether all of a tensor's memory is in one registration."""
        extent = _extent(tensor)
        return extent is not None and any(one.start <= extent[0] and extent[1] <= one.stop for one in self._ranges)

    def register(self, tensors: Iterable[torch.Tensor]) -> None:
        """Pin those that suit and are not pinned yet; what shares a page with an earlier registration is left out."""
        with self._lock:
            self.has_lost = False
            if self._closed:
                return
            for one in _page_ranges(tensor for tensor in tensors if self._is_new(tensor)):
                if any(one.start < other.stop and other.start < one.stop for other in self._ranges):
                    continue
                reason = self._pin(one.start, one.stop - one.start)
                if reason is not None:
                    warn_unpinned(one.stop - one.start, reason)
                    continue
                self._ranges.append(one)
                for reference in one.storages:
                    storage = reference()
                    assert storage is not None
                    weakref.finalize(storage, _unpin_range, weakref.ref(self), one).atexit = False

    def _is_new(self, tensor: torch.Tensor) -> bool:
        return self.suits(tensor) and not self.is_registered(tensor) and not tensor.is_pinned()

    def close(self) -> None:
        """Give all pages back; nothing is registered any more. Safe to call twice."""
        with self._lock:
            self._closed = True
            _unpin_all(self._ranges, self._unpin, self._lock)


def _unpin_range(registrar: weakref.ref[Registrar], one: _Range) -> None:
    """One of the range's storages is about to be freed."""
    owner = registrar()
    if owner is None:
        return
    with owner._lock:
        if one in owner._ranges:
            owner._ranges.remove(one)
            owner._unpin(one.start)
            owner.has_lost = True


def _unpin_all(ranges: list[_Range], unpin: Unpin, lock: threading.RLock) -> None:
    with lock:
        while ranges:
            with contextlib.suppress(RuntimeError):  # the driver is gone: so are its pins
                unpin(ranges.pop().start)


def _extent(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First and last byte's address (exclusive) of a tensor's memory, if it has memory without holes."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if last + 1 != tensor.numel():
        return None
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _page_ranges(tensors: Iterable[torch.Tensor]) -> list[_Range]:
    """Ranges of whole pages around tensors, those that share a page joined."""
    page = mmap.PAGESIZE
    found: list[tuple[int, int, torch.UntypedStorage]] = []
    for tensor in tensors:
        extent = _extent(tensor)
        assert extent is not None
        found.append((extent[0] // page * page, -(-extent[1] // page) * page, tensor.untyped_storage()))
    ranges: list[_Range] = []
    for start, stop, storage in sorted(found, key=lambda one: one[:2]):
        if not ranges or start >= ranges[-1].stop:
            ranges.append(_Range(start, stop))
        ranges[-1].stop = max(ranges[-1].stop, stop)
        ranges[-1].storages.append(weakref.ref(storage))
    return ranges
