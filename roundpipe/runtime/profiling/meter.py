"""Where workers' time goes: seconds of computing, and of waiting by cause (`Meter`), and what ran when (`Recorder`).

Around each computation the worker takes moments on its streams: when the one before ended, until when it waited for
what, when this one began and ended. They are read later, when they are done; nothing is waited for. A rotation on the
CPU is always measured; on accelerators, where a moment is an event, one step of several is, and the first after each
report. For a timeline, moments are
placed on the host's clock by one moment taken when recording begins.

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

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from roundpipe.core.contexts import contextmanager
from roundpipe.core.schedule import Job
from roundpipe.reports.timeline import WAIT_CAUSES, WAIT_NAMES, Span, WaitCause
from roundpipe.runtime.device.backend import Backend, Lane, Moment

MEASURED_EACH = 8
"""On accelerators one step of so many is measured, the first two too."""


class Gap(NamedTuple):
    """The time between two computations of a device, with causes that kept the second one, each until a moment."""

    device: str
    before: Moment
    marks: Sequence[tuple[str, Moment]]
    start: Moment

    def waits(self) -> Iterator[tuple[str, float, float]]:
        """Causes with the start and end of their pieces, in seconds since the first computation.

        A cause begins where the one before ends; what none covers is overhead.
        """
        start_s = self.start.seconds_since(self.before)
        since_s = 0.0
        for cause, moment in (*self.marks, ("overhead", self.start)):
            until_s = min(moment.seconds_since(self.before), start_s)
            if until_s > since_s:
                yield cause, since_s, until_s
                since_s = until_s


class _Measured(NamedTuple):
    lane: Lane
    began: Moment
    ended: Moment
    num_bytes: int = 0
    gap: Gap | None = None
    counted: list[float] | None = None
    """Where its overhead is counted; None: the first of a step."""


class Meter:
    """Measures one worker, which calls it around its work; ``device`` is its name in timelines."""

    def __init__(self, backend: Backend, device: str) -> None:
        self.backend = backend
        self.device = device
        self.recorder: Recorder | None = None
        self._each = 1 if backend.device.type == "cpu" else MEASURED_EACH
        self._is_on = False
        self._num_steps = 0
        self._is_asked = False
        self._at: tuple[Job, int | None] | None = None
        """What the worker is at: a job, and a microbatch unless all are meant."""
        self._visited: Job | None = None
        """Whose computation was the latest in this step."""
        self._before: Moment | None = None
        self._computing: _Timed | None = None
        """The computation that is under way."""
        self._marks: list[tuple[str, Moment]] = []
        self._unread: deque[_Measured] = deque()
        self._lock = threading.Lock()
        self._idle_s: dict[str, float] = dict.fromkeys(WAIT_CAUSES, 0.0)
        self._visits, self._runs = [0.0, 0.0], [0.0, 0.0]
        """Of the first computation of visits, and of the others: how many, and their overhead."""
        self._lane_s = [0.0] * len(Lane)
        self._lane_bytes = [0] * len(Lane)

    def begin_step(self, was_idle: bool) -> None:
        """A step begins; ``was_idle``: the worker had none before."""
        is_due = self._num_steps < 2 or self._num_steps % self._each == 0 or self._is_asked
        self._is_asked = False
        self._visited = None
        was_on, self._is_on = self._is_on, self.recorder is not None or is_due
        self._num_steps += 1
        if not was_on:
            self._marks.clear()
            self._before = self.backend.moment() if self._is_on else None
        elif was_idle:
            self.until("caller")

    def measure_next(self) -> None:
        """Measure the next step whether or not it is one of several; from any thread."""
        self._is_asked = True

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

    def computing(self, part: str, layers: tuple[int, ...]) -> _Timed:
        """A context around a computation of consecutive layers."""
        return _Timed(self, Lane.COMPUTE, part, layers)

    def copying(self, lane: Lane, what: str) -> _Timed:
        """A context around copies of values on a lane.

        The computation waits until what is uploaded was on the host, then for the copy.
        """
        return _Timed(self, lane, what)

    def copying_ahead(self, what: str, job: Job, microbatch: int) -> _Timed:
        """A context around uploads for a later run; its moments are for `arrived`, when that run takes them."""
        return _Timed(self, Lane.UPLOAD, what, ahead=(job, microbatch))

    def arrived(self, began: Moment, ended: Moment) -> None:
        """The next computation takes what came up ahead: it waits until that was on the host, then for the copy."""
        self.until("overhead")
        self.until("no_work", began)
        self.until("activations", ended)

    def moved(self, lane: Lane, what: str, num_bytes: int, began: Moment, ended: Moment, job: Job, **args: Any) -> None:
        """Note the copies for a job on a lane between two of its moments; with what is known of them beside.

        From any thread.
        """
        if not num_bytes:
            return
        if self._is_on and self._num_steps > 1:  # in the first step pinned memory is allocated between copies
            self._unread.append(_Measured(lane, began, ended, num_bytes))
        self._record(lane, f"{what} {{}}", began, ended, (job, None), bytes=num_bytes, **args)

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Around waits within a computation, if one is under way: what comes behind them counts as the next one."""
        computing = self._computing
        if computing is not None:
            computing.end()
        yield
        if computing is not None:
            computing.piece += 1
            computing.begin()

    def _record(
        self, lane: Lane, name: str, began: Moment, ended: Moment, at: tuple[Job, int | None] | None = None, **args: Any
    ) -> None:
        """Show work in the timeline, if one is recorded; ``{}`` in the name stands for the job it is part of.

        That is what the worker is at, if nothing else is given.
        """
        if (recorder := self.recorder) is None:
            return
        title = ""
        if (at := at or self._at) is not None:
            job, microbatch = at
            title = f"{job}" if microbatch is None else f"{job} m{microbatch}"
            known = {} if microbatch is None else {"microbatch": microbatch}
            args = {"layers": [job.start, job.stop], "job": job.index, **known, **args}
        recorder.add(DeviceWork(self.device, str(lane), name.format(title).strip(), began, ended, args))

    def _computed(self, part: str, layers: tuple[int, ...], began: Moment, piece: int) -> None:
        ended = self.backend.moment()
        marks, self._marks = self._marks, []
        gap = None if self._before is None else Gap(self.device, self._before, marks, began)
        job, before = None if self._at is None else self._at[0], self._visited
        self._visited = job
        counted = None if before is None or job is None else self._runs if job is before else self._visits
        self._unread.append(_Measured(Lane.COMPUTE, began, ended, gap=gap, counted=counted))
        name = "{} recompute" if part == "recompute" else "{}"
        pieces: dict[str, Any] = {"piece": piece} if piece else {}
        self._record(Lane.COMPUTE, name, began, ended, part=part, layers=[layers[0], layers[-1] + 1], **pieces)
        if self.recorder is not None and gap is not None:
            self.recorder.add(gap)
        self._before = ended
        self._read()

    def _read(self) -> None:
        """Take in the moments that are done."""
        with self._lock:
            while self._unread and self._unread[0].ended.is_done():
                work = self._unread.popleft()
                self._lane_s[work.lane] += work.ended.seconds_since(work.began)
                self._lane_bytes[work.lane] += work.num_bytes
                before_s = self._idle_s["overhead"]
                for cause, start_s, end_s in () if work.gap is None else work.gap.waits():
                    self._idle_s[cause] += end_s - start_s
                if work.counted is not None and work.gap is not None:
                    work.counted[0] += 1
                    work.counted[1] += self._idle_s["overhead"] - before_s

    def read(self) -> MeterReading:
        """What is known so far; from any thread, waits for nothing."""
        self._read()
        with self._lock:
            moved = tuple(self.backend.moved_bytes)
            link = tuple(zip(self._lane_bytes, self._lane_s, strict=True))
            visits, runs = (int(self._visits[0]), self._visits[1]), (int(self._runs[0]), self._runs[1])
            return MeterReading(self._lane_s[Lane.COMPUTE], dict(self._idle_s), moved, link, visits, runs)


