"""Workers: equal bits for any number, the caller's context, waits, links."""

import contextvars
import copy
import time
from collections import OrderedDict

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import ConfigError, ScheduleError, SynchronizationError
from roundpipe.runtime.device.backend import Lane
from tests.runtime.cases_engine import PLANS, backends_of, grains, norms, plans, workers
from tests.runtime.models import (
    DTYPE,
    Do,
    Piece,
    assert_equal_bits,
    assert_round_is_eager,
    assert_same,
    batch,
    buffers,
    chain,
    config,
    eager_round,
    gradients,
    mlp,
    skip_chain,
    square_loss,
    without_waits,
)


def rounds_on(num_workers, build, args, grain, plan, calls=2, loss_fn=square_loss):
    torch.manual_seed(1)
    model = build()
    torch.manual_seed(2)
    with roundpipe.RoundPipe(model, devices=["cpu"] * num_workers) as piped:
        losses = [
            piped.forward_backward(args, loss_fn=loss_fn, run_config=config(4, grain, plan)) for _ in range(calls)
        ]
    return losses, gradients(model), buffers(model), torch.get_rng_state()


def assert_same_bits_on_all_workers(build, args, grain="stage", plan=None):
    losses, grads, buffs, rng = rounds_on(1, build, args, grain, plan)
    for num_workers in (2, 3):
        other = rounds_on(num_workers, build, args, grain, plan)
        assert all(torch.equal(a, b) for a, b in zip(other[0], losses, strict=True))
        assert_equal_bits(other[1], grads)
        assert_equal_bits(other[2], buffs)
        assert torch.equal(other[3], rng)


@plans
@grains
def test_bits_do_not_depend_on_the_number_of_workers(grain, plan):
    assert_same_bits_on_all_workers(lambda: mlp(6), (batch(9),), grain, plan)
    assert_same_bits_on_all_workers(norms, (batch(9),), grain, plan)


@pytest.mark.parametrize("plan", list(PLANS.values())[1:], ids=list(PLANS)[1:])
@grains
def test_bits_of_skips_and_ties_do_not_depend_on_the_number_of_workers(grain, plan):
    def tied():
        model = mlp(6)
        model[0][0].weight = model[3][0].weight = model[5][0].weight
        return model

    assert_same_bits_on_all_workers(skip_chain, (batch(9),), grain, plan)
    assert_same_bits_on_all_workers(tied, (batch(9),), grain, plan)


def test_bits_of_the_stages_do_not_depend_on_the_grain():
    plan = PLANS["uneven"]
    stage, layer = (rounds_on(2, norms, (batch(9),), grain, plan) for grain in ("stage", "layer"))
    assert all(torch.equal(a, b) for a, b in zip(stage[0], layer[0], strict=True))
    assert_equal_bits(stage[1], layer[1])


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.dtypes = []

    def forward(self, value):
        value = self.linear(value)
        self.dtypes.append(value.dtype)
        return value


@grains
def test_the_callers_autocast_holds_in_the_workers(grain):
    model = nn.Sequential(*(Remembers() for _ in range(4)))
    reference = copy.deepcopy(model)
    given = batch().float()
    losses = []

    def loss_fn(output, _):
        losses.append(torch.is_autocast_enabled("cpu"))
        return output.float().square().sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, _ = eager_round(reference, (given,), loss_fn=loss_fn, num=2)
        with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
            plan = roundpipe.ExecutePlan([(0, 2)], (2, 4), [(0, 2)])
            found = piped.forward_backward((given,), loss_fn=loss_fn, run_config=config(2, grain, plan))
    assert torch.equal(found, expected)
    assert all(losses)
    for index, layer in enumerate(model):
        assert set(layer.dtypes) == {torch.bfloat16}
        assert len(layer.dtypes) == (4 if index < 2 else 2), "recomputed once, but for the fused tail"
    assert_same(gradients(model), gradients(reference), atol=1e-2)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        piped.forward_backward((given,), loss_fn=square_loss, run_config=config(2, grain))
    assert model[0].dtypes[-1] is torch.float32


GAIN: contextvars.ContextVar[float] = contextvars.ContextVar("gain", default=1.0)


