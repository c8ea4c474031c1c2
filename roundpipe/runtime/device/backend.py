"""What the runtime asks of a device, so that only backend files know what one is.

A backend owns five streams: COMPUTE runs layers, UPLOAD and DOWNLOAD copy carried values beside it, WEIGHTS and
GRADIENTS the bulk of a visit, since a value that the next computation waits for must not queue behind the weights
of the visit after it. Work on two streams is ordered only by an event: `record` on the one, `wait` on the other.

    upload(...) ; e = record(UPLOAD)          a copy to the device, and the event that it is done
    wait(COMPUTE, e) ; layer(...)             the layer runs after it
    d = record(COMPUTE) ; wait(DOWNLOAD, d)   a copy back to the host runs after the layer

Sources: the stream model is CUDA's; `torch.Stream` and `torch.Event` give it for any accelerator.
"""

from __future__ import annotations

import enum
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, Protocol

import torch

from roundpipe.core.checks import is_number
from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import ConfigError, DeviceMemoryError, shown
from roundpipe.core.field_docs import with_field_docs
from roundpipe.core.options import with_options
from roundpipe.core.quantities import as_number
from roundpipe.core.storages import is_plain
from roundpipe.runtime.device.host_memory import on_huge_pages


class Lane(enum.IntEnum):
    """The streams of a backend, as indices."""

    COMPUTE = 0
    UPLOAD = 1
    DOWNLOAD = 2
    WEIGHTS = 3
    GRADIENTS = 4

    def __str__(self) -> str:
        return self.name.lower()


OUT_OF_MEMORY = (torch.OutOfMemoryError, DeviceMemoryError)

ON_ITS_WAY = {Lane.DOWNLOAD: "values and gradients between stages", Lane.GRADIENTS: "gradients of weights"}
"""What downloads take host memory for."""


