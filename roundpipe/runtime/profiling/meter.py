"""Where one worker's time goes: seconds of computing, and of waiting by cause, without waiting for any of it.

Around each computation the worker takes moments on its streams: when the one before ended, until when it waited for
what, when this one began and ended. They are read later, when they are done. A rotation on the CPU is always measured;
on accelerators, where a moment is an event, one round of several is.

    cause        until
    caller       a round was given to a worker that had none
    no_work      what the computation takes was on the host: the stage before had made it
    activations  it was on the device
    weights      the stage's weights were on the device
    optimizer    the optimizer's thread had given weights back
    gradients    those of the worker's job before last were home
    overhead     the worker's thread was ready: Python, and on the CPU copies

Invariant: busy and idle seconds together are the time from the first measured moment to the last one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

from roundpipe.core.schedule import Job
from roundpipe.reports.timeline import WAIT_CAUSES, WAIT_NAMES, WaitCause
from roundpipe.runtime.device.backend import Backend, Lane, Moment
from roundpipe.runtime.profiling.recorder import Recorder, waiting

MEASURED_EACH = 8
"""On accelerators one round of so many is measured, the first two too."""


class _Computation(NamedTuple):
    before: Moment | None
    marks: list[tuple[str, Moment]]
    began: Moment
    ended: Moment


class _Transfer(NamedTuple):
    lane: Lane
    num_bytes: int
    began: Moment
    ended: Moment


class Meter:
    """One worker's.

    Args:
        backend: its device.
        device: its name in timelines.
    """

    def __init__(self, backend: Backend, device: str) -> None:
        self.backend = backend
        self.device = device
        self.recorder: Recorder | None = None
        """While a timeline is recorded."""
        self._each = 1 if backend.device.type == "cpu" else MEASURED_EACH
        self._is_on = False
        self._num_rounds = 0
        self._at: tuple[Job, int | None] | None = None
        self._before: Moment | None = None
        """The end of the computation before."""
        self._marks: list[tuple[str, Moment]] = []
        self._unread: deque[_Computation | _Transfer] = deque()
        self._lock = threading.Lock()
        self._busy_s = 0.0
        self._idle_s: dict[str, float] = dict.fromkeys(WAIT_CAUSES, 0.0)
        self._link_s = [0.0] * len(Lane)
        self._link_bytes = [0] * len(Lane)

    # What the worker says

    def begin_round(self, was_idle: bool) -> None:
        """A round begins here; ``was_idle``: the worker had none before."""
        is_due = self._num_rounds < 2 or self._num_rounds % self._each == 0
        was_on, self._is_on = self._is_on, self.recorder is not None or is_due
        self._num_rounds += 1
        if not was_on:
            self._marks.clear()
            self._before = self.backend.moment() if self._is_on else None
        elif was_idle:
            self.until("caller")

    def abandon(self) -> None:
        """The round was cancelled."""
        self._marks.clear()
        self._before = None

    def at(self, job: Job, microbatch: int | None) -> None:
        """What comes next is about this."""
        self._at = job, microbatch

    def until(self, cause: WaitCause, moment: Moment | None = None) -> None:
        """This kept the next computation from beginning, until now or until a moment."""
        if self._is_on:
            self._marks.append((cause, self.backend.moment() if moment is None else moment))

    def computing(self, part: str, layers: tuple[int, ...]) -> _Computing:
        """Around a computation of consecutive layers."""
        return _Computing(self, part, layers)

    def copying(self, lane: Lane, what: str) -> _Copying:
        """Around copies of values on a lane."""
        return _Copying(self, lane, what)

    def moved(self, lane: Lane, what: str, num_bytes: int, began: Moment, ended: Moment) -> None:
        """Copies on a lane that were given to it between two moments of it."""
        if not num_bytes:
            return
        if self._is_on and self._num_rounds > 1:  # in the first round pinned memory is allocated between copies
            self._unread.append(_Transfer(lane, num_bytes, began, ended))
        if self.recorder is not None:
            name, args = self._described(f"{what} ", {"bytes": num_bytes})
            self.recorder.add(self.device, str(lane), name, began, ended, args)

    def _described(self, what: str, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if self._at is None:
            return what.strip(), args
        job, microbatch = self._at
        known = {"layers": [job.start, job.stop], "job": job.index}
        if microbatch is None:
            return f"{what}{job}", {**known, **args}
        return f"{what}{job} m{microbatch}", {**known, "microbatch": microbatch, **args}

    def _computed(self, part: str, layers: tuple[int, ...], began: Moment) -> None:
        ended = self.backend.moment()
        marks, self._marks = self._marks, []
        self._unread.append(_Computation(self._before, marks, began, ended))
        recorder = self.recorder
        if recorder is not None:
            name, args = self._described("", {"part": part, "layers": [layers[0], layers[-1] + 1]})
            name += " recompute" if part == "recompute" else ""
            recorder.add(self.device, "compute", name, began, ended, args)
            if self._before is not None:
                recorder.add_gap(self.device, self._before, marks, began, "overhead", WAIT_NAMES)
        self._before = ended
        self._read()

    def _read(self) -> None:
        """Take in the moments that are done."""
        with self._lock:
            while self._unread and self._unread[0].ended.is_done():
                one = self._unread.popleft()
                seconds = one.ended.seconds_since(one.began)
                if isinstance(one, _Transfer):
                    self._link_s[one.lane] += seconds
                    self._link_bytes[one.lane] += one.num_bytes
                    continue
                self._busy_s += seconds
                if one.before is None:
                    continue
                before = one.before
                marks = ((cause, moment.seconds_since(before)) for cause, moment in one.marks)
                for cause, start_s, end_s in waiting(marks, one.began.seconds_since(before), "overhead"):
                    self._idle_s[cause] += end_s - start_s

    # What it found

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
    """By lane; of all rounds."""
    link: tuple[tuple[int, float], ...]
    """By lane, bytes and seconds of the copies of weights and gradients that were measured."""

    def since(self, earlier: MeterReading) -> MeterReading:
        """What came after an earlier reading."""
        return MeterReading(
            self.busy_s - earlier.busy_s,
            {cause: seconds - earlier.idle_s[cause] for cause, seconds in self.idle_s.items()},
            tuple(now - then for now, then in zip(self.moved_bytes, earlier.moved_bytes, strict=True)),
            tuple((a - c, b - d) for (a, b), (c, d) in zip(self.link, earlier.link, strict=True)),
        )


def _bytes_per_s(readings: Sequence[MeterReading], lane: Lane) -> float:
    """How fast whole stages moved, over all workers; infinity before any was measured."""
    num_bytes, seconds = (sum(one.link[lane][position] for one in readings) for position in (0, 1))
    return num_bytes / seconds if num_bytes and seconds > 0 else inf


def link_speeds(readings: Sequence[MeterReading]) -> tuple[float, float]:
    """Bytes per second up and down, of weights and gradients."""
    return _bytes_per_s(readings, Lane.WEIGHTS), _bytes_per_s(readings, Lane.GRADIENTS)


class _Computing:
    """A class, since every task opens some."""

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
        if meter.recorder is not None:
            name, args = meter._described(f"{self._what} ", {"bytes": num_bytes})
            meter.recorder.add(meter.device, str(lane), name, began, ended, args)
