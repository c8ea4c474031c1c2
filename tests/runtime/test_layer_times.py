"""Measured layer times: what is learned of a round, what plans and tables make of it."""

import logging
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.layers import ESTIMATED_LINK_BYTES_PER_S, LayerCost
from roundpipe.core.schedule import make_schedule
from roundpipe.runtime.config import resolve
from roundpipe.runtime.device.backend import Device, Lane
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.engine import cost_model, option_choice
from roundpipe.runtime.engine.plan_choice import PlanChooser
from roundpipe.runtime.engine.spec import Call
from roundpipe.runtime.profiling.layer_times import LayerTimes, StepTimes
from tests.runtime.models import DTYPE, batch, chain, config, square_loss


class At:
    """A moment of a made-up clock."""

    def __init__(self, at_s):
        self.at_s = at_s

    def is_done(self):
        return True

    def seconds_since(self, earlier):
        return self.at_s - earlier.at_s


def times_of(*spans):
    times = StepTimes()
    for kind, layers, seconds in spans:
        times.add(kind, layers, At(1.0), At(1.0 + seconds))
    return times


COSTS = [LayerCost(forward_s=1.0, backward_s=2.0, weight_bytes=7), LayerCost(forward_s=1.0, backward_s=6.0)]


def test_the_first_round_is_left_out_and_quiet_steps_count():
    times = LayerTimes(COSTS, 10)
    times.learn(times_of(("forward", (0,), 99.0)), 10)
    assert times.num_steps == 0 and times.costs(10) == COSTS
    times.learn(times_of(("forward", (0,), 2.0), ("forward", (0,), 4.0), ("backward", (0,), 5.0)), 10)
    assert times.num_steps == 1
    assert times.costs(10)[0] == LayerCost(forward_s=3.0, backward_s=5.0, weight_bytes=7)
    for seconds, counts in ((13.0, 3.0), (14.0, 3.0), (4.0, 3.0), (5.0, 4.0), (3.5, 4.0), (4.5, 4.0), (4.0, 4.0)):
        times.learn(times_of(("forward", (0,), seconds)), 10)
        assert times.costs(10)[0].forward_s == counts, seconds


def test_the_backward_of_a_stage_is_dealt_out_as_believed():
    times = LayerTimes(COSTS, 10)
    for _ in range(2):
        times.learn(times_of(("backward", (0, 1), 16.0)), 10)
    assert [cost.backward_s for cost in times.costs(10)] == [4.0, 12.0]
    alone = times_of(("backward", (0,), 4.0), ("backward", (1,), 4.0))
    for _ in range(60):
        times.learn(alone, 10)
    times.learn(times_of(("backward", (0, 1), 8.0)), 10)
    assert [cost.backward_s for cost in times.costs(10)] == pytest.approx([4.0, 4.0])


def test_the_loss_belongs_to_the_last_layer_and_all_scales_with_the_arguments():
    times = LayerTimes(COSTS, 10)
    for _ in range(2):
        times.learn(times_of(("forward", (0,), 2.0), ("forward", (1,), 2.0), ("loss", (1,), 1.0)), 20)
    assert [cost.forward_s for cost in times.costs(10)] == [1.0, 1.5]
    assert [cost.forward_s for cost in times.costs(40)] == [4.0, 6.0]
    # nobody saw a backward: it is what was estimated, as much slower or faster as the forward is
    assert times.costs(20)[0].backward_s == pytest.approx(4.0)


class Clock(threading.local):
    """A made-up clock per thread, that layers move on."""

    now_s = 0.0


CLOCK = Clock()


def last_plan(piped):
    return piped._runner.builder.last_plan  # a table has it only as text, beside what was measured


@pytest.fixture
def made_up_clock(monkeypatch):
    real = CpuBackend.moment

    def moment(self, lane=Lane.COMPUTE):
        return At(CLOCK.now_s) if lane is Lane.COMPUTE else real(self, lane)

    monkeypatch.setattr(CpuBackend, "moment", moment)


class _Rest(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, seconds):
        ctx.seconds = seconds
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        CLOCK.now_s += 2 * ctx.seconds
        return gradient, None


class Slow(nn.Module):
    """Takes its time in forward, and twice that in backward; on the made-up clock."""

    def __init__(self, seconds):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.seconds = seconds

    def forward(self, value):
        CLOCK.now_s += self.seconds
        return _Rest.apply(self.linear(value), self.seconds)


def train(piped, calls, plan=None):
    for _ in range(calls):
        piped.forward_backward((batch(6),), loss_fn=square_loss, run_config=config(3, plan=plan))
        piped.step(lambda: None, is_async=False)


SECONDS = (0.01, 0.01, 0.01, 0.09)


