"""Frozen weights stay on a device between visits and rounds, as long as they are what the host has."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import roundpipe
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.runtime.device.backend import Device
from tests.runtime.models import (
    DTYPE,
    assert_equal_bits,
    assert_same,
    batch,
    buffers,
    config,
    eager_round,
    gradients,
    mlp,
    square_loss,
)

WIDTH, NUM = 8, 3
"""Each weight is a multiple of 64 bytes."""
PLAN = ExecutePlan([(0, 1), (1, 2)], (2, 4), [(1, 2), (0, 1)])


class Adapted(nn.Module):
    """A frozen linear layer, and beside it a trained one of rank 1."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 1, bias=False), nn.Linear(1, WIDTH, bias=False)

    def forward(self, value):
        return torch.tanh(self.base(value) + self.up(self.down(value)))


def adapted():
    torch.manual_seed(5)
    return nn.Sequential(*(Adapted() for _ in range(4))).to(DTYPE)


def uploaded(piped):
    """Bytes of weights that each worker has got since the last call."""
    return [worker.moved_bytes["weights"] for worker in piped.report().workers]


def resident_bytes(piped):
    # by purpose: public numbers are sums
    return [backend.ledger.by_purpose["resident weights"] for backend in piped._session.engine.backends]


def train(piped, model, x):
    """Gradients of a round, which are cleared, and eager's."""
    piped.forward_backward((x,), loss_fn=square_loss)
    piped.synchronize()
    found = gradients(model)
    model.zero_grad()
    eager_round(model, (x,), num=NUM)
    expected = gradients(model)
    model.zero_grad()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # what is trained is another one in each round
                parameter.mul_(0.9)
    return found, expected


def same(piped, model, x=None):
    found, expected = train(piped, model, batch(width=WIDTH) if x is None else x)
    assert_same(found, expected)
    return found


def bytes_of(layers, is_trained):
    return sum(p.nbytes for layer in layers for p in layer.parameters() if p.requires_grad == is_trained)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_later_rounds_upload_only_what_is_trained(num_workers):
    found = {}
    for residency in ("off", "auto"):
        model = adapted()
        run_config = config(NUM, plan=PLAN, residency=residency)
        with roundpipe.RoundPipe(model, devices=["cpu"] * num_workers, model_run_config=run_config) as piped:
            found[residency] = [same(piped, model, batch(width=WIDTH, seed=seed)) for seed in range(4)]
            uploaded(piped)
            same(piped, model)
            # two layers are visited twice; they come up once where the second visit is the worker's next but one
            visited = [*model, *model[: {1: 1, 2: 0, 3: 2}[num_workers]]]
            if residency == "auto":
                assert sum(uploaded(piped)) == bytes_of(visited, is_trained=True)
                assert resident_bytes(piped) == [bytes_of(model, is_trained=False)] * num_workers
            else:
                assert sum(uploaded(piped)) == bytes_of(visited, is_trained=True) + bytes_of(visited, is_trained=False)
                assert not any(resident_bytes(piped))
        assert not any(resident_bytes(piped))
    for on, off in zip(found["auto"], found["off"], strict=True):
        assert_equal_bits(on, off)


WRITES = {
    "in place": lambda model: model[1].base.weight.mul_(2),
    "load_state_dict": lambda model: model.load_state_dict(
        {name: value + 0.25 for name, value in model.state_dict().items()}
    ),
    "through .data": lambda model: model[2].base.weight.data.mul_(0.5),
    "other memory": lambda model: setattr(model[0].base.weight, "data", torch.eye(WIDTH, dtype=DTYPE)),
    "another parameter": lambda model: setattr(
        model[0].base, "weight", nn.Parameter(torch.eye(WIDTH, dtype=DTYPE), requires_grad=False)
    ),
    "trained from now on": lambda model: model[1].base.requires_grad_(),
    "frozen from now on": lambda model: model[3].requires_grad_(False),
}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_changes_on_the_host_is_uploaded_again(num_workers):
    model = adapted()
    with roundpipe.RoundPipe(model, devices=["cpu"] * num_workers, model_run_config=config(NUM, plan=PLAN)) as piped:
        for _ in range(2):
            same(piped, model)
        for name, write in WRITES.items():
            with torch.no_grad():
                write(model)
            found, expected = train(piped, model, batch(width=WIDTH))
            for parameter, gradient in expected.items():
                assert (gradient is None) == (found[parameter] is None), (name, parameter)
                assert gradient is None or torch.allclose(found[parameter], gradient, rtol=0, atol=1e-10), name
            same(piped, model)
            assert resident_bytes(piped) == [bytes_of(model, is_trained=False)] * num_workers, name
    assert not any(resident_bytes(piped))


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("constant", torch.full((WIDTH,), 0.5))

    def forward(self, value):
        return value + self.constant


def mixed():
    """A frozen weight in two layers, one under a parametrization, a buffer that is constant, buffers that are not."""
    layers = adapted()[:2]
    layers[1].base.weight = layers[0].base.weight
    frozen = weight_norm(nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False))
    return nn.Sequential(*layers, frozen, nn.BatchNorm1d(WIDTH, affine=False), Shift()).to(DTYPE)


