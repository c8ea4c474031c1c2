"""What microbatches share of a stage visit's uploads: bytes that come up, and that nobody sees another's writes."""

import copy

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.schedule import Phase
from roundpipe.runtime.device.backend import Device, Lane
from roundpipe.runtime.device.cpu import CpuBackend
from tests.runtime.cases_engine import PLANS, backends_of, grains, workers
from tests.runtime.models import (
    DTYPE,
    assert_equal_bits,
    assert_round_is_eager,
    assert_same,
    batch,
    chain,
    config,
    gradients,
)
from tests.runtime.test_memory import assert_only_the_arenas_are_counted

NUM = 3


class Masked(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value, mask):
        return torch.tanh(self.linear(value)) * mask


def masked_chain(depth=6):
    """Each layer reads a mask, the last argument."""
    parts = [(Masked(), [f"h{i}", "mask"], [f"h{i + 1}"]) for i in range(depth)]
    return chain(["h0", "mask"], parts, [f"h{depth}"], may_write_reads=False)


def whole_mask():
    """Of another length than the batch, so that every microbatch gets all of it."""
    return torch.linspace(0.5, 1.5, 6, dtype=DTYPE).reshape(1, 6)


@pytest.fixture
def uploads(monkeypatch):
    """Shapes of the values that come up."""
    shapes = []
    upload = CpuBackend.upload

    def noted(self, source, target=None, lane=Lane.UPLOAD):
        if lane is Lane.UPLOAD:
            shapes.append(tuple(source.shape))
        return upload(self, source, target, lane)

    monkeypatch.setattr(CpuBackend, "upload", noted)
    return shapes


def weighted_loss(output, label):
    target, weights = label
    return ((output - target).square() * weights).sum()


def train(model, plan, grain, num_workers, *, num=NUM, mask=None, loss_fn=weighted_loss, **options):
    weights = torch.linspace(1, 2, 6, dtype=DTYPE)
    with roundpipe.RoundPipe(model, devices=[Device("cpu", **options)] * num_workers) as piped:
        loss = piped.forward_backward(
            (batch(9), whole_mask() if mask is None else mask),
            label=(batch(9, seed=4), weights),
            loss_fn=loss_fn,
            run_config=config(num, grain, plan),
        )
        piped.synchronize()
        assert_only_the_arenas_are_counted(piped)
        return loss, gradients(model), sum(b.moved_bytes[Lane.UPLOAD] for b in backends_of(piped))


def eager(model, num=NUM, mask=None, loss_fn=weighted_loss):
    """Eager's loss and gradients, with a fresh copy of what is shared for each microbatch."""
    mask, weights = whole_mask() if mask is None else mask, torch.linspace(1, 2, 6, dtype=DTYPE)
    model = copy.deepcopy(model)
    rows = zip(batch(9).tensor_split(num), batch(9, seed=4).tensor_split(num), strict=True)
    total = torch.zeros((), dtype=DTYPE)
    for x, target in rows:
        loss = loss_fn(model.run(x, mask.clone()), (target, weights.clone()))
        loss.backward()
        total = total + loss.detach()
    return total, gradients(model)


@pytest.mark.filterwarnings("ignore:.*every microbatch gets the whole tensor")
@pytest.mark.parametrize("plan", ["one stage", "one layer each", "uneven", "one backward"])
@grains
def test_what_is_not_split_comes_up_once_per_visit(plan, grain, uploads):
    model, plan = masked_chain(), PLANS[plan]
    expected, expected_gradients = eager(model)
    found = []
    for num_workers in (1, 2, 3):
        uploads.clear()
        model.zero_grad()
        loss, own, num_bytes = train(model, plan, grain, num_workers)
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
        assert_same(own, expected_gradients)
        visits = len(plan.forward) + 1 + len(plan.backward)
        assert uploads.count((1, 6)) == visits
        assert uploads.count((6,)) == 1  # the label's weights
        row_bytes = 3 * 6 * 8
        assert num_bytes == row_bytes * uploads.count((3, 6)) + 48 * (visits + 1)
        found.append((loss, own))
    for loss, own in found[1:]:
        assert torch.equal(loss, found[0][0])
        assert_equal_bits(own, found[0][1])


@pytest.mark.filterwarnings("ignore:.*every microbatch gets the whole tensor")
def test_pieces_of_one_expanded_row_are_the_same(uploads):
    model, plan = masked_chain(), PLANS["uneven"]
    mask = whole_mask().expand(9, 6)
    _, found, _ = train(model, plan, "stage", 2, mask=mask)
    assert_same(found, eager(model, mask=mask.narrow(0, 0, 3))[1])
    assert len(uploads) == NUM * (len(plan.forward) + 1 + 2 * len(plan.backward) + 1) + 5 + 1


@grains
def test_layers_recomputed_one_by_one_share_what_they_read_of_a_microbatch(grain, uploads):
    """Encoder states are split, and read by all layers of a decoder."""
    model, plan = masked_chain(), PLANS["one backward"]
    assert_round_is_eager(model, (batch(9), batch(9, seed=8)), num=NUM, workers=2, grain=grain, plan=plan)
    segments = 1 if grain == "stage" else 5
    carried = NUM * (2 + 1 + segments + segments)  # h0, h2 and h5 forward; those of the backward, and their gradients
    masks = NUM * (len(plan.forward) + 1 + len(plan.backward))
    assert len(uploads) == carried + masks


