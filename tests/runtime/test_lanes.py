"""What a device does at once, and when it has nothing to do: workers whose lanes have a clock of their own.

The clock is counted, not read: a layer, a copy and the worker's own part of a run take as long as the test says.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ExecutePlan, RoundPipeRunConfig
from roundpipe.runtime.device.backend import Lane
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.engine import pace
from tests.runtime.models import assert_same, gradients, square_loss

COMPUTE_S, HOST_S = 1.0, 0.3
"""Of a layer with one microbatch, on the device and in the worker's thread."""
COPY_S = {Lane.UPLOAD: 0.2, Lane.DOWNLOAD: 0.2, Lane.WEIGHTS: 3.0, Lane.GRADIENTS: 3.0}
LINKED = {
    Lane.UPLOAD: Lane.WEIGHTS,
    Lane.WEIGHTS: Lane.UPLOAD,
    Lane.DOWNLOAD: Lane.GRADIENTS,
    Lane.GRADIENTS: Lane.DOWNLOAD,
}
NUM_LAYERS, NUM_MICROBATCHES, WIDTH = 6, 4, 4


class Span(NamedTuple):
    start_s: float
    stop_s: float


class Clock:
    """When the lanes of the one device are done with what they were given, and what they did."""

    def __init__(self) -> None:
        self.ready_s = dict.fromkeys(Lane, 0.0)
        self.spans: dict[Lane, list[Span]] = defaultdict(list)
        self._thread = threading.local()

    @property
    def host_s(self) -> float:
        """Of the thread that asks: only the worker's gives lanes something to do."""
        return getattr(self._thread, "host_s", 0.0)

    @host_s.setter
    def host_s(self, value: float) -> None:
        self._thread.host_s = value

    def work(self, lane: Lane, seconds: float) -> None:
        """Two lanes share a link, which makes one copy at a time, the one first that could begin first."""
        start_s = max(self.ready_s[lane], self.host_s)
        for span in sorted(self.spans[LINKED[lane]]) if lane in LINKED else ():
            if span.start_s < start_s + seconds and start_s < span.stop_s:
                start_s = span.stop_s
        self.ready_s[lane] = start_s + seconds
        self.spans[lane].append(Span(start_s, start_s + seconds))

    def beside(self, lane: Lane) -> int:
        """Spans of a lane that began, were or ended while a layer ran."""
        runs = self.spans[Lane.COMPUTE]
        return sum(any(a.start_s < b.stop_s and b.start_s < a.stop_s for b in runs) for a in self.spans[lane])


class Event:
    """Work of a lane, done when the clock says so."""

    def __init__(self, clock: Clock, lane: Lane, inner: Any) -> None:
        self._clock, self.done_s, self.inner = clock, max(clock.ready_s[lane], clock.host_s), inner

    def synchronize(self) -> None:
        self._clock.host_s = max(self._clock.host_s, self.done_s)
        self.inner.synchronize()

    def is_done(self) -> bool:
        return self.done_s <= self._clock.host_s


class Timed(torch.autograd.Function):
    """Takes its time on the device, twice as long backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, clock: Clock) -> torch.Tensor:
        ctx.clock = clock
        clock.host_s += HOST_S
        clock.work(Lane.COMPUTE, COMPUTE_S)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.clock.work(Lane.COMPUTE, 2 * COMPUTE_S)
        return gradient, None


class Layer(nn.Linear):
    """A linear one."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(WIDTH, WIDTH)
        self.clocks = [clock]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(Timed.apply(value, self.clocks[0]))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    upload, download = CpuBackend.upload, CpuBackend.download
    record, wait = CpuBackend.record, CpuBackend.wait

    def timed_upload(backend: Any, source: Any, target: Any = None, lane: Lane = Lane.UPLOAD) -> torch.Tensor:
        clock.work(lane, COPY_S[lane])
        return upload(backend, source, target, lane)

    def timed_download(backend: Any, source: Any, lane: Lane = Lane.DOWNLOAD, **options: bool) -> torch.Tensor:
        clock.work(lane, COPY_S[lane])
        return download(backend, source, lane, **options)

    def timed_wait(backend: Any, lane: Lane, event: Event) -> None:
        clock.ready_s[lane] = max(clock.ready_s[lane], event.done_s)
        wait(backend, lane, event.inner)

    monkeypatch.setattr(CpuBackend, "upload", timed_upload)
    monkeypatch.setattr(CpuBackend, "download", timed_download)
    monkeypatch.setattr(CpuBackend, "record", lambda backend, lane: Event(clock, lane, record(backend, lane)))
    monkeypatch.setattr(CpuBackend, "wait", timed_wait)
    monkeypatch.setattr(CpuBackend, "is_own", lambda backend, event: True)
    monkeypatch.setattr(pace.Pace, "has_lanes", True)
    yield clock


def train(clock: Clock, trains: bool) -> None:
    model = nn.Sequential(*(Layer(clock) for _ in range(NUM_LAYERS)))
    singles = [(i, i + 1) for i in range(NUM_LAYERS)]
    plan = ExecutePlan(singles[:-1], singles[-1], singles[:-1][::-1])
    run = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES, execute_plan=plan, residency="off")
    batch = torch.randn(NUM_MICROBATCHES, WIDTH)
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        if trains:
            piped.forward_backward((batch,), loss_fn=square_loss, run_config=run)
        else:
            with torch.no_grad():
                piped(batch, roundpipe_run_config=run)
        piped.synchronize()


@pytest.mark.parametrize("trains", [False, True])
def test_a_device_waits_for_no_weights_but_the_first(clock: Clock, trains: bool) -> None:
    """Those of the next stage come up beside the present one, and the values of all its runs before them.

    They take three quarters of the time that the stage's runs take.
    """
    train(clock, trains)
    runs, weights = clock.spans[Lane.COMPUTE], clock.spans[Lane.WEIGHTS]
    idle_s = runs[-1].stop_s - runs[0].start_s - sum(run.stop_s - run.start_s for run in runs)
    assert clock.beside(Lane.WEIGHTS) == len(weights) - 1 > 0
    assert runs[0].start_s == COPY_S[Lane.WEIGHTS] + COPY_S[Lane.UPLOAD]
    assert idle_s < 1e-9


@pytest.mark.parametrize("num_workers", [2, 3])
def test_workers_beside_their_devices_equal_eager(clock: Clock, num_workers: int) -> None:
    """Weights go behind the first runs of a job where these wait for no other worker, else before them."""
    model = nn.Sequential(*(Layer(clock) for _ in range(NUM_LAYERS)))
    reference = nn.Sequential(*(Layer(Clock()) for _ in range(NUM_LAYERS)))
    reference.load_state_dict(model.state_dict())
    singles = [(i, i + 1) for i in range(NUM_LAYERS)]
    plan = ExecutePlan(singles[:-1], singles[-1], singles[:-1][::-1])
    run = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES, execute_plan=plan, residency="off")
    batch = torch.randn(NUM_MICROBATCHES, WIDTH)
    with roundpipe.RoundPipe(model, devices=["cpu"] * num_workers) as piped:
        for _ in range(3):
            piped.forward_backward((batch,), loss_fn=square_loss, run_config=run)
            square_loss(reference(batch), None).backward()
        piped.synchronize()
    assert_same(gradients(model), gradients(reference), atol=1e-5)
