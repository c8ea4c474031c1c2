"""Holds the simulator against the recurrence, the planner's peak, and limits that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf
from random import Random

import pytest

from roundpipe.core.errors import ConfigError, ScheduleError
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import make_schedule
from roundpipe.planning.machine import HardwareProfile
from roundpipe.planning.planner import plan, plan_greedy
from roundpipe.planning.simulator import simulate, simulate_timeline
from roundpipe.planning.stage_costs import plan_peak_bytes, plan_seconds
from tests.runtime.chains import PUBLISHED, published_chain, random_chain
from tests.runtime.schedule_rules import check

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
        assert found.seconds_per_step == pytest.approx(plan_seconds(chosen, costs, **machine), rel=0.01)
        assert all(idle.weights == idle.activations == idle.optimizer == 0 for idle in found.idle)


def random_schedule(random):
    """A chain with some layers that take no time or very long, and a schedule of some plan, good or bad."""
    costs = []
    for cost in random_chain(random, random.randint(1, 8)):
        times = random.choice([0.0, 1.0, 1.0, 10.0])
        costs.append(
            replace(cost, forward_s=cost.forward_s * times, backward_s=cost.backward_s * random.choice([1, times]))
        )
    start = random.randrange(len(costs))
    sides = []
    for _ in range(2):
        edges = [0, *(edge for edge in range(1, start) if random.random() < 0.5), start] if start else [0]
        sides.append(list(pairwise(edges)))
    chosen = ExecutePlan(sides[0], (start, len(costs)), sides[1][::-1])
    machine = {"num_workers": random.randint(1, 9), "num_microbatches": random.randint(1, 6)}
    return costs, chosen, machine


def test_workers_that_a_round_leaves_idle_at_first_are_not_taken_for_steady():
    """Where a round has fewer jobs than there are workers, the first rounds are alike and too fast."""
    random = Random(1)
    for _ in range(60):
        costs, chosen, machine = random_schedule(random)
        found = simulate(make_schedule(chosen, **machine), costs)
        expected_s = plan_seconds(chosen, costs, **machine)
        assert found.seconds_per_step == pytest.approx(expected_s, rel=0.005), (chosen, machine)


def test_idle_shares_are_shares_and_leave_the_time_of_the_work():
    random = Random(2)
    for _ in range(60):
        costs, chosen, machine = random_schedule(random)
        profile = HardwareProfile(
            *(random.choice([1.0, 10.0, 100.0]) for _ in range(2)),
            host_bytes_per_s=random.choice([inf, 5.0]),
            optimizer_bytes_per_s=random.choice([inf, 50.0]),
            optimizer_bytes_per_parameter=random.choice([0, 8]),
        )
        found = simulate(make_schedule(chosen, **machine), costs, profile)
        for idle in (*found.idle, found.mean_idle):
            assert 0 <= idle.total <= 1 + 1e-9
            assert min(idle.weights, idle.activations, idle.optimizer, idle.no_work) >= 0
        times = [*chosen.forward, chosen.fused, *chosen.backward]
        work_s = sum(sum(cost.forward_s for cost in costs[start:stop]) for start, stop in times)
        work_s += sum(cost.backward_s for cost in costs)
        work_s *= machine["num_microbatches"] / machine["num_workers"]
        assert found.seconds_per_step * (1 - found.mean_idle.total) == pytest.approx(work_s, rel=0.01)


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_peak_is_the_planners_however_fast_gradients_come_down(num_workers):
    """Workers hold those of the visit before for two runs in any case."""
    schedule = make_schedule(PLAN, num_workers, num_workers + 1)
    planned = plan_peak_bytes(PLAN, UNIFORM, num_workers=num_workers)
    slow = simulate(schedule, UNIFORM, HardwareProfile(download_bytes_per_s=20.0))
    assert max(slow.peak_bytes) == planned
    at_once = simulate(schedule, UNIFORM)
    assert max(at_once.peak_bytes) == planned


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_step_finds_nothing_of_the_one_before_if_they_do_not_overlap(num_workers):
    one_stage = ExecutePlan((), (0, 8), ())
    planned = plan_peak_bytes(one_stage, UNIFORM, num_workers=num_workers)
    schedule = make_schedule(one_stage, num_workers, 3)
    assert max(simulate(schedule, UNIFORM).peak_bytes) == planned
    alone = simulate(schedule, UNIFORM, HardwareProfile(prefetch_across_steps=False))
    assert max(alone.peak_bytes) == planned - 800  # gradients of all layers


def test_carried_values_wait_on_the_host():
    found = simulate(make_schedule(ExecutePlan([(0, 4)], (4, 8), [(0, 4)]), 1, 3), UNIFORM)
    assert found.peak_carried_bytes == 3 + 1  # on one device: all inputs of U, and the gradient of the first
    assert simulate(make_schedule(ExecutePlan((), (0, 8), ()), 1, 3), UNIFORM).peak_carried_bytes == 0


def test_idle_time_and_work_are_all_the_time():
    found = simulate(make_schedule(PLAN, 2, 3), UNIFORM, HardwareProfile(200, 150, 400))
    work_s = 3 * (6 * 1.0 + 2 * 3.0 + 6 * 3.0) / 2
    mean_idle = sum(idle.total for idle in found.idle) / 2
    assert work_s / found.seconds_per_step + mean_idle == pytest.approx(1.0, abs=0.02)


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
    assert at_least_s * 0.98 <= found.seconds_per_step <= at_least_s * 1.3
    assert found.mean_idle.weights > 0.5 * found.mean_idle.total > 0.1


def test_the_hosts_bandwidth_is_shared():
    schedule = make_schedule(PLAN, 2, 3)
    found = simulate(schedule, UNIFORM, HardwareProfile(host_bytes_per_s=20.0))
    at_least_s = (found.uploaded_bytes + found.downloaded_bytes) / 20.0
    assert at_least_s * 0.98 <= found.seconds_per_step <= at_least_s * 1.3


def test_a_slow_optimizer_binds_and_is_named():
    profile = HardwareProfile(optimizer_bytes_per_s=100.0, optimizer_bytes_per_parameter=44)
    found = simulate(make_schedule(PLAN, 2, 3), UNIFORM, profile)
    assert found.seconds_per_step == pytest.approx(44 * 50 * 8 / 100.0, rel=0.02)
    assert sum(idle.optimizer for idle in found.idle) > 0.1
    assert all(idle.weights == idle.activations == 0 for idle in found.idle)


def test_an_optimizer_that_keeps_up_costs_nothing():
    profile = HardwareProfile(optimizer_bytes_per_s=1e6, optimizer_bytes_per_parameter=44)
    schedule = make_schedule(PLAN, 2, 3)
    with_step, without = simulate(schedule, UNIFORM, profile), simulate(schedule, UNIFORM)
    assert with_step.seconds_per_step == pytest.approx(without.seconds_per_step)


def test_weights_that_go_into_the_model_when_the_step_is_made_are_waited_for():
    """Of one stage all are read at its start: what the next step lacks comes up between the two, or before.

    The step is made when the losses are known, so the last backward hides the first part, and the first microbatch
    runs through the layers that are there.
    """
    schedule = make_schedule(ExecutePlan([], (0, 8), []), 1, 10)
    ready = HardwareProfile(optimizer_bytes_per_s=100.0, optimizer_bytes_per_parameter=44)
    found, late = (
        simulate_timeline(schedule, UNIFORM, replace(ready, hand_over_bytes_per_parameter=num_bytes))
        for num_bytes in (0, 6)
    )
    weights_s, last_backward_s = 6 * 50 * 8 / 100.0, sum(cost.backward_s for cost in UNIFORM)
    exposed_s = late[0].seconds_per_step - found[0].seconds_per_step
    through_others_s = 3 / 4 * sum(cost.forward_s for cost in UNIFORM)
    assert exposed_s == pytest.approx(weights_s - last_backward_s - through_others_s, rel=0.01) and exposed_s > 1
    assert late[0].optimizer_bytes == found[0].optimizer_bytes and late[0].mean_idle.optimizer > 0
    assert found[0].mean_idle.total == pytest.approx(0, abs=1e-3)
    assert {span.lane for span in late[1].spans if span.device == "optimizer"} == {"update", "hand-over"}


def test_prefetch_across_steps_hides_the_first_upload():
    schedule = make_schedule(PLAN, 2, 3)
    ahead = simulate(schedule, UNIFORM, HardwareProfile(40.0))
    not_ahead = simulate(schedule, UNIFORM, HardwareProfile(40.0, prefetch_across_steps=False))
    assert ahead.seconds_per_step < not_ahead.seconds_per_step


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_forward_and_backward_alone(kind):
    found = simulate(make_schedule(PLAN, 2, 3, kind=kind), UNIFORM)
    seconds = 1.0 if kind == "forward" else 3.0
    assert found.seconds_per_step >= 3 * 8 * seconds / 2 * 0.99


PCIE_4_X16 = 25e9
"""Bytes per second that copies reach of 31.5 GB/s."""
HOST_BYTES_PER_S = 200e9
"""Two sockets of eight channels of DDR4-3200 have 410 GB/s; half of it is taken as sustained."""
ADAM_BYTES = 44
"""Per parameter: copy, gradient and Adam in three passes."""


def throughput_error(name, num_workers, host_bytes_per_s=HOST_BYTES_PER_S):
    """Predicted tokens per second over published ones, less 1; rounds that share an update share its traffic."""
    run = PUBLISHED["throughput"]["models"][name]
    rounds, num_microbatches = run["rounds_per_step"], run["num_microbatches"]
    tokens = run["sequences"] * 2048 / rounds
    costs = [cost.scaled(tokens / num_microbatches / PUBLISHED["tokens"]) for cost in published_chain(name)]
    machine = {"num_workers": num_workers, "num_microbatches": num_microbatches}
    chosen = plan_greedy(costs, **machine, memory_budget_bytes=PUBLISHED["device_memory_bytes"])
    profile = HardwareProfile(PCIE_4_X16, PCIE_4_X16, host_bytes_per_s, host_bytes_per_s, ADAM_BYTES / rounds)
    found = simulate(make_schedule(chosen, **machine), costs, profile)
    measured = run["tokens_per_s"][PUBLISHED["throughput"]["num_workers"].index(num_workers)]
    return tokens / found.seconds_per_step / measured - 1


def test_published_throughput():
    """From layer times, run shapes and link speeds alone; nothing is fitted."""
    counts = PUBLISHED["throughput"]["num_workers"]
    errors = {num: [abs(throughput_error(name, num)) for name in PUBLISHED["models"]] for num in counts}
    everywhere = [error for each in errors.values() for error in each]
    assert sum(everywhere) / len(everywhere) <= 0.02  # 0.010 when this was written; 0.03 is the aim
    assert max(errors[8]) <= 0.04  # 0.028; 0.05 is the aim
    assert max(everywhere) <= 0.05


def test_published_throughput_hardly_depends_on_the_hosts_bandwidth():
    full = throughput_error("qwen3-1.7b", 8)
    assert throughput_error("qwen3-1.7b", 8, HOST_BYTES_PER_S / 4) == pytest.approx(full, abs=0.01)


def test_greedy_is_the_published_reference():
    machine = {"num_workers": 8, "num_microbatches": 9}
    for name, published_s in (("qwen3-1.7b", 1.143), ("llama3.1-8b", 3.022), ("qwen3-32b", 12.78)):
        costs = published_chain(name)
        chosen = plan_greedy(costs, **machine, memory_budget_bytes=PUBLISHED["device_memory_bytes"])
        assert plan_peak_bytes(chosen, costs, num_workers=8) <= PUBLISHED["device_memory_bytes"]
        assert 0.98 * published_s <= plan_seconds(chosen, costs, **machine) <= 1.001 * published_s


@pytest.mark.parametrize("seed", range(6))
def test_replicas_without_transfers_are_the_recurrence(seed):
    random = Random(seed)
    costs = random_chain(random, 8)
    machine = {"num_workers": random.randint(2, 4), "num_microbatches": random.randint(4, 7)}
    chosen = ExecutePlan([(0, 2), (2, 5)], (5, 8), [(3, 5), (0, 3)])
    replicas = [random.randint(1, 2) for _ in range(5)]
    shared = replace(chosen, replicas=replicas)
    schedule = make_schedule(shared, **machine)
    check(schedule)
    found = simulate(schedule, costs)
    assert found.seconds_per_step == pytest.approx(plan_seconds(shared, costs, **machine), rel=0.002)


@pytest.mark.parametrize("has_peers", [False, True])
def test_replicas_bring_weights_several_times_and_gradients_too_unless_they_are_added_up_there(has_peers):
    replicated, profile = make_schedule(replace(PLAN, replicas=[1, 1, 2, 1, 1, 2]), 4, 6), HardwareProfile()
    once = simulate(make_schedule(PLAN, 4, 6), UNIFORM)
    twice = simulate(replicated, UNIFORM, replace(profile, has_peers=has_peers))
    assert twice.uploaded_bytes - once.uploaded_bytes == 200 + 200
    assert twice.downloaded_bytes - once.downloaded_bytes == (0 if has_peers else 200 + 200)


def test_frozen_layers_are_not_updated():
    profile = HardwareProfile(optimizer_bytes_per_s=100.0, optimizer_bytes_per_parameter=44)
    half_frozen = [replace(cost, gradient_bytes=0) if index % 2 else cost for index, cost in enumerate(UNIFORM)]
    found = simulate(make_schedule(PLAN, 2, 3), half_frozen, profile)
    assert found.optimizer_bytes == 44 * 50 * 4
    frozen = [replace(cost, gradient_bytes=0) for cost in UNIFORM]
    assert simulate(make_schedule(PLAN, 2, 3), frozen, profile).optimizer_bytes == 0


@pytest.mark.parametrize("replicas", [(), [1, 2, 1, 1, 2, 1]])
def test_idle_causes_and_work_are_all_the_time_of_every_device(replicas):
    profile = HardwareProfile(60.0, 50.0, 150.0, 2000.0, 44)
    schedule = make_schedule(replace(PLAN, replicas=replicas), 3, 4)
    found = simulate(schedule, UNIFORM, profile)
    work_s = 4 * (6 * 1.0 + 2 * 3.0 + 6 * 3.0) / 3
    assert found.mean_idle.total + work_s / found.seconds_per_step == pytest.approx(1.0, abs=0.01)


def test_misuse_is_told():
    with pytest.raises(ConfigError, match="costs of 7 layers for a schedule of 8"):
        simulate(make_schedule(PLAN, 2, 3), UNIFORM[:7])
    for replicas in ([2] * 5, [0] + [1] * 5, [True] * 6):
        with pytest.raises(ScheduleError, match="for 6 stages: give one count of at least 1 per stage"):
            replace(PLAN, replicas=replicas)
    with pytest.raises(ConfigError, match="upload_bytes_per_s is 0"):
        HardwareProfile(upload_bytes_per_s=0)
