"""With residency="full" a model that fits lives on its device: nothing is streamed, and the numbers are the same."""

import copy

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import ConfigError
from roundpipe.core.schedule import ExecutePlan
from roundpipe.runtime.device.backend import Device
from tests.runtime.models import DTYPE, assert_equal_bits, batch, config, mlp, square_loss

WIDTH, NUM, DEPTH = 8, 2, 3
PLANS = {"one stage": ExecutePlan([], (0, DEPTH), []), "stages": ExecutePlan([(0, 2)], (2, DEPTH), [(1, 2), (0, 1)])}
ROOM = 10**7


def wrapped(model, residency="full", plan=None, memory_bytes=ROOM, **options):
    """A model on one CPU worker whose memory is counted."""
    run_config = config(NUM, plan=plan, residency=residency)
    devices = [Device("cpu", memory_bytes=memory_bytes)]
    return roundpipe.RoundPipe(model, devices=devices, model_run_config=run_config, **options)


def model_of(dtype=DTYPE):
    torch.manual_seed(4)
    return mlp(DEPTH, WIDTH).to(dtype)


def moved(piped):
    """Bytes of weights and gradients that the worker has moved since the last call."""
    (worker,) = piped.report().workers
    return worker.moved_bytes["weights"], worker.moved_bytes["gradients"]


def lives_there(piped):
    return bool(piped._session.engine.twins)  # what is private to the runtime tells where weights are


def optimizer_of(piped, kind):
    return kind(piped.optim_parameters())


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, foreach=False),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
}


def run(residency, *, is_async, optimizer="AdamW", steps=6, accumulate=1, plan=None, between=lambda *state: None, **options):
    """Losses, and the weights after each step that reads them, of a run in which ``between`` happens after each step."""
    model = model_of()
    found, where = [], []
    with wrapped(model, residency, PLANS[plan] if plan else None, **options) as piped:
        ours = optimizer_of(piped, OPTIMIZERS[optimizer])
        schedule = torch.optim.lr_scheduler.ExponentialLR(ours, 0.9)

        def update():
            torch.nn.utils.clip_grad_norm_(ours.param_groups[0]["params"], 0.5, foreach=False)
            ours.step()
            schedule.step()
            ours.zero_grad()

        for step in range(steps):
            for part in range(accumulate):
                x = batch(5, width=WIDTH, seed=10 * step + part)
                found.append(piped.forward_backward((x,), loss_fn=square_loss))
            piped.step(update, is_async=is_async)
            where.append(lives_there(piped))
            between(step, piped, model, ours, found)
        piped.synchronize()
        found += [parameter.detach().clone() for parameter in model.parameters()]
        last = moved(piped)
        piped.forward_backward((x,), loss_fn=square_loss)
        piped.step(update, is_async=is_async)
        piped.forward_backward((x,), loss_fn=square_loss)
        last = moved(piped)
    found += [parameter.detach().clone() for parameter in model.parameters()]
    return dict(enumerate(found)), where, last


@pytest.mark.parametrize("plan", [None, *PLANS])
@pytest.mark.parametrize("is_async", [False, True])
def test_numbers_are_those_of_streamed_weights_and_nothing_moves(is_async, plan):
    for accumulate in (1, 2):
        options = {"is_async": is_async, "accumulate": accumulate, "plan": plan}
        streamed, where, moved_bytes = run("auto", **options)
        assert not any(where) and all(moved_bytes)
        found, where, moved_bytes = run("full", **options)
        assert where == [False] + [True] * 5
        assert moved_bytes == (0, 0)
        assert_equal_bits(found, streamed)


def evaluate(piped, model, ours, found):
    x = batch(5, width=WIDTH, seed=99)
    with torch.no_grad():
        found.append(piped.eval()(x))
        found.append(piped.forward_loss((x,), loss_fn=square_loss))
    piped.train()
    found.append(model.eval()(x).detach())  # the user's own model
    model.train()


def read_state(piped, model, ours, found):
    found += [value.clone() for value in piped.state_dict().values()]
    found += [value.clone() for value in copy.deepcopy(model).state_dict().values()]


def load_state(piped, model, ours, found):
    piped.load_state_dict({name: value * 0.5 for name, value in piped.state_dict().items()})


def write(piped, model, ours, found):
    piped.synchronize()
    with torch.no_grad():
        model[1][0].weight.mul_(0.5)
        model[0][0].bias.data.add_(0.25)  # of which torch takes no note


def write_copies(piped, model, ours, found):
    piped.synchronize()
    with torch.no_grad():
        next(piped.optim_parameters()).mul_(0.5)


def look_at_gradients(piped, model, ours, found):
    piped.forward_backward((batch(5, width=WIDTH, seed=98),), loss_fn=square_loss)
    piped.synchronize()
    found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model[2][0].weight.grad.mul_(0.5)


def freeze(piped, model, ours, found):
    model[1].requires_grad_(False)


def thaw(piped, model, ours, found):
    model[1].requires_grad_(True)


def deferred(piped, model, ours, found):
    out = piped(batch(5, width=WIDTH, seed=97))
    square_loss(out, None).backward()
    piped.zero_grad()


def save_and_load(piped, model, ours, found, folder):
    piped.save_checkpoint(folder, optimizer=ours)
    piped.forward_backward((batch(5, width=WIDTH, seed=96),), loss_fn=square_loss)
    piped.step(lambda: (ours.step(), ours.zero_grad()))
    piped.load_checkpoint(folder, optimizer=ours)


ACTIONS = [
    [],
    [evaluate, read_state],
    [load_state],
    [write],
    [look_at_gradients],
    [save_and_load],
    [freeze, evaluate],
    [],
    [thaw],
    [write_copies],
    [],
]


@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_happens_between_steps(is_async, tmp_path):
    def between(step, *state):
        for action in ACTIONS[step]:
            action(*state, *([tmp_path / "saved"] if action is save_and_load else []))

    options = {"is_async": is_async, "between": between, "steps": len(ACTIONS)}
    streamed, _, _ = run("auto", **options)
    found, where, moved_bytes = run("full", **options)
    assert where == [False] + [True] * (len(ACTIONS) - 1)
    assert moved_bytes == (0, 0)
    assert_equal_bits(found, streamed)
