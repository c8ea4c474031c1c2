"""CPU workers: the device protocol on the host's own memory, with copies, budgets and links that are real.

A worker copies weights and activations as an accelerator's would, so a missing transfer or a missing
wait shows in CI. Three things are modelled, because the host has no counterpart of them:

*Streams.* Copies are done at once, but each stream keeps a clock of how many copies it was given, and
each copy is stamped with it. Waiting for an event moves the waiter's view of that clock forward, and of
all clocks that the event's stream had waited for; using a tensor whose stamp is ahead of the view raises
`SynchronizationError`.

*Links.* With a link speed set, a copy takes ``bytes / speed`` on its stream's own timeline, which runs
beside the computation: only a wait for its event sleeps until that time. One link serves two streams;
carried values go first, and weights and gradients that are given to it later start that much later.

*Memory.* A ledger counts weights, gradients, carried values and what autograd keeps, and raises
`DeviceMemoryError` past the budget. Temporaries inside a layer are not counted.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from roundpipe.core.errors import DeviceMemoryError, SynchronizationError
from roundpipe.core.random_state import SeededTorch
from roundpipe.core.saved_tensor_hooks import saved_tensor_hooks_aside
from roundpipe.runtime.device.backend import Device, Event, Lane
from roundpipe.runtime.device.host_memory import empty_bytes

_STAMP = "_roundpipe_stamp"
_stream_ids = itertools.count()
_host_seen: dict[int, int] = {}
"""How far every stream's work is known to be done because a thread waited for it to be."""

_BULK_BEHIND = {Lane.WEIGHTS: Lane.UPLOAD, Lane.GRADIENTS: Lane.DOWNLOAD}
"""Stream of a visit's bulk to the stream of values that has the same link, and goes first."""


class _Clock:
    """Order of work on one stream: how much was given to it, and what it has seen of others, directly or not."""

    __slots__ = ("ready_at", "seen", "stream_id", "ticks")

    def __init__(self) -> None:
        self.stream_id = next(_stream_ids)
        self.ticks = 0
        self.ready_at = 0.0
        self.seen: dict[int, int] = {}


class CpuEvent:
    """A stream's clock at the time of `record`."""

    __slots__ = ("ready_at", "seen")

    def __init__(self, clock: _Clock) -> None:
        self.seen = {**clock.seen, clock.stream_id: clock.ticks}
        self.ready_at = clock.ready_at

    def synchronize(self) -> None:
        _sleep_until(self.ready_at)
        _see(_host_seen, self.seen)

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


def _see(view: dict[int, int], other: dict[int, int]) -> None:
    """Move a view of the streams forward to another one."""
    for stream_id, ticks in other.items():
        if view.get(stream_id, 0) < ticks:
            view[stream_id] = ticks


def _sleep_until(moment: float) -> None:
    if moment:
        delay = moment - time.perf_counter()
        if delay > 0:
            time.sleep(delay)


class Ledger:
    """Bytes in use on a device by purpose, with a peak and a limit."""

    def __init__(self, name: str, budget_bytes: int | None) -> None:
        self.name = name
        self.budget_bytes = budget_bytes
        self.by_purpose: Counter[str] = Counter()
        self.total_bytes = 0
        self.peak_bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int, purpose: str) -> None:
        """Count bytes.

        Raises:
            DeviceMemoryError: they would go past the budget; nothing is counted then.
        """
        with self._lock:
            total = self.total_bytes + num_bytes
            if self.budget_bytes is not None and total > self.budget_bytes:
                held = ", ".join(f"{use} {size:,}" for use, size in self.by_purpose.items() if size)
                raise DeviceMemoryError(
                    f"{self.name} is out of memory: {num_bytes:,} more bytes for {purpose} with {self.total_bytes:,} "
                    f"of {self.budget_bytes:,} in use ({held or 'nothing'}). Use more microbatches, "
                    "recompute_grain='layer', shorter stages or a larger budget."
                )
            self.total_bytes = total
            self.by_purpose[purpose] += num_bytes
            self.peak_bytes = max(self.peak_bytes, total)

    def remove(self, num_bytes: int, purpose: str) -> None:
        with self._lock:
            self.total_bytes -= num_bytes
            self.by_purpose[purpose] -= num_bytes


class _Hold:
    """Bytes counted while a context is open; a class, since every task opens one."""

    __slots__ = ("_ledger", "_num_bytes", "_purpose")

    def __init__(self, ledger: Ledger, num_bytes: int, purpose: str) -> None:
        self._ledger, self._num_bytes, self._purpose = ledger, num_bytes, purpose

    def __enter__(self) -> None:
        self._ledger.add(self._num_bytes, self._purpose)

    def __exit__(self, *exception: object) -> None:
        self._ledger.remove(self._num_bytes, self._purpose)


class _Saved:
    """A tensor kept by autograd; gives its bytes back to the ledger when autograd lets go of it."""

    __slots__ = ("forget", "tensor")

    def __init__(self, tensor: torch.Tensor, forget: Callable[[], None] | None) -> None:
        self.tensor = tensor
        self.forget = forget

    def __del__(self) -> None:
        if self.forget is not None:
            self.forget()


def _unpack(saved: _Saved) -> torch.Tensor:
    return saved.tensor


