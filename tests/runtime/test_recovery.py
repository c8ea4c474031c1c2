"""Out of device memory: the call is planned anew and run again, with eager's numbers."""

import copy
import itertools
import logging
import re
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import DeviceMemoryError
from roundpipe.runtime.device.backend import Device
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.engine.smaller_plans import shrink
from roundpipe.wrappers import recovery
from tests.repeats import repeats
from tests.runtime.models import DTYPE, assert_same, batch, config, eager_round, gradients, mlp, square_loss

ROOM = 10**6


class Fault:
    """Raises out of memory at some visit of a layer's forward or backward, once."""

    def __init__(self):
        self.at = -1
        self.counter = itertools.count(1)  # which no snapshot can put back

    @property
    def visits(self):
        return next(self.counter) - 1

    def visit(self, tensor):
        if type(tensor) is torch.Tensor and next(self.counter) == self.at:  # not where memory is computed on fakes
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Visit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fault):
        ctx.fault = fault
        fault.visit(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.fault.visit(gradient)
        return gradient, None


class Layer(nn.Module):
    def __init__(self, fault, width=6):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.fault = [fault]

    def forward(self, x):
        return torch.tanh(self.norm(Visit.apply(self.linear(x), self.fault[0])))


def model_of(fault, depth=6):
    torch.manual_seed(1)
    return nn.Sequential(*(Layer(fault) for _ in range(depth))).to(DTYPE)


def counted(fault):
    """Visits of one call."""
    with roundpipe.RoundPipe(model_of(fault), devices=[Device("cpu", memory_bytes=ROOM)]) as piped:
        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3))
    return fault.visits


@pytest.mark.parametrize(
    "position, workers",
    repeats(
        itertools.product(range(12), (1, 2)),
        [f"{position}-{1 + position % 2}" for position in range(0, 12, 2)] + [f"{position}-2" for position in (5, 11)],
    ),
)
def test_a_call_that_runs_out_of_memory_is_run_again(workers, position, caplog):
    fault = Fault()
    fault.at = 1 + position * (counted(Fault()) - 1) // 11
    model = model_of(fault)
    reference = copy.deepcopy(model)
    for layer in reference:
        layer.fault[0] = Fault()
    with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=ROOM)] * workers) as piped:
        with caplog.at_level(logging.WARNING, logger="roundpipe"):
            for _ in range(2):
                state = torch.get_rng_state()
                found = piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3))
                torch.set_rng_state(state)
                expected, _ = eager_round(reference, (batch(),), num=3)
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert_same(gradients(model), gradients(reference), atol=1e-9)
    assert_same(dict(model.named_buffers()), dict(reference.named_buffers()), atol=1e-9)
    assert sum("ran out of device memory" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("where", ["layer", "loss"])
def test_a_budget_is_taken_when_the_attempt_has_let_go_of_its_values(monkeypatch, where):
    """Of what failed and of what was there for it: in the frames of its error, and in the functions of these."""
    held, at_budget, runs = [], [], itertools.count(1)

    def fail(place, *tensors):
        if place == where and type(tensors[0]) is torch.Tensor and next(runs) == 1:
            held.extend(map(weakref.ref, tensors))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    class Last(nn.Module):
        def forward(self, x):
            large = x + 1
            fail("layer", large, x)
            return large

    def loss_fn(outputs, label):
        loss = square_loss(outputs, label)
        fail("loss", loss, outputs)
        return loss

    take_budget = CpuBackend.take_budget
    monkeypatch.setattr(
        CpuBackend, "take_budget", lambda self: (at_budget.extend(ref() for ref in held), take_budget(self))[1]
    )
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), Last()).to(DTYPE)
    with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=ROOM)]) as piped:
        piped.forward_backward((batch(),), loss_fn=loss_fn, run_config=config(3))
    assert at_budget == [None, None]


def test_the_worker_whose_allocation_failed_learns_from_it(monkeypatch):
    seen = []
    monkeypatch.setattr(CpuBackend, "note_failure", lambda self: seen.append(self.name))
    fault = Fault()
    fault.at = 1
    with roundpipe.RoundPipe(model_of(fault), devices=[Device("cpu", memory_bytes=ROOM)]) as piped:
        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3))
        assert len(seen) == 1
        with pytest.raises(ZeroDivisionError):
            piped.forward_backward((batch(),), loss_fn=lambda outputs, label: 1 / 0, run_config=config(3))
    assert len(seen) == 1


