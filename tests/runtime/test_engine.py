"""Rounds on several workers against an eager loop of microbatches, and against each other bit for bit."""

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
from tests.runtime.models import (
    DTYPE,
    Do,
    Noted,
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

workers = pytest.mark.parametrize("workers", [1, 2, 3])
grains = pytest.mark.parametrize("grain", ["stage", "layer"])

PLANS = {
    "planned": None,
    "one stage": roundpipe.ExecutePlan([], (0, 6), []),
    "one layer each": roundpipe.ExecutePlan(
        [(i, i + 1) for i in range(5)], (5, 6), [(i, i + 1) for i in reversed(range(5))]
    ),
    "uneven": roundpipe.ExecutePlan([(0, 1), (1, 4)], (4, 6), [(2, 4), (0, 2)]),
    "one backward": roundpipe.ExecutePlan([(0, 2), (2, 5)], (5, 6), [(0, 5)]),
}
plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


class Norms(nn.Sequential):
    """Layers of every kind of buffer."""


def norms():
    return nn.Sequential(
        nn.Linear(6, 6),
        nn.BatchNorm1d(6),
        Noted(),
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None), nn.Tanh()),
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.Linear(6, 6),
    ).to(DTYPE)


# ---------------------------------------------------------------------------------- equal to eager


@plans
@grains
@workers
def test_equals_eager_for_every_plan(workers, grain, plan):
    assert_round_is_eager(mlp(6), (batch(),), label=batch(seed=5), workers=workers, grain=grain, plan=plan)


@plans
@grains
@workers
def test_buffers_are_written_once_per_microbatch(workers, grain, plan):
    assert_round_is_eager(norms(), (batch(8),), workers=workers, grain=grain, plan=plan, calls=2)


@grains
@workers
def test_buffers_are_left_alone_in_eval_mode(workers, grain):
    model = norms()
    assert_round_is_eager(model, (batch(),), workers=workers, grain=grain)
    model.eval()
    model.zero_grad()
    before = buffers(model)
    assert_round_is_eager(model, (batch(),), workers=workers, grain=grain)
    assert_equal_bits(buffers(model), before)


@plans
@grains
@workers
def test_skip_connections(workers, grain, plan):
    assert_round_is_eager(skip_chain(), (batch(),), workers=workers, grain=grain, plan=plan, calls=2)


@pytest.mark.parametrize("size, num", [(1, 1), (5, 2), (7, 7), (9, 4)])
def test_uneven_batches(size, num):
    assert_round_is_eager(mlp(), (batch(size),), label=batch(size, seed=5), num=num, workers=2)


def test_calls_accumulate():
    assert_round_is_eager(mlp(), (batch(),), num=2, workers=2, calls=4)


def test_layers_that_share_buffers_are_warned_of():
    norm = nn.BatchNorm1d(6, dtype=DTYPE)
    model = nn.Sequential(norm, nn.Linear(6, 6, dtype=DTYPE), norm)
    with pytest.warns(UserWarning, match="layers 0, 2 share buffers"), roundpipe.RoundPipe(model):
        pass


def test_hooks_of_the_sequential_itself_are_warned_of():
    model = mlp()
    model.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="hooks of the nn.Sequential itself don't run"), roundpipe.RoundPipe(model):
        pass


@grains
@workers
def test_a_module_in_two_layers_has_one_gradient(workers, grain):
    shared = nn.Linear(6, 6)
    model = nn.Sequential(shared, nn.Tanh(), nn.Linear(6, 6), shared, nn.Tanh(), shared).to(DTYPE)
    plan = PLANS["one layer each"]
    for plan in (None, PLANS["one layer each"], PLANS["uneven"]):
        model.zero_grad()
        assert_round_is_eager(copy.deepcopy(model), (batch(),), workers=workers, grain=grain, plan=plan, calls=2)


@workers
def test_a_tied_parameter_has_one_gradient(workers):
    model = mlp(5)
    model[4][0].weight = model[0][0].weight
    model[2][0].bias = model[0][0].bias
    assert_round_is_eager(model, (batch(),), workers=workers, calls=2)
    assert model[4][0].weight is model[0][0].weight
    assert model[4][0].weight.grad is model[0][0].weight.grad


class AddInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, value):
        value.add_(1).mul_(2)
        return value * self.scale


