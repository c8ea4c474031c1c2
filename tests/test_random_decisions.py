"""A layer that Python's random numbers leave out at times is left out at times, whatever a trace has drawn."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import roundpipe
from roundpipe import RoundPipeRunConfig

NUM_CALLS, WIDTH = 24, 6
Draw = Callable[[], float]
DRAWS: dict[str, Draw] = {"Python": lambda: random.random(), "NumPy": lambda: float(np.random.rand())}


class Skipped(nn.Module):
    """A branch that is left out half of the time."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.layer, self.norm, self.draw = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.draw() < 0.5:
            return x
        out: torch.Tensor = self.norm(self.layer(x)).tanh()
        return out


class Residual(nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(WIDTH, WIDTH), Skipped(draw), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        out: torch.Tensor = self.last(h + self.branch(h))
        return out


@pytest.mark.parametrize("is_residual", [True, False])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("seed", range(4))
def test_each_call_draws_anew(seed: int, draw: Draw, is_residual: bool) -> None:
    random.seed(seed)
    np.random.seed(seed)
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))
    model = Residual(draw) if is_residual else nn.Sequential(Skipped(draw), nn.Linear(WIDTH, 2))
    branch = model.branch if isinstance(model, Residual) else model[0]
    config, skipped = RoundPipeRunConfig(num_microbatch=1), 0
    with roundpipe.compile(model, devices=["cpu"], model_run_config=config) as piped:
        for _ in range(NUM_CALLS):
            plain, before = copy.deepcopy(model), branch.norm.running_mean.clone()
            piped.zero_grad()
            out = piped(x)
            out.square().sum().backward()
            is_skipped = branch.layer.weight.grad is None or not branch.layer.weight.grad.any()
            skipped += is_skipped
            (plain.branch if isinstance(plain, Residual) else plain[0]).draw = lambda is_skipped=is_skipped: (
                0.0 if is_skipped else 1.0
            )
            plain.zero_grad()
            expected = plain(x)
            expected.square().sum().backward()
            assert_close(out, expected)
            for own, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert_close(_gradient(own), _gradient(other))
            assert is_skipped == torch.equal(branch.norm.running_mean, before)
            assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
    assert 2 < skipped < NUM_CALLS - 2


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
