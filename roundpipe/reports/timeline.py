"""What ran when: spans of work on the lanes of devices, recorded or simulated, as data, as a trace and as a picture.

Invariant: spans of one lane of one device don't overlap.
Source: the JSON is the Trace Event Format that chrome://tracing and ui.perfetto.dev read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from roundpipe.core.checks import check_type, is_number, items_of, path_of
from roundpipe.core.errors import ConfigError, shown
from roundpipe.reports.plotting import draw, matplotlib_parts

FORMATS = (".json", ".png")
OPTIMIZER = "optimizer"
"""The optimizer's thread, as a device."""
_OF_DEVICES = ("compute", "waits", "upload", "weights", "download", "gradients")
_OF_HOST = ("home", "converted", "update", "hand-over", "averaging", "other ranks")
LANES = (*_OF_DEVICES, *_OF_HOST)
"""In the order in which they are shown."""

WaitCause = Literal["caller", "no_work", "activations", "weights", "optimizer", "gradients", "overhead"]
WAIT_CAUSES: tuple[WaitCause, ...] = get_args(WaitCause)
WAIT_NAMES = {
    "caller": "wait for a call",
    "no_work": "wait for the stage before",
    "activations": "wait for values",
    "weights": "wait for weights",
    "optimizer": "wait for the optimizer",
    "gradients": "wait for gradients to go home",
    "overhead": "overhead",
}
"""The names of spans on the lane ``waits``, by cause."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on one lane of one device."""

    device: str
    """Such as ``cuda:0 (worker 0)``, or ``optimizer``."""
    lane: str
    """``compute``; copies: ``upload``, ``download``, ``weights``, ``gradients``; ``waits``; ``home``: gradients are
    added to the host's, and ``converted`` for the optimizer; of this: ``update``, ``hand-over``, ``waits``; with other
    ranks: ``averaging``, and ``other ranks``, which it waits for."""
    name: str
    """Such as ``U[22:24] m3``, ``weights of B1[3:5]``, ``wait for weights``, ``optimizer step 4``."""
    start_s: float
    """Since recording began."""
    end_s: float
    """Since recording began."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """What is known beside: ``layers`` (first, behind the last), ``microbatch``, ``bytes``, ``job``, ``part``.

    ``piece``, from 1 on, of what was interrupted: a computation that waited for weights of its layers, and these.
    """

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


class Timeline:
    """Spans of work, by device and lane.

    Args:
        spans: in any order; while a model is recorded there are none yet.
        name: of the model.
    """

    def __init__(self, spans: Iterable[Span] = (), name: str = "") -> None:
        check_type("name", name, str, "a string")
        self.name = name
        self.spans: list[Span] = []
        """In the order of their starts; empty until recording has ended."""
        self.fill(spans)

    def fill(self, spans: Iterable[Span]) -> None:
        """Takes the place of all spans that were there."""
        items = items_of("spans", spans, "a list of Span")
        for item in items:
            check_type("an item of spans", item, Span, "a Span")
        self.spans = sorted(items, key=lambda span: (span.start_s, span.end_s))

    @property
    def devices(self) -> list[str]:
        """The devices that have spans, the optimizer's thread last."""
        return sorted({span.device for span in self.spans}, key=lambda name: (name == OPTIMIZER, _natural(name)))

    def lanes(self, device: str) -> list[str]:
        """The lanes of a device that have spans, in the order in which they are shown."""
        check_type("device", device, str, "the name of one of the devices")
        lanes = {span.lane for span in self.spans if span.device == device}
        return sorted(lanes, key=lambda lane: (LANES.index(lane) if lane in LANES else len(LANES), lane))

    def on(self, device: str, lane: str) -> list[Span]:
        """The spans of one lane of a device, in the order of their starts."""
        check_type("device", device, str, "the name of one of the devices")
        check_type("lane", lane, str, "the name of one of the device's lanes")
        return [span for span in self.spans if span.device == device and span.lane == lane]

    def between(self, start_s: float, end_s: float) -> Timeline:
        """The spans that lie in a window, at least in part, with times from its start on."""
        for name, given in (("start_s", start_s), ("end_s", end_s)):
            if not is_number(given):
                raise ConfigError(f"{name}={shown(given)}; give seconds")
        moved = (
            replace(span, start_s=span.start_s - start_s, end_s=span.end_s - start_s)
            for span in self.spans
            if span.end_s > start_s and span.start_s < end_s
        )
        return Timeline(moved, self.name)

    def chrome_trace(self) -> dict[str, Any]:
        """The spans in the Trace Event Format: a process per device, a thread per lane, times in microseconds."""
        events: list[dict[str, Any]] = []
        numbers: dict[tuple[str, str], tuple[int, int]] = {}
        for pid, device in enumerate(self.devices, 1):
            events += _named("process", pid, 0, device, pid)
            for tid, lane in enumerate(self.lanes(device), 1):
                numbers[device, lane] = pid, tid
                events += _named("thread", pid, tid, lane, tid)
        for span in self.spans:
            pid, tid = numbers[span.device, span.lane]
            times = {"ts": round(span.start_s * 1e6, 3), "dur": round(span.seconds * 1e6, 3)}
            place = {"pid": pid, "tid": tid, "cat": span.lane}
            events.append({"ph": "X", "name": span.name, **times, **place, "args": dict(span.args)})
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"model": self.name}}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the spans to a file.

        Args:
            path: ``.json`` for ui.perfetto.dev and chrome://tracing, ``.png`` for a picture (with matplotlib).

        Raises:
            ConfigError: another ending, no such folder, matplotlib is missing, or there is nothing to draw.
        """
        target = check_path(path)
        try:
            if target.suffix.lower() == ".json":
                target.write_text(json.dumps(self.chrome_trace()) + "\n", encoding="utf-8")
                return
            if not self.spans:
                raise ConfigError(f"{str(path)!r}: there are no spans to draw; nothing ran while it was recorded")
            rows = [
                (device, lane, [(span.name, span.start_s, span.end_s) for span in self.on(device, lane)])
                for device in self.devices
                for lane in self.lanes(device)
            ]
            draw(target, rows, self.name or "Timeline")
        except OSError as error:
            raise ConfigError(f"{str(path)!r} can't be written: {error.strerror or error}") from error

    def __repr__(self) -> str:
        if not self.spans:
            return "Timeline of nothing: recording has not ended, or nothing ran meanwhile"
        seconds = max(span.end_s for span in self.spans) - self.spans[0].start_s
        return f"Timeline of {len(self.spans)} spans on {', '.join(self.devices)} in {seconds:.3g} s"


def check_path(path: str | os.PathLike[str]) -> Path:
    """Raise `ConfigError` for a file that `Timeline.save` could not write; before anything is recorded."""
    target = path_of("path", path, f"the path of a file, {' or '.join(FORMATS)}")
    if target.suffix.lower() not in FORMATS:
        raise ConfigError(f"a timeline is written as {' or '.join(FORMATS)}, not to the path {str(path)!r}")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"path={str(path)!r}: there is no folder {target.absolute().parent}")
    if target.suffix.lower() == ".png":
        matplotlib_parts()
    return target


def _named(what: str, pid: int, tid: int, name: str, position: int) -> list[dict[str, Any]]:
    place = {"ph": "M", "pid": pid, "tid": tid}
    sort_index = {"name": f"{what}_sort_index", **place, "args": {"sort_index": position}}
    return [{"name": f"{what}_name", **place, "args": {"name": name}}, sort_index]


def _natural(name: str) -> list[tuple[int, str]]:
    """A key by which ``worker 10`` comes behind ``worker 9``."""
    words = "".join(letter if letter.isdigit() else f" {letter} " for letter in name).split()
    return [(int(word), "") if word.isdigit() else (-1, word) for word in words]