@grains
@workers
def test_a_first_layer_that_writes_into_its_input(workers, grain):
    model = nn.Sequential(AddInPlace(), *mlp(4)).to(DTYPE)
    given = batch()
    expected, _ = eager_round(copy.deepcopy(model), (given.clone(),), num=3)
    reference = copy.deepcopy(model)
    eager_round(reference, (given.clone(),), num=3)
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        loss = piped.forward_backward((given,), loss_fn=square_loss, run_config=config(3, grain))
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
        assert_same(gradients(model), gradients(reference))
    assert torch.equal(given, batch()), "the caller's tensor was written"


@grains
@workers
def test_layers_that_write_into_what_the_layer_before_made(workers, grain):
    def build():
        return nn.Sequential(
            nn.Linear(6, 6), nn.Hardswish(inplace=True), nn.Linear(6, 6), nn.SiLU(inplace=True), nn.Linear(6, 6),
            nn.ELU(inplace=True),
        ).to(DTYPE)  # fmt: skip

    for plan in (None, PLANS["one layer each"], PLANS["one backward"]):
        assert_round_is_eager(build(), (batch(),), workers=workers, grain=grain, plan=plan)


def test_a_layer_that_may_write_waits_for_the_copy_of_what_it_reads(monkeypatch):
    """On an accelerator the copy to the host runs beside the next layer, which must not write into it meanwhile."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Hardswish(inplace=True), nn.Linear(6, 6), nn.Linear(6, 6)).to(DTYPE)
    plan = roundpipe.ExecutePlan([(0, 2), (2, 3)], (3, 4), [(1, 3), (0, 1)])
    log, downloads = [], []
    model[1].register_forward_pre_hook(lambda *_: log.append("layer 1"))
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        (backend,) = backends_of(piped)
        real_record, real_wait = backend.record, backend.wait

        def record(lane):
            event = real_record(lane)
            if lane is Lane.DOWNLOAD:
                downloads.append(event)
            return event

        def wait(lane, event):
            if lane is Lane.COMPUTE and event in downloads:
                log.append("waits")
            real_wait(lane, event)

        monkeypatch.setattr(backend, "record", record)
        monkeypatch.setattr(backend, "wait", wait)
        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(1, plan=plan))
    assert log[:2] == ["waits", "layer 1"]


@plans
@workers
def test_values_with_several_readers(workers, plan):
    model = chain(
        ["x"],
        [
            (nn.Linear(6, 6), ["x"], ["a"]),
            (nn.Sequential(nn.Linear(6, 6), nn.Tanh()), ["a"], ["b"]),
            (Do(lambda a, b, x: (a * b, a + x)), ["a", "b", "x"], ["c", "d"]),
            (nn.Linear(6, 6), ["d"], ["e"]),
            (Do(lambda a, c, e: a * c + e), ["a", "c", "e"], ["f"]),
            (Do(lambda a, b, f: a + b * f), ["a", "b", "f"], ["g"]),
        ],
        ["g", "c"],
        build=lambda g, c: g + c,
    )
    assert_round_is_eager(model, (batch(),), workers=workers, plan=plan, calls=2)


@plans
@grains
@workers
def test_tuples_and_dicts_as_values(workers, grain, plan):
    def split(value):
        return (value.tanh(), {"twice": [value * 2, 3], "size": value.shape[1]})

    def join(pair):
        first, rest = pair
        return first * rest["twice"][0] + rest["twice"][1] * rest["size"]

    linears = [nn.Linear(6, 6) for _ in range(3)]
    model = chain(
        ["x"],
        [
            (linears[0], ["x"], ["a"]),
            (Do(lambda a: (split(a),)), ["a"], ["pair", "none"][:1]),
            (linears[1], ["x"], ["b"]),
            (Do(lambda pair, b: join(pair[0]) + b), ["pair", "b"], ["c"]),
            (linears[2], ["c"], ["d"]),
            (Do(lambda d, pair: d + join(pair[0])), ["d", "pair"], ["y"]),
        ],
        ["y"],
    )
    assert_round_is_eager(model, (batch(),), workers=workers, grain=grain, plan=plan)


@workers
def test_a_loss_with_several_parts(workers):
    def losses(output, label):
        return [output.square().sum(), (output - label).abs().sum()]

    assert_round_is_eager(mlp(), (batch(),), label=batch(seed=5), loss_fn=losses, workers=workers, calls=2)
    assert_round_is_eager(mlp(), (batch(),), label=batch(seed=5), loss_fn=lambda *a: tuple(losses(*a)[:1]))


@workers
def test_frozen_parameters_get_no_gradient(workers):
    model = mlp(6)
    model.requires_grad_(False)
    for index in (1, 4):
        adapter = nn.Linear(6, 6, dtype=DTYPE)
        model[index] = nn.Sequential(model[index], adapter)
    for plan in PLANS.values():
        assert_round_is_eager(copy.deepcopy(model), (batch(),), workers=workers, plan=plan)
    assert all(p.grad is None for p in model.parameters())


@workers
def test_a_frozen_front_is_not_recomputed(workers):
    model = mlp(6)
    model[:5].requires_grad_(False)
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3, plan=PLANS["one layer each"]))
    assert len(calls) == 3
    assert all(p.grad is None for p in model[:5].parameters())
    assert all(p.grad is not None for p in model[5].parameters())


@plans
@workers
def test_gradients_of_inputs(workers, plan):
    model = mlp(6)
    reference = copy.deepcopy(model)
    given, expected = batch().requires_grad_(), batch().requires_grad_()
    eager_round(reference, (expected,), num=3)
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        piped.forward_backward((given,), loss_fn=square_loss, run_config=config(3, plan=plan))
        assert_same(gradients(model), gradients(reference))
    torch.testing.assert_close(given.grad, expected.grad, rtol=0, atol=1e-10)


def test_gradients_flow_into_what_made_the_inputs():
    front, model = nn.Linear(6, 6, dtype=DTYPE), mlp()
    front_reference, reference = copy.deepcopy(front), copy.deepcopy(model)
    eager_round(reference, (front_reference(batch()),), num=1)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        piped.forward_backward((front(batch()),), loss_fn=square_loss, run_config=config(3))
    assert_same(gradients(front), gradients(front_reference))


def test_keyword_arguments_and_replicated_values():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, value, *, factor=1.0, shift=None):
            value = self.linear(value) * factor
            return value if shift is None else value + shift

    model = nn.Sequential(Scaled(), *mlp(2)).to(DTYPE)
    reference = copy.deepcopy(model)
    shift = torch.full((), 0.5, dtype=DTYPE)
    total = 0.0
    for one in torch.tensor_split(batch(), 3):
        loss = square_loss(reference[1:](reference[0](one, factor=2.0, shift=shift)), None)
        loss.backward()
        total += loss.detach()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        found = piped.forward_backward(
            (batch(),), {"factor": 2.0, "shift": shift}, loss_fn=square_loss, run_config=config(3)
        )
    torch.testing.assert_close(found, total, rtol=0, atol=1e-10)
    assert_same(gradients(model), gradients(reference))


def test_labels_and_loss_are_optional():
    """A model that gives its own loss needs neither."""
    model = nn.Sequential(*mlp(2), Do(lambda value: value.square().sum()))
    reference = copy.deepcopy(model)
    expected, _ = eager_round(reference, (batch(),), loss_fn=lambda output, _: output, num=3)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        found = piped.forward_backward((batch(),), run_config=config(3))
    assert found.device.type == "cpu" and not found.requires_grad
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert_same(gradients(model), gradients(reference))


def test_structured_labels():
    def loss_fn(output, label):
        return ((output - label["target"][0]) * label["weight"]).square().sum() * label["factor"]

    label = {"target": (batch(seed=5),), "weight": batch(seed=6), "factor": 2.0}
    model = mlp()
    reference = copy.deepcopy(model)
    total = 0.0
    for one, target, weight in zip(
        *(torch.tensor_split(t, 3) for t in (batch(), label["target"][0], label["weight"])), strict=True
    ):
        loss = loss_fn(reference(one), {"target": (target,), "weight": weight, "factor": 2.0})
        loss.backward()
        total += loss.detach()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        found = piped.forward_backward((batch(),), label=label, loss_fn=loss_fn, run_config=config(3))
    torch.testing.assert_close(found, total, rtol=0, atol=1e-10)
    assert_same(gradients(model), gradients(reference))


def test_num_microbatches_is_known_in_loss_fn():
    seen = []

    def loss_fn(output, _):
        seen.append(roundpipe.num_microbatches())
        return output.sum()

    with roundpipe.RoundPipe(mlp(), devices=["cpu"] * 2) as piped:
        with pytest.warns(UserWarning, match="2 microbatches"):
            piped.forward_backward((batch(2),), loss_fn=loss_fn, run_config=config(5))
    assert seen == [2, 2]


def test_sparse_gradients():
    model = nn.Sequential(nn.Embedding(9, 6, sparse=True), *mlp(2)).to(DTYPE)
    reference = copy.deepcopy(model)
    tokens = torch.arange(12).reshape(6, 2) % 9
    eager_round(reference, (tokens,), num=3)
    eager_round(reference, (tokens,), num=3)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        for _ in range(2):
            piped.forward_backward((tokens,), loss_fn=square_loss, run_config=config(3))
    found, expected = gradients(model), gradients(reference)
    assert found["0.weight"].is_sparse
    for values in (found, expected):
        values["0.weight"] = values["0.weight"].to_dense()
    assert_same(found, expected)


def test_recurrent_layers_use_the_weights_of_the_device():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(6, 6, num_layers=2, batch_first=True)

        def forward(self, value):
            return self.lstm(value)[0][:, -1]

    model = nn.Sequential(Last(), *mlp(2)).to(DTYPE)
    assert_round_is_eager(model, (batch(6)[:, None].expand(-1, 3, -1).contiguous(),), workers=2, calls=2)
    lstm = model[0].lstm
    assert all(a is b for a, b in zip(lstm._flat_weights, lstm.parameters(), strict=True))


# ------------------------------------------------------------------------------------ bit for bit


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


# ------------------------------------------------------------------------------------- autocast


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


# ------------------------------------------------------------------------------- synchronisation


def stages_of_two(num_layers):
    pairs = [(i, i + 2) for i in range(0, num_layers, 2)]
    return roundpipe.ExecutePlan(pairs[:-1], pairs[-1], pairs[:-1][::-1])


def backends_of(piped):
    return piped._session.engine.backends


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
    from roundpipe.runtime.engine.offload import Offload

    real = Offload.upload_gradients

    def take(self, *args):
        with without_waits(monkeypatch, [self._backend], Lane.UPLOAD):
            return real(self, *args)

    monkeypatch.setattr(Offload, "upload_gradients", take)
    with roundpipe.RoundPipe(mlp(6), devices=["cpu"] * 2) as piped, pytest.raises(SynchronizationError):
        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3, plan=stages_of_two(6)))


# ---------------------------------------------------------------------------------- links and time


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


def test_an_upload_takes_its_time():
    model = nn.Sequential(*(Slow(0.0) for _ in range(4)))
    weight_bytes = 256 * 256 * 4
    speed = weight_bytes / 0.03
    with roundpipe.RoundPipe(model, devices=[roundpipe.Device("cpu", upload_bytes_per_s=speed)]) as piped:
        seconds = quickest(lambda: timed(piped, run_config=config(1, plan=singles(4))), 7 * 0.03 * 2)
    assert 7 * 0.03 <= seconds < 7 * 0.03 * 2  # F0 F1 F2 U B1 B2 B3


def test_a_download_takes_its_time():
    model = nn.Sequential(*(Slow(0.0) for _ in range(3)))
    speed = 256 * 256 * 4 / 0.05
    with roundpipe.RoundPipe(model, devices=[roundpipe.Device("cpu", download_bytes_per_s=speed)]) as piped:
        seconds = quickest(lambda: timed(piped, run_config=config(1, plan=singles(3))), 3 * 0.05 * 2)
    assert 3 * 0.05 <= seconds < 3 * 0.05 * 2


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
            with torch.no_grad():
                piped(torch.ones(3, 4), roundpipe_run_config=config(num_microbatches, plan=singles(5)))
            return time.perf_counter() - start

        limit = 0.8 * (5 * 0.12)
        assert 5 * 0.06 + 0.06 <= quickest(seconds, limit) < limit


def test_values_do_not_queue_behind_weights():
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
    assert len(times) == 4 and times[-1] - start < 0.3


def test_two_workers_compute_at_the_same_time():
    model = nn.Sequential(*(Slow(0.03, width=4) for _ in range(4)))

    def seconds_on(num_workers):
        with roundpipe.RoundPipe(model, devices=["cpu"] * num_workers) as piped:
            return timed(piped, run_config=config(2, plan=singles(4), preserve_rng_state=False))

    limit = 0.8 * (7 * 2 * 0.03)
    assert quickest(lambda: seconds_on(2), limit) < limit
    assert seconds_on(1) >= 7 * 2 * 0.03


# -------------------------------------------------------------------------------------- bad plans


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
