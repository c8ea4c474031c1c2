"""Rounds on several workers against an eager loop of microbatches, and against each other bit for bit."""

import copy

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.runtime.device.backend import Lane
from tests.runtime.cases_engine import PLANS, backends_of, grains, norms, plans, workers
from tests.runtime.models import (
    DTYPE,
    Do,
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
)


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
