"""Where everything lives on the device, an asynchronous step returns once its update was given to it."""

import signal
import threading

import pytest
import torch

from roundpipe.runtime.engine.builder import StepBuilder
from roundpipe.runtime.optimizer import update_steps
from roundpipe.runtime.weights.twins import Twins
from tests.runtime.cases_twins import OPTIMIZERS, ROOM, WIDTH, lives_there, model_of, optimizer_of, wrapped
from tests.runtime.models import assert_equal_bits, batch, square_loss

pytestmark = pytest.mark.timeout(60)
LONG_S = 30.0


def begin(piped, residency="full"):
    """The optimizer of a model that lives on its device by now, or is streamed, and a function that trains."""
    ours, x = optimizer_of(piped, OPTIMIZERS["AdamW"]), batch(5, width=WIDTH)

    def update():
        ours.step()
        ours.zero_grad()

    def train():
        return piped.forward_backward((x,), loss_fn=square_loss)

    for _ in range(3):
        train()
        piped.step(update).wait()
    assert lives_there(piped) == (residency == "full")
    return update, train


@pytest.fixture
def patient(monkeypatch):
    """However slow this machine is, what is waited for is awaited."""
    monkeypatch.setattr(update_steps, "ISSUE_S", LONG_S)


def test_the_update_was_issued_when_the_step_returns(patient):
    with wrapped(model_of()) as piped:
        update, train = begin(piped)
        for _ in range(4):
            train()
            assert piped.step(update).done()


def test_a_round_with_memory_to_spare_does_not_count_as_tight(monkeypatch):
    """Its call need not wait until its last backward was launched: the next one is made ready meanwhile."""
    specs, build = [], StepBuilder.train_step

    def kept(self, *args, **kwargs):
        spec, values = build(self, *args, **kwargs)
        specs.append(spec)
        return spec, values

    monkeypatch.setattr(StepBuilder, "train_step", kept)
    with wrapped(model_of()) as piped:
        begin(piped)
        peak_bytes = piped.report().peak_device_bytes
    assert specs[-1].runs_again and not specs[-1].is_tight
    spare_bytes = specs[-1].spare_bytes
    assert ROOM - 2 * peak_bytes < spare_bytes <= ROOM - peak_bytes
    with wrapped(model_of(), memory_bytes=int(1.05 * (ROOM - spare_bytes))) as piped:
        begin(piped)
    assert specs[-1].is_tight


@pytest.mark.parametrize("residency", ["full", "auto"])
def test_weights_are_one_update_old(residency, patient):
    """As for SGD: ``W_k = W_{k-1} - lr * grad(W_{k-2})``."""
    model, seen = model_of(), []
    with wrapped(model, residency) as piped:
        ours = torch.optim.SGD(piped.optim_parameters(), lr=0.05)
        for step in range(5):
            seen.append(piped.forward_backward((batch(5, width=WIDTH, seed=step),), loss_fn=square_loss))
            piped.step(lambda: (ours.step(), ours.zero_grad()))
        piped.synchronize()
    eager = model_of()
    before = [each.detach().clone() for each in eager.parameters()]  # that the next round runs on
    latest = [each.clone() for each in before]
    for step, loss in enumerate(seen):
        with torch.no_grad():
            for each, value in zip(eager.parameters(), before, strict=True):
                each.copy_(value)
        expected = square_loss(eager(batch(5, width=WIDTH, seed=step)), None)
        gradients = torch.autograd.grad(expected, list(eager.parameters()))
        torch.testing.assert_close(loss, expected.detach())
        before = latest
        latest = [value - 0.05 * gradient for value, gradient in zip(latest, gradients, strict=True)]
    trained = dict(model.named_parameters())
    for (name, _), value in zip(eager.named_parameters(), latest, strict=True):
        torch.testing.assert_close(trained[name].detach(), value)


def stays_behind(monkeypatch):
    """The device has other work for as long as updates take to be issued."""

    class Behind:
        def synchronize(self):
            pass

        def is_done(self):
            return False

    monkeypatch.setattr(Twins, "record", lambda self: Behind() if self else None)


def takes_long(monkeypatch):
    """So did the update before."""
    monkeypatch.setattr(update_steps, "ISSUE_S", -1.0)


def streams(monkeypatch):
    """Nothing lives there."""


@pytest.mark.parametrize("reason", [stays_behind, takes_long, streams])
def test_steps_that_return_at_once(reason, patient, monkeypatch):
    reason(monkeypatch)
    returned = threading.Event()
    with wrapped(model_of(), residency := "auto" if reason is streams else "full") as piped:
        update, train = begin(piped, residency)
        for _ in range(3):
            train()
            handle = piped.step(lambda: (returned.wait(), update()))
            assert not handle.done()
            returned.set()
            assert handle.wait()
            returned.clear()


def test_a_step_fn_that_waits_for_the_caller_is_not_waited_for_again(monkeypatch):
    def losses(is_slow):
        returned, found = threading.Event(), []
        with wrapped(model_of()) as piped:
            update, train = begin(piped)
            for _ in range(4):
                found.append(train())
                if is_slow:
                    returned.clear()
                    monkeypatch.setattr(update_steps, "ISSUE_S", 0.02)
                handle = piped.step(lambda: (returned.wait() if is_slow else None, update()))
                returned.set()
                handle.wait()
        return dict(enumerate(found))

    assert_equal_bits(losses(True), losses(False))


def test_what_step_fn_raises_comes_with_the_next_call(patient):
    with wrapped(model_of()) as piped:
        update, train = begin(piped)
        train()
        handle = piped.step(lambda: 1 / 0)
        assert handle.done()
        with pytest.raises(ZeroDivisionError):
            train()
        train()
        piped.step(update)
        train()
        handle = piped.step(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            handle.result()
        train()


def _after_four_steps(is_interrupted):
    """The weights of a model after as many steps, of which Ctrl-C may end the wait for the last but one."""
    model, returned = model_of(), threading.Event()
    with wrapped(model) as piped:
        update, train = begin(piped)

        def interrupt():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            returned.wait(LONG_S)
            update()

        train()
        if is_interrupted:
            with pytest.raises(KeyboardInterrupt):
                piped.step(interrupt)
            returned.set()
        else:
            piped.step(update)
        assert piped.report().num_steps == 4
        train()
        piped.step(update)
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def test_an_interrupted_wait_leaves_the_update_to_its_end(patient):
    assert_equal_bits(_after_four_steps(True), _after_four_steps(False))
