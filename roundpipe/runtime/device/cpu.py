"""CPU workers: a backend on the host's own memory, with copies, budgets and links that are real.

A worker copies what an accelerator's would, so a missing transfer or wait shows in CI. Three things are modelled:

*Streams.* Copies are done at once, but each is stamped with its stream's clock, the number of copies so far. Waiting
for an event moves the waiter's view of that clock forward, and of all clocks that the event's stream had waited for;
using a tensor whose stamp is ahead of the view raises `SynchronizationError`.

*Links.* With a link speed set, a copy takes ``bytes / speed`` on its stream's own timeline, beside the computation:
only a wait for its event sleeps until then. One link serves two streams; carried values go before weights and
gradients.

*Memory.* A `Ledger` counts weights and carried values and, under a budget, all that operators of layers and losses
allocate; past the budget it raises `DeviceMemoryError`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe.core.allocations import Allocations
from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import DeviceMemoryError, SynchronizationError
from roundpipe.core.random_state import SeededTorch
from roundpipe.core.storages import bytes_of
from roundpipe.core.together import copy_all
from roundpipe.runtime.device.backend import ON_ITS_WAY, Backend, Device, Event, Lane
from roundpipe.runtime.device.host_limit import HOST_LIMIT
from roundpipe.runtime.device.host_memory import on_huge_pages
from roundpipe.runtime.device.host_threads import set_threads, worker_threads

_STAMP = "_roundpipe_stamp"
_stream_ids = itertools.count()
_host_seen: dict[int, int] = {}
"""How far every stream's work is known to be done because a thread waited for it to be."""

_BULK_BEHIND = {Lane.WEIGHTS: Lane.UPLOAD, Lane.GRADIENTS: Lane.DOWNLOAD}
"""Stream of a visit's bulk to the stream of values that has the same link, and goes first."""


class _StreamClock:
    """How much work one stream was given, and what it has seen of others, directly or not."""

    __slots__ = ("ready_at", "seen", "stream_id", "ticks")

    def __init__(self) -> None:
        self.stream_id = next(_stream_ids)
        self.ticks = 0
        self.ready_at = 0.0
        self.seen: dict[int, int] = {}


class CpuEvent:
    """A stream's clock at the time of `record`."""

    __slots__ = ("ready_at", "seen")

    def __init__(self, clock: _StreamClock) -> None:
        self.seen = {**clock.seen, clock.stream_id: clock.ticks}
        self.ready_at = clock.ready_at

    def synchronize(self) -> None:
        _sleep_until(self.ready_at)
        _advance(_host_seen, self.seen)

    def is_done(self) -> bool:
        return self.ready_at <= time.perf_counter()


class CpuMoment:
    """A time of the host's clock: what the thread has done is done, and when a link will be done is known."""

    __slots__ = ("at_s",)

    def __init__(self, at_s: float | None = None) -> None:
        self.at_s = time.perf_counter() if at_s is None else at_s

    def is_done(self) -> bool:
        return True

    def seconds_since(self, earlier: CpuMoment) -> float:
        return self.at_s - earlier.at_s


def _advance(view: dict[int, int], other: dict[int, int]) -> None:
    """Move a view of the streams forward to another one."""
    for stream_id, ticks in other.items():
        if view.get(stream_id, 0) < ticks:
            view[stream_id] = ticks


def _sleep_until(moment: float) -> None:
    if moment:
        delay = moment - time.perf_counter()
        if delay > 0:
            time.sleep(delay)


