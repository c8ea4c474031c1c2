"""What is counted on a device with a budget, and what happens at its limit."""

import copy
import gc
import re

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import DeviceMemoryError
from roundpipe.runtime.device.backend import Device
from roundpipe.runtime.device.cpu import Ledger
from tests.repeats import repeats
from tests.runtime.models import (
    DTYPE,
    assert_same,
    batch,
    chain,
    config,
    cost_of,
    eager_round,
    gradients,
    mlp,
    square_loss,
)

ROOMY = Device("cpu", memory_bytes=10**9)
"""A worker that counts what operators allocate, and has room for it."""

grains = pytest.mark.parametrize("grain", ["stage", "layer"])


def bytes_of(model):
    """Weights, and gradients of what is trainable."""
    return sum(p.nbytes * (1 + p.requires_grad) for p in model.parameters()) + sum(b.nbytes for b in model.buffers())


def ledgers(piped):
    return [backend.ledger for backend in piped._session.engine.backends]  # by purpose: public numbers are sums


def assert_only_the_arenas_are_counted(piped):
    gc.collect()
    for ledger in ledgers(piped):
        held = {purpose: size for purpose, size in ledger.by_purpose.items() if size}
        assert set(held) <= {"weights", "resident weights"}, held
        assert ledger.total_bytes == sum(held.values())


def test_training_in_a_quarter_of_weights_and_gradients():
    model = mlp(depth=16, width=32)
    reference = copy.deepcopy(model)
    budget = bytes_of(model) // 4
    for num_workers in (1, 2):
        model.zero_grad()
        reference.zero_grad()
        with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=budget)] * num_workers) as piped:
            for _ in range(2):
                expected, _ = eager_round(reference, (batch(8, 32),), num=4)
                found = piped.forward_backward((batch(8, 32),), loss_fn=square_loss, run_config=config(4))
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
            assert 0 < piped.peak_device_bytes() <= budget
            assert_same(gradients(model), gradients(reference), atol=1e-9)
            assert_only_the_arenas_are_counted(piped)


@grains
def test_the_peak_is_within_what_the_planner_counts(grain):
    """Costs that tell the activations keep the plan, and the run, within the budget."""
    width, rows = 32, 64
    value_bytes = rows // 4 * width * 8

    def build():
        parts = [(nn.Sequential(nn.Linear(width, width), nn.Tanh()), [f"h{i}"], [f"h{i + 1}"]) for i in range(12)]
        model = chain(["h0"], parts, ["h12"], draws_random=False)
        model.costs = tuple(
            cost_of(layer, activation_bytes=2 * value_bytes, carry_bytes=value_bytes) for layer in model
        )
        return model

    model = build()
    budget = int(bytes_of(model) * 0.4)
    with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=budget)] * 2) as piped:
        piped.forward_backward((batch(rows, width),), loss_fn=square_loss, run_config=config(4, grain))
        assert piped.peak_device_bytes() <= budget
        assert_only_the_arenas_are_counted(piped)