def test_a_plan_that_needs_a_little_less_is_tried_at_last(monkeypatch):
    """Where none needs much less: the one of single layers, and with that the proposals end."""
    needs = []

    def noted(plans, call, plan):
        before = plans.needed_bytes(call, plan)
        if found := shrink(plans, call, plan):
            needs.append((before, plans.needed_bytes(call, plans.plan(call)), plans.least_need(call).memory.total))
        return found

    monkeypatch.setattr(recovery, "shrink", noted)
    options = {"grain": "layer", "tiles": "off", "residency": "off"}

    def run(budget_bytes, num_faults):
        fault = Fault()
        faults = iter(range(1, num_faults + 1))
        fault.visit = lambda tensor: _raise_until(tensor, faults)
        with roundpipe.RoundPipe(model_of(fault), devices=[Device("cpu", memory_bytes=budget_bytes)]) as piped:
            samples = torch.randn(120, 6, dtype=DTYPE)
            piped.forward_backward((samples,), loss_fn=square_loss, run_config=config(3, **options))

    run(ROOM, 1)
    least_bytes = needs.pop()[2]
    run(int(1.1 * least_bytes), 1)
    ((before, after, least),) = needs
    assert least_bytes == least == after < before <= 1.1 * least_bytes
    with pytest.raises(DeviceMemoryError, match="no plan is known that needs less"):
        run(int(1.1 * least_bytes), 2)


def _raise_until(tensor, faults):
    if type(tensor) is torch.Tensor and next(faults, None) is not None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_without_a_smaller_plan_the_error_says_what_was_tried():
    class Never(nn.Module):
        def forward(self, x):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model = nn.Sequential(nn.Linear(6, 6), Never(), nn.Linear(6, 6)).to(DTYPE)
    with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=ROOM)]) as piped:
        with pytest.raises(DeviceMemoryError, match=r"no plan is known that needs less: CUDA out of memory") as caught:
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3))
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_what_an_error_proposes_works(caplog):
    model = mlp(depth=4, width=32)
    options = {"devices": [Device("cpu", memory_bytes=90_000)]}
    with roundpipe.RoundPipe(model, **options) as piped:
        with (
            caplog.at_level(logging.INFO, "roundpipe"),
            pytest.raises(DeviceMemoryError, match="is predicted to fit") as caught,
        ):
            piped.forward_backward((batch(256, 32),), loss_fn=square_loss, run_config=config(2))
        assert "predicted" not in caplog.text  # nothing was chosen
        number, grain = re.search(r"num_microbatch=(\d+) with recompute_grain='(\w+)'", str(caught.value)).groups()
        piped.forward_backward((batch(256, 32),), loss_fn=square_loss, run_config=config(int(number), grain))


def test_what_an_error_proposes_was_planned_for_as_it_would_run():
    """Gradients of weights come and go, and take the same for microbatches of any size."""
    proposed = 0
    for budget in (26_000, 30_000):
        with roundpipe.RoundPipe(mlp(depth=6, width=24), devices=[Device("cpu", memory_bytes=budget)]) as piped:
            with pytest.raises(DeviceMemoryError) as caught:
                piped.forward_backward((batch(16, 24),), loss_fn=square_loss, run_config=config(2))
            if found := re.search(r"num_microbatch=(\d+) with recompute_grain='(\w+)'", str(caught.value)):
                run = config(int(found[1]), found[2])
                piped.forward_backward((batch(16, 24),), loss_fn=square_loss, run_config=run)
                proposed += 1
    assert proposed


def test_no_more_microbatches_are_proposed_than_there_are_samples():
    device = Device("cpu", memory_bytes=90_000)
    with roundpipe.RoundPipe(mlp(depth=4, width=32), devices=[device]) as piped:
        with pytest.raises(DeviceMemoryError, match="shorter or fewer samples") as caught:
            piped.forward_backward((torch.ones(2, 128, 32, dtype=DTYPE),), loss_fn=square_loss, run_config=config(2))
        assert "is predicted to fit" not in str(caught.value)
    found = re.search(r"\(([\d,]+) bytes are needed for plans, which have 90,000\)", str(caught.value))
    device = Device("cpu", memory_bytes=int(found[1].replace(",", "")))
    with roundpipe.RoundPipe(mlp(depth=4, width=32), devices=[device]) as piped:
        piped.forward_backward((torch.ones(2, 128, 32, dtype=DTYPE),), loss_fn=square_loss, run_config=config(2))
        assert piped.peak_device_bytes() > 90_000


