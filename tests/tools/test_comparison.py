"""Settings of forecasts: which plan a run ends up with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import ExecutePlan
from roundpipe.planning.machine import HardwareProfile
from roundpipe.runtime.engine.plan_choice import REPLAN_GAIN
from roundpipe.tools.comparison import Setting


@pytest.fixture
def setting() -> Setting:
    cost = LayerCost(forward_s=0.01, backward_s=0.02, num_parameters=100, weight_bytes=200, gradient_bytes=200)
    profile = HardwareProfile(upload_bytes_per_s=1e6, download_bytes_per_s=1e6)
    return Setting((cost,) * 8, num_workers=2, num_microbatches=4, budget_bytes=None, profile=profile)


def test_a_run_changes_its_first_plan_for_one_that_is_faster_by_enough(setting: Setting) -> None:
    singles = [(index, index + 1) for index in range(8)]
    slow = ExecutePlan(singles[:7], (7, 8), singles[6::-1])
    fastest = setting.fastest_plan()
    seconds = {plan: setting.simulate(plan).seconds_per_step for plan in (slow, fastest)}
    assert seconds[fastest] < (1 - REPLAN_GAIN) * seconds[slow]
    assert setting.steady_plan(slow) == fastest
    assert setting.steady_plan(fastest) == fastest


def test_a_first_plan_that_is_nearly_as_fast_stays(setting: Setting) -> None:
    first = setting.fastest_plan()
    heavier = (*setting.costs[:-1], replace(setting.costs[-1], forward_s=0.0105))
    assert replace(setting, costs=heavier).steady_plan(first) == first
    assert replace(setting, budget_bytes=1).steady_plan(first) == first  # nothing fits: the run has the plan that ran
