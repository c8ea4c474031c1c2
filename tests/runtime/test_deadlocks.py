"""Deadlocks, and errors where nothing catches them."""

import contextlib
import threading
import time

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import ConfigError, DeadlockError, RoundPipeError
from roundpipe.runtime import threads
from roundpipe.runtime.engine.running import RunningSteps
from roundpipe.runtime.engine.step import StepState
from roundpipe.runtime.profiling.layer_times import StepTimes
from roundpipe.runtime.weights.replica import BoundLayer
from tests.runtime.cases_errors import SINGLES, Fragile, Mine, assert_still_works, fragile_model
from tests.runtime.models import (
    DTYPE,
    assert_round_is_eager,
    batch,
    config,
    mlp,
    square_loss,
)

pytestmark = pytest.mark.timeout(60)


# what is lost is the library's own: no user's code reaches it
LOST = {
    "runs": (StepState, "advance", "stuck worker 1 waits for microbatch 0 of job 0"),
    "the end": (RunningSteps, "leave", "the call waits for the end of the step"),
}


@pytest.mark.parametrize("what", LOST)
def test_a_deadlock_names_who_waits_for_whom(what, monkeypatch):
    monkeypatch.setattr(threads, "CHECK_INTERVAL_S", 0.1)
    owner, name, words = LOST[what]
    piped = roundpipe.RoundPipe(fragile_model(), devices=["cpu"] * 2, name="stuck")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *given, **options: None)
        with pytest.raises(DeadlockError, match=words):
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3, plan=SINGLES))


def test_a_slow_layer_is_no_deadlock(monkeypatch):
    monkeypatch.setattr(threads, "CHECK_INTERVAL_S", 0.02)

    class Slow(nn.Module):
        def forward(self, value):
            time.sleep(0.15)
            return value

    model = nn.Sequential(nn.Linear(6, 6), Slow(), nn.Linear(6, 6)).to(DTYPE)
    plan = roundpipe.ExecutePlan([(0, 1), (1, 2)], (2, 3), [(0, 2)])
    with roundpipe.RoundPipe(model, devices=["cpu"] * 3) as piped:
        loss = piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(2, plan=plan))
    assert torch.isfinite(loss)


def test_what_goes_wrong_after_an_error_is_noted_and_the_next_call_works(monkeypatch, caplog):
    model = fragile_model()
    unbind = BoundLayer.unbind

    with roundpipe.RoundPipe(model, devices=["cpu"] * 2, name="clumsy") as piped:

        def fails(self):
            if any(step.failed for step in piped._session.engine.running()):  # seen by nobody from outside
                raise KeyError("while letting go")
            unbind(self)

        Fragile.broken["early"] = "recomputation"
        with monkeypatch.context() as patch:
            patch.setattr(BoundLayer, "unbind", fails)
            with pytest.raises(Mine, match="early in recomputation") as caught:
                piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3, plan=SINGLES))
        notes = "\n".join(caught.value.__notes__)
        assert "after it, clumsy worker" in notes and "KeyError: 'while letting go'" in notes
        assert "after the error of a step" in caplog.text
        assert [one.ledger.by_purpose["gradients"] for one in piped._session.engine.backends] == [0, 0]  # by purpose
        assert_still_works(piped, model)


@pytest.mark.parametrize("where", ["after an error", "between rounds", "in the thread of the gradients"])
def test_an_error_that_nothing_catches_fails_the_rounds_instead_of_hanging(where, monkeypatch):
    model = fragile_model()

    def run():
        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3, plan=SINGLES))
        piped.synchronize()

    def fails(*_):
        raise KeyError("nobody knows why")

    with roundpipe.RoundPipe(model, devices=["cpu"] * 2, name="lost") as piped:
        run()
        worker = piped._session.engine._workers[1]  # what fails is a worker's own code: no user's code reaches it
        if where == "after an error":
            Fragile.broken["early"] = "forward"
            monkeypatch.setattr(worker, "_abandon", fails)  # its own code
            with pytest.raises(Mine):
                run()
        elif where == "between rounds":
            worker.thread.submit(fails)  # as above
            wait_until(lambda: worker._broken is not None)  # else the next call may come first
        else:
            # as above
            add = worker._home._add
            monkeypatch.setattr(worker._home, "_add", lambda *given: (add(*given), fails()))
            with contextlib.suppress(KeyError):  # if it comes before the round is over
                run()
            wait_until(lambda: worker._broken is not None)  # as above
        for _ in range(2):
            with pytest.raises(RoundPipeError, match="lost worker 1 can't go on since an earlier error") as caught:
                run()
            assert isinstance(caught.value.__cause__, KeyError)


def test_a_round_that_a_worker_lost_is_taken_up_again(monkeypatch):
    """As if an error came up in the worker's thread before it had begun with what it was given."""
    with roundpipe.RoundPipe(fragile_model(), devices=["cpu"] * 2, name="lost") as piped:
        thread = piped._session.engine._workers[0].thread  # what fails is the worker's own code
        submit, told = thread.submit, threading.Event()

        def lose(work, *args):
            monkeypatch.setattr(thread, "submit", submit)
            submit(lambda: told.wait(5) and 1 / 0)

        monkeypatch.setattr(thread, "submit", lose)
        threading.Timer(0.05, told.set).start()
        with pytest.raises(ZeroDivisionError):
            piped(batch())


def wait_until(reached):
    deadline = time.monotonic() + 10
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert reached()


def test_a_step_is_over_even_if_what_it_tells_of_raises(monkeypatch):
    def fails(*_, **options):
        raise KeyError("nobody knows why")

    monkeypatch.setattr(StepTimes, "end", fails)
    with roundpipe.RoundPipe(mlp(3), devices=["cpu"] * 2) as piped:
        with contextlib.suppress(KeyError):  # if it comes before the call returns
            piped.forward_backward((batch(),), loss_fn=square_loss)
        with pytest.raises(RoundPipeError, match="can't go on since an earlier error"):
            for _ in range(2):
                piped.forward_backward((batch(),), loss_fn=square_loss)


def test_a_hook_that_can_not_run_is_refused_before_any_work(monkeypatch):
    model = mlp(3)
    handle = model[1][0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    for make in (roundpipe.RoundPipe, roundpipe.compile):
        with make(model, devices=["cpu"] * 2) as piped:
            seen = []
            for call in (
                lambda piped=piped: piped.forward_backward((batch(),), loss_fn=square_loss),
                lambda piped=piped: piped(batch()),
            ):
                with pytest.raises(
                    ConfigError, match=r"1\.0\.weight has a hook of register_post_accumulate.*model\.step"
                ):
                    call()
                seen.append(piped._session.engine.steps.num_begun)  # a report counts only what ended
            assert seen == [0, 0]
            with torch.no_grad():
                piped(batch())
            model[1][0].weight.requires_grad_(False)  # eager runs no such hook either
            piped.forward_backward((batch(),), loss_fn=square_loss)
            model[1][0].weight.requires_grad_(True)
    handle.remove()
    model.zero_grad()
    assert_round_is_eager(model, (batch(),))
