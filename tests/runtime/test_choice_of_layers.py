"""Among layers whose trained weights may live on a device, as many are chosen as make a step the fastest."""

import logging

from roundpipe.runtime.engine import full_plans, plan_choice, plans_beside
from roundpipe.runtime.engine.cost_model import CostModel
from roundpipe.runtime.engine.plans_beside import PlanBeside
from tests.runtime.cases_twins import OPTIMIZERS, WIDTH, optimizer_of
from tests.runtime.models import batch, square_loss
from tests.runtime.test_some_layers_stay import eight_layers, number_there


def test_fewer_layers_are_looked_at_until_that_is_slower(monkeypatch):
    seconds, looked_at, measured, bounds = iter([5.0, 4.0, 4.1, 4.2, 3.0]), [], [], {}
    times_of = CostModel.times_of

    def compared(self, call, found, before_s):
        if not isinstance(found, PlanBeside):  # one that might be found
            bounds[found.residency] = found.seconds
            return 1e9, 0.0
        assert bounds[found.residency] <= (1 + 1e-9) * found.seconds
        looked_at.append(len(found.residency.trained))
        return 1e9, next(seconds)

    def note(self, call):
        measured.append((number_there(piped) > 0, (times := times_of(self, call)) is not None))
        return times

    # no seconds of a CPU worker are such
    monkeypatch.setattr(full_plans.FullPlans, "_compared", compared)
    monkeypatch.setattr(CostModel, "times_of", note)
    init = full_plans.FullPlans.__init__
    monkeypatch.setattr(full_plans.FullPlans, "__init__", lambda self, costs, accelerators: init(self, costs, True))
    _, piped = eight_layers("auto")
    with piped:
        ours = optimizer_of(piped, OPTIMIZERS["AdamW"])
        for step in range(14):
            piped.forward_backward((batch(4, width=WIDTH, seed=step),), loss_fn=square_loss)
            piped.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
        assert number_there(piped) == 2 * looked_at[1] and len(looked_at) == 4
    there = [is_measured for is_there, is_measured in measured if is_there]
    assert sum(there[:6]) >= 4, "steps are measured in a row again once weights live there"


def test_plans_that_can_not_win_are_not_looked_for(monkeypatch, caplog):
    """Nor is one that is faster than streaming, but by too little."""
    # as above
    monkeypatch.setattr(full_plans.FullPlans, "_compared", lambda self, call, found, before_s: (1.0, 0.98))
    init = full_plans.FullPlans.__init__
    monkeypatch.setattr(full_plans.FullPlans, "__init__", lambda self, costs, accelerators: init(self, costs, True))
    looked_for = []
    monkeypatch.setattr(plans_beside, "choose_plan", lambda *args, **kwargs: looked_for.append(args))
    _, piped = eight_layers("auto")
    with piped, caplog.at_level(logging.INFO, logger="roundpipe"):
        ours = optimizer_of(piped, OPTIMIZERS["AdamW"])
        for step in range(10):
            piped.forward_backward((batch(4, width=WIDTH, seed=step),), loss_fn=square_loss)
            piped.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
        assert not number_there(piped) and not looked_for
    assert any("on the device a step takes at least 0.98 s instead of 1 s" in message for message in caplog.messages)


def test_plans_that_are_not_used_are_not_looked_at_again(monkeypatch):
    """While weights live on the device, stages to stream them by would hold up the caller for nothing."""
    looked_at = []
    replanned = plan_choice.replanned

    def look(*given):
        looked_at.append(number_there(piped))
        return replanned(*given)

    monkeypatch.setattr(plan_choice, "replanned", look)
    for residency in ("full", "off"):
        looked_at.clear()
        _, piped = eight_layers(residency)
        with piped:
            step_fn = optimizer_of(piped, OPTIMIZERS["AdamW"]).step
            for step in range(10):
                piped.forward_backward((batch(4, width=WIDTH, seed=step),), loss_fn=square_loss)
                piped.step(step_fn, is_async=False)
            assert bool(number_there(piped)) is (residency == "full")
        assert not any(looked_at)
        assert residency == "full" or looked_at
