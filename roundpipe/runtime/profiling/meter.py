"""Where one worker's time goes: seconds of computing, and of waiting by cause, without waiting for any of it.

Around each computation the worker takes moments on its streams: when the one before ended, until when it waited for
what, when this one began and ended. They are read later, when they are done. A rotation on the CPU is always measured;
on accelerators, where a moment is an event, one step of several is.

    cause        the worker waited until
    caller       it was given a step, having had none
    no_work      the stage before had put the values it takes on the host
    activations  they were on the device
    weights      the stage's weights were on the device
    optimizer    the optimizer's thread had given weights back
    gradients    those of the worker's job before last were on the host
    overhead     its thread was ready: Python, and on the CPU copies

Invariant: busy and idle seconds together are the time from the first measured moment to the last one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

from roundpipe.core.schedule import Job
from roundpipe.reports.timeline import WAIT_CAUSES, WaitCause
from roundpipe.runtime.device.backend import Backend, Lane, Moment
from roundpipe.runtime.profiling.recorder import DeviceWork, Gap, Recorder

MEASURED_EACH = 8
"""On accelerators one step of so many is measured, the first two too."""


class _Computation(NamedTuple):
    gap: Gap | None
    began: Moment
    ended: Moment


class _LinkUse(NamedTuple):
    lane: Lane
    num_bytes: int
    began: Moment
    ended: Moment


class Meter:
    """Measures one worker, which calls it around its work; ``device`` is its name in timelines."""

    def __init__(self, backend: Backend, device: str) -> None:
        self.backend = backend
        self.device = device
        self.recorder: Recorder | None = None
        self._each = 1 if backend.device.type == "cpu" else MEASURED_EACH
        self._is_on = False
        self._num_steps = 0
        self._at: tuple[Job, int | None] | None = None
        """What the worker is at: a job, and a microbatch unless all are meant."""
        self._before: Moment | None = None
        self._marks: list[tuple[str, Moment]] = []
        self._unread: deque[_Computation | _LinkUse] = deque()
        self._lock = threading.Lock()
        self._busy_s = 0.0
        self._idle_s: dict[str, float] = dict.fromkeys(WAIT_CAUSES, 0.0)
        self._link_s = [0.0] * len(Lane)
        self._link_bytes = [0] * len(Lane)

    def begin_step(self, was_idle: bool) -> None:
        """A step begins; ``was_idle``: the worker had none before."""
        is_due = self._num_steps < 2 or self._num_steps % self._each == 0
        was_on, self._is_on = self._is_on, self.recorder is not None or is_due
        self._num_steps += 1
        if not was_on:
            self._marks.clear()
            self._before = self.backend.moment() if self._is_on else None
        elif was_idle:
            self.until("caller")

    def abandon(self) -> None:
        self._marks.clear()
        self._before = None

    def at(self, job: Job, microbatch: int | None) -> None:
        """What comes next is part of this job."""
        self._at = job, microbatch

    def until(self, cause: WaitCause, moment: Moment | None = None) -> None:
        """The next computation waited for this, until now or until a moment."""
        if self._is_on:
            self._marks.append((cause, self.backend.moment() if moment is None else moment))

    def computing(self, part: str, layers: tuple[int, ...]) -> _Computing:
        """A context around a computation of consecutive layers."""
        return _Computing(self, part, layers)

    def copying(self, lane: Lane, what: str) -> _Copying:
        """A context around copies of values on a lane."""
        return _Copying(self, lane, what)

    def moved(self, lane: Lane, what: str, num_bytes: int, began: Moment, ended: Moment) -> None:
        """Note the copies on a lane between two of its moments."""
        if not num_bytes:
            return
        if self._is_on and self._num_steps > 1:  # in the first step pinned memory is allocated between copies
            self._unread.append(_LinkUse(lane, num_bytes, began, ended))
        self._record(lane, f"{what} {{}}", began, ended, bytes=num_bytes)

    def _record(self, lane: Lane, name: str, began: Moment, ended: Moment, **args: Any) -> None:
        """Show work in the timeline, if one is recorded; ``{}`` in the name stands for the job it is part of."""
        if self.recorder is None:
            return
        title = ""
        if self._at is not None:
            job, microbatch = self._at
            title = f"{job}" if microbatch is None else f"{job} m{microbatch}"
            known = {} if microbatch is None else {"microbatch": microbatch}
            args = {"layers": [job.start, job.stop], "job": job.index, **known, **args}
        self.recorder.add(DeviceWork(self.device, str(lane), name.format(title).strip(), began, ended, args))

    def _computed(self, part: str, layers: tuple[int, ...], began: Moment) -> None:
        ended = self.backend.moment()
        marks, self._marks = self._marks, []
        gap = None if self._before is None else Gap(self.device, self._before, marks, began)
        self._unread.append(_Computation(gap, began, ended))
        name = "{} recompute" if part == "recompute" else "{}"
        self._record(Lane.COMPUTE, name, began, ended, part=part, layers=[layers[0], layers[-1] + 1])
        if self.recorder is not None and gap is not None:
            self.recorder.add(gap)
        self._before = ended
        self._read()

    def _read(self) -> None:
        """Take in the moments that are done."""
        with self._lock:
            while self._unread and self._unread[0].ended.is_done():
                work = self._unread.popleft()
                seconds = work.ended.seconds_since(work.began)
                if isinstance(work, _LinkUse):
                    self._link_s[work.lane] += seconds
                    self._link_bytes[work.lane] += work.num_bytes
                    continue
                self._busy_s += seconds
                for cause, start_s, end_s in work.gap.waits() if work.gap is not None else ():
                    self._idle_s[cause] += end_s - start_s

    def read(self) -> MeterReading:
        """What is known so far; from any thread, waits for nothing."""
        self._read()
        with self._lock:
            moved = tuple(self.backend.moved_bytes)
            link = tuple(zip(self._link_bytes, self._link_s, strict=True))
            return MeterReading(self._busy_s, dict(self._idle_s), moved, link)


class MeterReading(NamedTuple):
    """A worker's seconds and bytes since it began."""

    busy_s: float
    idle_s: dict[str, float]
    """By `WaitCause`."""
    moved_bytes: tuple[int, ...]
    """By lane; of all steps."""
    link: tuple[tuple[int, float], ...]
    """By lane, bytes and seconds of the copies of weights and gradients that were measured."""

    def since(self, earlier: MeterReading) -> MeterReading:
        return MeterReading(
            self.busy_s - earlier.busy_s,
            {cause: seconds - earlier.idle_s[cause] for cause, seconds in self.idle_s.items()},
            tuple(now - then for now, then in zip(self.moved_bytes, earlier.moved_bytes, strict=True)),
            tuple((a - c, b - d) for (a, b), (c, d) in zip(self.link, earlier.link, strict=True)),
        )


