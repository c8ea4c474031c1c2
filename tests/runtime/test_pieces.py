"""Parameters that are updated in pieces are updated as without; where code could see a difference, they are not."""

import itertools
import logging

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import roundpipe
from roundpipe.runtime.optimizer import pieces
from roundpipe.runtime.optimizer.pieces import PiecewiseUpdates
from tests.runtime.models import assert_equal_bits, config, square_loss

pytestmark = pytest.mark.timeout(120)
WIDTH = 6
KINDS = {
    "AdamW": lambda given: torch.optim.AdamW(given, 0.01),
    "AdamW foreach": lambda given: torch.optim.AdamW(given, 0.01, foreach=True, weight_decay=0.1),
    "AdamW amsgrad": lambda given: torch.optim.AdamW(given, 0.01, amsgrad=True, betas=(0.8, 0.9), eps=1e-5),
    "Adam": lambda given: torch.optim.Adam(given, 0.01, weight_decay=0.1, maximize=True),
    "SGD momentum": lambda given: torch.optim.SGD(given, 0.01, momentum=0.9, dampening=0.1, maximize=True),
    "SGD nesterov": lambda given: torch.optim.SGD(given, 0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD decay": lambda given: torch.optim.SGD(given, 0.01, weight_decay=0.1, maximize=True, foreach=True),
}


@pytest.fixture
def in_pieces(monkeypatch):
    """Has parameters of any size updated in pieces of few elements; the shapes of those that were."""
    roundpipe.RoundPipe(nn.Linear(1, 1), devices=["cpu"]).close()  # torch has the library's hooks from then on
    monkeypatch.setattr(pieces, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", 7)
    monkeypatch.setattr(pieces, "ELEMENTS_PER_THREAD", 1)
    found, update = [], pieces._update_in_pieces  # the one place that all of them pass
    monkeypatch.setattr(pieces, "_update_in_pieces", lambda *args: (found.append(args[1].shape), update(*args)))  # it
    return found


def same_parameters(seed=0):
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(size)) for size in ((5, 3), (7,), (2, 7), (1,), ())]


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_own_step_alone_gives_the_same(kind, in_pieces):
    """Bit by bit, with gradients that are missing now and then, groups, and a learning rate that changes."""
    ours, plain = same_parameters(), same_parameters()
    optimizers = [KINDS[kind]([{"params": each[:2]}, {"params": each[2:], "lr": 0.1}]) for each in (ours, plain)]
    updates = PiecewiseUpdates()
    for step in range(5):
        torch.manual_seed(step)
        for index, (one, other) in enumerate(zip(ours, plain, strict=True)):
            gradient = torch.randn(one.shape) if (step + index) % 4 else None
            one.grad, other.grad = gradient, None if gradient is None else gradient.clone()
        gradients = [each.grad for each in ours]
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        updates.before_step(optimizers[0], False)
        optimizers[0].step()
        updates.after_step()
        optimizers[1].step()
        assert all(one.grad is gradient for one, gradient in zip(ours, gradients, strict=True))
        assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
        found, expected = (optimizer.state_dict() for optimizer in optimizers)
        assert_equal_bits(flat(found), flat(expected))
    assert in_pieces


def flat(state):
    """The tensors of an optimizer's state by name; all that it says of groups is the same."""
    return {
        f"{key} {name}": value
        for key, states in state["state"].items()
        for name, value in states.items()
        if value is not None
    }


