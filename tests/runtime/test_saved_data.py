"""`save_for_recompute` and `get_recompute_data`: decisions of the forward replayed in the recomputation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ConfigError, ExecutePlan, RoundPipe, RoundPipeRunConfig


class Routed(nn.Module):
    """Sends each row to one of two experts; the router's noise would route anew at every call."""

    def __init__(self, noise: torch.Generator | None) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.noise = noise
        self.routes: list[torch.Tensor] = []

    def route(self, x: torch.Tensor) -> torch.Tensor:
        if roundpipe.doing_recompute():
            (choice,) = roundpipe.get_recompute_data()
            return choice
        choice = torch.rand(len(x), generator=self.noise) < 0.5  # a generator that nobody rewinds
        roundpipe.save_for_recompute(choice)
        self.routes.append(choice)
        return choice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (expert(x) for expert in self.experts)
        return torch.where(self.route(x)[:, None], first, second).tanh()


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_recomputation_takes_the_decisions_of_the_forward(num_workers: int, grain: Any) -> None:
    torch.manual_seed(0)
    noise = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 6), Routed(noise), Routed(noise), nn.Linear(6, 2)).double()
    reference = copy.deepcopy(nn.ModuleList(model))
    config = RoundPipeRunConfig(
        num_microbatch=3,
        recompute_grain=grain,
        execute_plan=ExecutePlan([(0, 3)], (3, 4), [(1, 3), (0, 1)]),
    )
    x = torch.randn(9, 6).double()
    with RoundPipe(model, devices=["cpu"] * num_workers, model_run_config=config) as pipe:
        pipe.forward_backward((x,), loss_fn=lambda outputs, _: outputs.pow(2).sum())
    for microbatch, piece in enumerate(x.split(3)):
        for module in reference:
            if isinstance(module, Routed):
                choice = model[[*reference].index(module)].routes[microbatch]
                first, second = (expert(piece) for expert in module.experts)
                piece = torch.where(choice[:, None], first, second).tanh()
            else:
                piece = module(piece)
        piece.pow(2).sum().backward()
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-12)


def test_saving_without_a_recomputation_does_nothing_and_getting_is_refused() -> None:
    roundpipe.save_for_recompute(torch.ones(2))
    assert not roundpipe.doing_recompute()
    with pytest.raises(ConfigError, match="only in a recomputation"):
        roundpipe.get_recompute_data()


def test_getting_more_than_was_saved_names_the_rule() -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if roundpipe.doing_recompute():
                roundpipe.get_recompute_data()
            return x * self.scale

    model = nn.Sequential(Greedy(), nn.Linear(4, 4))
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=ExecutePlan([(0, 1)], (1, 2), [(0, 1)]))
    with (
        RoundPipe(model, devices="cpu", model_run_config=config) as pipe,
        pytest.raises(ConfigError, match="nothing left to give"),
    ):
        pipe.forward_backward((torch.randn(2, 4),), loss_fn=lambda outputs, _: outputs.sum())
