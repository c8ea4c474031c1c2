"""Batch norms of microbatches: told of once where nobody has asked for microbatches."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


class Deciding(nn.Module):
    """Runs in parts, since it decides by its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = normed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out if out.isfinite().all() else out * 0


def said_of(model: nn.Module, config: RoundPipeRunConfig) -> list[str]:
    x, label = torch.randn(9, 5), torch.randint(3, (9,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=config) as pipe:
            is_training = model.training
            pipe.eval()
            with torch.no_grad():
                pipe(x)
            pipe.train(is_training)
            for _ in range(2):
                pipe.forward_backward((x,), label=label, loss_fn=F.cross_entropy, loss_reduction="mean")
                F.cross_entropy(pipe(x), label).backward()
    return [str(warning.message) for warning in caught if "BatchNorm" in str(warning.message)]


def test_it_is_said_once() -> None:
    said = said_of(normed(), RoundPipeRunConfig())
    assert len(said) == 1 and "take their statistics over each of 3 microbatches" in said[0]


@pytest.mark.parametrize("options", [{"num_microbatch": 3}, {"num_microbatch": 1}])
def test_whoever_gives_a_number_means_it(options: dict[str, Any]) -> None:
    assert not said_of(normed(), RoundPipeRunConfig(**options))


def test_other_norms_and_evaluation_have_nothing_to_tell() -> None:
    assert not said_of(nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)), RoundPipeRunConfig())
    assert not said_of(normed().eval(), RoundPipeRunConfig())


def test_a_batch_that_is_not_cut_has_its_own_statistics() -> None:
    assert not said_of(Deciding(), RoundPipeRunConfig())
