"""A user's exception keeps its type, says where it was raised, and leaves a model that works."""

import contextlib
import copy
import gc
import threading
import time
import traceback
import weakref

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import ConfigError, DeadlockError, RoundPipeError
from roundpipe.runtime.engine import step as steps
from roundpipe.runtime.profiling.layer_times import StepTimes
from roundpipe.runtime.weights.bound_layer import BoundLayer
from tests.runtime.models import (
    DTYPE,
    assert_round_is_eager,
    assert_same,
    batch,
    chain,
    config,
    eager_round,
    gradients,
    mlp,
    square_loss,
)

pytestmark = pytest.mark.timeout(60)

workers = pytest.mark.parametrize("workers", [1, 2, 3])

SINGLES = roundpipe.ExecutePlan([(i, i + 1) for i in range(4)], (4, 5), [(i, i + 1) for i in reversed(range(4))])


class Mine(Exception):
    """Somebody's own exception."""


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, owner):
        ctx.owner = owner
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.owner.maybe_fail("backward")
        return gradient, None


class Fragile(nn.Module):
    """Fails once in a phase, in the microbatch whose first value is asked for."""

    broken = {}

    def __init__(self, name):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.name = name

    def maybe_fail(self, phase):
        if self.broken.get(self.name) == phase:
            del self.broken[self.name]
            raise Mine(f"{self.name} in {phase}")

    def forward(self, value):
        self.maybe_fail("recomputation" if roundpipe.doing_recompute() else "forward")
        return FailsInBackward.apply(torch.tanh(self.linear(value)), self)


def fragile_model():
    Fragile.broken.clear()
    model = mlp(5)
    model[1] = nn.Sequential(nn.Tanh(), Fragile("early"))
    model[4] = nn.Sequential(Fragile("late"), nn.Tanh())
    return model.to(DTYPE)


def assert_still_works(piped, model, num=3):
    model.zero_grad()
    piped.zero_grad()
    reference = copy.deepcopy(model)
    expected, _ = eager_round(reference, (batch(),), num=num)
    found = piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(num, plan=SINGLES))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert_same(gradients(model), gradients(reference))


def note_of(error):
    (note,) = error.__notes__
    return note


@pytest.mark.parametrize(
    "name, phase, stage, module",
    [
        ("early", "forward", "F1[1:2]", "1.1"),
        ("early", "recomputation", "B3[1:2]", "1.1"),
        ("late", "forward", "U[4:5]", "4.0"),
    ],
)
@workers
def test_an_exception_in_a_layer_says_where(workers, name, phase, stage, module):
    model = fragile_model()
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        Fragile.broken[name] = phase
        with pytest.raises(Mine, match=f"{name} in {phase}") as caught:
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3, plan=SINGLES))
        note = note_of(caught.value)
        layer = module[0]
        where = f"layer {layer} ({layer}), module {module}, stage {stage}, microbatch 0, phase {phase}"
        assert note == f"roundpipe: raised in {where}"
        del caught
        assert_still_works(piped, model)


@pytest.mark.parametrize("name, stage", [("early", "B3[1:2]"), ("late", "U[4:5]")])
@workers
def test_an_exception_in_backward_says_where(workers, name, stage):
    model = fragile_model()
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        Fragile.broken[name] = "backward"
        with pytest.raises(Mine, match="in backward") as caught:
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3, plan=SINGLES))
        note = note_of(caught.value)
        assert f"stage {stage}" in note and "microbatch 0" in note and "phase backward" in note
        del caught
        assert_still_works(piped, model)


@workers
def test_an_exception_in_the_loss_function_says_where(workers):
    model = fragile_model()
    calls = []

    def loss_fn(output, label):
        calls.append(1)
        if len(calls) == 2:
            raise Mine("in loss_fn")
        return square_loss(output, label)

    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        with pytest.raises(Mine, match="in loss_fn") as caught:
            piped.forward_backward((batch(),), loss_fn=loss_fn, run_config=config(3, plan=SINGLES))
        note = note_of(caught.value)
        assert "stage U[4:5]" in note and "microbatch 1" in note and "phase loss_fn" in note
        del caught
        assert_still_works(piped, model)


