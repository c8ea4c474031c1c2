"""Host memory that weights, gradients and their copies lie in: huge pages, and pages pinned where they lie.

Large blocks ask for huge pages before they are touched: 512 times fewer page faults, and fewer misses of the address
cache afterwards. It is advice: where the system has no huge pages left, the memory is ordinary.

To pin memory in place is to register it with a driver. What is copied must lie in one registration as a whole, or in
none: a copy of which only a part is registered fails, be it of a weight or of what somebody else has beside it. So what
is registered is a tensor's whole storage, to the byte: two of them share pages, but no byte, and no copy goes beyond
one. The memory stays the user's: nothing here keeps it alive, and it is unpinned before it is freed, whoever frees it.

    pages     0         1         2         3         4         5
    storages     [---- a ----][--- b ---] [ an input ]  [--- c ----]
    spans        [===========][=========]               [==========]

Invariant: no byte is in two spans, and no storage is in part in one. Storages that overlap, such as those of one array
of numpy, are pinned together. Whatever is refused stays as it was, which only makes its uploads slower; the first
refusal of a process warns, with the limit of locked memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from roundpipe.core.caller import warn
from roundpipe.runtime.device.allocator import MAX_PINNING_THREADS

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 * 1024**2
"""Blocks below this size are left alone; the usual size of a huge page."""
TAKEN_BYTES = 16 * 1024**2
"""Of a new buffer, taken by a thread at a time."""
MIN_REGISTERED_BYTES = 64 * 1024
"""Tensors below this size are packed into a buffer instead: many registrations and copies would cost more."""

Pin = Callable[[int, int], str | None]
"""``f(address, num_bytes)``: pins memory; None, or why not."""
Unpin = Callable[[int], None]
"""``f(address)``: undoes a `Pin`."""

_has_warned = threading.Event()


@functools.cache
def _madvise() -> Callable[[ctypes.c_void_p, ctypes.c_size_t, int], int] | None:
    """The C library's function, where huge pages can be asked for with it."""
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    with contextlib.suppress(OSError, AttributeError):
        return ctypes.CDLL(None).madvise
    return None


