"""Timelines as data: the trace, the picture, simulated runs, accelerators."""

import json
import time
from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import ConfigError
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import Phase, make_schedule
from roundpipe.planning.machine import HardwareProfile
from roundpipe.planning.simulator import simulate, simulate_timeline, steady, step_alone_s
from roundpipe.reports.timeline import Span, Timeline
from roundpipe.runtime.device.backend import Device, Lane
from roundpipe.runtime.device.cpu import CpuBackend, CpuMoment
from roundpipe.runtime.profiling.meter import DeviceWork, Gap, Recorder
from tests.runtime.cases_timeline import (
    NUM_MICROBATCHES,
    PLAN,
    assert_lanes_do_not_overlap,
    both_rounds,
    computed,
    recorded,
)
from tests.runtime.models import config, square_loss

pytestmark = pytest.mark.timeout(60)


def test_the_trace_has_what_perfetto_needs(tmp_path):
    timeline, _ = recorded()
    timeline.save(tmp_path / "run.json")
    trace = json.loads((tmp_path / "run.json").read_text())
    assert trace["otherData"]["model"] == "net"
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    devices = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(devices.values()) == ["cpu (worker 0)", "cpu (worker 1)", "optimizer"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(timeline.spans)
    for event, span in zip(complete, timeline.spans, strict=True):
        assert devices[event["pid"]] == span.device and names[event["pid"], event["tid"]] == span.lane
        assert event["name"] == span.name and event["args"] == dict(span.args)
        assert event["ts"] == pytest.approx(span.start_s * 1e6, abs=0.01) and event["ts"] >= 0
        assert event["dur"] == pytest.approx(span.seconds * 1e6, abs=0.01) and event["dur"] >= 0
    assert all({"ph", "pid", "tid", "name"} <= event.keys() for event in events)


def test_the_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the extra [plot]")
    timeline, _ = recorded(speed=2e6)
    timeline.save(tmp_path / "run.png")
    data = (tmp_path / "run.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 5000
    with pytest.raises(ConfigError, match="no spans"):
        Timeline().save(tmp_path / "none.png")


def test_devices_and_lanes_are_in_the_order_of_people():
    spans = [Span(f"cpu (worker {n})", lane, "x", 0, 1) for n in (10, 9, 0) for lane in ("weights", "compute", "new")]
    timeline = Timeline([*spans, Span("optimizer", "update", "x", 0, 1)])
    assert timeline.devices == ["cpu (worker 0)", "cpu (worker 9)", "cpu (worker 10)", "optimizer"]
    assert timeline.lanes("cpu (worker 9)") == ["compute", "weights", "new"]


@pytest.mark.parametrize(
    "marks, parts",
    [
        ([], [("overhead", 0, 10)]),
        ([("weights", 4)], [("weights", 0, 4), ("overhead", 4, 10)]),
        ([("weights", -3), ("no_work", 6)], [("no_work", 0, 6), ("overhead", 6, 10)]),
        ([("no_work", 6), ("weights", 4)], [("no_work", 0, 6), ("overhead", 6, 10)]),
        ([("overhead", 2), ("weights", 5), ("weights", 7), ("no_work", 99)],
         [("overhead", 0, 2), ("weights", 2, 5), ("weights", 5, 7), ("no_work", 7, 10)]),
    ],
)  # fmt: skip
def test_time_between_computations_is_dealt_out(marks, parts):
    gap = Gap("cpu", CpuMoment(0), [(cause, CpuMoment(until)) for cause, until in marks], CpuMoment(10))
    assert list(gap.waits()) == parts


def test_moments_of_a_link_are_in_its_time():
    one = CpuBackend(Device("cpu", upload_bytes_per_s=1000), "here")
    began = one.moment(Lane.WEIGHTS)
    one.upload(torch.zeros(25), lane=Lane.WEIGHTS)
    ended = one.moment(Lane.WEIGHTS)
    assert 0.1 <= ended.seconds_since(began) < 0.2
    later = one.moment(Lane.WEIGHTS)
    assert later.at_s == ended.at_s  # a further copy begins when the link is free
    assert one.moved_bytes[Lane.WEIGHTS] == 100 and one.moved_bytes[Lane.UPLOAD] == 0


def test_what_began_before_the_recording_is_shown_from_its_start_on():
    one = CpuBackend(Device("cpu"), "here")
    began = one.moment()
    gone = one.moment()
    time.sleep(0.002)
    recorder = Recorder({"cpu": one})
    recorder.add(DeviceWork("cpu", "compute", "before", began, gone, {}))
    recorder.add(DeviceWork("cpu", "compute", "across", began, one.moment(), {}))
    (span,) = recorder.finish()
    assert span.name == "across" and span.start_s == 0


COST = LayerCost(
    forward_s=0.01,
    backward_s=0.02,
    num_parameters=1000,
    weight_bytes=4000,
    gradient_bytes=4000,
    activation_bytes=100,
    workspace_bytes=10,
    carry_bytes=500,
)


@pytest.mark.parametrize("link", [float("inf"), 1e6, 2e5])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_simulated_run_has_the_same_spans(workers, link):
    schedule = make_schedule(PLAN, workers, NUM_MICROBATCHES)
    profile = HardwareProfile(link, link, optimizer_bytes_per_s=1e6, optimizer_bytes_per_parameter=10)
    found, timeline = simulate_timeline(schedule, [COST] * 6, profile)
    assert found == simulate(schedule, [COST] * 6, profile)
    assert_lanes_do_not_overlap(timeline)
    first = [span for span in computed(timeline) if span.args["job"] < schedule.next_job]
    names = Counter(span.name for span in first)
    for job in schedule.jobs:
        for microbatch in range(NUM_MICROBATCHES):
            begins = job in schedule.jobs[:workers] and microbatch == schedule.microbatches(job)[0]
            pieces = len(job.layers) if begins and job.phase is not Phase.BACKWARD else 1  # weights come layer by layer
            assert names.pop(f"{job} m{microbatch}") == pieces
            if job.phase is Phase.BACKWARD:
                assert names.pop(f"{job} m{microbatch} recompute") == 1
    assert not names
    for span in timeline.spans:
        if span.lane == "weights":
            assert span.seconds >= span.args["bytes"] / link * (1 - 1e-9)  # values interrupt it
    assert {span.name for span in timeline.on("optimizer", "update")} >= {"optimizer step 1", "optimizer step 2"}
    assert step_alone_s(timeline, schedule) >= max(span.end_s for span in first)


def test_steady_rounds_take_what_the_simulator_says():
    schedule = make_schedule(PLAN, 3, NUM_MICROBATCHES)
    found, timeline = simulate_timeline(schedule, [COST] * 6)
    shown = steady(timeline, schedule, 2)
    jobs = {span.args["job"] for span in computed(shown)}
    starts = [min(s.start_s for s in computed(shown) if s.args["job"] == job) for job in sorted(jobs)]
    length = len(schedule.jobs)
    assert starts[length + 2] - starts[2] == pytest.approx(found.seconds_per_step, rel=1e-6)
    assert min(starts) <= 1e-12


cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]


def wide(devices, width=512, **settings):
    """A pipe whose computations take longer than giving them to the device does."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6)))
    return roundpipe.RoundPipe(net, devices=devices, **settings), torch.randn(30_000, width)


def run_wide(piped, value, rounds):
    for _ in range(rounds):
        piped.forward_backward(
            (value,), loss_fn=square_loss, run_config=config(NUM_MICROBATCHES, plan=PLAN, preserve_rng_state=False)
        )
        piped.step(lambda: None)


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cuda:0"], ["cuda:0", "cpu"]], ids=["one", "two", "mixed"])
class TestOnAnAccelerator:
    pytestmark = cuda

    def test_spans_are_those_of_the_devices_streams(self, devices):
        piped, value = wide(devices)
        with piped:
            run_wide(piped, value, 2)
            piped.synchronize()
            # what turn the workers are at shows in the timeline alone, which is under test
            first_job = piped._session.engine.next_job
            started = time.perf_counter()
            with piped.record_timeline() as timeline:
                run_wide(piped, value, 2)
            wall_s = time.perf_counter() - started
        schedule = make_schedule(PLAN, len(devices), NUM_MICROBATCHES, first_job=first_job)
        for device in timeline.devices:
            for lane in timeline.lanes(device):
                for one, following in pairwise(timeline.on(device, lane)):
                    assert one.end_s <= following.start_s + 2e-5, (device, lane, one, following)
        runs = Counter(
            (s.args["job"], s.args["microbatch"]) for s in computed(timeline) if s.args["part"] != "recompute"
        )
        assert runs == Counter(
            (job.index, m) for one in both_rounds(schedule) for job in one.jobs for m in range(NUM_MICROBATCHES)
        )
        assert max(span.end_s for span in timeline.spans) < wall_s + 0.01
        ends = {(s.args["job"], s.args["microbatch"]): s for s in computed(timeline) if s.args["part"] != "recompute"}
        uploads = {span.args["job"]: span for span in timeline.spans if span.lane == "weights"}
        begin = {one.first_job for one in both_rounds(schedule)}  # a round's first forward waits for no backward
        for (job, microbatch), span in ends.items():
            assert span.seconds > 0
            before = ends.get((job - 1, microbatch))
            if before is not None and job not in begin:
                assert before.end_s <= span.start_s + 1e-3, (before, span)  # clocks of two devices
            if job in uploads and microbatch == 0:
                assert uploads[job].end_s <= span.start_s + 1e-3

    def test_the_report_knows_busy_and_idle_time(self, devices):
        piped, value = wide(devices)
        with piped:
            run_wide(piped, value, 9)
            piped.synchronize()
            report = piped.report()
        assert report.num_rounds == 9 and report.num_samples == 9 * len(value)
        for worker in report.workers:
            assert worker.measured_s > 0
            assert 0 < worker.busy <= 1
            assert worker.busy + sum(worker.idle.values()) == pytest.approx(1)
            assert worker.moved_bytes["weights"] > 0
        assert report.predicted is not None and report.predicted.round_s is not None
        assert str(report)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")
def test_layers_are_ranges_of_nvidias_tools(monkeypatch):
    pushed = []
    real = torch.cuda.nvtx.range_push
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: (pushed.append(name), real(name))[1])
    piped, value = wide(["cuda:0"])
    with piped, torch.autograd.profiler.emit_nvtx():
        run_wide(piped, value, 1)
        piped.synchronize()
    assert sum(name.startswith("roundpipe layer 3 (3) m1") for name in pushed) == 2  # forward, recomputation
    assert any("layers 4 to 5" in name and name.endswith("backward") for name in pushed)
