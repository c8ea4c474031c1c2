"""Plans are chosen and compared with what updates take, and with what the visits of stages do."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import make_schedule
from roundpipe.planning.machine import ChainSeconds, HardwareProfile
from roundpipe.planning.simulator import simulate
from roundpipe.runtime.config import resolve
from roundpipe.runtime.engine import plan_choice
from roundpipe.runtime.engine.chain_record import BUDGET_CHANGE, MOST_LOOKS, KeptPlan
from roundpipe.runtime.engine.plan_choice import PlanChooser
from roundpipe.runtime.engine.replanning import REPLAN_GAIN
from roundpipe.runtime.engine.spec import Call
from roundpipe.runtime.profiling.meter import MeterReading, visit_seconds
from tests.runtime.models import batch, chain, config, mlp, slow_step, square_loss

MB = 10**6
LAYER = LayerCost(
    forward_s=0.01,
    backward_s=0.02,
    weight_bytes=20 * MB,
    gradient_bytes=20 * MB,
    num_parameters=10 * MB,
    activation_bytes=5 * MB,
    carry_bytes=MB,
)
COSTS = [*[LAYER] * 11, replace(LAYER, activation_bytes=205 * MB)]
BUDGET_BYTES = 350 * MB
"""For which more stages recompute less."""
ROUND_S = 2 * 12 * 0.03
ELEMENTS = 8


def call_of(**options):
    names = "xabcdefghijkl"
    model = chain(["x"], [(nn.Identity(), [a], [b]) for a, b in pairwise(names)], ["l"], draws_random=False)
    model.costs, model.example_elements = tuple(COSTS), ELEMENTS
    config = resolve(roundpipe.RoundPipeRunConfig(**options), None, num_devices=1)
    return Call(model, config, [(torch.ones(ELEMENTS),)] * 2, [{}] * 2, [None] * 2, 2)


def chooser(call, chain_s=None, visit_s=0.0, budget_bytes=None):
    """Plans by measured seconds of layers."""
    found = PlanChooser(1, [budget_bytes], lambda: (1e10, 1e10), chain=lambda: chain_s, visit_s=lambda: visit_s)
    found.costs.expect(call.chain, COSTS, ELEMENTS)
    return found


def test_a_plan_s_predicted_step_has_the_chain():
    call = call_of(residency="off")
    plan = ExecutePlan([(0, 6)], (6, 12), [(0, 6)])
    alone_s, with_updates_s = (
        chooser(call, chain_s).seconds(call, call.tiles)(plan) for chain_s in (None, ChainSeconds(2.0, 0.5, 0.1))
    )
    assert alone_s == pytest.approx(ROUND_S + 2 * 6 * 0.01, rel=0.05)  # the first half is recomputed
    assert with_updates_s == pytest.approx(2.5, rel=0.02)
    call.is_evaluation = True  # no update comes behind it
    assert chooser(call, ChainSeconds(2.0, 0.5, 0.1)).seconds(call, call.tiles)(plan) == alone_s


def test_where_updates_are_the_limit_stages_are_few():
    """More of them would recompute less, and nothing would be gained."""
    call = call_of(residency="off")
    streamed = chooser(call, budget_bytes=BUDGET_BYTES).streaming(call)
    few = chooser(call, ChainSeconds(3.0, 1.0, 0.1), budget_bytes=BUDGET_BYTES).streaming(call)
    assert few.num_stages < streamed.num_stages
    predict = chooser(call, ChainSeconds(3.0, 1.0, 0.1)).seconds(call, call.tiles)
    assert predict(few) == pytest.approx(predict(streamed), rel=0.01)


def test_where_visits_take_long_stages_are_few():
    call = call_of(residency="off")
    plans = [chooser(call, visit_s=seconds, budget_bytes=BUDGET_BYTES).streaming(call) for seconds in (0.0, 0.05)]
    assert plans[0].num_stages > plans[1].num_stages


def test_each_visit_takes_its_time():
    plan = ExecutePlan([(0, 4), (4, 8)], (8, 12), [(4, 8), (0, 4)])
    seconds = [
        simulate(make_schedule(plan, 1, 2), COSTS, HardwareProfile(visit_s=visit_s)).seconds_per_step
        for visit_s in (0.0, 0.1)
    ]
    assert seconds[1] - seconds[0] == pytest.approx(5 * 0.1)


def test_a_visit_takes_what_its_first_computation_waits_longer_than_others():
    def reading(visits, runs):
        return MeterReading(0.0, {}, (), (), visits, runs)

    assert visit_seconds([reading((0, 0.0), (0, 0.0))]) == 0.0
    assert visit_seconds([reading((4, 0.4), (10, 0.1)), reading((6, 0.6), (10, 0.1))]) == pytest.approx(0.09)
    assert visit_seconds([reading((4, 0.1), (10, 1.0))]) == 0.0


def test_visits_are_counted_behind_the_first_of_a_step():
    plan = ExecutePlan([(0, 2), (2, 4)], (4, 6), [(2, 4), (0, 2)])
    with roundpipe.RoundPipe(mlp(6), devices=["cpu"]) as piped:
        for _ in range(3):
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(2, plan=plan))
        (found,) = piped._session.engine.read_meters()  # reports have means of other things
    assert found.visits[0] == 3 * 4 and found.runs[0] >= 3 * 5
    assert 0.0 <= found.visits[1] + found.runs[1] <= found.idle_s["overhead"] * (1 + 1e-9)


def test_a_plan_is_looked_at_again_when_updates_are_known_and_once_when_they_turn_out_otherwise():
    call, chain_s = call_of(residency="off"), None
    plans = PlanChooser(1, [None], lambda: (1e10, 1e10), chain=lambda: chain_s)
    plans.costs.expect(call.chain, COSTS, ELEMENTS)
    kept = KeptPlan(ExecutePlan([], (0, 12), []), 0)
    looks = []
    for update_s in (None, 1.0, 1.1, 2.0, 9.0):
        chain_s = None if update_s is None else ChainSeconds(update_s, 0.0, 0.0)
        looks.append(kept.has_other_updates(sum(plans.costs.chain_of(call) or ())))
    assert looks == [False, True, False, True, False] and sum(looks) == MOST_LOOKS


@pytest.mark.parametrize("chain_s", [None, ChainSeconds(0.7, 0.2, 0.1)])
def test_a_first_plan_changes_for_one_that_is_faster_by_enough(chain_s):
    call = call_of(residency="off")
    singles = [(index, index + 1) for index in range(12)]
    slow = ExecutePlan(singles[:11], (11, 12), singles[10::-1])

    def following(first, budget_bytes=None, layers=COSTS):
        plans = chooser(call, chain_s, 0.01, budget_bytes)
        plans.costs.expect(call.chain, layers, ELEMENTS)
        plans.costs.record(call.chain).plans[plans.key(call)] = KeptPlan(first, 0)
        plans.update_begun()
        return plans.streaming(call), plans.seconds(call, call.tiles)

    fastest, seconds = following(slow)
    assert seconds(fastest) < (1 - REPLAN_GAIN) * seconds(slow)
    assert following(fastest)[0] == fastest
    heavier = [*COSTS[:-1], replace(COSTS[-1], forward_s=0.0105)]
    assert following(fastest, layers=heavier)[0] == fastest  # the best one is nearly as fast
    assert following(slow, budget_bytes=MB)[0] == slow  # nothing fits: the plan stays that has run


def test_a_run_with_a_slow_optimizer_is_planned_with_it():
    """Once two warm updates are known; a slow one is the limit of any plan."""
    with roundpipe.RoundPipe(mlp(6), devices=["cpu"]) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)
        settings, slow = config(2, preserve_rng_state=False), slow_step(optimizer, 0.1)
        for _ in range(7):
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=settings)
            piped.step(slow)
        piped.synchronize()
        builder, chain = piped._runner.builder, piped._runner.source.latest  # plans are chosen inside calls
        call = Call.like_example(chain, resolve(settings, None, num_devices=1))
        assert builder.plans.costs.chain_of(call).update_s >= 0.1
        predicted_s = builder.plans.seconds(call, call.tiles)(builder.last_plan)
    assert predicted_s >= 0.1 and predicted_s < inf


def test_memory_that_comes_and_goes_is_planned_for_once(monkeypatch):
    """Others take some of a device, less than plans leave over, and give it back: there is no search."""
    asked, choose_for = [], plan_choice.choose_for
    monkeypatch.setattr(plan_choice, "choose_for", lambda *given: asked.append(given) or choose_for(*given))
    call = call_of(residency="off")
    plans = chooser(call, budget_bytes=BUDGET_BYTES)
    first = plans.streaming(call)
    spare_bytes = BUDGET_BYTES - plans.needed_bytes(call, first)
    assert spare_bytes > BUDGET_CHANGE * BUDGET_BYTES
    for taken_bytes in (spare_bytes, 0, spare_bytes - 1, 0):
        plans.set_budgets([BUDGET_BYTES - taken_bytes])
        assert plans.streaming(call) == first
    assert len(asked) == 1
    plans.set_budgets([BUDGET_BYTES - spare_bytes - BUDGET_BYTES // 10])
    assert plans.needed_bytes(call, plans.streaming(call)) <= BUDGET_BYTES - spare_bytes - BUDGET_BYTES // 10
    plans.set_budgets([BUDGET_BYTES])
    assert plans.streaming(call) == first and len(asked) == 2
    plans.set_budgets([10 * BUDGET_BYTES])
    assert plans.streaming(call) != first and len(asked) == 3