def uneven():
    """Alike by all that can be told without running them."""
    torch.manual_seed(0)
    return nn.Sequential(*map(Slow, SECONDS)).to(DTYPE)


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_measured_seconds_are_those_of_the_layers(made_up_clock, grain):
    plan = roundpipe.ExecutePlan([(0, 2)], (2, 4), [(0, 1 + 1)])
    with roundpipe.RoundPipe(uneven(), devices=["cpu"] * 2) as piped:
        for _ in range(4):
            piped.forward_backward((batch(6),), loss_fn=square_loss, run_config=config(3, grain, plan))
        # a table rounds seconds, and learning waits for a step
        plans, chain = piped._runner.builder.plans, piped._runner.last_chain
        piped.synchronize()
        assert plans.costs.is_measured(chain)
        costs = plans.costs.of(chain, 12)
        assert [cost.forward_s for cost in costs] == pytest.approx(SECONDS)
        # nobody can tell two layers apart that only ran backward together
        assert costs[2].backward_s + costs[3].backward_s == pytest.approx(2 * (SECONDS[2] + SECONDS[3]))
        if grain == "layer":
            assert [cost.backward_s for cost in costs[:2]] == pytest.approx([0.02, 0.02])
        table = piped.partition_table()
        assert "measured seconds" in table and "forward ms" in table


def test_the_plan_changes_behind_a_step_alone_and_says_so(made_up_clock, caplog):
    with roundpipe.RoundPipe(uneven(), devices=["cpu"] * 2) as piped, caplog.at_level(logging.INFO, "roundpipe"):
        run = config(3)
        plans = []
        for _ in range(8):
            piped.forward_backward((batch(6),), loss_fn=square_loss, run_config=run)
            plans.append(last_plan(piped))
        first = plans[0]
        assert plans == [first] * 8
        assert not [record for record in caplog.records if "new plan" in record.message]
        piped.step(lambda: None, is_async=False)
        piped.forward_backward((batch(6),), loss_fn=square_loss, run_config=run)
        assert last_plan(piped) != first
        (record,) = [record for record in caplog.records if "new plan" in record.message]
        assert "predicted" in record.message


def test_plans_are_compared_with_links_as_fast_as_measured(made_up_clock, monkeypatch):
    real, profiles = cost_model.simulate, []

    def simulate(schedule, costs, profile, **options):
        profiles.append(profile)
        return real(schedule, costs, profile, **options)

    monkeypatch.setattr(cost_model, "simulate", simulate)
    device = Device("cpu", upload_bytes_per_s=1e5, download_bytes_per_s=2e5)
    with roundpipe.RoundPipe(uneven(), devices=[device] * 2) as piped:
        train(piped, 9)
    assert profiles
    assert profiles[0].upload_bytes_per_s == pytest.approx(1e5, rel=0.2)
    assert profiles[0].download_bytes_per_s == pytest.approx(2e5, rel=0.2)


def test_deterministic_algorithms_keep_the_plan(made_up_clock):
    torch.use_deterministic_algorithms(True)
    try:
        with roundpipe.RoundPipe(uneven(), devices=["cpu"] * 2) as piped:
            train(piped, 1)
            first = last_plan(piped)
            train(piped, 9)
            assert last_plan(piped) == first
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_small_gain_keeps_the_plan(made_up_clock):
    torch.manual_seed(0)
    model = nn.Sequential(*(Slow(0.01) for _ in range(4))).to(DTYPE)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        train(piped, 1)
        first = last_plan(piped)
        train(piped, 9)
        assert last_plan(piped) == first


def test_a_given_plan_is_kept():
    plan = roundpipe.ExecutePlan([(0, 3)], (3, 4), [(0, 3)])
    with roundpipe.RoundPipe(uneven(), devices=["cpu"] * 2) as piped:
        train(piped, 9, plan)
        assert last_plan(piped) == plan


# ------------------------------------------------------------------------------------- left to choice


def wide(layers=6):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(layers)))


def compiled(budget=None, workers=1, **options):
    device = roundpipe.Device("cpu", memory_bytes=budget)
    return roundpipe.compile(
        wide(),
        example_args=(torch.randn(64, 64),),
        devices=[device] * workers,
        model_run_config=roundpipe.RoundPipeRunConfig(**options),
    )


def used(piped, size=512):
    """Number of microbatches of a call, and what the chosen options are."""
    numbers = []

    def loss(output, _):
        numbers.append(roundpipe.num_microbatches())
        return output.square().mean()

    piped.forward_backward((torch.randn(size, 64),), loss_fn=loss)
    # the grain of recomputation shows in no table
    (by_size,) = piped._runner.builder.plans.costs.record(piped._runner.last_chain).settled.values()
    ((_, grain),) = by_size.values()
    return numbers[0], grain


