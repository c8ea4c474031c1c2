"""A weight that several layers have is on a device once, and is counted once."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.runtime.device.backend import Device
from tests.runtime.models import DTYPE, assert_same, batch, config, eager_round, gradients, square_loss

WIDTH, NUM = 16, 3
PLAN = ExecutePlan([(0, 1), (1, 2)], (2, 4), [(1, 2), (0, 1)])
TABLE_BYTES = WIDTH * WIDTH * 8


class Adapted(nn.Module):
    """A frozen weight, and beside it a trained one of rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 1, bias=False), nn.Linear(1, WIDTH, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.scale * self.base(value) + self.up(self.down(value)))


def tied() -> nn.Sequential:
    """The first layer and the last have one weight."""
    torch.manual_seed(5)
    model = nn.Sequential(*(Adapted() for _ in range(4))).to(DTYPE)
    model[3].base.weight = model[0].base.weight
    return model


def unique_bytes(model: nn.Module, *, is_trained: bool) -> int:
    return sum(each.nbytes for each in model.parameters() if each.requires_grad is is_trained)


def resident_bytes(piped: roundpipe.RoundPipe) -> list[int]:
    # by purpose: public numbers are sums
    return [backend.ledger.by_purpose["resident weights"] for backend in piped._session.engine.backends]


def check(piped: roundpipe.RoundPipe, model: nn.Module, what: str = "") -> None:
    """A round, and an evaluation, are eager's; then what is trained is another one."""
    x = batch(width=WIDTH)
    piped.forward_backward((x,), loss_fn=square_loss)
    piped.synchronize()
    found = gradients(model)
    model.zero_grad()
    eager_round(model, (x,), num=NUM)
    assert_same(found, gradients(model))
    model.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(piped(x), model(x), rtol=0, atol=1e-10, msg=what or None)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(0.9)


def new_weight() -> nn.Parameter:
    return nn.Parameter(torch.eye(WIDTH, dtype=DTYPE), requires_grad=False)


def give(model: nn.Sequential, weight: nn.Parameter, layers: tuple[int, ...]) -> None:
    for index in layers:
        model[index].base.weight = weight


WRITES: dict[str, Callable[[nn.Sequential], object]] = {
    "in place": lambda model: model[0].base.weight.mul_(2),
    "load_state_dict": lambda model: model.load_state_dict(
        {name: value + 0.25 for name, value in model.state_dict().items()}
    ),
    "through .data": lambda model: model[3].base.weight.data.mul_(0.5),
    "another parameter in both": lambda model: give(model, new_weight(), (0, 3)),
    "no longer tied": lambda model: give(model, new_weight(), (3,)),
    "tied again": lambda model: give(model, model[0].base.weight, (3,)),
    "trained from now on": lambda model: model[0].base.requires_grad_(),
    "frozen from now on": lambda model: model[0].base.requires_grad_(False),
}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_it_is_there_once_whatever_becomes_of_it(num_workers: int) -> None:
    model = tied()
    with roundpipe.RoundPipe(model, devices=["cpu"] * num_workers, model_run_config=config(NUM, plan=PLAN)) as piped:
        for _ in range(2):
            piped.forward_backward((batch(width=WIDTH),), loss_fn=square_loss)
            piped.synchronize()
            model.zero_grad()
        assert resident_bytes(piped) == [unique_bytes(model, is_trained=False)] * num_workers
        for name, write in WRITES.items():
            with torch.no_grad():
                write(model)
            for _ in range(2):
                check(piped, model, name)
            piped.forward_backward((batch(width=WIDTH),), loss_fn=square_loss)
            piped.synchronize()
            model.zero_grad()
            here = resident_bytes(piped)
            assert max(here) <= sum(each.nbytes for each in model.parameters()), name
    assert not any(resident_bytes(piped))


def test_an_evaluation_has_a_trained_one_once() -> None:
    model, x = tied().requires_grad_(), batch(width=WIDTH)
    with roundpipe.RoundPipe(model, devices="cpu", model_run_config=config(NUM, plan=PLAN)) as piped:
        for _ in range(3):
            with torch.no_grad():
                torch.testing.assert_close(piped(x), model(x), rtol=0, atol=1e-10)
            assert resident_bytes(piped) == [sum(each.nbytes for each in model.parameters())]
            check(piped, model)


def test_with_less_room_steps_are_eagers_and_stay_within_the_budget() -> None:
    """By then one of the two layers stays alone, or none."""
    seen = set()
    for spare_bytes in range(0, 5 * TABLE_BYTES, TABLE_BYTES // 2):
        model = tied()
        least_bytes = 2 * TABLE_BYTES + 6000
        devices = [Device("cpu", memory_bytes=least_bytes + spare_bytes)]
        with roundpipe.RoundPipe(model, devices=devices, model_run_config=config(NUM, plan=PLAN)) as piped:
            for _ in range(2):
                check(piped, model)
            piped.forward_backward((batch(width=WIDTH),), loss_fn=square_loss)
            piped.synchronize()
            report = piped.report()
            assert report.peak_device_bytes <= least_bytes + spare_bytes
            seen.add(report.workers[0].resident_bytes)
            assert report.workers[0].resident_bytes <= sum(each.nbytes for each in model.parameters())
    assert len(seen) > 2