class CpuBackend(Backend):
    """One CPU worker of ``num_sharing``, which have the cores in common."""

    def __init__(self, entry: Device, name: str, num_sharing: int = 1) -> None:
        super().__init__(torch.device("cpu"), name, entry.memory_bytes)
        self._num_sharing = num_sharing
        self._num_threads: int | None = None
        """Of operators in the worker's thread before this changed it."""
        self.ledger = Ledger(name, entry.memory_bytes)
        up, down = entry.upload_bytes_per_s, entry.download_bytes_per_s
        self._speeds = {Lane.UPLOAD: up, Lane.WEIGHTS: up, Lane.DOWNLOAD: down, Lane.GRADIENTS: down}
        self._clocks = tuple(_StreamClock() for _ in Lane)

    def begin_step(self, operator_flops: float) -> None:
        self._num_threads = self._num_threads or torch.get_num_threads()
        set_threads(worker_threads(self._num_threads, self._num_sharing, operator_flops), self._num_threads)

    # Memory

    def allocate(self, num_bytes: int, purpose: str) -> torch.Tensor:
        self.ledger.add(num_bytes, purpose)
        return torch.empty(num_bytes, dtype=torch.uint8)

    def free(self, buffer: torch.Tensor, purpose: str) -> None:
        self.ledger.remove(buffer.numel(), purpose)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return on_huge_pages(torch.empty(num_bytes, dtype=torch.uint8))

    def hold(self, num_bytes: int, purpose: str) -> AbstractContextManager[Any]:
        return Hold(self.ledger, num_bytes, purpose)

    def activations(
        self, memory: Sequence[torch.Tensor], uploaded: Sequence[torch.Tensor] = ()
    ) -> AbstractContextManager[Any]:
        if self.ledger.budget_bytes is None:  # each operator would take some microseconds more
            return nullcontext()
        counted = CountedAllocations(self.ledger, memory)
        counted.leave_out(uploaded)  # a layer may be the last to read one: its outputs may then be where it was
        return counted

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        self.ledger.is_paused = True
        try:
            yield
        finally:
            self.ledger.is_paused = False

    def peak_bytes(self, reset: bool = False) -> int:
        peak = self.ledger.peak_bytes
        if reset:
            self.ledger.peak_bytes = self.ledger.total_bytes
        return peak

    def begin_visit(self) -> None:
        self.ledger.visit_peak_bytes = self.ledger.total_bytes

    def visit_peak_bytes(self) -> int:
        return self.ledger.visit_peak_bytes

    # Copies

    @property
    def uploads_lag(self) -> bool:
        return self._speeds[Lane.UPLOAD] is not None

    @property
    def downloads_lag(self) -> bool:
        return self._speeds[Lane.DOWNLOAD] is not None

    def upload(
        self, source: torch.Tensor, target: torch.Tensor | None = None, lane: Lane = Lane.UPLOAD
    ) -> torch.Tensor:
        return self._copy(lane, source, target)

    def download(self, source: torch.Tensor, lane: Lane = Lane.DOWNLOAD, *, is_inner: bool = False) -> torch.Tensor:
        HOST_LIMIT.check({ON_ITS_WAY[lane]: bytes_of(source)})
        return self._copy(lane, source, None)

    def write_home(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with torch.no_grad():
            copy_all((target, source) for source, target in copies)

    def _copy(self, lane: Lane, source: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
        clock = self._clocks[lane]
        _check_stamp(source, clock, lane)
        began_s = time.perf_counter()
        if target is None:
            source = source.detach()
            target = source.clone() if source.device.type == "cpu" else source.cpu()
        else:
            target.copy_(source)
        clock.ticks += 1
        speed, num_bytes = self._speeds[lane], bytes_of(target)
        self._count(lane, num_bytes)
        if speed is not None:
            self._occupy_link(lane, num_bytes / speed, began_s)
        setattr(target, _STAMP, (clock.stream_id, clock.ticks, lane, self.name))
        return target

    def _occupy_link(self, lane: Lane, seconds: float, now: float) -> None:
        """Let a copy begun ``now`` take its time on the stream and on the link that the stream shares."""
        clock = self._clocks[lane]
        if lane in _BULK_BEHIND:
            clock.ready_at = max(clock.ready_at, self._clocks[_BULK_BEHIND[lane]].ready_at, now) + seconds
            return
        clock.ready_at = max(clock.ready_at, now) + seconds
        for bulk, values in _BULK_BEHIND.items():
            if values is lane and self._clocks[bulk].ready_at > now:
                self._clocks[bulk].ready_at += seconds

    def record(self, lane: Lane) -> Event:
        clock = self._clocks[lane]
        if lane is Lane.COMPUTE:  # the thread itself: what it has done is done
            clock.ticks += 1
        return CpuEvent(clock)

    def moment(self, lane: Lane = Lane.COMPUTE) -> CpuMoment:
        if lane is Lane.COMPUTE:
            return CpuMoment()
        behind = self._clocks[_BULK_BEHIND.get(lane, lane)]
        return CpuMoment(max(time.perf_counter(), self._clocks[lane].ready_at, behind.ready_at))

    def anchor(self) -> tuple[CpuMoment, float]:
        moment = CpuMoment()
        return moment, moment.at_s

    def wait(self, lane: Lane, event: Event) -> None:
        if not isinstance(event, CpuEvent):  # an accelerator's, in a rotation over both
            event.synchronize()
            return
        clock = self._clocks[lane]
        _advance(clock.seen, event.seen)
        if lane is Lane.COMPUTE:
            _sleep_until(event.ready_at)
        else:
            clock.ready_at = max(clock.ready_at, event.ready_at)

    def is_own(self, event: Event) -> bool:
        return isinstance(event, CpuEvent)

    def check_ready(self, tensors: Sequence[torch.Tensor]) -> None:
        clock = self._clocks[Lane.COMPUTE]
        for tensor in tensors:
            _check_stamp(tensor, clock, Lane.COMPUTE)

    def synchronize(self) -> None:
        for clock in self._clocks:
            _sleep_until(clock.ready_at)

    def random(self, seed: int) -> AbstractContextManager[Any]:
        return SeededTorch(seed, self.device)


def _check_stamp(tensor: torch.Tensor, clock: _StreamClock, lane: Lane) -> None:
    stamp = getattr(tensor, _STAMP, None)
    if stamp is None:
        return
    stream_id, ticks, source, where = stamp
    if stream_id != clock.stream_id and max(clock.seen.get(stream_id, 0), _host_seen.get(stream_id, 0)) < ticks:
        raise SynchronizationError(
            f"a tensor of shape {tuple(tensor.shape)} made by {source} work on {where} is used by {lane} "
            "work that did not wait for that copy's event"
        )


class Ledger:
    """Bytes in use on a device by purpose, with a peak and a limit."""

    def __init__(self, name: str, budget_bytes: int | None) -> None:
        self.name = name
        self.budget_bytes = budget_bytes
        self.by_purpose: Counter[str] = Counter()
        self.total_bytes = 0
        self.peak_bytes = 0
        self.visit_peak_bytes = 0
        self.is_paused = False
        """Whether what operators allocate is not to be counted now."""
        self._lock = threading.RLock()  # a collection of garbage inside may free what is counted

    def add(self, num_bytes: int, purpose: str) -> None:
        """Count bytes; past the budget raise `DeviceMemoryError` and count nothing."""
        with self._lock:
            total = self.total_bytes + num_bytes
            if self.budget_bytes is not None and total > self.budget_bytes:
                in_use = ", ".join(f"{use} {size:,}" for use, size in self.by_purpose.items() if size)
                raise DeviceMemoryError(
                    f"{self.name} is out of memory: {num_bytes:,} more bytes for {purpose} with {self.total_bytes:,} "
                    f"of {self.budget_bytes:,} in use ({in_use or 'nothing'})"
                )
            self.total_bytes = total
            self.by_purpose[purpose] += num_bytes
            self.peak_bytes = max(self.peak_bytes, total)
            self.visit_peak_bytes = max(self.visit_peak_bytes, total)

    def remove(self, num_bytes: int, purpose: str) -> None:
        with self._lock:
            self.total_bytes -= num_bytes
            self.by_purpose[purpose] -= num_bytes


@dataclass(slots=True)
class Hold:
    """Bytes counted while a context is open; a class, since every task opens one."""

    ledger: Ledger
    num_bytes: int
    purpose: str

    def __enter__(self) -> None:
        self.ledger.add(self.num_bytes, self.purpose)

    def __exit__(self, *exception: object) -> None:
        self.ledger.remove(self.num_bytes, self.purpose)


class CountedAllocations(Allocations):
    """Counts in a ledger what operators allocate while it is entered, until it is freed."""

    def __init__(self, ledger: Ledger, known: Sequence[torch.Tensor]) -> None:
        super().__init__(known)
        self._ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._ledger.is_paused:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def grow(self, num_bytes: int) -> None:
        self._ledger.add(num_bytes, "activations")

    def shrink(self, num_bytes: int) -> None:
        self._ledger.remove(num_bytes, "activations")
