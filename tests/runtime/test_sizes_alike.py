"""Batches whose sizes differ all the time, as padded ones do: how often it is planned for them, and by what memory."""

import copy

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.layers import CarriedValue, LayerCost
from roundpipe.runtime.engine import plan_choice
from roundpipe.runtime.engine.chain_record import ChainRecord, somewhat_larger
from roundpipe.wrappers import calls_in_tiles, recovery
from tests.fx.test_memory import Block, cross_entropy

BUDGET_BYTES = 3 * 2**20


def decoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 32), *[Block() for _ in range(6)], nn.Linear(32, 64)).eval()


def train(piped, length, samples=4):
    ids = torch.arange(samples * length).view(samples, length) % 64
    return piped.forward_backward((ids,), label=ids.flip(1), loss_fn=cross_entropy, loss_reduction="mean")


def compiled(**options):
    return roundpipe.compile(
        decoder(),
        devices=[roundpipe.Device("cpu", memory_bytes=BUDGET_BYTES)],
        model_run_config=roundpipe.RoundPipeRunConfig(**options),
    )


@pytest.fixture
def planned(monkeypatch):
    """Elements of the calls that were planned for since it was cleared."""
    choose, sizes = plan_choice.choose_for, []

    def note(plans, call):
        sizes.append(call.elements())
        return choose(plans, call)

    monkeypatch.setattr(plan_choice, "choose_for", note)
    return sizes


@pytest.mark.parametrize("options", [{"num_microbatch": 2}, {"num_microbatch": "auto", "recompute_grain": "auto"}])
def test_somewhat_smaller_batches_run_by_the_plan_of_larger_ones(planned, options):
    with compiled(**options) as piped:
        for _ in range(2):  # options are chosen once there is a chain
            train(piped, 40)
        planned.clear()
        for length in (39, 36, 40, 38):
            train(piped, length)
        assert not planned
        for length in (24, 45, 41):
            train(piped, length)
        assert len(planned) == 2
        assert piped.peak_device_bytes() <= BUDGET_BYTES


def test_losses_are_those_of_any_plan():
    lengths = (40, 38, 21, 37, 45, 20)
    model = decoder()
    with compiled(num_microbatch=2) as piped:
        for length in lengths:
            ids = torch.arange(4 * length).view(4, length) % 64
            torch.testing.assert_close(train(piped, length), cross_entropy(model(ids), ids.flip(1)))


def test_ever_longer_batches_are_computed(monkeypatch):
    """Attention takes more than what follows from shorter ones."""
    computed, measure = [], calls_in_tiles.measure_memory
    monkeypatch.setattr(recovery, "shrink", None)  # nothing runs out of memory
    monkeypatch.setattr(
        calls_in_tiles, "measure_memory", lambda *args: computed.append(args[1][0].numel()) or measure(*args)
    )
    lengths = [8 + 6 * step for step in range(12)]
    with compiled(num_microbatch=2) as piped:
        for length in lengths:
            train(piped, length)
    assert {2 * length for length in lengths} == {*computed}


@pytest.mark.parametrize("length", [20, 33, 47, 60])
def test_memory_between_two_sizes_is_hardly_more_than_what_is_computed(length):
    """It grows with the length, and in attention with its square."""
    with compiled(num_microbatch=1) as piped:
        for known in (16, 64):
            train(piped, known)
        # what is known of sizes in between shows in no report
        record = piped._runner.builder.plans.costs.record(piped._runner.last_chain)
        between = record.memory_at(4 * length)
        record.computed.clear()
        record.sizes.clear()
        train(piped, length)
        exact = record.memory_at(4 * length)
    for one, other in zip(between, exact, strict=True):
        assert other.training_bytes <= one.training_bytes <= 1.25 * other.training_bytes


def test_only_somewhat_larger_sizes_stand_for_one():
    sizes = [80, 100, 200]
    assert [somewhat_larger(sizes, size) for size in (100, 99, 89, 88, 80, 79, 101, 178, 177, 201)] == [
        *(100, 100, 100, 88, 80, 80, 101, 200, 177, 201)
    ]


def test_growing_sizes_are_planned_for_in_steps():
    record = ChainRecord()
    found = []
    for size in range(100, 1000):
        found.append(record.planned_for(size))
        assert size <= found[-1] <= 1.125 * size
        record.add_size(found[-1])
    assert len({*found}) == len(record.sizes) < 22
    assert [record.planned_for(size) for size in range(100, 1000)] == found


def test_what_fits_by_itself_only_is_planned_by_itself(monkeypatch, planned):
    """A batch that is a little larger than one before is planned as a still larger one, if there is memory for it."""
    needed = []

    def shorter(plans, call):
        needed.append(plans.costs.elements(call))
        if needed[-1] == 90:
            raise roundpipe.DeviceMemoryError("too large")
        return choose(plans, call)

    with compiled(num_microbatch=2) as piped:
        train(piped, 40)
        choose = plan_choice.choose_for
        monkeypatch.setattr(plan_choice, "choose_for", shorter)
        train(piped, 42)
        train(piped, 42)
        train(piped, 41)
    assert needed == [90, 84]
    assert planned == [80, 84]


@pytest.mark.parametrize("num_microbatch", [1, 2])
def test_while_everything_lives_on_the_device_no_stages_to_stream_it_are_looked_for(planned, num_microbatch):
    model = decoder()
    reference, ours = copy.deepcopy(model), None
    with roundpipe.compile(
        model,
        devices=[roundpipe.Device("cpu", memory_bytes=2**30)],
        model_run_config=roundpipe.RoundPipeRunConfig(num_microbatch=num_microbatch, residency="full"),
    ) as piped:
        ours = torch.optim.SGD(piped.optim_parameters(), 0.1)
        theirs = torch.optim.SGD(reference.parameters(), 0.1)
        for step, length in enumerate((40, 40, 60, 21, 33, 40, 64, 12)):
            if step == 2:
                planned.clear()
            train(piped, length)
            piped.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
            ids = torch.arange(4 * length).view(4, length) % 64
            cross_entropy(reference(ids), ids.flip(1)).backward()
            theirs.step()
            theirs.zero_grad()
            with torch.no_grad():
                torch.testing.assert_close(piped(ids), reference(ids))
    assert not planned
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_costs_between_two_sizes():
    value = CarriedValue(0, (1,), num_bytes=10, own_bytes=4)
    small = LayerCost(forward_s=1.0, weight_bytes=7, activation_bytes=100, unmade_bytes=3, values=(value,))
    large = LayerCost(forward_s=5.0, weight_bytes=7, activation_bytes=300, unmade_bytes=3, values=(value.scaled(3.0),))
    assert small.between(large, 0.25) == LayerCost(
        forward_s=2.0,
        weight_bytes=7,
        activation_bytes=150,
        unmade_bytes=3,
        values=(CarriedValue(0, (1,), num_bytes=15, own_bytes=6),),
    )
    assert small.between(large, 1.0) == large