@with_options("devices=[Device('cuda:0', {0}=...)]")
@with_field_docs
@dataclass(frozen=True, slots=True)
class Device:
    """One entry of ``devices=``: a device, and the limits to keep on it.

    Raises:
        ConfigError: a limit is not positive, or the device is not one torch knows.
    """

    device: str | torch.device = "cpu"
    """Such as ``"cpu"``, ``"cuda:0"`` or ``torch.device("xpu", 1)``."""
    memory_bytes: int | None = None
    """Memory that may be used on it, in bytes, or given as a text such as ``"24GiB"``; None: no limit on the CPU, what
    is free on an accelerator. On an accelerator a tenth of it is left to libraries and to transfers in flight, and the
    rest planned for."""
    upload_bytes_per_s: float | None = None
    """CPU only: speed of the modelled link from the host to the device, or a text such as ``"16GB/s"``; None: as fast
    as memory is."""
    download_bytes_per_s: float | None = None
    """CPU only: the same of the link from the device to the host."""

    def __post_init__(self) -> None:
        if not isinstance(self.device, str | torch.device):
            raise ConfigError(
                f"Device({shown(self.device)}) is not a device torch knows; give a device's name, such as 'cuda:0'"
            )
        try:
            torch.device(self.device)
        except RuntimeError as error:
            several = "; several devices are a list, such as ['cpu', 'cpu']" if "," in str(self.device) else ""
            raise ConfigError(f"{shown(self.device)} is not a device torch knows ({error}){several}") from None
        for field in ("memory_bytes", "upload_bytes_per_s", "download_bytes_per_s"):
            object.__setattr__(self, field, as_number(getattr(self, field)))
        if isinstance(self.memory_bytes, float) and 1 <= self.memory_bytes < inf:  # such as 24e9
            object.__setattr__(self, "memory_bytes", int(self.memory_bytes))
        for field in ("memory_bytes", "upload_bytes_per_s", "download_bytes_per_s"):
            limit = getattr(self, field)
            text = "24GiB" if field == "memory_bytes" else "16GB/s"
            if limit is not None and not (is_number(limit) and 0 < limit < inf):
                raise ConfigError(
                    f"Device({field}={shown(limit)}): give a positive number, or a text such as '{text}', or None for "
                    "no limit"
                )


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block the calling thread until the work before the event is done."""

    def is_done(self) -> bool:
        """Whether the work before the event is done."""


class Moment(Protocol):
    """When the work given to a stream before it was done."""

    def is_done(self) -> bool:
        """Whether that work is done."""

    def seconds_since(self, earlier: Any) -> float:
        """Seconds from another moment of the same backend to this one, negative if it was later; both must be done."""


Move = Callable[[torch.Tensor, torch.device], torch.Tensor]
"""``f(tensor, device)``: its values in new memory, there or on the host."""


class UnplannedMemory(NamedTuple):
    """Bytes of a device that no plan counts with, for which a part of the device is left."""

    context: int = 0
    """In use beyond torch's allocator: the process's context and its libraries, and what other processes have."""
    fragmentation: int = 0
    """The most that the allocator held, but could not give, when an allocation failed."""


class Backend(ABC):
    """One worker's view of one device; a ``memory_budget_bytes`` of None is no limit to plan for."""

    def __init__(self, device: torch.device, name: str, memory_budget_bytes: int | None) -> None:
        self.device = device
        self.name = name
        self.memory_budget_bytes = memory_budget_bytes
        self.moved_bytes = [0] * len(Lane)
        """By lane, bytes that copies were given to it for."""
        self._moved_lock = threading.Lock()

    def take_budget(self) -> int | None:
        """The memory to plan for as it is now: others may have taken or given back some. At little cost."""
        return self.memory_budget_bytes

    def unplanned(self) -> UnplannedMemory:
        """What is in use beside what is planned for, as far as the device tells."""
        return UnplannedMemory()

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make the device and its COMPUTE stream current in the calling thread."""
        yield

    def _count(self, lane: Lane, num_bytes: int) -> None:
        """A copy is given to a lane; GRADIENTS gets some from other threads than the worker's own."""
        with self._moved_lock:
            self.moved_bytes[lane] += num_bytes

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        """Give a lane what the calling thread has the device do inside; other devices' work goes where it went."""
        yield

    def is_peer(self, other: Backend) -> bool:
        """Whether the device reads another worker's memory without the host in between."""
        return type(other) is type(self) and other.device == self.device

    # Memory

    @abstractmethod
    def allocate(self, num_bytes: int, purpose: str) -> torch.Tensor:
        """A byte buffer on the device, counted under ``purpose`` until `free`."""

    @abstractmethod
    def free(self, buffer: torch.Tensor, purpose: str) -> None:
        """Stop counting a buffer of `allocate`; its memory goes with the last reference."""

    def release_cached(self) -> None:  # noqa: B027 - most have nothing to do
        """Give back device memory that an allocator keeps for later."""

    @abstractmethod
    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """A byte buffer of exactly this size in host memory, pinned for this device where that is possible."""

    def hold(self, num_bytes: int, purpose: str) -> AbstractContextManager[Any]:
        """Count bytes that others allocated for as long as the context is open."""
        return nullcontext()

    def activations(
        self, memory: Sequence[torch.Tensor], uploaded: Sequence[torch.Tensor] = ()
    ) -> AbstractContextManager[Any]:
        """Count what operators allocate inside; may be entered again and again.

        Storages of a visit's ``memory`` are left out, and those of what was ``uploaded`` as long as they live.
        """
        return nullcontext()

    def uncounted(self) -> AbstractContextManager[Any]:
        """Around work inside of `activations` that makes none."""
        return nullcontext()

    @abstractmethod
    def peak_bytes(self, reset: bool = False) -> int:
        """Largest number of bytes in use at once since the last reset."""

    def warm_up(self, *, has_attention: bool = False) -> None:  # noqa: B027 - most libraries keep nothing
        """Have libraries loaded, and take what memory they keep for the calling thread, so that no visit is found to.

        ``has_attention``: whether the library that computes attention is one of them.
        """

    def begin_step(self, operator_flops: float) -> None:  # noqa: B027 - accelerators need no threads for operators
        """A step begins, in the calling thread; an average operator with weights has so many FLOPs, or 0: unknown."""

    def note_others(self, own_bytes: int) -> None:  # noqa: B027 - most count only what is the worker's
        """Take all that is in use but for the worker's own bytes as others', while the worker has nothing to do."""

    def note_failure(self) -> None:  # noqa: B027 - most allocators hold nothing that is free
        """Learn from an allocation that may have failed, before an allocator gives back what it holds."""

    def num_retries(self) -> int:
        """How often the device's allocator was at its limit, gave back what it kept, and asked the device anew."""
        return 0

    @abstractmethod
    def begin_visit(self) -> None:
        """Note the largest number of bytes in use at once from now on, for `visit_peak_bytes`."""

    @abstractmethod
    def visit_peak_bytes(self) -> int | None:
        """That of the worker since `begin_visit`; None where it can't be told from that of other workers."""

    # Copies

    @property
    def uploads_lag(self) -> bool:
        """Whether an `upload` may return before its copy is done."""
        return True

    @property
    def downloads_lag(self) -> bool:
        """Whether a `download` may return before its copy is done."""
        return True

    @abstractmethod
    def upload(
        self, source: torch.Tensor, target: torch.Tensor | None = None, lane: Lane = Lane.UPLOAD
    ) -> torch.Tensor:
        """Copy to the device on the UPLOAD or WEIGHTS stream; always a copy, also where both are the CPU."""

    @abstractmethod
    def download(self, source: torch.Tensor, lane: Lane = Lane.DOWNLOAD, *, is_inner: bool = False) -> torch.Tensor:
        """Copy to (pinned) host memory on the DOWNLOAD or GRADIENTS stream; always a copy.

        One that ``is_inner`` nobody but the UPLOAD and DOWNLOAD lanes of workers will copy from or to.
        """

    @abstractmethod
    def write_home(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each first one into the second, in (pinned) host memory, on GRADIENTS; not among `moved_bytes`."""

    def moving(self) -> AbstractContextManager[Move]:
        """A context with a function that moves tensors, be the host's pinned or not; at its end they have arrived."""
        return nullcontext(moved_at_once)

    def take_uploads(self) -> list[torch.Tensor]:
        """What `upload` made on the UPLOAD stream since the last call; whoever gives work to COMPUTE keeps them until
        that is done, since their memory is the UPLOAD stream's. None on the CPU, where a call is done when it returns.
        """
        return []

    # Order and time

    @abstractmethod
    def record(self, lane: Lane) -> Event:
        """An event after all work given to the stream so far."""

    @abstractmethod
    def wait(self, lane: Lane, event: Event) -> None:
        """Let later work on the stream run after the event, whichever backend recorded it."""

    @abstractmethod
    def is_own(self, event: Event) -> bool:
        """Whether a wait for an event holds up the stream alone; for one of another kind of device the thread waits."""

    def follow_caller(self) -> None:  # noqa: B027 - on the CPU what a thread has done is done
        """Let later work on COMPUTE run after what the calling thread's current stream has been given so far."""

    def precede_caller(self) -> None:  # noqa: B027 - as above
        """Let what the calling thread's current stream is given later run after the work that COMPUTE has."""

    @abstractmethod
    def check_ready(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise SynchronizationError if COMPUTE did not wait for the copy that made one of them."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all streams are done."""

    @abstractmethod
    def moment(self, lane: Lane = Lane.COMPUTE) -> Moment:
        """The moment after all work given to a stream so far; waits for nothing."""

    @abstractmethod
    def anchor(self) -> tuple[Moment, float]:
        """A moment and its time by ``time.perf_counter``; waits for none of the backend's own work."""

    # What runs

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        """Name what is done inside in the traces of profilers."""
        return torch.profiler.record_function(name)

    @abstractmethod
    def random(self, seed: int) -> AbstractContextManager[Any]:
        """Draw random numbers from ``seed`` inside; the generator's state is as before afterwards."""


def are_peers(backends: Sequence[Backend]) -> bool:
    """Whether each reads the memory of all others."""
    return all(one.is_peer(other) for one in backends for other in backends)


def moved_at_once(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A `Move` that waits."""
    if not is_plain(tensor):
        return tensor.to(device)
    return on_huge_pages(torch.empty_like(tensor, device=device)).copy_(tensor)


def is_profiled() -> bool:
    """Whether a profiler of torch's is on, in whatever thread."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def synchronize_streams(tensors: Iterable[torch.Tensor]) -> None:
    """Return once what the calling thread's streams have made of these tensors is done."""
    for device in {tensor.device for tensor in tensors}:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.current_stream(device).synchronize()