class MeterReading(NamedTuple):
    """A worker's seconds and bytes since it began."""

    busy_s: float
    idle_s: dict[str, float]
    """By `WaitCause`."""
    moved_bytes: tuple[int, ...]
    """By lane; of all steps."""
    link: tuple[tuple[int, float], ...]
    """By lane, bytes and seconds of the copies that were measured."""
    visits: tuple[int, float] = (0, 0.0)
    """Visits of stages that another one of the same step came before, and seconds of overhead before they computed."""
    runs: tuple[int, float] = (0, 0.0)
    """The same of the computations within visits, behind their first ones."""

    def since(self, earlier: MeterReading) -> MeterReading:
        return MeterReading(
            self.busy_s - earlier.busy_s,
            {cause: seconds - earlier.idle_s[cause] for cause, seconds in self.idle_s.items()},
            tuple(now - then for now, then in zip(self.moved_bytes, earlier.moved_bytes, strict=True)),
            tuple((a - c, b - d) for (a, b), (c, d) in zip(self.link, earlier.link, strict=True)),
            (self.visits[0] - earlier.visits[0], self.visits[1] - earlier.visits[1]),
            (self.runs[0] - earlier.runs[0], self.runs[1] - earlier.runs[1]),
        )


def link_speeds(readings: Sequence[MeterReading]) -> tuple[float, float]:
    """Bytes per second up and down, over all workers; infinity before weights or gradients were measured.

    A link is as fast as the faster of its lanes: small copies, such as an adapter's gradients, take longer to start
    than to copy, and tell nothing of how long values of gigabytes take.
    """

    def bytes_per_s(lane: Lane) -> float:
        num_bytes, seconds = (sum(reading.link[lane][position] for reading in readings) for position in (0, 1))
        return num_bytes / seconds if num_bytes and seconds > 0 else 0.0

    def faster(whole: Lane, values: Lane) -> float:
        return max(bytes_per_s(whole), bytes_per_s(values)) if bytes_per_s(whole) else inf

    return faster(Lane.WEIGHTS, Lane.UPLOAD), faster(Lane.GRADIENTS, Lane.DOWNLOAD)


