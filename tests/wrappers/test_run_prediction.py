"""What `model.report()` predicts of a round, from what was measured."""

import time
from dataclasses import replace

import pytest
import torch

import roundpipe
from roundpipe.core.schedule import ExecutePlan
from tests.runtime.models import batch, config, mlp, square_loss

pytestmark = pytest.mark.timeout(60)

PLAN = ExecutePlan([(0, 2), (2, 4)], (4, 6), [(2, 4), (0, 2)])


def test_the_optimizers_chain_is_predicted_and_named():
    """No round is predicted to be shorter than an update and the hand-over behind it, as the same report has them."""
    with roundpipe.RoundPipe(mlp(6), devices=["cpu"]) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)
        settings = config(2, plan=PLAN, preserve_rng_state=False)

        def slow():
            time.sleep(0.15)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(6):
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=settings)
            piped.step(slow)
        piped.synchronize()
        report = piped.report()
    chain = {what: report.optimizer_s[what] / report.num_steps for what in ("begin", "hand-over", "update")}
    assert report.predicted.round_s >= 0.99 * sum(chain.values())
    shown = str(replace(report, limit="update"))
    assert "of each step update" in shown and "hand-over" in shown.partition("of each step")[2]
