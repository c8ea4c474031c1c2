"""Holds the simulator against the recurrence, the planner's peak, and limits that can be worked out by hand."""

from __future__ import annotations

from random import Random

import pytest

from roundpipe.errors import ConfigError
from roundpipe.layers import LayerCost
from roundpipe.runtime.planner import peak_bytes, plan, round_seconds
from roundpipe.runtime.schedule import ExecutePlan, make_schedule
from roundpipe.runtime.simulate import HardwareProfile, simulate
from tests.runtime.chains import published_chain, random_chain

UNIFORM = [
    LayerCost(
        forward_s=1.0,
        backward_s=2.0,
        num_parameters=50,
        weight_bytes=100,
        gradient_bytes=100,
        activation_bytes=10,
        workspace_bytes=5,
        carry_bytes=1,
    )
] * 8
PLAN = ExecutePlan([(0, 3), (3, 6)], (6, 8), [(4, 6), (2, 4), (0, 2)])


def test_without_transfers_it_is_the_recurrence():
    random = Random(1)
    for _ in range(12):
        costs = random_chain(random, random.randint(2, 9))
        machine = {"num_workers": random.randint(1, 4), "num_microbatches": random.randint(1, 6)}
        chosen = plan(costs, **machine)
        found = simulate(make_schedule(chosen, **machine), costs)
        assert found.seconds_per_round == pytest.approx(round_seconds(chosen, costs, **machine), rel=0.01)
        assert all(idle.weights == idle.activations == idle.optimizer == 0 for idle in found.idle)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_peak_is_the_planners(num_workers):
    found = simulate(make_schedule(PLAN, num_workers, num_workers + 1), UNIFORM)
    assert max(found.peak_bytes) == peak_bytes(PLAN, UNIFORM, num_workers=num_workers)


def test_idle_time_and_work_are_all_the_time():
    found = simulate(make_schedule(PLAN, 2, 3), UNIFORM, HardwareProfile(200, 150, 400))
    work_s = 3 * (6 * 1.0 + 2 * 3.0 + 6 * 3.0) / 2
    mean_idle = sum(idle.total for idle in found.idle) / 2
    assert work_s / found.seconds_per_round + mean_idle == pytest.approx(1.0, abs=0.02)


def test_bytes_moved_per_round():
    found = simulate(make_schedule(PLAN, 2, 3), UNIFORM)
    weights_up, gradients_down = 100 * (6 + 2 + 6), 100 * (2 + 6)
    # Up, per microbatch: inputs of F1 and U; inputs and gradients of the three B stages, less layer 0's input.
    # Down: outputs of F0, F1; F inputs kept for B at layers 2 and 4; gradients of U, B1, B2.
    assert found.uploaded_bytes == weights_up + 3 * (2 + 2 * 3 - 1)
    assert found.downloaded_bytes == gradients_down + 3 * (2 + 2 + 3)


def test_a_slow_upload_binds_and_is_named():
    bandwidth = 10.0
    found = simulate(make_schedule(PLAN, 2, 3), UNIFORM, HardwareProfile(upload_bytes_per_s=bandwidth))
    at_least_s = found.uploaded_bytes / (2 * bandwidth)
    assert at_least_s * 0.98 <= found.seconds_per_round <= at_least_s * 1.3
    assert all(idle.weights > 0.5 * idle.total > 0.1 for idle in found.idle)


def test_the_hosts_bandwidth_is_shared():
    schedule = make_schedule(PLAN, 2, 3)
    found = simulate(schedule, UNIFORM, HardwareProfile(host_bytes_per_s=20.0))
    at_least_s = (found.uploaded_bytes + found.downloaded_bytes) / 20.0
    assert at_least_s * 0.98 <= found.seconds_per_round <= at_least_s * 1.3


def test_a_slow_optimizer_binds_and_is_named():
    profile = HardwareProfile(optimizer_bytes_per_s=100.0, optimizer_bytes_per_parameter=44)
    found = simulate(make_schedule(PLAN, 2, 3), UNIFORM, profile)
    assert found.seconds_per_round == pytest.approx(44 * 50 * 8 / 100.0, rel=0.02)
    assert sum(idle.optimizer for idle in found.idle) > 0.1
    assert all(idle.weights == idle.activations == 0 for idle in found.idle)


def test_an_optimizer_that_keeps_up_costs_nothing():
    profile = HardwareProfile(optimizer_bytes_per_s=1e6, optimizer_bytes_per_parameter=44)
    schedule = make_schedule(PLAN, 2, 3)
    with_step, without = simulate(schedule, UNIFORM, profile), simulate(schedule, UNIFORM)
    assert with_step.seconds_per_round == pytest.approx(without.seconds_per_round)


def test_prefetch_across_rounds_hides_the_first_upload():
    schedule = make_schedule(PLAN, 2, 3)
    ahead = simulate(schedule, UNIFORM, HardwareProfile(40.0))
    not_ahead = simulate(schedule, UNIFORM, HardwareProfile(40.0, prefetch_across_rounds=False))
    assert ahead.seconds_per_round < not_ahead.seconds_per_round


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_forward_and_backward_alone(kind):
    found = simulate(make_schedule(PLAN, 2, 3, kind=kind), UNIFORM)
    seconds = 1.0 if kind == "forward" else 3.0
    assert found.seconds_per_round >= 3 * 8 * seconds / 2 * 0.99


def test_published_links_cost_little():
    costs = published_chain("qwen3-1.7b")
    chosen = ExecutePlan(
        [(0, 9), (9, 17), (17, 28)],
        (28, 30),
        [(24, 28), (20, 24), (16, 20), (12, 16), (8, 12), (4, 8), (0, 4)],
    )
    schedule = make_schedule(chosen, 8, 9)
    computed_s = round_seconds(chosen, costs, num_workers=8, num_microbatches=9)
    found = simulate(schedule, costs, HardwareProfile(25e9, 25e9, 200e9))
    assert computed_s < found.seconds_per_round < computed_s * 1.05


def test_misuse_is_told():
    with pytest.raises(ConfigError, match="costs of 7 layers for a schedule of 8"):
        simulate(make_schedule(PLAN, 2, 3), UNIFORM[:7])
    with pytest.raises(ConfigError, match="upload_bytes_per_s is 0"):
        HardwareProfile(upload_bytes_per_s=0)
