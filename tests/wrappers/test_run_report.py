"""`model.report()`: counts against what was done, shares that add up, predictions."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.schedule import make_schedule
from roundpipe.reports.timeline import WAIT_CAUSES
from roundpipe.runtime.device.backend import Device, Lane
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.engine.step import StepState
from roundpipe.runtime.profiling import start_log
from roundpipe.runtime.profiling.meter import Meter
from roundpipe.runtime.weights.residency import Visit
from tests.runtime.models import Branches, batch, config, mlp, square_loss

pytestmark = pytest.mark.timeout(60)

PLAN = ExecutePlan([(0, 2), (2, 4)], (4, 6), [(2, 4), (0, 2)])


class Sleeps(nn.Module):
    """A linear layer that takes a known time."""

    def __init__(self, seconds):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.seconds = seconds

    def forward(self, value):
        time.sleep(self.seconds)
        return self.linear(value)


def sleepy(seconds=0.004):
    return nn.Sequential(*(Sleeps(seconds) for _ in range(6))).double()


def train(piped, rounds=2, is_async=True, num=3, value=None, **options):
    optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.01)
    settings = config(num, plan=PLAN, preserve_rng_state=False, **options)
    for _ in range(rounds):
        piped.forward_backward((batch() if value is None else value,), loss_fn=square_loss, run_config=settings)
        piped.step(optimizer.step, is_async)
    piped.synchronize()


# ------------------------------------------------------------------------------------------ counts


def test_before_the_first_call():
    with roundpipe.RoundPipe(mlp(6), devices=["cpu"], name="net") as piped:
        report = piped.report()
    assert (report.num_calls, report.num_rounds, report.num_steps, report.wall_s) == (0, 0, 0, 0.0)
    assert report.samples_per_s is None and report.tokens_per_s is None
    assert report.round_s is None and report.predicted is None and report.limit is None and not report.start_s
    assert report.workers[0].busy != report.workers[0].busy  # not a number
    assert str(report).startswith("net\n")


def test_counts_are_of_what_was_done_since_the_last_report():
    with roundpipe.RoundPipe(mlp(6), devices=["cpu"] * 2) as piped:
        started = time.perf_counter()
        train(piped, 3)
        first = piped.report()
        assert (first.num_calls, first.num_rounds, first.num_steps, first.num_samples) == (3, 3, 3, 21)
        assert first.num_tokens is None and first.tokens_of is None
        assert 0 < first.wall_s < time.perf_counter() - started
        assert first.samples_per_s == pytest.approx(21 / first.wall_s)
        train(piped, 1)
        with torch.no_grad():
            piped(batch())
        second = piped.report()
        assert (second.num_calls, second.num_rounds, second.num_steps, second.num_samples) == (2, 2, 1, 14)
        third = piped.report()
        assert (third.num_calls, third.num_rounds, third.num_steps, third.wall_s) == (0, 0, 0, 0.0)
        assert third.uploaded_bytes == third.downloaded_bytes == 0 and not third.optimizer_s


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, scale, input_ids):
        return self.head(self.embed(input_ids)) * scale


def test_tokens_are_the_elements_of_the_first_argument_of_integers_with_two_dimensions():
    with roundpipe.RoundPipe(Tagger(), devices=["cpu"]) as piped:
        ids = torch.zeros(4, 5, dtype=torch.long)
        for _ in range(2):
            piped.forward_backward(
                (torch.ones(4, 5, 1),), {"input_ids": ids}, loss_fn=lambda out, _: out.sum(), run_config=config(2)
            )
        report = piped.report()
    assert (report.num_tokens, report.tokens_of, report.num_samples) == (40, "input_ids", 8)
    assert report.tokens_per_s == pytest.approx(40 / report.wall_s)
    assert "tokens/s (elements of input_ids)" in str(report)


def test_bytes_are_those_of_weights_and_gradients():
    weight, bias = mlp(1).parameters()
    layer_bytes = -(-weight.nbytes // 64) * 64 + bias.nbytes  # one copy, in which each is aligned
    own_bytes = sum(p.nbytes for p in mlp(1).parameters())
    with roundpipe.RoundPipe(mlp(6), devices=["cpu"] * 3) as piped:
        train(piped, 2)
        workers = piped.report().workers
    visited = sum(stop - start for start, stop in (*PLAN.forward, PLAN.fused, *PLAN.backward))
    assert sum(one.moved_bytes["weights"] for one in workers) == 2 * visited * layer_bytes
    assert sum(one.moved_bytes["gradients"] for one in workers) == 2 * 6 * own_bytes
    value_bytes = batch().nbytes
    # up: F0, F1, U and both B stages take what they run on; B1 and B2 gradients, too
    assert sum(one.moved_bytes["upload"] for one in workers) == 2 * 7 * value_bytes
    losses_bytes = 3 * 8
    assert sum(one.moved_bytes["download"] for one in workers) == 2 * (2 * value_bytes + 2 * value_bytes + losses_bytes)


def test_memory_of_the_host():
    model = mlp(6)
    weights = sum(p.nbytes for p in model.parameters())
    with roundpipe.RoundPipe(model, devices=["cpu"], optim_dtype=torch.float32) as piped:
        assert piped.report().host_memory.optimizer_copies == 0
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)
        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(2))
        memory = piped.report().host_memory
        assert (memory.weights, memory.gradients) == (weights, weights)
        # shown on both sides, until the loop has told by `step` that nobody looks at the copies' in between
        assert (memory.optimizer_copies, memory.optimizer_gradients) == (weights // 2, weights // 2)
        piped.step(optimizer.step, is_async=False)
        memory = piped.report().host_memory
        assert (memory.gradients, memory.optimizer_gradients, memory.total) == (0, weights // 2, 2 * weights)


def test_gradients_that_are_shown_are_counted_once():
    model = mlp(6)
    weights = sum(p.nbytes for p in model.parameters())
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        list(piped.optim_parameters())
        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(2))
        piped.synchronize()
        memory = piped.report().host_memory
    assert memory.gradients + memory.optimizer_gradients == weights


# -------------------------------------------------------------------------------------------- time


def test_gradients_that_an_update_is_about_to_drop_are_not_read():
    """A read of ``.grad`` beside a thread that sets it can end the process."""
    dropped, reported, found = threading.Event(), threading.Event(), []

    def update():
        optimizer.zero_grad()
        dropped.set()
        assert reported.wait(30)

    with roundpipe.RoundPipe(mlp(6), devices=["cpu"], optim_dtype=torch.float32) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.01)
        piped.forward_backward((batch(),), loss_fn=square_loss)
        piped.step(update)
        assert dropped.wait(30)
        found.append(piped.report().host_memory)
        reported.set()
        piped.synchronize()
        found.append(piped.report().host_memory)
        size = sum(parameter.numel() for parameter in piped.parameters())
    assert (found[0].gradients, found[0].optimizer_gradients) == (8 * size, 4 * size)
    assert (found[1].gradients, found[1].optimizer_gradients) == (0, 0)


def test_shares_add_up_and_busy_is_what_layers_take():
    with roundpipe.RoundPipe(sleepy(), devices=["cpu"] * 2) as piped:
        train(piped, 1)
        piped.report()
        train(piped, 3)
        report = piped.report()
    slept_s = 3 * 3 * (6 + 4) * 0.004  # rounds, microbatches, layers forward and again for backward
    busy_s = sum(one.busy * one.measured_s for one in report.workers)
    assert slept_s <= busy_s < sum(one.measured_s for one in report.workers)
    for one in report.workers:
        assert one.busy + sum(one.idle.values()) == pytest.approx(1)
        assert set(one.idle) == set(WAIT_CAUSES) and min(one.idle.values()) >= 0
    assert 0 < report.busy <= 1


def test_waiting_for_weights_is_seen(clock):
    entry = Device("cpu", upload_bytes_per_s=3e4)
    with roundpipe.RoundPipe(mlp(6), devices=[entry]) as piped:
        train(piped, 2, num=1, value=batch(1))  # values are small
        (worker,) = piped.report().workers
    assert max(worker.idle, key=lambda cause: worker.idle[cause]) == "weights"
    assert worker.idle["weights"] > 0.7


def test_waiting_for_the_stage_before_is_seen():
    with roundpipe.RoundPipe(sleepy(), devices=["cpu"] * 2) as piped:
        train(piped, 2, num=1)
        report = piped.report()
    assert sum(one.idle["no_work"] for one in report.workers) > 0.25  # one microbatch: one worker at a time


def test_what_python_takes_is_no_wait_for_a_stage(clock, monkeypatch):
    arrive, begin_read = Visit.arrive, StepState.begin_read

    def slowly(function, *args):
        time.sleep(0.05)
        return function(*args)

    monkeypatch.setattr(Visit, "arrive", lambda *args: slowly(arrive, *args))
    monkeypatch.setattr(StepState, "begin_read", lambda *args: slowly(begin_read, *args))
    with roundpipe.RoundPipe(mlp(6), devices=["cpu"]) as piped:
        train(piped, 2)
        (worker,) = piped.report().workers
    assert worker.idle["overhead"] > 0.9
    assert worker.idle["no_work"] == pytest.approx(0, abs=0.01)


def test_time_between_calls_is_the_callers(clock):
    with roundpipe.RoundPipe(mlp(6), devices=["cpu"]) as piped:
        train(piped, 1)
        piped.report()
        time.sleep(0.3)
        train(piped, 1)
        report = piped.report()
    (worker,) = report.workers
    assert worker.idle["caller"] * worker.measured_s > 0.25
    assert report.limit == "caller" and "calls come too late" in str(report)


def test_several_devices_that_compute_all_the_time_are_told_of_replicas():
    def text(devices, plan, limit="compute"):
        with roundpipe.RoundPipe(mlp(6), devices=["cpu"] * devices) as piped:
            for _ in range(2):  # what layers leave behind is known after the first
                piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(4, plan=plan))
            return str(replace(piped.report(), limit=limit))

    assert "replicas='auto'" in text(2, PLAN)
    assert "replicas='auto'" not in text(1, PLAN)
    assert "replicas='auto'" not in text(2, ExecutePlan(fused=(0, 6), replicas=[2]))
    assert "take turns at Python" in text(2, PLAN, "overhead")
    assert "take turns at Python" not in text(1, PLAN, "overhead")


def test_waiting_for_the_optimizer_is_seen():
    with roundpipe.RoundPipe(mlp(6), devices=["cpu"]) as piped:
        list(piped.optim_parameters())
        settings = config(2, plan=PLAN, preserve_rng_state=False)

        def slow():
            time.sleep(0.15)

        for _ in range(3):
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=settings)
            piped.step(slow)
        piped.synchronize()
        report = piped.report()
    assert report.optimizer_s["update"] >= 0.45
    assert report.num_steps == 3


def test_a_meter_measures_some_rounds_of_an_accelerator(clock):
    one = CpuBackend(Device("cpu"), "here")
    meter = Meter(one, "here")
    meter._each = 3  # as an accelerator's
    job = make_schedule(PLAN, 1, 1).jobs[0]
    for _ in range(6):
        meter.begin_step(was_idle=False)
        meter.at(job, 0)
        meter.until("overhead")
        with meter.computing("forward", (0, 1)):
            time.sleep(0.02)
    reading = meter.read()
    assert 0.04 <= reading.busy_s < 0.08
    assert sum(reading.idle_s.values()) == 0  # what lies between two measured rounds counts for nothing
    meter.measure_next()  # as a report does
    meter.begin_step(was_idle=False)
    with meter.computing("forward", (0, 1)):
        time.sleep(0.02)
    assert meter.read().since(reading).busy_s == pytest.approx(0.02)


def test_seconds_to_the_first_step_are_logged_and_reported_by_part(caplog, monkeypatch):
    monkeypatch.setattr(start_log, "LOGGED_S", 0.0)
    with caplog.at_level("INFO", logger="roundpipe"):
        with roundpipe.compile(mlp(6), example_args=(batch(),), devices=["cpu"], name="net") as model:
            model.forward_backward((batch(),), loss_fn=square_loss)
            started = len(caplog.records)
            report = model.report()
            model.forward_backward((batch(),), loss_fn=square_loss)
            assert not model.report().start_s and len(caplog.records) == started
    assert list(report.start_s) == ["trace", "cut", "measure memory", "plan", "pin weights", "first round"]
    assert "to the first step" in str(report)
    lines = [record.getMessage() for record in caplog.records]
    for part in list(report.start_s)[2:]:
        assert [line for line in lines if f"{part} " in line and line.endswith(" s")]
    assert any("traced Sequential in" in line for line in lines) and any("cut it in" in line for line in lines)


# ------------------------------------------------------------------------------------- predictions


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_rounds_are_predicted_from_what_layers_took(is_async):
    work_s = 3 * (6 + 4) * 0.01 / 2
    with roundpipe.RoundPipe(sleepy(0.01), devices=["cpu"] * 2) as piped:
        train(piped, 3, is_async)
        assert piped.report().predicted is not None
        train(piped, 4, is_async)
        report = piped.report()
    predicted = report.predicted
    assert predicted is not None and "measured" in predicted.rests_on
    assert predicted.round_s >= 0.5 * work_s  # sleep takes no less than it is asked to
    assert report.round_s > 0 and 0 <= predicted.idle < 1
    assert predicted.peak_device_bytes is None  # nobody knows what these layers keep
    assert "predicted" in str(report)


def test_memory_is_predicted_for_a_traced_model():
    torch.manual_seed(0)
    value = torch.randn(64, 64)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    with roundpipe.compile(net, example_args=(value,), devices=["cpu"] * 2) as model:
        for _ in range(2):
            model.forward_backward((value,), loss_fn=square_loss)
        report = model.report()
    assert report.predicted is not None and report.predicted.peak_device_bytes
    assert report.peak_device_bytes == max(one.peak_bytes for one in report.workers)
    assert 0.4 < report.peak_device_bytes / report.predicted.peak_device_bytes < 1.1
    assert "planned for" in str(report)


@pytest.mark.parametrize("rounds", [1, 4], ids=["estimated", "measured"])
def test_memory_is_predicted_per_device(rounds):
    """Two stages, two devices: each has the same two jobs in every round, and their memory is not the same."""
    torch.manual_seed(0)
    value = torch.randn(12, 64)
    widths = [64, 512, 512, 64, 64]
    net = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in zip(widths, widths[1:], strict=False)))
    settings = roundpipe.RoundPipeRunConfig(num_microbatch=3)
    devices = [Device("cpu", memory_bytes=10**9)] * 2  # with a budget they count what operators allocate
    with roundpipe.compile(net, example_args=(value,), devices=devices, model_run_config=settings) as model:
        layers = len(model._runner.source.latest)  # a plan needs the number
        plan = ExecutePlan([(0, 1), (1, 2)], (2, layers), [(0, 2)])
        for _ in range(rounds):
            model.forward_backward((value,), loss_fn=square_loss, run_config=config(3, plan=plan))
        report = model.report()
    assert report.predicted is not None and report.predicted.device_bytes is not None
    measured = [one.peak_bytes for one in report.workers]
    assert measured == pytest.approx(list(report.predicted.device_bytes), rel=0.1)
    assert max(measured) > 1.2 * min(measured)
    header, *rows = [line.split() for line in str(report).split("worker", 1)[1].splitlines()]
    assert header[-2:] == ["peak", "predicted"] and all(len(row) > 2 for row in rows if row)


def test_a_model_that_runs_by_parts_has_a_report_too():
    model = roundpipe.wrap_model_to_roundpipe(Branches(), use_sequential_preset=False, devices=["cpu"])
    with model, pytest.warns(UserWarning, match="nothing overlaps"):
        model.forward_backward((batch(),), loss_fn=square_loss, run_config=config(2))
        report = model.report()
    assert (report.num_calls, report.num_samples) == (1, 7)
    assert report.num_rounds == 4  # forward and backward of the part, per microbatch
    assert report.uploaded_bytes > 0 and report.predicted is None


def test_lanes_of_a_report_are_those_of_the_backends():
    with roundpipe.RoundPipe(mlp(2), devices=["cpu"]) as piped:
        (worker,) = piped.report().workers
    assert set(worker.moved_bytes) == {str(lane) for lane in Lane if lane is not Lane.COMPUTE}
