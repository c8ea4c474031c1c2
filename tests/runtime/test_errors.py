"""A user's exception keeps its type, says where it was raised, and leaves a model that works."""

import dataclasses
import gc
import threading
import traceback
import weakref

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import GRADIENTS_ADDED
from roundpipe.runtime.engine import step as steps
from roundpipe.wrappers.auto import PartsProgram
from tests.runtime.cases_errors import SINGLES, FailsInBackward, Fragile, Mine, assert_still_works, fragile_model
from tests.runtime.models import (
    DTYPE,
    batch,
    chain,
    config,
    square_loss,
)

pytestmark = pytest.mark.timeout(60)


workers = pytest.mark.parametrize("workers", [1, 2, 3])


def note_of(error):
    note, *others = error.__notes__
    assert all("call zero_grad() before trying again" in other for other in others)
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
        with pytest.raises(KeyboardInterrupt) as caught:
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3, plan=SINGLES))
        assert "module 2.1, stage F2[2:3], microbatch 0, phase forward" in note_of(caught.value)
        assert_still_works(piped, model)


@pytest.mark.parametrize("phase, has_note", [("forward", False), ("recomputation", True), ("backward", True)])
def test_the_error_says_whether_gradients_may_have_been_added(phase, has_note):
    model = fragile_model()
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        Fragile.broken["early"] = phase  # one worker has added those of the first backward job before this one
        with pytest.raises(Mine) as caught:
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3, plan=SINGLES))
        has_gradients = any(parameter.grad is not None for parameter in model.parameters())
        assert (GRADIENTS_ADDED in caught.value.__notes__) == has_gradients == has_note
        assert_still_works(piped, model)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Can't be changed: not even the notes and the traceback, if they are set as attributes."""

    code: int


class Refuses(Exception):
    def add_note(self, note):
        raise TypeError("no notes")


class Raises(nn.Module):
    """Raises in a phase what it is given."""

    def __init__(self, phase, error):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.phase = phase
        self.error = error

    def maybe_fail(self, phase):
        if phase == self.phase:
            self.phase = None
            raise self.error

    def forward(self, value):
        self.maybe_fail("recomputation" if roundpipe.doing_recompute() else "forward")
        with torch.autocast("cpu"):
            return FailsInBackward.apply(self.linear(value), self)


def wrap_in_parts(model, **options):
    """The second child runs on the host."""
    parts = {model[0]: roundpipe.RoundPipeRunConfig(), model[2]: roundpipe.RoundPipeRunConfig()}
    return roundpipe.AutoRoundPipe(PartsProgram(model, parts), **options)


PLACES = ("forward", "backward", "loss_fn", "split_input", "step_fn")


@pytest.mark.parametrize("error", [Frozen(7), Refuses("x"), StopIteration("x")])
@pytest.mark.parametrize(
    "wrap, place",
    [
        (roundpipe.RoundPipe, "recomputation"),
        *((wrap, place) for wrap in (roundpipe.RoundPipe, wrap_in_parts) for place in PLACES),
    ],
)
def test_an_exception_that_can_not_be_changed_arrives(wrap, error, place):
    """Also under autocast, with drawn numbers and buffers, on whose account contexts are open where it passes."""
    layers = [nn.Dropout(0.1), Raises(place, error), nn.BatchNorm1d(6)]
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(*layers), nn.Linear(6, 6))

    def raises(*_):
        raise error

    options = config(2, split_input=raises if place == "split_input" else None)
    with wrap(model, devices=["cpu"] * 2) as piped, torch.autocast("cpu"):
        with pytest.raises(type(error)) as caught:
            loss_fn = raises if place == "loss_fn" else square_loss
            piped.forward_backward((batch().float(),), loss_fn=loss_fn, run_config=options)
            piped.step(raises if place == "step_fn" else lambda: None, is_async=False)
        assert caught.value is error


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