@workers
def test_an_exception_in_forward_alone(workers):
    model = fragile_model()
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        for grad in (False, True):
            Fragile.broken["late"] = "forward"
            with torch.set_grad_enabled(grad), pytest.raises(Mine):
                piped(batch(), roundpipe_run_config=config(3, plan=SINGLES))
        assert_still_works(piped, model)


def test_the_traceback_shows_the_users_line():
    with roundpipe.RoundPipe(fragile_model(), devices=["cpu"] * 2) as piped:
        Fragile.broken["early"] = "forward"
        with pytest.raises(Mine) as caught:
            piped(batch())
    text = "".join(traceback.format_exception(caught.value))
    assert 'raise Mine(f"{self.name} in {phase}")' in text and "roundpipe: raised in" in text


def test_a_loss_that_is_no_tensor_says_what_to_do():
    model = fragile_model()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        for wrong in (3.0, None, [], {"loss": 1}, [1.0]):
            with pytest.raises(roundpipe.LossError, match="must return a tensor or a non-empty sequence of tensors"):
                piped.forward_backward((batch(),), loss_fn=lambda *_, wrong=wrong: wrong)
        assert_still_works(piped, model)


def test_a_loss_without_gradient_says_what_to_do():
    model = fragile_model()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        for wrong in (lambda output, _: output.detach().sum(), lambda output, _: [output.sum(), torch.zeros(())]):
            with pytest.raises(RuntimeError, match="does not depend on anything that requires grad") as caught:
                piped.forward_backward((batch(),), loss_fn=wrong)
            assert isinstance(caught.value, roundpipe.LossError)
        assert_still_works(piped, model)


def test_a_loss_of_several_numbers_says_its_shape():
    model = fragile_model()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        with pytest.raises(roundpipe.LossError, match=r"a tensor of shape \[3, 6\].*Reduce it"):
            piped.forward_backward((batch(9),), loss_fn=lambda output, _: output.square())
        assert_still_works(piped, model)


@workers
def test_an_interrupt_leaves_a_model_that_works(workers, monkeypatch):
    """Ctrl-C reaches the caller where it waits; the workers stop at their next task."""
    model = fragile_model()
    real = steps.StepState.wait_over
    calls = []

    def interrupted(self):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(self)

    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        with monkeypatch.context() as patch:
            patch.setattr(steps.StepState, "wait_over", interrupted)
            with pytest.raises(KeyboardInterrupt):
                piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3, plan=SINGLES))
        assert len(calls) == 2, "the caller waits for the workers to stop"
        assert_still_works(piped, model)


@workers
def test_an_interrupt_raised_in_a_layer(workers):
    class Interrupts(nn.Module):
        armed = True

        def forward(self, value):
            if type(self).armed:
                type(self).armed = False
                raise KeyboardInterrupt
            return value

    model = fragile_model()
    model[2] = nn.Sequential(model[2], Interrupts())
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        with pytest.raises(KeyboardInterrupt):
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3, plan=SINGLES))
        assert_still_works(piped, model)


def test_nothing_of_a_failed_round_stays_alive():
    """No reference cycle keeps the tensors of the exception's frames once it is handled."""
    made = []

    class Makes(nn.Module):
        def forward(self, value):
            big = value * 2
            made.append(weakref.ref(big))
            raise Mine

    model = nn.Sequential(nn.Linear(6, 6), Makes()).to(DTYPE)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        gc.collect()
        gc.disable()
        try:
            try:
                piped.forward_backward((batch(),), loss_fn=square_loss)
            except Mine:
                pass
            assert made[0]() is None
        finally:
            gc.enable()