class Gained(nn.Module):
    """Multiplies by a context variable."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value):
        return torch.tanh(self.linear(value)) * GAIN.get()


@grains
@workers
def test_the_callers_context_variables_hold_in_the_workers(workers, grain):
    """In the forward and in its recomputation, whatever they are by then."""
    model = nn.Sequential(*(Gained() for _ in range(4))).to(DTYPE)
    reference = copy.deepcopy(model)

    def train(net):
        for gain in (0.5, 2.0):
            token = GAIN.set(gain)
            output = net(batch()).square().sum()
            GAIN.reset(token)
            output.backward()

    def loss_fn(output, label):
        return square_loss(output, label) * GAIN.get()

    train(reference)
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers, model_run_config=config(2, grain)) as piped:
        train(piped)
        assert_same(gradients(model), gradients(reference))
        token = GAIN.set(3.0)
        expected, _ = eager_round(reference, (batch(),), loss_fn=loss_fn, num=2)
        found = piped.forward_backward((batch(),), loss_fn=loss_fn)
        GAIN.reset(token)
        piped.synchronize()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert_same(gradients(model), gradients(reference))


def stages_of_two(num_layers):
    pairs = [(i, i + 2) for i in range(0, num_layers, 2)]
    return roundpipe.ExecutePlan(pairs[:-1], pairs[-1], pairs[:-1][::-1])


@pytest.mark.parametrize("lane", [Lane.COMPUTE, Lane.UPLOAD], ids=str)
def test_a_handoff_without_its_wait_is_found(monkeypatch, lane):
    """COMPUTE not waiting for uploads; UPLOAD not waiting for what another worker brought down."""
    model = mlp(6)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        run = config(3, plan=stages_of_two(6))
        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=run)
        with without_waits(monkeypatch, backends_of(piped), lane), pytest.raises(SynchronizationError):
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=run)
        model.zero_grad()
        reference = copy.deepcopy(model)
        eager_round(reference, (batch(),), num=3)
        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=run)
        assert_same(gradients(model), gradients(reference))


def test_weights_without_their_wait_are_found(monkeypatch):
    """Only the wait for a visit's weights is left out."""
    model = chain([], [(Constant(), [], ["y"])], ["y"])
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        (backend,) = backends_of(piped)
        real_record, real_wait, weights = backend.record, backend.wait, []

        def record(lane):
            event = real_record(lane)
            if lane is Lane.WEIGHTS:
                weights.append(event)
            return event

        def wait(lane, event):
            if event not in weights:
                real_wait(lane, event)

        with monkeypatch.context() as patch:
            patch.setattr(backend, "record", record)
            patch.setattr(backend, "wait", wait)
            with pytest.raises(SynchronizationError, match="made by weights work"):
                piped.forward_backward((), loss_fn=lambda output, _: output.sum(), run_config=config(1))
        loss = piped.forward_backward((), loss_fn=lambda output, _: output.sum(), run_config=config(1))
        assert loss == 6


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self):
        return self.weight * 2


def test_gradients_without_their_wait_are_found(monkeypatch):
    """Only the wait for the gradients that another worker brought down is left out."""
    from roundpipe.runtime.engine.runner import MicrobatchRunner

    # no other way to leave out this wait alone
    real = MicrobatchRunner._upload_gradients

    def take(self, *args):
        with without_waits(monkeypatch, [self._backend], Lane.UPLOAD):
            return real(self, *args)

    # as above
    monkeypatch.setattr(MicrobatchRunner, "_upload_gradients", take)
    with roundpipe.RoundPipe(mlp(6), devices=["cpu"] * 2) as piped, pytest.raises(SynchronizationError):
        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3, plan=stages_of_two(6)))


class Slow(nn.Module):
    """Takes a while, as a device would; the thread sleeps, so other workers can run."""

    def __init__(self, seconds, width=256):
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(width, width))

    def forward(self, value):
        time.sleep(self.seconds)
        return value * self.weight[0, 0]


def timed(piped, **options):
    start = time.perf_counter()
    piped.forward_backward((torch.ones(2, 4),), loss_fn=lambda output, _: output.sum(), **options)
    return time.perf_counter() - start


def singles(num):
    return roundpipe.ExecutePlan(
        [(i, i + 1) for i in range(num - 1)], (num - 1, num), [(i, i + 1) for i in reversed(range(num - 1))]
    )


def test_an_upload_takes_its_time(clock):
    model = nn.Sequential(*(Slow(0.0) for _ in range(4)))
    weight_bytes = 256 * 256 * 4
    speed = weight_bytes / 0.03
    with roundpipe.RoundPipe(model, devices=[roundpipe.Device("cpu", upload_bytes_per_s=speed)]) as piped:
        seconds = timed(piped, run_config=config(1, plan=singles(4)))
    assert seconds == pytest.approx(6 * 0.03, rel=1e-3)  # F0 F1 F2 U B2 B3: B1 finds the weights of F2


def test_a_download_takes_its_time(clock):
    model = nn.Sequential(*(Slow(0.0) for _ in range(3)))
    speed = 256 * 256 * 4 / 0.05
    with roundpipe.RoundPipe(model, devices=[roundpipe.Device("cpu", download_bytes_per_s=speed)]) as piped:
        seconds = timed(piped, run_config=config(1, plan=singles(3)))
    assert seconds == pytest.approx(3 * 0.05, rel=1e-3)