def visit_seconds(readings: Sequence[MeterReading]) -> float:
    """What beginning a visit takes a worker beyond what any computation does; 0 before any was measured."""

    def mean_s(name: str) -> float:
        number, seconds = (sum(getattr(reading, name)[position] for reading in readings) for position in (0, 1))
        return seconds / number if number else 0.0

    return max(mean_s("visits") - mean_s("runs"), 0.0)


class _Timed:
    """Around work on a lane; a class, since every task opens some."""

    __slots__ = ("_ahead", "_began", "_lane", "_layers", "_meter", "_moved_bytes", "_what", "moments", "piece")

    def __init__(
        self,
        meter: Meter,
        lane: Lane,
        what: str,
        layers: tuple[int, ...] = (),
        ahead: tuple[Job, int] | None = None,
    ) -> None:
        self._meter, self._lane, self._what, self._layers, self._ahead = meter, lane, what, layers, ahead
        self._began: Moment | None = None
        self._moved_bytes = 0
        self.piece = 0
        """How many interruptions there were."""
        self.moments: tuple[Moment, Moment] | None = None
        """When copies ahead began and ended, if that is measured."""

    def __enter__(self) -> _Timed:
        if self._lane is Lane.COMPUTE:
            self._meter._computing = self
        self.begin()
        return self

    def begin(self) -> None:
        meter, lane = self._meter, self._lane
        if meter._is_on:
            self._began = meter.backend.moment(lane)
            self._moved_bytes = meter.backend.moved_bytes[lane]
            if lane is Lane.UPLOAD and self._ahead is None:
                meter.until("overhead")  # until then the thread had not asked
                meter.until("no_work", self._began)

    def __exit__(self, *exception: object) -> None:
        if self._lane is Lane.COMPUTE:
            self._meter._computing = None
        self.end()

    def end(self) -> None:
        # given up here, not with the frame: torch's CUDA sanitizer can't have an event destroyed while an exception
        # passes, and takes the process with it
        began, self._began = self._began, None
        meter, lane = self._meter, self._lane
        if began is None:
            return
        if lane is Lane.COMPUTE:
            meter._computed(self._what, self._layers, began, self.piece)
        elif num_bytes := meter.backend.moved_bytes[lane] - self._moved_bytes:
            ended, at = meter.backend.moment(lane), meter._at
            if self._ahead is not None:
                self.moments, meter._at = (began, ended), self._ahead
            elif lane is Lane.UPLOAD:
                meter.until("activations", ended)
            if meter._num_steps > 1:
                meter._unread.append(_Measured(lane, began, ended, num_bytes))
            meter._record(lane, f"{self._what} {{}}", began, ended, bytes=num_bytes)
            meter._at = at


class DeviceWork(NamedTuple):
    """Work on a stream of a device; see `Span`."""

    device: str
    lane: str
    name: str
    began: Moment
    ended: Moment
    args: Mapping[str, Any]


class Recorder:
    """Collects what several threads and devices do, until `finish`; ``backends`` are by device name."""

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        self._anchors = {name: backend.anchor() for name, backend in backends.items()}
        self._items: list[DeviceWork | Gap] = []
        self._host_spans: list[Span] = []
        self._start_s = time.perf_counter()

    def add(self, item: DeviceWork | Gap) -> None:
        self._items.append(item)

    def add_host(
        self, device: str, lane: str, name: str, start_s: float, end_s: float, args: Mapping[str, Any]
    ) -> None:
        """Take in work of a thread of the host, timed by ``time.perf_counter``."""
        start_s = max(start_s - self._start_s, 0.0)
        self._host_spans.append(Span(device, lane, name, start_s, max(end_s - self._start_s, start_s), args))

    def finish(self) -> list[Span]:
        """All spans, once everything recorded is done; what began before recording is shown from its start on."""
        spans = [*self._host_spans, *(span for item in self._items for span in self._spans(item))]
        return [replace(span, start_s=max(span.start_s, 0.0)) for span in spans if span.end_s > 0]

    def _spans(self, item: DeviceWork | Gap) -> Iterator[Span]:
        if isinstance(item, Gap):
            if item.start.is_done():
                offset_s = self._time_s(item.device, item.before)
                for cause, pieces in itertools.groupby(item.waits(), key=lambda piece: piece[0]):
                    times_s = [offset_s + seconds for _, *span in pieces for seconds in span]
                    yield Span(item.device, "waits", WAIT_NAMES[cause], times_s[0], times_s[-1], {"cause": cause})
        elif item.began.is_done() and item.ended.is_done():
            start_s, end_s = self._time_s(item.device, item.began), self._time_s(item.device, item.ended)
            yield Span(item.device, item.lane, item.name, start_s, max(end_s, start_s), item.args)

    def _time_s(self, device: str, moment: Moment) -> float:
        anchor, host_s = self._anchors[device]
        return host_s - self._start_s + moment.seconds_since(anchor)
