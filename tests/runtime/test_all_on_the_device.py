"""Rounds of a model that lives on its device as a whole, with asynchronous steps."""

import gc

import pytest
import torch

from roundpipe.runtime.engine.builder import StepBuilder
from tests.runtime.cases_twins import OPTIMIZERS, ROOM, WIDTH, lives_there, model_of, optimizer_of, wrapped
from tests.runtime.models import assert_equal_bits, batch, square_loss

pytestmark = pytest.mark.timeout(60)


def begin(piped):
    """Three steps, after which a model lives on its device."""
    ours, x = optimizer_of(piped, OPTIMIZERS["AdamW"]), batch(5, width=WIDTH)

    def update():
        ours.step()
        ours.zero_grad()

    for _ in range(3):
        piped.forward_backward((x,), loss_fn=square_loss)
        piped.step(update).wait()
    assert lives_there(piped)


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
def test_weights_are_one_update_old(residency):
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


def test_weights_come_home_when_python_collects_a_wrapper_that_refers_to_itself(monkeypatch):
    """Its threads are told to end before its own end is run."""

    def trained(refers):
        model = model_of()
        piped = wrapped(model)
        begin(piped)
        if refers:
            piped.__dict__["_itself"] = piped
            del piped
            gc.collect()
        else:
            piped.close()
        return {name: each.detach().clone() for name, each in model.named_parameters()}

    errors = []
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: errors.append(unraisable.exc_value))
    assert_equal_bits(trained(refers=True), trained(refers=False))
    assert not errors