def test_gradients_of_what_is_not_split_add_up():
    model = masked_chain()
    expected, found = (whole_mask().requires_grad_() for _ in range(2))
    reference = copy.deepcopy(model)
    for x in batch(9).tensor_split(NUM):
        reference.run(x, expected).square().sum().backward()
    with pytest.warns(UserWarning, match="every microbatch gets the whole tensor"):
        with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
            run_config = config(NUM, "layer", PLANS["uneven"])
            piped.forward_backward((batch(9), found), loss_fn=lambda y, _: y.square().sum(), run_config=run_config)
    torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=1e-10)


@workers
@pytest.mark.filterwarnings("ignore:.*every microbatch gets the whole tensor")
def test_no_microbatch_sees_what_another_writes(workers):
    """A loss that writes its label, and a layer that writes its mask without having said so."""

    class Writes(Masked):
        def forward(self, value, mask):
            mask.mul_(0.5)
            return super().forward(value, mask)

    def writing_loss(output, label):
        label[1].mul_(2)
        return weighted_loss(output, label)

    parts = [(Writes(), [f"h{i}", "mask"], [f"h{i + 1}"]) for i in range(2)]
    model = chain(["h0", "mask"], parts, ["h2"], may_write_reads=False)
    plan = roundpipe.ExecutePlan([(0, 1)], (1, 2), [(0, 1)])
    reference = copy.deepcopy(model)
    weights, total = torch.linspace(1, 2, 6, dtype=DTYPE), torch.zeros((), dtype=DTYPE)
    for x, target in zip(batch(9).tensor_split(NUM), batch(9, seed=4).tensor_split(NUM), strict=True):
        h1 = reference[0]({"h0": x, "mask": whole_mask()})["h1"]  # each stage has a copy of its own
        h2 = reference[1]({"h1": h1, "mask": whole_mask()})["h2"]
        loss = writing_loss(h2, (target, weights.clone()))
        loss.backward()
        total += loss.detach()
    loss, found, _ = train(model, plan, "stage", workers, loss_fn=writing_loss)
    torch.testing.assert_close(loss, total, rtol=0, atol=1e-10)
    assert_same(found, gradients(reference))


@pytest.mark.filterwarnings("ignore:.*every microbatch gets the whole tensor")
def test_layers_that_may_write_what_they_read_share_nothing(uploads):
    parts = [(Masked(), [f"h{i}", "mask"], [f"h{i + 1}"]) for i in range(6)]
    model = chain(["h0", "mask"], parts, ["h6"])
    plan = PLANS["uneven"]
    _, found, _ = train(model, plan, "layer", 2)
    assert_same(found, eager(model)[1])
    assert uploads.count((1, 6)) == NUM * (3 + 4)


@pytest.mark.filterwarnings("ignore:.*every microbatch gets the whole tensor")
def test_nothing_is_held_after_an_error():
    model = masked_chain()

    def fails(output, label):
        raise ArithmeticError("no loss")

    with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=10**9)] * 2) as piped:
        with pytest.raises(ArithmeticError):
            piped.forward_backward((batch(9), whole_mask()), loss_fn=fails, run_config=config(NUM))
        assert_only_the_arenas_are_counted(piped)


@pytest.mark.filterwarnings("ignore:.*every microbatch gets the whole tensor")
def test_the_caller_may_overwrite_what_is_not_split_once_the_call_has_returned():
    model = masked_chain()
    expected, expected_gradients = eager(model)
    plan = PLANS["uneven"]
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2, optim_dtype=DTYPE) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.0)
        label = (batch(9, seed=4), torch.linspace(1, 2, 6, dtype=DTYPE))
        for _ in range(4):
            model.zero_grad()
            mask = whole_mask()
            loss = piped.forward_backward((batch(9), mask), {}, label, weighted_loss, run_config=config(NUM, plan=plan))
            mask.zero_()
            torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
            piped.synchronize()
            assert_same(gradients(model), expected_gradients)
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))


def test_a_schedule_says_which_values_segments_share():
    model, plan = masked_chain(), PLANS["uneven"]
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        seen = []
        run = piped._session.engine.run  # its steps are no part of what a call returns

        def noted(spec, *args, **kwargs):
            seen.append(spec)
            return run(spec, *args, **kwargs)

        piped._session.engine.run = noted  # as above
        for grain in ("stage", "layer"):
            piped.forward_backward(
                (batch(9), batch(9)), loss_fn=lambda y, _: y.square().sum(), run_config=config(NUM, grain, plan)
            )
    for spec, names in zip(seen, (frozenset(), frozenset({"mask"})), strict=True):
        for job in spec.schedule.jobs:
            assert spec.flow_of(job).read_again == (names if job.phase is Phase.BACKWARD else frozenset())
        assert not spec.not_split