def test_as_many_microbatches_as_samples_are_proposed():
    """Three samples in one microbatch, of which two are too much."""
    samples = torch.ones(3, 128, 32, dtype=DTYPE)
    numbers = set()
    for budget in range(150_000, 400_000, 25_000):
        with roundpipe.RoundPipe(mlp(depth=4, width=32), devices=[Device("cpu", memory_bytes=budget)]) as piped:
            try:
                piped.forward_backward((samples,), loss_fn=square_loss, run_config=config(1))
                numbers.add(1)
            except DeviceMemoryError as error:
                if found := re.search(r"num_microbatch=(\d+) with recompute_grain='(\w+)'", str(error)):
                    run = config(int(found[1]), found[2])
                    piped.forward_backward((samples,), loss_fn=square_loss, run_config=run)
                    numbers.add(int(found[1]))
    assert 3 in numbers, numbers


def test_microbatches_of_other_traces_count_in_a_proposal():
    class ByMode(nn.Module):  # a trace for each of two microbatches
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x, flags):
            return self.linear(x).tanh() if int(flags[0]) > 0 else self.linear(x)

    x, flags = batch(256, 32).float(), torch.arange(2).repeat_interleave(128)
    with roundpipe.compile(ByMode(), devices=[Device("cpu", memory_bytes=100_000)]) as piped:
        with pytest.raises(DeviceMemoryError) as caught:
            piped.forward_backward((x, flags), loss_fn=square_loss, run_config=replace(config(2), tiles="off"))
        (number,) = re.findall(r"num_microbatch=(\d+) with", str(caught.value))
        piped.forward_backward((x, flags), loss_fn=square_loss, run_config=replace(config(int(number)), tiles="off"))
        assert piped.trace_count == 2


def test_after_an_error_the_next_call_works():
    """The limits that were tried are those of the call that failed."""
    fault = Fault()
    fault.visit = lambda tensor: raise_out_of_memory() if type(tensor) is torch.Tensor and fault.at else None
    model = model_of(fault)
    reference = copy.deepcopy(model)
    for layer in reference:
        layer.fault[0] = Fault()
    with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=ROOM)]) as piped:
        with pytest.raises(DeviceMemoryError):
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3))
        fault.at = 0
        model.zero_grad()
        found = piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3))
        expected, _ = eager_round(reference, (batch(),), num=3)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        assert_same(gradients(model), gradients(reference), atol=1e-9)


def raise_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_without_a_limit_an_error_of_the_users_code_is_theirs():
    fault = Fault()
    fault.at = 3
    with roundpipe.RoundPipe(model_of(fault), devices=["cpu"]) as piped, pytest.raises(torch.OutOfMemoryError):
        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3))


@pytest.mark.parametrize("grain", repeats(["stage", "layer"], ["layer"]))
def test_true_budgets(grain):
    """From more than all down to less than a layer: eager's numbers within the budget, or an error."""
    model = mlp(depth=8, width=16)
    reference = copy.deepcopy(model)
    expected, _ = eager_round(reference, (batch(64, 16),), num=2)
    trained = 0
    for budget in range(12_000, 120_000, 5_400):
        model.zero_grad()
        with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=budget)]) as piped:
            try:
                found = piped.forward_backward((batch(64, 16),), loss_fn=square_loss, run_config=config(2, grain))
            except DeviceMemoryError:
                continue
            trained += 1
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
            assert_same(gradients(model), gradients(reference), atol=1e-9)
            assert piped.peak_device_bytes() <= budget
    assert trained >= 10


def test_what_hooks_and_losses_count_is_counted_once():
    fault, hooks, losses = Fault(), [], []
    fault.at = counted(Fault()) // 2
    model = model_of(fault)
    model[0].register_forward_hook(lambda module, args, output: hooks.append("hook"))

    def loss_fn(outputs, label):
        losses.append("loss")
        return square_loss(outputs, label)

    with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=ROOM)]) as piped:
        piped.forward_backward((batch(),), loss_fn=loss_fn, run_config=config(3))
    assert losses == ["loss"] * 3
