"""Records what runs when: moments on the devices' streams and times of host threads; nothing is waited for.

A device's moments are placed on the host's clock by one moment taken when recording begins.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from roundpipe.reports.timeline import WAIT_NAMES, Span
from roundpipe.runtime.device.backend import Backend, Moment


def waits_by_cause(marks: Iterable[tuple[str, float]], start_s: float) -> Iterator[tuple[str, float, float]]:
    """Deal the time between two computations out to causes, each with the start and end of its piece.

    Args:
        marks: causes in the order in which they were met, each with its end, in seconds since the first computation.
        start_s: of the second computation; what no mark covers is overhead.
    """
    since_s = 0.0
    for cause, until_s in (*marks, ("overhead", start_s)):
        until_s = min(until_s, start_s)
        if until_s > since_s:
            yield cause, since_s, until_s
            since_s = until_s


class DeviceWork(NamedTuple):
    """Work on a stream of a device; see `Span`."""

    device: str
    lane: str
    name: str
    began: Moment
    ended: Moment
    args: Mapping[str, Any]


class Gap(NamedTuple):
    """The time between two computations of a device, with causes that kept the second one, each until a moment."""

    device: str
    before: Moment
    marks: Sequence[tuple[str, Moment]]
    start: Moment

    def waits(self) -> Iterator[tuple[str, float, float]]:
        """See `waits_by_cause`, in seconds since the first computation."""
        marks = ((cause, moment.seconds_since(self.before)) for cause, moment in self.marks)
        return waits_by_cause(marks, self.start.seconds_since(self.before))


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


class HostLog:
    """A host thread's seconds by lane, and its spans, shown under ``device``, while a timeline is recorded."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.recorder: Recorder | None = None
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.last_s = 0.0
        """When the latest work was done, by ``time.perf_counter``."""

    @contextlib.contextmanager
    def doing(self, lane: str, name: str, **args: Any) -> Iterator[None]:
        """Time what is done inside."""
        recorder, start_s = self.recorder, time.perf_counter()
        try:
            yield
        finally:
            end_s = time.perf_counter()
            self.seconds[lane] += end_s - start_s
            self.last_s = end_s
            if recorder is not None:
                recorder.add_host(self.device, lane, name, start_s, end_s, args)
