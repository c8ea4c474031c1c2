"""What `model.report()` predicts of a round, from what was measured."""

from dataclasses import replace

import pytest
import torch

import roundpipe
from roundpipe.core.execute_plan import ExecutePlan
from tests.runtime.models import batch, config, mlp, slow_step, square_loss

pytestmark = pytest.mark.timeout(60)

PLAN = ExecutePlan([(0, 2), (2, 4)], (4, 6), [(2, 4), (0, 2)])


def test_the_optimizers_chain_is_predicted_and_named():
    """No round is predicted to be shorter than an update and the hand-over behind it, as the same report has them."""
    with roundpipe.RoundPipe(mlp(6), devices=["cpu"]) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)
        settings, slow = config(2, plan=PLAN, preserve_rng_state=False), slow_step(optimizer, 0.15)
        for _ in range(6):
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=settings)
            piped.step(slow)
        piped.synchronize()
        report = piped.report()
        chain = piped._session.optimizer.times.per_round()  # of warm updates; the report's sums have the first, too
    assert report.predicted.round_s >= 0.99 * (chain.update_s + chain.hand_over_s) and chain.update_s >= 0.15
    shown = str(replace(report, limit="update"))
    assert "of each step update" in shown and "hand-over" in shown.partition("of each step")[2]


def test_a_window_of_few_rounds_does_not_change_the_chain():
    """Rounds and updates that end in it need not be as many: what an update takes is known by itself."""
    with roundpipe.RoundPipe(mlp(6), devices=["cpu"]) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)
        settings, slow = config(2, plan=PLAN, preserve_rng_state=False), slow_step(optimizer, 0.1)
        for step in range(6):
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=settings)
            if step == 4:
                piped._session.wait_idle()  # no public call waits for rounds alone
            piped.step(slow)
            if step >= 3:
                assert piped.report().predicted.round_s >= 0.1


def test_rounds_that_do_not_overlap_have_the_hand_over_behind_the_update():
    """As where a loss reads the weights; updates run beside the next round all the same."""
    model = mlp(6)
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)
        settings, slow = config(2, plan=PLAN, preserve_rng_state=False), slow_step(optimizer, 0.1)
        for _ in range(5):
            x = batch().requires_grad_()
            piped.forward_backward((x,), loss_fn=square_loss, run_config=settings)
            piped.step(slow)
        piped.synchronize()
        assert not piped._session.log.latest.overlaps  # else it shows in seconds alone
        assert piped.report().predicted.round_s >= 0.1