def quickest(measure, limit, tries=4):
    """Least of a few measurements, until one is below the limit: other processes may take the cores."""
    found = measure()
    while found >= limit and tries > 1:
        found, tries = min(found, measure()), tries - 1
    return found


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_uploads_run_beside_the_computation(num_microbatches):
    """Per stage 60 ms of upload and 60 ms of compute take about 60 ms, not 120 ms."""
    model = nn.Sequential(*(Slow(0.06 / num_microbatches) for _ in range(5)))
    model.requires_grad_(False)
    speed = 256 * 256 * 4 / 0.06
    with roundpipe.RoundPipe(model, devices=[roundpipe.Device("cpu", upload_bytes_per_s=speed)]) as piped:

        def seconds():
            start = time.perf_counter()
            options = config(num_microbatches, plan=singles(5), residency="off")  # each call uploads the frozen weights
            with torch.no_grad():
                piped(torch.ones(3, 4), roundpipe_run_config=options)
            return time.perf_counter() - start

        limit = 0.8 * (5 * 0.12)
        assert 5 * 0.06 + 0.06 <= quickest(seconds, limit) < limit


def test_values_do_not_queue_behind_weights(clock):
    """A carried value of the running stage goes up at once, though the next stage's weights are on the way."""
    model = nn.Sequential(Slow(0.0, width=4), Slow(0.0, width=512), Slow(0.0, width=512)).requires_grad_(False)
    times = []
    model[0].register_forward_hook(lambda *_: times.append(time.perf_counter()))
    speed = 512 * 512 * 4 / 0.5
    with roundpipe.RoundPipe(model, devices=[roundpipe.Device("cpu", upload_bytes_per_s=speed)]) as piped:
        start = time.perf_counter()
        with torch.no_grad():
            piped(torch.ones(4, 4), roundpipe_run_config=config(4, plan=singles(3)))
        assert time.perf_counter() - start >= 1.0
    assert len(times) == 4 and times[-1] - start < 0.01


def test_two_workers_compute_at_the_same_time():
    model = nn.Sequential(*(Slow(0.03, width=4) for _ in range(4)))

    def seconds_on(num_workers):
        with roundpipe.RoundPipe(model, devices=["cpu"] * num_workers) as piped:
            return timed(piped, run_config=config(2, plan=singles(4), preserve_rng_state=False))

    limit = 0.8 * (7 * 2 * 0.03)
    assert quickest(lambda: seconds_on(2), limit) < limit
    assert seconds_on(1) >= 7 * 2 * 0.03


def test_a_plan_for_another_number_of_layers_is_refused():
    with roundpipe.RoundPipe(mlp(3)) as piped:
        with pytest.raises(ScheduleError, match="ends at layer 4, but the model has 3 layers"):
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(2, plan=singles(4)))
        with pytest.raises(ScheduleError, match="no fused range"):
            plan = roundpipe.ExecutePlan([(0, 3)], None, [(1, 3), (0, 1)])
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(2, plan=plan))
        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(2))


def test_weights_on_the_meta_device_are_refused_by_name():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with roundpipe.RoundPipe(model) as piped, pytest.raises(ConfigError, match="meta device"):
        piped(torch.ones(2, 3))


def test_a_chain_that_reads_what_nobody_makes_names_the_value():
    model = chain(["x"], [(nn.Linear(6, 6), ["x"], ["a"]), (nn.Linear(6, 6), ["b"], ["y"])], ["y"])
    with roundpipe.RoundPipe(model) as piped, pytest.raises(KeyError, match="b"):
        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(2))


def test_layers_pass_on_what_they_do_not_read():
    """The runtime gives a layer what it reads and takes what it makes, whatever else it returns."""
    seen = []

    class Watch(Piece):
        def forward(self, carry):
            seen.append(sorted(carry))
            return super().forward(carry)

    model = skip_chain()
    watched = Watch(model[4].module, model[4].reads, model[4].makes).to(DTYPE)
    model[4] = watched
    assert_round_is_eager(model, (batch(),), workers=2, plan=PLANS["uneven"])
    expected = sorted(watched.reads)
    assert expected == ["h3"] and seen[3:] == [expected] * len(seen[3:])


def test_ordered_outputs_keep_their_type():
    model = nn.Sequential(*mlp(2), Do(lambda value: OrderedDict(y=value, n=3)))
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        _, outputs = piped.forward_backward(
            (batch(),), loss_fn=lambda output, _: output["y"].sum(), return_outputs=True, run_config=config(3)
        )
    assert type(outputs) is OrderedDict and outputs["n"] == 3
    torch.testing.assert_close(outputs["y"], mlp_outputs(model), rtol=0, atol=1e-10)


def mlp_outputs(model):
    with torch.no_grad():
        return model(batch())["y"]