def test_a_layer_larger_than_the_budget_is_named():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 512), nn.Linear(512, 8)).to(DTYPE)
    layer_bytes = bytes_of(model[2])
    budget = layer_bytes // 2
    with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=budget)]) as piped:
        with pytest.raises(DeviceMemoryError) as caught:
            piped.forward_backward((batch(4, 8),), loss_fn=square_loss, run_config=config(2))
    message = str(caught.value)
    numbers = [int(one.replace(",", "")) for one in re.findall(r"\d[\d,]*", message)]
    assert budget in numbers, message
    assert re.search(r"layer \d", message), message
    assert any(number >= layer_bytes // 2 for number in numbers if number != budget), message


def peak_of(build, given, grain=None, num=2, plan=None, **options):
    with roundpipe.RoundPipe(build(), devices=[ROOMY], **options) as piped:
        piped.forward_backward((given,), loss_fn=square_loss, run_config=config(num, grain, plan))
        peak = piped.peak_device_bytes()
        assert_only_the_arenas_are_counted(piped)
    return peak


def test_layer_grain_peaks_below_stage_grain():
    plan = roundpipe.ExecutePlan([(0, 7)], (7, 8), [(0, 7)])
    given = batch(64, 16)
    layer, stage = (peak_of(lambda: mlp(8, 16), given, grain, 2, plan) for grain in ("layer", "stage"))
    assert layer < 0.75 * stage


@pytest.mark.parametrize("grain", repeats(["stage", "layer"], ["layer"]))
def test_more_microbatches_peak_lower(grain):
    plan = roundpipe.ExecutePlan([(0, 4)], (4, 8), [(0, 4)])
    given = batch(256, 16)
    peaks = [peak_of(lambda: mlp(8, 16), given, grain, num, plan) for num in (1, 2, 8)]
    assert peaks[2] < peaks[1] < peaks[0]


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_the_order_of_peaks(workers):
    """One model, one batch, one plan: what each way to run it needs at most, on the device that needs most."""
    plan = roundpipe.ExecutePlan([(0, 4)], (4, 8), [(0, 4)])
    given = batch(256, 16)

    def peak(run, grain="stage", num=4):
        with roundpipe.RoundPipe(mlp(8, 16), devices=[ROOMY] * workers) as piped:
            run(piped, config(num, grain, plan))
            return piped.peak_device_bytes()

    def train(piped, run):
        piped.forward_backward((given,), loss_fn=square_loss, run_config=run)

    def apart(piped, run):
        square_loss(piped(given, roundpipe_run_config=run), None).backward()

    @torch.no_grad()
    def forward(piped, run):
        piped(given, roundpipe_run_config=run)

    assert peak(forward) < min(peak(train), peak(apart))
    assert peak(apart, "layer") < peak(apart, "stage")
    assert peak(train, num=8) < peak(train, num=4) < peak(train, num=2)


def test_shorter_stages_peak_lower():
    given = batch(4, 32)
    whole = roundpipe.ExecutePlan([], (0, 8), [])
    singles = roundpipe.ExecutePlan([(i, i + 1) for i in range(7)], (7, 8), [(i, i + 1) for i in reversed(range(7))])
    assert peak_of(lambda: mlp(8, 32), given, plan=singles) < 0.5 * peak_of(lambda: mlp(8, 32), given, plan=whole)


def test_frozen_weights_have_no_gradients_on_the_device():
    given = batch(2, 32)
    trained = peak_of(lambda: mlp(4, 32), given, plan=roundpipe.ExecutePlan([], (0, 4), []))

    def frozen():
        model = mlp(4, 32)
        model[:3].requires_grad_(False)
        return model

    less = peak_of(frozen, given, plan=roundpipe.ExecutePlan([], (0, 4), []))
    frozen_bytes = sum(p.nbytes for p in mlp(4, 32)[:3].parameters())
    assert trained - less >= frozen_bytes


def test_forward_without_grad_keeps_no_activations():
    model = mlp(8, 16)
    with roundpipe.RoundPipe(model, devices=[ROOMY]) as piped, torch.no_grad():
        piped(batch(64, 16), roundpipe_run_config=config(2))
        assert_only_the_arenas_are_counted(piped)
        (ledger,) = ledgers(piped)
        assert ledger.by_purpose["activations"] == 0
        weight_bytes = ledger.by_purpose["weights"] + ledger.by_purpose["resident weights"]
        assert ledger.peak_bytes <= weight_bytes + 2 * 64 * 16 * 8


def test_nothing_is_counted_after_forward_and_backward_apart():
    with roundpipe.RoundPipe(mlp(6), devices=[ROOMY] * 2) as piped:
        output = piped(batch(), roundpipe_run_config=config(3))
        assert_only_the_arenas_are_counted(piped)
        output.sum().backward()
        assert_only_the_arenas_are_counted(piped)


@pytest.mark.parametrize("grain", repeats(["stage", "layer"], ["layer"]))
def test_nothing_is_counted_after_an_error(grain):
    class Fails(nn.Module):
        phase = None

        def forward(self, value):
            if self.phase == ("recomputation" if roundpipe.doing_recompute() else "forward"):
                raise ValueError(self.phase)
            return value * 2

    model = nn.Sequential(*mlp(2), Fails(), *mlp(2))
    plan = roundpipe.ExecutePlan([(0, 2), (2, 4)], (4, 5), [(2, 4), (0, 2)])
    with roundpipe.RoundPipe(model, devices=[ROOMY] * 2) as piped:
        for phase in ("forward", "recomputation"):
            Fails.phase = phase
            with pytest.raises(ValueError, match=phase):
                piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3, grain, plan))
            assert_only_the_arenas_are_counted(piped)
        Fails.phase = None
        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3, grain, plan))
        assert_only_the_arenas_are_counted(piped)


def test_running_out_in_the_middle_leaves_a_model_that_works():
    """A batch whose activations don't fit raises; a smaller one then trains."""
    model = mlp(6, 16)
    plan = roundpipe.ExecutePlan([(0, 3)], (3, 6), [(0, 3)])
    budget = 2 * bytes_of(model)
    with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=budget)] * 2) as piped:
        with pytest.raises(DeviceMemoryError, match="more bytes for (activations|carried values).*num_microbatch=4"):
            piped.forward_backward((batch(512, 16),), loss_fn=square_loss, run_config=config(2, plan=plan))
        assert_only_the_arenas_are_counted(piped)
        model.zero_grad()
        reference = copy.deepcopy(model)
        eager_round(reference, (batch(4, 16),), num=2)
        piped.forward_backward((batch(4, 16),), loss_fn=square_loss, run_config=config(2, plan=plan))
        assert_same(gradients(model), gradients(reference))


def test_closing_gives_everything_back():
    piped = roundpipe.RoundPipe(mlp(6), devices=[ROOMY] * 2)
    piped.forward_backward((batch(),), loss_fn=square_loss)
    piped.close()
    assert [ledger.total_bytes for ledger in ledgers(piped)] == [0, 0]


def test_the_peak_can_be_reset():
    with roundpipe.RoundPipe(mlp(6), devices=[ROOMY]) as piped:
        piped.forward_backward((batch(200),), loss_fn=square_loss)
        large = piped.peak_device_bytes(reset=True)
        assert piped.peak_device_bytes() < large
        piped.forward_backward((batch(4),), loss_fn=square_loss)
        assert piped.peak_device_bytes() < large


def test_a_ledger():
    ledger = Ledger("cpu (worker 0)", 100)
    ledger.add(60, "weights")
    with pytest.raises(DeviceMemoryError, match=r"41 more bytes for activations with 60 of 100 in use \(weights 60\)"):
        ledger.add(41, "activations")
    assert ledger.total_bytes == 60 and ledger.by_purpose["activations"] == 0
    ledger.add(40, "activations")
    ledger.remove(60, "weights")
    assert (ledger.total_bytes, ledger.peak_bytes) == (40, 100)