def link_speeds(readings: Sequence[MeterReading]) -> tuple[float, float]:
    """Bytes per second of weights up and of gradients down, over all workers; infinity before any was measured."""

    def bytes_per_s(lane: Lane) -> float:
        num_bytes, seconds = (sum(reading.link[lane][position] for reading in readings) for position in (0, 1))
        return num_bytes / seconds if num_bytes and seconds > 0 else inf

    return bytes_per_s(Lane.WEIGHTS), bytes_per_s(Lane.GRADIENTS)


class _Computing:
    """Around a computation; a class, since every task opens some."""

    __slots__ = ("_began", "_layers", "_meter", "_part")

    def __init__(self, meter: Meter, part: str, layers: tuple[int, ...]) -> None:
        self._meter, self._part, self._layers = meter, part, layers
        self._began: Moment | None = None

    def __enter__(self) -> None:
        if self._meter._is_on:
            self._began = self._meter.backend.moment()

    def __exit__(self, *exception: object) -> None:
        # given up here, not with the frame: torch's CUDA sanitizer can't have an event destroyed while an exception
        # passes, and takes the process with it
        began, self._began = self._began, None
        if began is not None:
            self._meter._computed(self._part, self._layers, began)


class _Copying:
    """Values on their way: the computation waits until what is uploaded was on the host, then for the copy."""

    __slots__ = ("_began", "_lane", "_meter", "_num_bytes", "_what")

    def __init__(self, meter: Meter, lane: Lane, what: str) -> None:
        self._meter, self._lane, self._what = meter, lane, what
        self._began: Moment | None = None
        self._num_bytes = 0

    def __enter__(self) -> None:
        meter, lane = self._meter, self._lane
        if meter._is_on and (lane is Lane.UPLOAD or meter.recorder is not None):
            self._began = meter.backend.moment(lane)
            self._num_bytes = meter.backend.moved_bytes[lane]
            if lane is Lane.UPLOAD:
                meter.until("no_work", self._began)

    def __exit__(self, *exception: object) -> None:
        meter, lane = self._meter, self._lane
        began, self._began = self._began, None
        if began is None:
            return
        num_bytes = meter.backend.moved_bytes[lane] - self._num_bytes
        if not num_bytes:
            return
        ended = meter.backend.moment(lane)
        if lane is Lane.UPLOAD:
            meter.until("activations", ended)
        meter._record(lane, f"{self._what} {{}}", began, ended, bytes=num_bytes)
