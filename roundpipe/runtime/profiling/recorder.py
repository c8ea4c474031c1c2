"""Records what runs when: moments on the devices' streams and times of host threads; nothing is waited for.

A device's moments are placed on the host's clock by one moment taken when recording begins.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from roundpipe.reports.timeline import Span
from roundpipe.runtime.device.backend import Backend, Moment

Mark = tuple[str, Moment]
"""A cause, and until when it kept a computation from beginning."""


Part = tuple[str, float, float]
"""A cause, and the piece of the time between two computations that it took."""


def waiting(marks: Iterable[tuple[str, float]], start_s: float, rest: str) -> Iterator[Part]:
    """Deals the time from 0, where a computation ended, to the start of the next one out to causes.

    Args:
        marks: causes, each with the time until which it held; in the order in which they were met.
        start_s: of the next computation.
        rest: the cause of what no mark covers.
    """
    since_s = 0.0
    for cause, until_s in marks:
        if until_s > start_s:
            until_s = start_s
        if until_s > since_s:
            yield cause, since_s, until_s
            since_s = until_s
    if start_s > since_s:
        yield rest, since_s, start_s


def _joined(parts: Iterable[Part]) -> list[Part]:
    """Parts with neighbours of one cause made one."""
    found: list[Part] = []
    for cause, start_s, end_s in parts:
        if found and found[-1][0] == cause:
            start_s = found.pop()[1]
        found.append((cause, start_s, end_s))
    return found


class _Entry(NamedTuple):
    device: str
    lane: str
    name: str
    began: Moment
    ended: Moment
    args: Mapping[str, Any]


class _Gap(NamedTuple):
    device: str
    before: Moment
    marks: Sequence[Mark]
    start: Moment
    rest: str
    names: Mapping[str, str]


class Recorder:
    """Collects what several threads and devices do, until `finish`.

    Args:
        backends: by device name; their moments are placed on the host's clock.
    """

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        self._anchors = {name: backend.anchor() for name, backend in backends.items()}
        self._entries: list[_Entry] = []
        self._gaps: list[_Gap] = []
        self._of_host: list[Span] = []
        self._start_s = time.perf_counter()

    def add(self, device: str, lane: str, name: str, began: Moment, ended: Moment, args: Mapping[str, Any]) -> None:
        """Work on a stream of a device."""
        self._entries.append(_Entry(device, lane, name, began, ended, args))

    def add_gap(
        self,
        device: str,
        before: Moment,
        marks: Sequence[Mark],
        start: Moment,
        rest: str,
        names: Mapping[str, str],
    ) -> None:
        """The time between two computations, with what kept the second one from beginning."""
        self._gaps.append(_Gap(device, before, marks, start, rest, names))

    def add_host(
        self, device: str, lane: str, name: str, start_s: float, end_s: float, args: Mapping[str, Any]
    ) -> None:
        """Work of a thread of the host, by its clock."""
        start_s = max(start_s - self._start_s, 0.0)
        self._of_host.append(Span(device, lane, name, start_s, max(end_s - self._start_s, start_s), args))

    def finish(self) -> list[Span]:
        """All spans; when everything is done that was recorded."""
        spans = list(self._of_host)
        for entry in self._entries:
            if entry.began.is_done() and entry.ended.is_done():
                start_s, end_s = self._at(entry.device, entry.began), self._at(entry.device, entry.ended)
                spans.append(Span(entry.device, entry.lane, entry.name, start_s, max(end_s, start_s), entry.args))
        for gap in self._gaps:
            if not gap.start.is_done():
                continue
            at_s = self._at(gap.device, gap.before)
            marks = [(cause, moment.seconds_since(gap.before)) for cause, moment in gap.marks]
            for cause, start_s, end_s in _joined(waiting(marks, gap.start.seconds_since(gap.before), gap.rest)):
                args = {"cause": cause}
                spans.append(Span(gap.device, "waits", gap.names[cause], at_s + start_s, at_s + end_s, args))
        return [
            Span(one.device, one.lane, one.name, max(one.start_s, 0.0), one.end_s, one.args)
            for one in spans
            if one.end_s > 0  # what began before is shown from the start on
        ]

    def _at(self, device: str, moment: Moment) -> float:
        anchor, host_s = self._anchors[device]
        return host_s - self._start_s + moment.seconds_since(anchor)


class HostLog:
    """What a thread of the host spends its time on: seconds by lane, and spans while a timeline is recorded.

    Args:
        device: under which its spans are shown.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.recorder: Recorder | None = None
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.last_s = 0.0
        """When the latest of it was done, by ``time.perf_counter``."""

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