def train(kind, is_async, *, dtype=torch.bfloat16, in_step=lambda optimizers: None, steps=5, zeroes=True):
    """Losses, weights and states of some steps with two optimizers, a scheduler and clipping in ``step_fn``."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))).to(dtype)
    found = []
    with roundpipe.RoundPipe(
        model, torch.float32, devices=["cpu"] * 2, model_run_config=config(2), pin_model="double"
    ) as piped:
        copies = list(piped.optim_parameters())
        optimizers = [KINDS[kind](copies[:2]), KINDS[kind](copies[2:])]
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.8)

        def update():
            torch.nn.utils.clip_grad_norm_(copies, 0.5)
            for optimizer in optimizers:
                optimizer.step()
            in_step(optimizers)
            schedule.step()
            found.append(torch.stack([copy.grad.norm() for copy in copies]))
            for optimizer in optimizers:
                optimizer.zero_grad(zeroes)

        for step in range(steps):
            value = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
            found.append(piped.forward_backward((value,), loss_fn=square_loss).detach())
            piped.step(update, is_async=is_async).wait()
        piped.synchronize()
        states = [flat(optimizer.state_dict()) for optimizer in optimizers]
        found += [*model.parameters(), *(each for state in states for each in state.values())]
    return {str(index): each.detach().clone() for index, each in enumerate(found)}


@pytest.mark.parametrize("kind", ["AdamW", "SGD nesterov"])
def test_training_is_the_same(kind, in_pieces, monkeypatch):
    for is_async, dtype, zeroes in itertools.product((True, False), (torch.bfloat16, torch.float32), (True, False)):
        in_pieces.clear()
        found = train(kind, is_async, dtype=dtype, zeroes=zeroes)
        assert in_pieces
        with monkeypatch.context() as patch:
            patch.setattr(pieces, "LEAST_ELEMENTS", 10**9)
            assert_equal_bits(found, train(kind, is_async, dtype=dtype, zeroes=zeroes))


def test_gradients_come_back_after_an_error(in_pieces):
    """torch's step refuses an option after the update: ``step_fn`` raised, and gradients are where they were."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        optimizer = torch.optim.AdamW(piped.optim_parameters(), 0.01)
        for _ in range(2):
            piped.forward_backward((torch.ones(2, WIDTH),), loss_fn=square_loss)
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        piped.forward_backward((torch.ones(2, WIDTH),), loss_fn=square_loss)
        add, optimizer._optimizer_step_code = optimizer._optimizer_step_code, None
        with pytest.raises(TypeError, match="NoneType"):
            piped.step(optimizer.step, is_async=False)
        optimizer._optimizer_step_code = add
        assert in_pieces and all(copy.grad is not None for copy in optimizer.param_groups[0]["params"])


def step_once(optimizer, has_closure=False):
    updates = PiecewiseUpdates()
    updates.before_step(optimizer, has_closure)
    updates.after_step()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda given: torch.optim.AdamW(given, fused=True), "fused"),
        (lambda given: torch.optim.RMSprop(given), "not known to update each element by itself"),
        (lambda given: type("Mine", (torch.optim.AdamW,), {})(given), "not known to update each element by itself"),
        (lambda given: torch.optim.AdamW(given, torch.tensor(0.1)), "options that are tensors"),
        (lambda given: torch.optim.AdamW(given, capturable=True), "capturable or differentiable"),
        (lambda given: torch.optim.SGD(given, momentum=0.9), "no tensors in between"),
        (lambda given: hooked(torch.optim.AdamW(given), "pre"), "hooks"),
        (lambda given: hooked(torch.optim.AdamW(given), "post"), "hooks"),
    ],
)
def test_others_are_left_alone(make, reason, in_pieces, caplog):
    caplog.set_level(logging.DEBUG, "roundpipe")
    parameters = same_parameters()
    optimizer = make(parameters)
    for each in parameters:
        each.grad = torch.ones_like(each)
    for _ in range(2):
        step_once(optimizer)
    assert not in_pieces and caplog.text.count(reason) == 2, "once for each that logs"


def hooked(optimizer, when):
    getattr(optimizer, f"register_step_{when}_hook")(lambda *given: None)
    return optimizer


def test_what_is_left_alone_by_the_case(in_pieces, caplog):
    """A closure, sparse gradients, somebody's hook for all optimizers, and a tensor that is no piece of memory."""
    caplog.set_level(logging.DEBUG, "roundpipe")
    parameters = same_parameters()
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer.step()
    step_once(optimizer, has_closure=True)
    parameters[1].grad = torch.ones(7).to_sparse()
    step_once(optimizer)
    parameters[1].grad = None
    handle = register_optimizer_step_pre_hook(lambda *given: None)
    step_once(optimizer)
    handle.remove()
    for reason in ("closure", "sparse", "hooks"):
        assert reason in caplog.text
    assert not in_pieces
    parameters[0].grad = torch.ones(3, 5).T
    step_once(optimizer)
    assert in_pieces == [each.shape for each in parameters[2:]]
