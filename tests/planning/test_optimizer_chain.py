"""The optimizer's chain in the simulator: gradients home, converted, update, hand-over, next upload."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import make_schedule
from roundpipe.planning.machine import ChainSeconds, HardwareProfile
from roundpipe.planning.simulator import Simulation, simulate, simulate_timeline

LAYERS = [LayerCost(forward_s=0.1, backward_s=0.2, weight_bytes=100, gradient_bytes=100, num_parameters=50)] * 8
NUM_PARAMETERS, MICROBATCHES = 400, 2
ROUND_S = MICROBATCHES * 8 * 0.3
ONE_STAGE = ExecutePlan([], (0, 8), [])
STREAMED = ExecutePlan([(0, 4)], (4, 8), [(0, 4)])


def steady(plan: ExecutePlan, profile: HardwareProfile) -> Simulation:
    return simulate(make_schedule(plan, 1, MICROBATCHES), LAYERS, profile)


def optimizer(update_s: float = 0.0, hand_over_s: float = 0.0, gradients_s: float = 0.0) -> HardwareProfile:
    return HardwareProfile().with_optimizer(NUM_PARAMETERS, ChainSeconds(update_s, hand_over_s, gradients_s))


@pytest.mark.parametrize("plan", [ONE_STAGE, STREAMED], ids=["one stage", "streamed"])
def test_a_step_takes_as_long_as_the_update_and_the_hand_over_behind_it(plan: ExecutePlan) -> None:
    """What is one behind the other in the optimizer's thread does not overlap, however short a round is."""
    found = steady(plan, optimizer(update_s=20.0, hand_over_s=5.0))
    assert found.seconds_per_step == pytest.approx(25.0, rel=0.01)
    assert found.mean_idle.optimizer > 0.5 * found.mean_idle.total > 0.3


def test_the_hand_over_is_hidden_by_the_last_backward_and_by_the_layers_that_have_their_weights() -> None:
    """Of one stage all is handed over between two rounds, from when the losses are known, a quarter after the other."""
    hand_over_s = 3.0
    found = steady(ONE_STAGE, optimizer(update_s=2.0, hand_over_s=hand_over_s))
    last_backward_s, three_quarters_s = 8 * 0.2, 6 * 0.1
    exposed_s = hand_over_s - last_backward_s - three_quarters_s
    assert found.seconds_per_step == pytest.approx(ROUND_S + exposed_s, rel=0.01)
    double = steady(ONE_STAGE, optimizer(update_s=2.0 + hand_over_s))  # made ready in second memory
    assert double.seconds_per_step == pytest.approx(max(ROUND_S, 2.0 + hand_over_s), rel=0.01)


def test_gradients_are_converted_beside_the_worker_and_before_the_update() -> None:
    """U's and B1's are converted one behind the other; the worker goes on once they are home, and the update waits."""
    own_s = 8.0
    schedule = make_schedule(STREAMED, 1, MICROBATCHES)
    found, timeline = simulate_timeline(schedule, LAYERS, optimizer(update_s=0.1, gradients_s=2 * own_s))
    assert not any(span.lane == "waits" and span.args["cause"] == "gradients" for span in timeline.spans)
    added = [span for span in timeline.spans if span.lane == "converted"]
    assert {round(span.seconds, 6) for span in added} == {own_s}
    updates = sorted(span.start_s for span in timeline.spans if span.lane == "update")
    assert all(any(span.end_s == pytest.approx(start_s) for span in added) for start_s in updates)
    at_once = steady(STREAMED, optimizer(update_s=0.1))
    assert found.seconds_per_step > at_once.seconds_per_step
    assert at_once.mean_idle.gradients == found.mean_idle.gradients == pytest.approx(0.0, abs=1e-6)


def test_a_job_waits_for_its_own_weights_and_not_for_the_next_ones() -> None:
    """Those of F0 are handed over first, beside the last backwards of U and of B1; the others until F0 ends.

    F0's four layers are handed over one by one, and its first microbatch begins with the first.
    """
    backwards_s, forward_s = 4 * 0.2 + MICROBATCHES * 4 * 0.3, MICROBATCHES * 4 * 0.1
    hidden = steady(STREAMED, optimizer(update_s=0.1, hand_over_s=backwards_s + 0.75 * forward_s))
    alone = steady(STREAMED, optimizer(update_s=0.1))
    assert hidden.seconds_per_step == pytest.approx(alone.seconds_per_step, rel=0.001)
    profile = optimizer(update_s=30.0, hand_over_s=4.0)
    _, timeline = simulate_timeline(make_schedule(STREAMED, 1, MICROBATCHES), LAYERS, profile)
    hand_overs = sorted(span.end_s for span in timeline.spans if span.lane == "hand-over")
    first = sorted(span.start_s for span in timeline.spans if span.lane == "compute" and span.name.startswith("F0"))
    of_rounds = first[:: 4 + MICROBATCHES - 1][3:]  # later than the first hand-over
    assert all(any(start_s == pytest.approx(end_s) for end_s in hand_overs[::5]) for start_s in of_rounds)


def test_conversions_have_a_rate_of_their_own() -> None:
    """44 bytes per parameter, 6 for the weight and 6 for the gradient, at a quarter of the update's rate."""
    bytes_of = {"hand_over_bytes_per_parameter": 6, "gradients_bytes_per_parameter": 6}
    alike = HardwareProfile(optimizer_bytes_per_s=1e3, optimizer_bytes_per_parameter=44, **bytes_of)  # type: ignore[arg-type]
    slower = replace(alike, conversion_bytes_per_s=250.0)
    assert alike.optimizer_s(NUM_PARAMETERS) == pytest.approx(NUM_PARAMETERS * 44 / 1e3)
    assert slower.optimizer_s(NUM_PARAMETERS) == pytest.approx(NUM_PARAMETERS * (32 / 1e3 + 12 / 250.0))
    assert steady(STREAMED, slower).seconds_per_step > steady(STREAMED, alike).seconds_per_step
    assert steady(STREAMED, slower).optimizer_bytes == pytest.approx(44 * NUM_PARAMETERS)