AUTO = {"num_microbatch": "auto", "recompute_grain": "auto"}


def test_without_a_limit_there_are_few_microbatches():
    with compiled(**AUTO) as piped:
        assert used(piped) == (1, "stage")
    with compiled(workers=3, **AUTO) as piped:
        number, grain = used(piped, size=16384)
        assert 3 <= number <= 6 and grain == "stage"


def test_a_limit_asks_for_more_microbatches_or_layer_by_layer():
    with compiled(10**9, **AUTO) as piped:
        used(piped)
        largest = piped.peak_device_bytes()
    found = []
    for share in (0.9, 0.6, 0.4):
        with compiled(int(largest * share), **AUTO) as piped:
            found.append(used(piped))
            assert piped.peak_device_bytes() <= largest * share
    assert found != [(1, "stage")] * 3


def test_options_that_cannot_be_the_fastest_are_not_planned_for(monkeypatch):
    real, asked = option_choice.choose_plan, []

    def choose(costs, **options):
        asked.append(options["num_microbatches"])
        return real(costs, **options)

    monkeypatch.setattr(option_choice, "choose_plan", choose)
    cost = LayerCost(forward_s=0.01, backward_s=0.02, activation_bytes=4096)
    model = chain(["x"], [(nn.Identity(), [a], [b]) for a, b in pairwise("xabcdefgh")], ["h"], draws_random=False)
    model.costs, model.example_elements = (cost,) * 8, 64
    auto = resolve(roundpipe.RoundPipeRunConfig(num_microbatch="auto"), None, num_devices=3)

    def settled():
        asked.clear()
        whole = Call(model, auto, [(torch.empty(64 * 256),)], [{}], [None], 1)
        chosen = PlanChooser(3, [None]).options.settle(whole, 256).num_microbatch
        return chosen, len(asked)

    chosen, num_planned = settled()
    monkeypatch.setattr(option_choice, "least_seconds", lambda costs, **options: 0.0)
    assert settled() == (chosen, 10)
    assert num_planned < 7


def test_what_fits_in_no_way_is_an_error():
    with compiled(100_000, **AUTO) as piped, pytest.raises(roundpipe.DeviceMemoryError, match="does not fit"):
        used(piped)


def test_a_batch_that_cannot_be_split_has_one_microbatch():
    with compiled(workers=2, **AUTO) as piped:
        assert used(piped, size=1)[0] == 1


def test_before_the_layers_are_known_the_built_in_number_serves():
    with roundpipe.compile(wide(), devices=["cpu"] * 2, model_run_config=roundpipe.RoundPipeRunConfig(**AUTO)) as piped:
        numbers = []

        def loss(output, _):
            numbers.append(roundpipe.num_microbatches())
            return output.square().mean()

        piped.forward_backward((torch.randn(8, 64),), loss_fn=loss)
        assert numbers[0] == 3


def test_a_first_plan_for_accelerators_is_chosen_by_the_simulator(monkeypatch):
    """With the link that goes with estimated seconds; of CPU workers nothing is known before they are measured."""
    real, profiles = cost_model.simulate, []

    def simulate(schedule, costs, profile, **options):
        profiles.append(profile)
        return real(schedule, costs, profile, **options)

    monkeypatch.setattr(cost_model, "simulate", simulate)
    link_bytes = ESTIMATED_LINK_BYTES_PER_S
    cost = LayerCost(forward_s=0.01, backward_s=0.02, weight_bytes=int(0.03 * link_bytes), gradient_bytes=10**6)
    costs = [replace(cost, forward_s=share * 0.01) for share in (1, 2, 1, 1, 2, 1, 1, 2, 1, 1, 1, 1)]
    names = "xabcdefghijkl"
    model = chain(["x"], [(nn.Identity(), [a], [b]) for a, b in pairwise(names)], ["l"], draws_random=False)
    model.costs, model.example_elements = tuple(costs), 6
    # without residency, since most of the weights is frozen and would stay
    streamed = resolve(roundpipe.RoundPipeRunConfig(residency="off"), None, num_devices=2)
    call = Call(model, streamed, [(torch.ones(6),)] * 3, [{}] * 3, [None] * 3, 3)
    by_recurrence = PlanChooser(2, [None]).plan(call)
    assert not profiles
    chosen = PlanChooser(2, [None], accelerators=True).plan(call)
    assert {(one.upload_bytes_per_s, one.download_bytes_per_s) for one in profiles} == {(link_bytes, link_bytes)}
    seconds = [real(make_schedule(plan, 2, 3), costs, profiles[0]).seconds_per_step for plan in (by_recurrence, chosen)]
    assert seconds[1] < 0.97 * seconds[0]
    assert PlanChooser(2, [None], accelerators=True).plan(call) == chosen