def test_the_first_error_is_the_one_raised():
    barrier = threading.Barrier(2, timeout=20)

    class Meets(nn.Module):
        def __init__(self, position):
            super().__init__()
            self.position = position

        def forward(self, value):
            if self.position == 0 and value[0, 0] == 1:
                barrier.wait()
                raise Mine("of the first layer")
            if self.position == 1 and value[0, 0] == 0:
                barrier.wait()
                raise Mine("of the second layer")
            return value

    model = chain(["x"], [(Meets(0), ["x"], ["a"]), (Meets(1), ["a"], ["y"])], ["y"], draws_random=False)
    given = torch.tensor([[0.0], [1.0]], dtype=DTYPE)
    plan = roundpipe.ExecutePlan([(0, 1)], (1, 2), [(0, 1)])
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        with pytest.raises(Mine, match="of the (first|second) layer"):
            piped(given, roundpipe_run_config=config(2, plan=plan))
        assert torch.equal(piped(given * 5 + 5, roundpipe_run_config=config(1, plan=plan)), given * 5 + 5)


def test_a_deadlock_names_who_waits_for_whom(monkeypatch):
    monkeypatch.setattr(steps, "CHECK_INTERVAL_S", 0.1)
    model = fragile_model()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2, name="stuck") as piped:
        with monkeypatch.context() as patch:
            patch.setattr(steps.StepState, "advance", lambda self, job_index: None)
            with pytest.raises(DeadlockError, match="stuck worker 1 waits for microbatch 0 of job 0"):
                piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3, plan=SINGLES))


def test_a_slow_layer_is_no_deadlock(monkeypatch):
    monkeypatch.setattr(steps, "CHECK_INTERVAL_S", 0.02)

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

    def fails(self):
        if not Fragile.broken:  # it has failed
            raise KeyError("while letting go")
        unbind(self)

    with roundpipe.RoundPipe(model, devices=["cpu"] * 2, name="clumsy") as piped:
        Fragile.broken["early"] = "recomputation"
        with monkeypatch.context() as patch:
            patch.setattr(BoundLayer, "unbind", fails)
            with pytest.raises(Mine, match="early in recomputation") as caught:
                piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3, plan=SINGLES))
        notes = "\n".join(caught.value.__notes__)
        assert "after it, clumsy worker" in notes and "KeyError: 'while letting go'" in notes
        assert "after the error of a step" in caplog.text
        assert [one.ledger.by_purpose["gradients"] for one in piped._session.engine.backends] == [0, 0]
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
        worker = piped._session.engine._workers[1]
        if where == "after an error":
            Fragile.broken["early"] = "forward"
            monkeypatch.setattr(worker, "_abandon", fails)
            with pytest.raises(Mine):
                run()
        elif where == "between rounds":
            worker._thread.submit(fails)
            wait_until(lambda: worker._broken is not None)
        else:
            settle = worker._settle
            monkeypatch.setattr(worker, "_settle", lambda *given: (settle(*given), fails()))
            with contextlib.suppress(KeyError):  # if it comes before the round is over
                run()
            wait_until(lambda: worker._broken is not None)
        for _ in range(2):
            with pytest.raises(RoundPipeError, match="lost worker 1 can't go on since an earlier error") as caught:
                run()
            assert isinstance(caught.value.__cause__, KeyError)


def test_a_round_that_a_worker_lost_is_taken_up_again(monkeypatch):
    """As if an error came up in the worker's thread before it had begun with what it was given."""
    with roundpipe.RoundPipe(fragile_model(), devices=["cpu"] * 2, name="lost") as piped:
        thread = piped._session.engine._workers[0]._thread
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
                seen.append(piped._session.engine.steps.num_begun)
            assert seen == [0, 0]
            with torch.no_grad():
                piped(batch())
            model[1][0].weight.requires_grad_(False)  # eager runs no such hook either
            piped.forward_backward((batch(),), loss_fn=square_loss)
            model[1][0].weight.requires_grad_(True)
    handle.remove()
    model.zero_grad()
    assert_round_is_eager(model, (batch(),))