def new_pages(num_bytes: int) -> mmap.mmap:
    """Memory on pages of its own, which may be huge ones: those that processes share are not."""
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes)
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def on_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, dense and not touched yet, after asking for huge pages below it."""
    madvise = _madvise()
    if madvise is None or tensor.nbytes < HUGE_PAGE_BYTES or tensor.device.type != "cpu":
        return tensor
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    stop = (tensor.data_ptr() + tensor.nbytes) // page * page
    madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_HUGEPAGE)  # refused: ordinary pages
    return tensor


class Pages:
    """Memory on pages of its own, which are taken in parallel, and pinned for as long as it lives if that may be."""

    def __init__(self, num_bytes: int, pin: Pin, unpin: Unpin) -> None:
        self.num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = new_pages(self.num_bytes)
        whole = on_huge_pages(self.tensor(self.num_bytes))
        take_pages(whole)
        reason = pin(whole.data_ptr(), self.num_bytes)
        if reason is not None:
            warn_unpinned(num_bytes, reason)
        else:
            weakref.finalize(self, unpin, whole.data_ptr())

    def tensor(self, num_bytes: int) -> torch.Tensor:
        """The first bytes, as a tensor with a storage of its own; keep the pages as long as it is used."""
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes)


def take_pages(buffer: torch.Tensor) -> None:
    """Have the system give the pages of a new byte buffer to several threads; to one it does so slowly."""
    if buffer.nbytes < 2 * TAKEN_BYTES:
        return
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_PINNING_THREADS)) as pool:
        deque(pool.map(lambda piece: piece[:: mmap.PAGESIZE].zero_(), buffer.split(TAKEN_BYTES)), maxlen=0)


def convert(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Give a parameter and its gradient another dtype in place, as ``nn.Module.to`` does."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(dtype)
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


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
    if not _has_warned.is_set():
        _has_warned.set()
        warn(
            f"{text}: it stays unpinned, and copies between it and the devices are slower. The limit of locked memory "
            f"is {locked_memory_limit()}; raise it (ulimit -l, or memlock in /etc/security/limits.conf or the "
            "container's settings), or pass pin_model='off'. Further refusals are only logged",
            RuntimeWarning,
        )


@dataclass(slots=True, eq=False)
class _PinnedSpan:
    """Memory that is pinned together, and the storages in it."""

    start: int
    stop: int
    storages: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


class Registrar:
    """Pins tensors where they lie; calls of ``pin`` and ``unpin`` come from any thread, one at a time."""

    def __init__(self, pin: Pin, unpin: Unpin) -> None:
        self._pin = pin
        self._unpin = unpin
        self._spans: list[_PinnedSpan] = []
        self._lock = threading.RLock()
        self._closed = False
        self.has_lost = False
        """Whether memory was freed since the last `register` that was pinned, perhaps together with other tensors'."""
        weakref.finalize(self, _unpin_all, self._spans, unpin, self._lock)

    @staticmethod
    def suits(tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and _extent(tensor) is not None and tensor.nbytes >= MIN_REGISTERED_BYTES

    def is_registered(self, tensor: torch.Tensor) -> bool:
        """Whether all of a tensor's memory is in one span."""
        extent = _extent(tensor)
        return extent is not None and any(span.start <= extent[0] and extent[1] <= span.stop for span in self._spans)

    def register(self, tensors: Iterable[torch.Tensor]) -> None:
        """Pin those that suit and are not pinned yet; what overlaps an earlier span is left out."""
        with self._lock:
            self.has_lost = False
            if self._closed:
                return
            new = (tensor for tensor in tensors if self.suits(tensor) and not self.is_registered(tensor))
            for span in _spans_of(tensor for tensor in new if not tensor.is_pinned()):
                if any(span.start < other.stop and other.start < span.stop for other in self._spans):
                    continue
                reason = self._pin(span.start, span.num_bytes)
                if reason is not None:
                    warn_unpinned(span.num_bytes, reason)
                    continue
                self._spans.append(span)
                for reference in span.storages:
                    storage = reference()
                    assert storage is not None
                    weakref.finalize(storage, _unpin_span, weakref.ref(self), span).atexit = False

    def close(self) -> None:
        """Unpin everything; nothing is pinned any more. Safe to call twice."""
        with self._lock:
            self._closed = True
            _unpin_all(self._spans, self._unpin, self._lock)


def _unpin_span(registrar: weakref.ref[Registrar], span: _PinnedSpan) -> None:
    """Unpin a span of which a storage is about to be freed."""
    owner = registrar()
    if owner is None:
        return
    with owner._lock:
        if span in owner._spans:
            owner._spans.remove(span)
            owner._unpin(span.start)
            owner.has_lost = True


def _unpin_all(spans: list[_PinnedSpan], unpin: Unpin, lock: threading.RLock) -> None:
    with lock:
        while spans:
            with contextlib.suppress(RuntimeError):  # the driver is gone: so are its pins
                unpin(spans.pop().start)


def _extent(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Addresses of a tensor's first byte and behind its last one, if it has memory without holes."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if last + 1 != tensor.numel():
        return None
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _spans_of(tensors: Iterable[torch.Tensor]) -> list[_PinnedSpan]:
    """The storages of tensors, those that overlap joined."""
    storages = {id(storage): storage for storage in [tensor.untyped_storage() for tensor in tensors]}
    spans: list[_PinnedSpan] = []
    for storage in sorted(storages.values(), key=torch.UntypedStorage.data_ptr):
        start, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if not spans or start >= spans[-1].stop:
            spans.append(_PinnedSpan(start, stop))
        spans[-1].stop = max(spans[-1].stop, stop)
        spans[-1].storages.append(weakref.ref(storage))
    return spans
