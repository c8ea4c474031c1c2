"""Models that update a momentum (or target) encoder in their forward, in all the ways in which this is written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from tests.runtime.models import assert_same

WIDTH = 6
Update = Callable[[nn.Module, nn.Module], Any]


@torch.no_grad()
def decorated(of: nn.Module, slow: nn.Module) -> None:
    for fast, own in zip(of.parameters(), slow.parameters(), strict=True):
        own.mul_(0.5).add_(fast, alpha=0.5)


def copied(of: nn.Module, slow: nn.Module) -> None:
    with torch.no_grad():
        for fast, own in zip(of.parameters(), slow.parameters(), strict=True):
            own.copy_(own * 0.5 + fast * 0.5)


def other_data(of: nn.Module, slow: nn.Module) -> None:
    for fast, own in zip(of.parameters(), slow.parameters(), strict=True):
        own.data = own.data * 0.5 + fast.data * 0.5


def written_data(of: nn.Module, slow: nn.Module) -> None:
    for fast, own in zip(of.parameters(), slow.parameters(), strict=True):
        own.data.lerp_(fast.data, 0.5)


def all_at_once(of: nn.Module, slow: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(list(slow.parameters()), list(of.parameters()), 0.5)  # public, but for its name


class Updater:
    def update(self, of: nn.Module, slow: nn.Module) -> None:
        written_data(of, slow)


WAYS: dict[str, Update] = {
    "decorated": decorated,
    "copied": copied,
    "other data": other_data,
    "written data": written_data,
    "all at once": all_at_once,
    "an object": Updater().update,
}


class Momentum(nn.Module):
    def __init__(self, update: Update, decides: bool) -> None:
        super().__init__()
        self.fast = nn.Linear(WIDTH, WIDTH)
        self.slow = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.update, self.decides = update, decides

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.fast(x)
        if self.decides and outputs.abs().mean() > 1000:
            return outputs, outputs
        with torch.no_grad():
            self.update(self.fast, self.slow)
            return outputs, self.slow(x)


class ByMethod(Momentum):
    """As MoCo's own code does."""

    def __init__(self, update: Update, decides: bool) -> None:
        super().__init__(self.move, decides)

    @torch.no_grad()
    def move(self, of: nn.Module, slow: nn.Module) -> None:
        for fast, own in zip(of.parameters(), slow.parameters(), strict=True):
            own.data = own.data * 0.5 + fast.data * 0.5

    def __deepcopy__(self, memo: Any) -> ByMethod:
        other = ByMethod(self.update, self.decides)
        other.load_state_dict(self.state_dict())
        return other


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(WIDTH, WIDTH), inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(self.layer(x))


def distance(outputs: Any, label: Any = None) -> torch.Tensor:
    return F.mse_loss(outputs[0] + 1, outputs[1])


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("decides", [False, True], ids=["", "decides before"])
@pytest.mark.parametrize("is_inside", [False, True], ids=["root", "inside"])
@pytest.mark.parametrize("way", [*WAYS, "a method"])
def test_it_is_updated_once_in_a_step(way: str, is_inside: bool, decides: bool, num_devices: int) -> None:
    torch.manual_seed(0)
    kind = ByMethod if way == "a method" else Momentum
    model: nn.Module = kind(WAYS.get(way, decorated), decides)
    model = Around(model) if is_inside else model
    reference = copy.deepcopy(model)
    plain = torch.optim.SGD([each for each in reference.parameters() if each.requires_grad], lr=0.1)
    with roundpipe.compile(model, devices=["cpu"] * num_devices) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)
        for _ in range(3):
            x = torch.randn(9, WIDTH)
            expected = distance(reference(x))
            expected.backward()
            plain.step()
            plain.zero_grad()
            loss = piped.forward_backward((x,), loss_fn=distance, loss_reduction="mean")
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            torch.testing.assert_close(loss, expected.detach())
            assert_same(model.state_dict(), reference.state_dict(), 1e-6)
