"""One worker runs out of memory and runs its stage again, while others go on."""

from roundpipe.runtime.engine.runner import MicrobatchRunner
from tests.runtime.cases_shortage import PLANS, Fault, break_at, run, skips


def test_a_stage_that_runs_layer_by_layer_reads_nothing_that_another_worker_drops(monkeypatch):
    by_layer = MicrobatchRunner._by_layer  # private, since no code of the user's runs between it and the reads

    def followed_by_drops(self, step, job, stage, visit, values, microbatch):
        found = by_layer(self, step, job, stage, visit, values, microbatch)
        step.wait_done(step.spec.schedule.before(job, microbatch), microbatch, "the test")
        return found

    fault = Fault()
    break_at(monkeypatch, fault, "weights")
    monkeypatch.setattr(MicrobatchRunner, "_by_layer", followed_by_drops)  # as above
    run(skips(), fault, {1, 2}, workers=2, plan=PLANS["stages"])
    assert fault.num_raised