@contextlib.contextmanager
def _counting(pack: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """Hand what autograd saves in this thread to ``pack``, but for what it saves inside torch.func's transforms.

    These refuse to run under any hooks, with `torch.autograd.graph.disable_saved_tensors_hooks`. So while somebody
    counts, that function puts the hooks of who counts aside first; those of others are refused as they always are.
    """
    global _num_counting
    with _counting_lock:
        if not _num_counting:
            torch.autograd.graph.disable_saved_tensors_hooks = _disable_beside_counting
        _num_counting += 1
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield
    finally:
        with _counting_lock:
            _num_counting -= 1
            if not _num_counting:
                torch.autograd.graph.disable_saved_tensors_hooks = _disable_hooks


_num_counting = 0
_counting_lock = threading.Lock()
_disable_hooks = torch.autograd.graph.disable_saved_tensors_hooks


@contextlib.contextmanager
def _disable_beside_counting(error_message: str) -> Iterator[None]:
    """What `_counting` puts in the place of `torch.autograd.graph.disable_saved_tensors_hooks`."""
    with saved_tensor_hooks_aside(lambda unpack: unpack is _unpack), _disable_hooks(error_message):
        yield


class CpuBackend:
    """One CPU worker."""

    def __init__(self, given: Device, name: str) -> None:
        self.device = torch.device("cpu")
        self.name = name
        self.memory_budget_bytes = given.memory_bytes
        self.ledger = Ledger(name, given.memory_bytes)
        up, down = given.upload_bytes_per_s, given.download_bytes_per_s
        self._speeds = {Lane.UPLOAD: up, Lane.WEIGHTS: up, Lane.DOWNLOAD: down, Lane.GRADIENTS: down}
        self._clocks = tuple(_Clock() for _ in Lane)
        self.moved_bytes = [0] * len(Lane)

    def activate(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    # Memory

    def allocate(self, num_bytes: int, purpose: str) -> torch.Tensor:
        self.ledger.add(num_bytes, purpose)
        return torch.empty(num_bytes, dtype=torch.uint8)

    def free(self, buffer: torch.Tensor, purpose: str) -> None:
        self.ledger.remove(buffer.numel(), purpose)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return empty_bytes(num_bytes)

    def hold(self, num_bytes: int, purpose: str) -> contextlib.AbstractContextManager[Any]:
        return _Hold(self.ledger, num_bytes, purpose)

    def activations(self, known: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        counts: Counter[int] = Counter()
        dense = (tensor for tensor in known if tensor.layout is torch.strided)
        skip = frozenset(tensor.untyped_storage().data_ptr() for tensor in dense)
        ledger = self.ledger

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.layout is not torch.strided:
                return _Saved(tensor.detach(), None)
            storage = tensor.untyped_storage()
            try:
                address, num_bytes = storage.data_ptr(), storage.nbytes()
            except RuntimeError:  # a tensor of one of torch.func's transforms, which has no memory to look at
                return _Saved(tensor.detach(), None)
            if not num_bytes or address in skip:
                return _Saved(tensor.detach(), None)
            if not counts[address]:
                ledger.add(num_bytes, "activations")
            counts[address] += 1

            def forget() -> None:
                counts[address] -= 1
                if not counts[address]:
                    ledger.remove(num_bytes, "activations")

            return _Saved(tensor.detach(), forget)

        return _counting(pack)

    def peak_bytes(self, reset: bool = False) -> int:
        peak = self.ledger.peak_bytes
        if reset:
            self.ledger.peak_bytes = self.ledger.total_bytes
        return peak

    # Copies

    def upload(
        self, source: torch.Tensor, target: torch.Tensor | None = None, lane: Lane = Lane.UPLOAD
    ) -> torch.Tensor:
        return self._copy(lane, source, target)

    def take_uploads(self) -> list[torch.Tensor]:
        return []  # whatever reads them is done when its call returns

    def download(
        self, source: torch.Tensor, target: torch.Tensor | None = None, lane: Lane = Lane.DOWNLOAD
    ) -> torch.Tensor:
        return self._copy(lane, source, target)

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
        speed, num_bytes = self._speeds[lane], target.numel() * target.element_size()
        self.moved_bytes[lane] += num_bytes
        if speed is not None:
            self._take_link(lane, num_bytes / speed, began_s)
        setattr(target, _STAMP, (clock.stream_id, clock.ticks, lane, self.name))
        return target

    def _take_link(self, lane: Lane, seconds: float, now: float) -> None:
        """Let a copy that was begun ``now`` take its time on the stream, and on the link that the stream shares."""
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

    def annotate(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return torch.profiler.record_function(name)

    def wait(self, lane: Lane, event: Event) -> None:
        if not isinstance(event, CpuEvent):  # an accelerator's, in a rotation over both
            event.synchronize()
            return
        clock = self._clocks[lane]
        _see(clock.seen, event.seen)
        if lane is Lane.COMPUTE:
            _sleep_until(event.ready_at)
        else:
            clock.ready_at = max(clock.ready_at, event.ready_at)

    def check_ready(self, tensors: Sequence[torch.Tensor]) -> None:
        clock = self._clocks[Lane.COMPUTE]
        for tensor in tensors:
            _check_stamp(tensor, clock, Lane.COMPUTE)

    def synchronize(self) -> None:
        for clock in self._clocks:
            _sleep_until(clock.ready_at)

    def random(self, seed: int) -> contextlib.AbstractContextManager[Any]:
        return SeededTorch(seed, self.device)


def _check_stamp(tensor: torch.Tensor, clock: _Clock, lane: Lane) -> None:
    stamp = getattr(tensor, _STAMP, None)
    if stamp is None:
        return
    stream_id, ticks, maker, where = stamp
    if stream_id != clock.stream_id and max(clock.seen.get(stream_id, 0), _host_seen.get(stream_id, 0)) < ticks:
        raise SynchronizationError(
            f"a tensor of shape {tuple(tensor.shape)} made by {maker} work on {where} is used by {lane} "
            "work that did not wait for that copy's event"
        )