def test_ties_parametrizations_and_buffers_are_as_in_eager_mode():
    model, reference = mixed(), mixed()
    reference.load_state_dict(model.state_dict())
    x = batch(9, width=WIDTH)
    with roundpipe.RoundPipe(model, devices="cpu", model_run_config=config(NUM)) as piped:
        for _ in range(3):
            piped.forward_backward((x,), loss_fn=square_loss)
            piped.synchronize()
            eager_round(reference, (x,), num=NUM)
            assert_same(gradients(model), gradients(reference))
            assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))
            with torch.no_grad():
                for one in (model, reference):
                    one[0].base.weight.mul_(1.5)
                    one[4].constant.add_(1)
                    one.zero_grad()
        assert resident_bytes(piped) == [bytes_of([model], is_trained=False) + model[4].constant.nbytes]


@pytest.mark.parametrize("plan", [ExecutePlan([], (0, 4), []), ExecutePlan([(0, 2)], (2, 4), [(0, 2)])])
def test_what_a_visit_brought_is_there_for_the_next(plan):
    """Rounds without an update between them, evaluations, the backward behind a forward."""
    model = mlp(4, WIDTH)
    buffered = nn.Sequential(*model, nn.BatchNorm1d(WIDTH, affine=False).to(DTYPE)) if plan.forward else model
    if plan.forward:
        plan = ExecutePlan([(0, 2)], (2, 5), [(0, 2)])
    reference = copy.deepcopy(buffered)
    x = batch(9, width=WIDTH)
    streamed = bytes_of(model, is_trained=True)
    own_bytes = bytes_of(model[2:], is_trained=True) + 2 * 64 + 8  # statistics, which each visit may write

    def uploaded_in(call):
        uploaded(piped)
        call()
        return uploaded(piped)[0]

    def train():
        piped.forward_backward((x,), loss_fn=square_loss)
        piped.synchronize()
        eager_round(reference, (x,), num=NUM)
        assert_same(gradients(buffered), gradients(reference))
        assert_same(buffers(buffered), buffers(reference))

    with roundpipe.RoundPipe(buffered, devices="cpu", model_run_config=config(NUM, plan=plan)) as piped:
        expected = 0 if not plan.forward else own_bytes
        first = uploaded_in(train)
        assert first >= streamed and first <= streamed + own_bytes  # not twice what both stages have
        uploaded_in(train)
        for _ in range(2):
            assert uploaded_in(train) <= expected
        with torch.no_grad():
            for one in (buffered, reference):
                one[1][0].weight.data.mul_(2)  # of which torch takes no note
        assert uploaded_in(train) >= bytes_of(model[:2], is_trained=True)
        assert uploaded_in(train) <= expected
        with torch.no_grad():
            for one in (buffered, reference):
                one[0][0].weight.mul_(2)
                one.eval()
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(piped(x), reference(x), rtol=0, atol=1e-10)
                last = uploaded(piped)[0]
        assert last <= expected


def test_when_memory_runs_out_nothing_stays(caplog):
    def run(residency, limit_bytes=None):
        model = adapted()
        devices = [Device("cpu", memory_bytes=10**6)]
        plan = ExecutePlan([(0, 1), (1, 2), (2, 3)], (3, 4), [(2, 3), (1, 2), (0, 1)])
        run_config = config(NUM, plan=plan, residency=residency)
        with roundpipe.RoundPipe(model, devices=devices, model_run_config=run_config) as piped:
            if limit_bytes is not None:
                piped._session.engine.backends[0].ledger.budget_bytes = limit_bytes  # less than it said to have
            for _ in range(2):
                same(piped, model)
            report = piped.report()
            return report.peak_device_bytes, report.workers[0].resident_bytes, report.predicted

    most_bytes, resident, streamed = run("off")
    assert resident == 0
    with_residency, resident, predicted = run("auto")
    assert resident == bytes_of(adapted(), is_trained=False) < with_residency
    frozen = [bytes_of([layer], is_trained=False) for layer in adapted()]
    assert streamed.uploaded_bytes - predicted.uploaded_bytes == pytest.approx(sum(frozen) + sum(frozen[:2]))
    caplog.clear()
    assert run("auto", most_bytes)[1] == 0
    assert sum("ran out of device memory" in record.message for record in caplog.records) == 1


def test_evaluations_keep_trained_weights_where_there_is_room():
    model, plan = adapted(), ExecutePlan([(0, 1), (1, 2), (2, 3)], (3, 4), [(2, 3), (1, 2), (0, 1)])
    x, devices = batch(width=WIDTH), [Device("cpu", memory_bytes=10**6)]
    everything = sum(p.nbytes for p in model.parameters())

    def evaluate():
        with torch.no_grad():
            torch.testing.assert_close(piped(x), model(x), rtol=0, atol=1e-10)
        return sum(uploaded(piped))

    with roundpipe.RoundPipe(model, devices=devices, model_run_config=config(NUM, plan=plan)) as piped:
        assert evaluate() == everything
        assert evaluate() == 0 and resident_bytes(piped) == [everything]
        for _ in range(2):
            same(piped, model)  # and writes what is trained
            assert evaluate() >= bytes_of(model, is_trained=True)
            assert evaluate() == 0
        assert resident_bytes(piped) == [everything]
        piped._session.engine.backends[0].ledger.budget_bytes = everything  # less than it said to have
        piped._session.engine.release_memory()
        assert evaluate() < everything * 2 and resident_bytes(piped) == [0]
