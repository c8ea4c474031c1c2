"""Losses that change what they compute with: that is said of several microbatches; loss_scope='batch' is right."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig

torch.manual_seed(3)
X, Y, TARGET = torch.randn(6, 6), torch.randperm(20)[:6], torch.randn(6, 8)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))


class Bank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.linspace(-1, 1, 160).view(20, 8).clone())

    def forward(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(outputs @ self.rows.clone().T, label)
        with torch.no_grad():
            self.rows[label] = 0.5 * self.rows[label] + 0.5 * outputs.detach()
        return loss


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(outputs, label - self.centre)
        self.centre = 0.9 * self.centre + 0.1 * label.mean(0)
        return loss


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def forward(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        self.number += 1
        return F.mse_loss(outputs, label) * min(1, self.number / 5)


class ByFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first: float | None = None

    def forward(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(outputs, label)
        self.first = float(loss.detach()) if self.first is None else 0.5 * self.first
        return loss / self.first


LOSSES = [(Bank, Y), (Centred, TARGET), (Counted, TARGET), (ByFirst, TARGET)]


def run(criterion: Any, label: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    with roundpipe.compile(model(), devices=["cpu", "cpu"]) as piped:
        call = (X,), {}, label
        return [piped.forward_backward(*call, loss_fn=criterion, loss_reduction="mean", **options) for _ in range(3)]


@pytest.mark.parametrize(("kind", "label"), LOSSES)
def test_it_is_said(kind: type[nn.Module], label: torch.Tensor) -> None:
    with pytest.warns(UserWarning, match="loss_fn changes what it computes with") as caught:
        run(kind(), label)
    assert len([each for each in caught if "loss" in str(each.message)]) == 1


@pytest.mark.parametrize(("kind", "label"), LOSSES)
@pytest.mark.parametrize(
    "options", [{"loss_scope": "batch"}, {"run_config": RoundPipeRunConfig(num_microbatch=1)}], ids=["batch", "one"]
)
def test_it_is_right_of_the_whole_batch(kind: type[nn.Module], label: torch.Tensor, options: Any) -> None:
    criterion, net = kind(), model()
    reference = copy.deepcopy(criterion)
    expected = [reference(net(X), label).detach() for _ in range(3)]
    with warnings.catch_warnings(action="error"):
        torch.testing.assert_close(run(criterion, label, **options), expected)


class Summed(nn.Module):
    """Changes what it does not compute with."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("latest", torch.zeros(6, 8))
        self.number = 0

    def forward(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        self.number += 1
        loss = F.mse_loss(outputs, label)
        self.total += loss.detach()
        self.latest[: len(label)].copy_(outputs.detach())
        return loss


def test_sums_for_a_log_are_no_such_state() -> None:
    criterion = Summed()
    with warnings.catch_warnings(action="error"):
        (loss, *_) = run(criterion, TARGET)
    torch.testing.assert_close(loss, F.mse_loss(model()(X), TARGET).detach())
    assert criterion.number == 9
