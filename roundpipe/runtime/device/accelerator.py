"""Any accelerator, through torch's generic API: streams, events, memory; CUDA first.

Copies run on streams of their own. Lifetime across streams is carried by events: whoever hands a tensor
from one stream to another keeps it until the event of its last reader (the engine's in-flight list), so
no `record_stream` is needed and the caching allocator can reuse memory in stream order.

Only this file and `allocator.py` name anything of CUDA: registering host memory has no generic API. Where the system
refuses to pin memory, unpinned memory serves; only copies are slower then.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from roundpipe.core.contexts import contextmanager
from roundpipe.core.random_state import SeededTorch
from roundpipe.core.storages import bytes_of
from roundpipe.core.together import copy_all
from roundpipe.runtime.device.allocator import expand_segments
from roundpipe.runtime.device.backend import ON_ITS_WAY, Backend, Device, Event, Lane, Moment, Move, UnplannedMemory
from roundpipe.runtime.device.device_memory import (
    allocated_bytes,
    memory_budget_bytes,
    obtainable_bytes,
    peak_allocated_bytes,
)
from roundpipe.runtime.device.host_limit import HOST_LIMIT
from roundpipe.runtime.device.host_memory import Pages, Registrar, warn_unpinned
from roundpipe.runtime.device.pieces_across import PiecesAcross
from roundpipe.runtime.device.value_pages import ValuePages, suits

LARGEST_PADDING = 1.1
"""Pinned allocations are padded to a power of two; past this factor host memory is registered instead."""
SMALL_BYTES = 1 << 17
"""Pinned allocations up to this size may be padded by more."""

ATTENTION = 1, 1, 128, 128
"""Samples, heads, tokens and elements of the first attention."""

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of the process

_idle_streams: dict[torch.device, list[tuple[torch.Stream, ...]]] = {}
"""Streams of backends that are gone, to be used again: libraries keep workspaces per stream and never free them."""

_copying: list[torch.Stream] = []
"""All streams that values between stages go up and down on."""

_on_device: dict[torch.device, weakref.WeakSet[AcceleratorBackend]] = {}


class AcceleratorEvent:
    """A `torch.Event` recorded on a stream; an event, and with ``timed`` a moment."""

    __slots__ = ("event",)

    def __init__(self, stream: torch.Stream, timed: bool = False) -> None:
        self.event = torch.Event(stream.device, enable_timing=timed)
        self.event.record(stream)

    def synchronize(self) -> None:
        self.event.synchronize()

    def is_done(self) -> bool:
        return bool(self.event.query())

    def seconds_since(self, earlier: AcceleratorEvent) -> float:
        return float(earlier.event.elapsed_time(self.event)) * 1e-3


class AcceleratorBackend(Backend):
    """One worker on an accelerator; ``num_sharing`` workers share the device's memory."""

    def __init__(self, entry: Device, name: str, num_sharing: int = 1) -> None:
        device = torch.device(entry.device)
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        super().__init__(torch.device(device.type, index), name, memory_budget_bytes(entry, num_sharing))
        expand_segments(self.device)
        idle = _idle_streams.setdefault(self.device, [])
        self._entry, self._num_sharing = entry, num_sharing
        self._others_bytes = torch.accelerator.memory_allocated(self.device)
        self._peak_bytes = 0
        """The largest before torch's own mark was last reset."""
        self._fragmentation_bytes = 0
        self._num_failed = self._statistic("num_ooms")
        """Allocations that had failed on the device when `note_failure` last looked."""
        _on_device.setdefault(self.device, weakref.WeakSet()).add(self)
        if not idle:
            idle.append(tuple(torch.Stream(self.device) for _ in Lane))
            _copying.extend(idle[-1][lane] for lane in (Lane.UPLOAD, Lane.DOWNLOAD))
        self._streams = idle.pop()
        weakref.finalize(self, idle.append, self._streams)
        self._uploaded: list[torch.Tensor] = []

    @contextmanager
    def activate(self) -> Iterator[None]:
        with torch.accelerator.device_index(self.device.index), self.on(Lane.COMPUTE):
            yield

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        before = torch.accelerator.current_stream(self.device)
        torch.accelerator.set_stream(self._streams[lane])
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def is_peer(self, other: Backend) -> bool:
        are_cuda = self.device.type == other.device.type == "cuda" and self.device != other.device
        return _are_cuda_peers(self.device, other.device) if are_cuda else super().is_peer(other)

    # Memory

    def allocate(self, num_bytes: int, purpose: str) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def free(self, buffer: torch.Tensor, purpose: str) -> None:
        self.synchronize()

    def release_cached(self) -> None:
        self.synchronize()
        torch.accelerator.empty_cache()

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        padded = 1 << max(num_bytes - 1, 0).bit_length()
        if padded <= max(LARGEST_PADDING * num_bytes, SMALL_BYTES) or self.device.type != "cuda":
            return _pinned(torch.empty, num_bytes, dtype=torch.uint8)
        return _registered(num_bytes)

    def registrar(self) -> Registrar:
        return Registrar(functools.partial(_register, self.device), _unregister)

    def peak_bytes(self, reset: bool = False) -> int:
        peak = max(self._peak_bytes, peak_allocated_bytes(self.device))
        if reset:
            self._reset_mark()
            self._peak_bytes = 0
        return peak

    def _reset_mark(self) -> None:
        """Begin anew with torch's own mark, which all workers on the device share."""
        peak = peak_allocated_bytes(self.device)
        if peak:  # before the first allocation the allocator may not know the device
            for backend in _on_device[self.device]:
                backend._peak_bytes = max(backend._peak_bytes, peak)
            torch.accelerator.reset_peak_memory_stats(self.device)

    def warm_up(self, *, has_attention: bool = False) -> None:
        """Matrix products have workspaces, one for each thread and stream: the worker's, and autograd's own.

        Attention is cuDNN's on some devices, which takes seconds to come from a disk.
        """
        with self.activate(), torch.enable_grad():
            with contextlib.suppress(RuntimeError):  # such as of an order that is not fixed
                matrix = torch.ones(16, 16, device=self.device, requires_grad=True)
                (matrix @ matrix).sum().backward()
            with contextlib.suppress(RuntimeError):
                if has_attention:
                    query = torch.ones(ATTENTION, device=self.device, dtype=torch.bfloat16, requires_grad=True)
                    functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()

    def note_others(self, own_bytes: int) -> None:
        if self._num_sharing == 1:
            # not all that is counted as own is there yet
            self._others_bytes = max(allocated_bytes(self.device) - own_bytes, 0)

    def take_budget(self) -> int:
        self.memory_budget_bytes = memory_budget_bytes(
            self._entry, self._num_sharing, self._others_bytes, self._fragmentation_bytes
        )
        return self.memory_budget_bytes

    def unplanned(self) -> UnplannedMemory:
        found_bytes, total_bytes = obtainable_bytes(self.device)
        return UnplannedMemory(max(total_bytes - found_bytes, 0), self._fragmentation_bytes)

    def note_failure(self) -> None:
        """What the allocator keeps it could not give: before it fails it gives the device back all that it can.

        How much was in use then is not known, but that it was no more than the peak.
        """
        num_failed, self._num_failed = self._num_failed, self._statistic("num_ooms")
        if self._num_failed > num_failed:
            reserved_bytes = torch.accelerator.memory_reserved(self.device)
            unused_bytes = reserved_bytes - peak_allocated_bytes(self.device)
            self._fragmentation_bytes = max(self._fragmentation_bytes, unused_bytes)

    def num_retries(self) -> int:
        return self._statistic("num_alloc_retries")

    def _statistic(self, what: str) -> int:
        return int(torch.accelerator.memory_stats(self.device).get(what, 0))

    def begin_visit(self) -> None:
        self._reset_mark()

    def visit_peak_bytes(self) -> int | None:
        if self._num_sharing > 1:
            return None
        return peak_allocated_bytes(self.device) - self._others_bytes

    # Copies

    def upload(
        self, source: torch.Tensor, target: torch.Tensor | None = None, lane: Lane = Lane.UPLOAD
    ) -> torch.Tensor:
        source = source.detach()
        self._count(lane, bytes_of(source))
        with self.on(lane):
            if target is not None:
                return target.copy_(source, non_blocking=True)
            target = source.to(self.device, non_blocking=True, copy=True)
        if lane is Lane.UPLOAD:
            self._uploaded.append(target)
        return target

    def take_uploads(self) -> list[torch.Tensor]:
        uploaded, self._uploaded = self._uploaded, []
        return uploaded

    def download(self, source: torch.Tensor, lane: Lane = Lane.DOWNLOAD, *, is_inner: bool = False) -> torch.Tensor:
        source = source.detach()
        self._count(lane, bytes_of(source))
        with self.on(lane):
            if source.layout is not torch.strided:
                _check_host(lane, bytes_of(source))
                return source.cpu()
            if is_inner and self.device.type == "cuda" and suits(source):
                like = torch.empty_like(source, device="meta")
                buffer = _VALUE_PAGES.take(source.nbytes, functools.partial(_check_host, lane))
                target = buffer.view(source.dtype).as_strided(like.shape, like.stride())
            else:
                _check_host(lane, source.nbytes)
                target = _pinned(torch.empty_like, source, device="cpu")
            return target.copy_(source, non_blocking=True)

    def write_home(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with self.on(Lane.GRADIENTS), torch.no_grad():
            copy_all(((target, source) for source, target in copies), non_blocking=True)

    @contextmanager
    def moving(self) -> Iterator[Move]:
        with self.activate(), PiecesAcross(self.host_buffer, lambda: self.record(Lane.COMPUTE)) as pieces:
            yield pieces.move

    def record(self, lane: Lane) -> Event:
        return AcceleratorEvent(self._streams[lane])

    def moment(self, lane: Lane = Lane.COMPUTE) -> Moment:
        return AcceleratorEvent(self._streams[lane], timed=True)

    def anchor(self) -> tuple[Moment, float]:
        idle = torch.Stream(self.device)
        idle.synchronize()  # it has no work, but may have to be set up
        moment = AcceleratorEvent(idle, timed=True)
        host_s = time.perf_counter()
        idle.synchronize()
        return moment, host_s

    @contextmanager
    def annotate(self, name: str) -> Iterator[None]:
        is_cuda = self.device.type == "cuda"
        if is_cuda:  # torch's own ranges for NVIDIA's tools end at the thread in which they were switched on
            torch.cuda.nvtx.range_push(name)
        try:
            with super().annotate(name):
                yield
        finally:
            if is_cuda:
                torch.cuda.nvtx.range_pop()

    def wait(self, lane: Lane, event: Event) -> None:
        if isinstance(event, AcceleratorEvent):
            self._streams[lane].wait_event(event.event)
        else:
            event.synchronize()

    def is_own(self, event: Event) -> bool:
        return isinstance(event, AcceleratorEvent)

    def follow_caller(self) -> None:
        stream = torch.accelerator.current_stream(self.device)
        self._streams[Lane.COMPUTE].wait_event(AcceleratorEvent(stream).event)

    def precede_caller(self) -> None:
        event = AcceleratorEvent(self._streams[Lane.COMPUTE]).event
        torch.accelerator.current_stream(self.device).wait_event(event)

    def check_ready(self, tensors: Sequence[torch.Tensor]) -> None:
        """Left to the vendor's tools, such as ``TORCH_CUDA_SANITIZER=1``."""

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    @contextmanager
    def random(self, seed: int) -> Iterator[None]:
        with SeededTorch(seed, torch.device("cpu")), SeededTorch(seed, self.device):
            yield


@functools.cache
def _are_cuda_peers(device: torch.device, other: torch.device) -> bool:
    return torch.cuda.can_device_access_peer(device, other)


def _cached_pinned_bytes() -> int:
    """Pinned host memory that torch's allocator keeps for later; of CUDA alone is it told."""
    if not torch.cuda.is_available():
        return 0
    stats = torch.cuda.host_memory_stats()
    return max(int(stats.get("allocated_bytes.current", 0)) - int(stats.get("active_bytes.current", 0)), 0)


def _pinned(make: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
    """Empty host memory as ``make`` gives it, pinned if the system allows it."""
    try:
        return make(*args, **options, pin_memory=True)
    except RuntimeError as error:
        tensor = make(*args, **options)
        warn_unpinned(tensor.nbytes, str(error).partition("\n")[0])
        return tensor


def _registered(num_bytes: int) -> torch.Tensor:
    """A byte buffer on pages of its own, which are taken in parallel; pinned if the system allows."""
    pages = _new_pages(num_bytes)
    buffer = pages.tensor(num_bytes)
    weakref.finalize(buffer, lambda pages: None, pages)  # which live as long
    return buffer


def _new_pages(num_bytes: int) -> Pages:
    return Pages(num_bytes, functools.partial(_register, None), _unregister)


def _ends() -> list[AcceleratorEvent]:
    """After all copies of values that any worker has given to its device so far."""
    with contextlib.suppress(RuntimeError):  # the device is lost: so are the copies
        return [AcceleratorEvent(stream) for stream in tuple(_copying)]
    return []


def _check_host(lane: Lane, num_bytes: int) -> None:
    """Raise an error if the host has no room for what goes down, beside what pinned memory is kept for later."""
    HOST_LIMIT.check({ON_ITS_WAY[lane]: num_bytes}, _kept_bytes)


def _kept_bytes() -> int:
    return _VALUE_PAGES.release() + _cached_pinned_bytes()


_VALUE_PAGES = ValuePages(_new_pages, _ends)
"""The process's."""


def _register(device: torch.device | None, address: int, num_bytes: int) -> str | None:
    """Pin a range of host memory through CUDA; None, or why the driver refused."""
    runtime = torch.cuda.cudart()
    result = runtime.cudaHostRegister(address, num_bytes, _PORTABLE)
    if int(result) == 0:
        return None
    with contextlib.suppress(RuntimeError, AssertionError):  # the refusal is reported by the next kernel's launch
        torch.ones((), device=device or "cuda")
    return f"cudaHostRegister: error {int(result)}, {runtime.cudaGetErrorString(result)}"


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
