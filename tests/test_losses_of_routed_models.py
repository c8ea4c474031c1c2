"""Losses of models that send tokens to experts, whose values have other sizes for other data."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from tests.equality import assert_mean_is_eagers

NUM_SAMPLES, WIDTH, NUM_EXPERTS, NUM_CLASSES = 9, 6, 3, 4


class Routed(nn.Module):
    """Logits, and how evenly experts are used."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(WIDTH, NUM_EXPERTS), nn.Linear(WIDTH, NUM_CLASSES)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_EXPERTS))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities = self.gate(x).softmax(-1)
        weights, indices = probabilities.topk(2, -1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, places = torch.where(indices == index)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, places, None])
        load = F.one_hot(indices, NUM_EXPERTS).float().mean((0, 1))
        return self.head(x + out), (load * probabilities.mean(0)).sum()


def example() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    label = torch.randint(NUM_CLASSES, (NUM_SAMPLES,))
    label[1:4] = -100
    return torch.randn(NUM_SAMPLES, WIDTH), label


def cross_entropy(outputs: tuple[torch.Tensor, torch.Tensor], label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs[0], label)


def balanced(outputs: tuple[torch.Tensor, torch.Tensor], label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs[0], label) + 0.1 * outputs[1]


def test_targets_are_counted() -> None:
    x, label = example()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_mean_is_eagers(Routed(), (x,), label, cross_entropy)


def test_balance_of_experts_is_told_of() -> None:
    x, label = example()
    with (
        roundpipe.compile(Routed(), devices=["cpu"] * 2) as pipe,
        pytest.warns(UserWarning, match="as the load balancing of experts has"),
    ):
        pipe.forward_backward(input_args=(x,), label=label, loss_fn=balanced, loss_reduction="mean")
