"""Buffers that each microbatch changes, where the batch would once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe.fx.passes.sample_dependence import dependence_of_samples
from roundpipe.fx.trace.tracer import trace
from tests.fx.test_sample_dependence import WIDTH, where


class Keeping(nn.Module):
    """Has a buffer that changes with each batch, inside of a leaf or not."""

    def __init__(self, run: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("centre", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros(()))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.run(self, self.first(x)))


def moved(model: Any, x: torch.Tensor) -> torch.Tensor:
    out = x - model.centre
    model.centre = 0.9 * model.centre + 0.1 * x.detach().mean(0)
    return out


def moved_in_place(model: Any, x: torch.Tensor) -> torch.Tensor:
    out = x - model.centre
    with torch.no_grad():
        model.centre.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return out


def only_kept(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.centre = 0.9 * model.centre + 0.1 * x.detach().mean(0)
    return x


def counted(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return model.norm(x) / model.calls


def following(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Moves towards a weight once for each microbatch."""
    model.centre = 0.9 * model.centre + 0.1 * model.first.weight.detach().sum(0)
    return x - model.centre


def normed(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Torch's own power iteration."""
    return model.norm(model.spectral(x))


def in_a_leaf(run: Callable[[Any, torch.Tensor], Any]) -> nn.Module:
    others = (nn.Sequential(nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)) for _ in range(7))
    return nn.Sequential(Keeping(run), *others)


@pytest.mark.parametrize("make", [Keeping, in_a_leaf])
def test_buffers_that_a_batch_reads_and_changes_are_found(make: Callable[[Any], nn.Module]) -> None:
    for run, name in ((moved, "centre"), (moved_in_place, "centre"), (following, "centre"), (counted, "calls")):
        assert f"{name}, which the forward reads, changes with each batch" in where(make(run))
    for run in (only_kept, normed):
        assert where(make(run)) == ""


def counting(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Samples and some of their values, which add up."""
    model.calls += len(x)
    model.calls.add_((x > 0).sum())
    return x


def setting(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.centre.copy_(torch.linspace(0, 1, WIDTH))
    model.calls.zero_()
    return x


def stepping(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return x


@pytest.mark.parametrize("make", [Keeping, in_a_leaf])
def test_buffers_that_a_batch_only_changes_are_found(make: Callable[[Any], nn.Module]) -> None:
    for run, name in ((only_kept, "centre"), (stepping, "calls"), (normed, ""), (counting, ""), (setting, "")):
        traced = trace(make(run), (torch.randn(6, WIDTH),), {})
        assert dependence_of_samples(traced).changed_buffer.rpartition(".")[2] == name
