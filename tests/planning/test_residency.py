"""What stays on devices: within the budget, as much as fits, and never slower by the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import make_schedule
from roundpipe.core.shared_weights import SharedWeight
from roundpipe.planning.machine import HardwareProfile
from roundpipe.planning.residency import (
    STREAMED,
    choose_residency,
    full_residency,
    trained_residency,
    with_weights_home,
)
from roundpipe.planning.simulator import simulate, simulate_timeline
from roundpipe.planning.stage_costs import StageCosts, plan_peak_bytes

COST = LayerCost(
    forward_s=0.1,
    backward_s=0.2,
    num_parameters=100,
    weight_bytes=200,
    gradient_bytes=20,
    activation_bytes=50,
    carry_bytes=5,
)
COSTS = [COST] * 8
PLAN = ExecutePlan([(0, 2), (2, 4), (4, 6)], (6, 8), [(4, 6), (2, 4), (0, 2)])
ONE_STAGE = ExecutePlan([], (0, 8), [])
PROFILE = HardwareProfile(upload_bytes_per_s=300.0, download_bytes_per_s=300.0)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_more_room_keeps_more_and_uploads_less(num_workers: int) -> None:
    schedule, costs = make_schedule(PLAN, num_workers, 3), StageCosts(COSTS)
    least = plan_peak_bytes(PLAN, COSTS, num_workers=num_workers)
    before, sizes = simulate(schedule, COSTS, PROFILE), []
    for budget_bytes in range(least, least + 1700, 100):
        residency = choose_residency(schedule, costs, budget_bytes)
        assert residency.num_bytes == 180 * len(residency.layers)
        assert residency.peak_bytes(schedule, costs) <= budget_bytes
        found = simulate(schedule, COSTS, PROFILE, residency=residency)
        assert max(found.peak_bytes) <= budget_bytes
        assert found.uploaded_bytes <= before.uploaded_bytes
        assert found.seconds_per_step <= before.seconds_per_step * (1 + 1e-9)
        before = found
        sizes.append(len(residency.layers))
    assert sizes == sorted(sizes) and sizes[-1] == len(COSTS) and sizes[0] < len(COSTS)
    everything = choose_residency(schedule, costs, None)
    assert everything.layers == set(range(8)) and everything.num_bytes == 8 * 180
    streamed = simulate(schedule, COSTS, PROFILE)
    num_uploaded = {1: 12, 2: 10, 3: 12}[num_workers]  # of 14 visits of layers; others find them there
    assert found.uploaded_bytes == pytest.approx(streamed.uploaded_bytes - 180 * num_uploaded)
    assert found.seconds_per_step < 0.9 * streamed.seconds_per_step
    assert found.optimizer_bytes == streamed.optimizer_bytes


def test_in_few_stages_it_costs_no_memory() -> None:
    plan = ExecutePlan([(0, 4)], (4, 8), [(0, 4)])
    schedule, costs = make_schedule(plan, 1, 3), StageCosts(COSTS)
    least = plan_peak_bytes(plan, COSTS, num_workers=1)
    assert choose_residency(schedule, costs, least).layers == set(range(8))


def test_trained_layers_are_streamed() -> None:
    trained = replace(COST, gradient_bytes=COST.weight_bytes - 8)  # but for a buffer
    schedule = make_schedule(PLAN, 1, 3)
    assert choose_residency(schedule, StageCosts([trained] * 8), None) == STREAMED
    mixed = choose_residency(schedule, StageCosts([COST, trained] * 4), None)
    assert mixed.layers == {0, 2, 4, 6}
    wider = replace(COST, weight_bytes=400)
    assert 5 in choose_residency(schedule, StageCosts([*COSTS[:5], wider, *COSTS[6:]]), 2600).layers


def test_where_everything_stays_only_values_are_moved() -> None:
    schedule, costs = make_schedule(PLAN, 1, 3), StageCosts(COSTS)
    residency = full_residency(COSTS, 1000)
    assert residency.num_bytes == 8 * (200 + 20) + 1000
    assert full_residency(COSTS, 1000, adds_up=True).num_bytes == 8 * (200 + 2 * 20) + 1000
    assert residency.bytes_of(COSTS) == dict.fromkeys(range(8), 200)
    working_bytes = plan_peak_bytes(PLAN, residency.streamed(COSTS), num_workers=1)
    assert residency.peak_bytes(schedule, costs) == residency.num_bytes + working_bytes
    found, streamed = (simulate(schedule, COSTS, PROFILE, residency=each) for each in (residency, STREAMED))
    num_visits, num_trained = 12, 8  # of layers; two more find their weights there
    assert found.uploaded_bytes == pytest.approx(streamed.uploaded_bytes - 200 * num_visits)
    assert found.downloaded_bytes == pytest.approx(streamed.downloaded_bytes - 20 * num_trained)


def test_what_is_trained_of_some_layers_stays_beside_frozen_weights_of_others() -> None:
    schedule, costs = make_schedule(PLAN, 1, 3), StageCosts(COSTS)
    trained = trained_residency(COSTS, [0, 1], 70)
    assert trained.num_bytes == 2 * (20 + 20) + 70 and trained.bytes_of(COSTS) == {0: 20, 1: 20}
    assert trained_residency(COSTS, [0, 1], 70, adds_up=True).num_bytes == trained.num_bytes + 2 * 20
    least = plan_peak_bytes(PLAN, trained.streamed(COSTS), num_workers=1) + trained.num_bytes
    assert trained.peak_bytes(schedule, costs) == least
    sizes = []
    for budget_bytes in range(least, least + 1700, 100):
        residency = choose_residency(schedule, costs, budget_bytes, trained)
        assert residency.trained == {0, 1}
        assert residency.num_bytes == trained.num_bytes + 180 * len(residency.layers)
        assert residency.peak_bytes(schedule, costs) <= budget_bytes
        sizes.append(len(residency.layers))
    assert sizes == sorted(sizes) and sizes[-1] == len(COSTS) and sizes[0] < len(COSTS)
    assert residency.bytes_of(COSTS) == {index: 200 if index < 2 else 180 for index in range(8)}
    found, streamed = (simulate(schedule, COSTS, PROFILE, residency=each) for each in (trained, STREAMED))
    num_visits = 4  # of the two layers
    assert found.uploaded_bytes == pytest.approx(streamed.uploaded_bytes - 20 * num_visits)
    assert found.downloaded_bytes == pytest.approx(streamed.downloaded_bytes - 20 * 2)
    assert found.seconds_per_step <= streamed.seconds_per_step


def test_an_update_on_the_device_takes_its_time_and_weights_that_follow_go_down_beside_the_next_step() -> None:
    schedule, profile = make_schedule(ONE_STAGE, 1, 3), replace(PROFILE, device_bytes_per_s=1000.0)
    optimizer_bytes = 500
    there = full_residency(COSTS, optimizer_bytes)
    free, found = (simulate(schedule, COSTS, each, residency=there) for each in (PROFILE, profile))
    assert there.most.update_s(1000.0) == 2 * optimizer_bytes / 1000.0
    assert found.seconds_per_step == pytest.approx(free.seconds_per_step + there.most.update_s(1000.0))
    assert found.mean_idle.total == pytest.approx(free.mean_idle.total, abs=1e-6)
    home = with_weights_home(there, COSTS)
    followed = simulate(schedule, COSTS, profile, residency=home)
    assert home.most.home_bytes == 8 * 20 and followed.downloaded_bytes == pytest.approx(
        found.downloaded_bytes + 8 * 20
    )
    assert followed.seconds_per_step == pytest.approx(found.seconds_per_step)
    slow = simulate(schedule, COSTS, replace(profile, download_bytes_per_s=1.0), residency=home)
    assert slow.seconds_per_step >= 8 * 20  # the next update waits for them
    _, timeline = simulate_timeline(schedule, COSTS, profile, residency=home)
    lanes = {span.lane for span in timeline.spans if span.device == "worker 0"}
    assert {"update", "home"} <= lanes


def test_where_everything_stays_nothing_stays_twice() -> None:
    everything = full_residency(COSTS, 1000)
    schedule = make_schedule(PLAN, 1, 3)
    assert choose_residency(schedule, StageCosts(COSTS), 10**6, everything) == everything


def tied(*, is_trained: bool) -> list[LayerCost]:
    """The first and the last layer have a weight in common: most of what is frozen, or all that is trained."""
    shared = (SharedWeight(0, 20 if is_trained else 160, is_trained),)
    return [replace(COST, shared=shared if index in (0, 7) else ()) for index in range(8)]


def test_a_frozen_weight_of_several_layers_is_counted_once() -> None:
    schedule, costs = make_schedule(PLAN, 1, 3), StageCosts(tied(is_trained=False))
    least = plan_peak_bytes(PLAN, costs.layers, num_workers=1)
    stays = set()
    for budget_bytes in range(least, least + 1700, 20):
        residency = choose_residency(schedule, costs, budget_bytes)
        both = {0, 7} <= residency.layers
        assert residency.num_bytes == 180 * len(residency.layers) - 160 * both
        assert residency.num_bytes == residency.weight_bytes(costs.layers)
        assert sum(residency.bytes_of(costs.layers).values()) == 180 * len(residency.layers)
        assert residency.peak_bytes(schedule, costs) <= budget_bytes
        stays.add(frozenset({0, 7} & residency.layers))
    assert {1, 2} <= {len(each) for each in stays}  # alone it is there as well
    everything = choose_residency(schedule, costs, None)
    assert everything.layers == set(range(8)) and everything.num_bytes == 8 * 180 - 160
    assert full_residency(costs.layers, 1000).num_bytes == 8 * (200 + 20) - 160 + 1000
    evaluated = [replace(cost, gradient_bytes=0) for cost in tied(is_trained=True)]
    assert choose_residency(schedule, StageCosts(evaluated), None).num_bytes == 8 * 200 - 20


def test_a_trained_weight_of_several_layers_is_counted_once() -> None:
    costs = tied(is_trained=True)
    assert full_residency(costs, 1000).num_bytes == 8 * (200 + 20) - 20 + 1000
    both, one = (trained_residency(costs, layers, 70) for layers in ([0, 7], [0]))
    assert both.num_bytes == 2 * (20 + 20) - 20 + 70 and one.num_bytes == 20 + 20 + 70
    assert both.weight_bytes(costs) == 20 and both.bytes_of(costs) == {0: 20, 7: 20}
    assert choose_residency(make_schedule(PLAN, 1, 3), StageCosts(costs), None).num_bytes == 8 * 180
