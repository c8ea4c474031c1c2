"""A number that a loss function finds in a variable or an attribute is read anew at each step, without a new trace."""

from __future__ import annotations

import copy
import logging
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.runtime.models import gradients

NUM_STEPS = 5
settings = types.SimpleNamespace(beta=1.0)
BETA = 1.0

Loss = Callable[[torch.Tensor, torch.Tensor], Any]
Weighed = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]

LOSSES: dict[str, Weighed] = {
    "a weight of a term": lambda out, y, beta: F.cross_entropy(out, y) + beta * out.square().mean(),
    "a factor": lambda out, y, beta: F.cross_entropy(out, y) * beta,
    "a factor computed with": lambda out, y, beta: F.cross_entropy(out, y) * (1 - 0.5 * beta) + 1.0,
    "a divisor": lambda out, y, beta: F.cross_entropy(out, y) / (1 + beta),
    "a temperature": lambda out, y, beta: F.cross_entropy(out / beta, y),
    "smoothing": lambda out, y, beta: F.cross_entropy(out, y, label_smoothing=0.1 * beta),
    "a margin": lambda out, y, beta: F.multi_margin_loss(out, y, margin=beta),
    "a limit": lambda out, y, beta: F.cross_entropy(out.clamp(max=beta), y),
    "a decision that stays": lambda out, y, beta: F.cross_entropy(out, y) * (beta if beta < 10 else 10.0),
    "not at all": lambda out, y, beta: F.cross_entropy(out, y),
}


def of_global(loss: Weighed) -> tuple[Callable[[float], None], Callable[[], Loss]]:
    def put(number: float) -> None:
        globals()["BETA"] = number

    return put, lambda: lambda out, y: loss(out, y, BETA)


def of_variable(loss: Weighed) -> tuple[Callable[[float], None], Callable[[], Loss]]:
    beta = 1.0

    def put(number: float) -> None:
        nonlocal beta
        beta = number

    return put, lambda: lambda out, y: loss(out, y, beta)


def of_object(loss: Weighed) -> tuple[Callable[[float], None], Callable[[], Loss]]:
    def put(number: float) -> None:
        settings.beta = number

    return put, lambda: lambda out, y: loss(out, y, settings.beta)


class Trainer:
    def __init__(self, loss: Weighed) -> None:
        self.function, self.beta = loss, 1.0

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.function(out, y, self.beta)


def of_trainer(loss: Weighed) -> tuple[Callable[[float], None], Callable[[], Loss]]:
    trainer = Trainer(loss)

    def put(number: float) -> None:
        trainer.beta = number

    return put, lambda: trainer.loss


PLACES = {"global": of_global, "variable": of_variable, "object": of_object, "trainer": of_trainer}


@pytest.mark.parametrize(("reduction", "num_microbatch"), [("mean", 3), ("sum", 1)])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", LOSSES)
def test_two_traces_serve_all_steps(
    name: str, place: str, reduction: Any, num_microbatch: int, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    eager = copy.deepcopy(model)
    put, make = PLACES[place](LOSSES[name])
    config = RoundPipeRunConfig(num_microbatch=num_microbatch)
    with (
        caplog.at_level(logging.INFO, "roundpipe.wrappers.tails"),
        roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=config) as pipe,
    ):
        for step in range(NUM_STEPS):
            number = 0.9 / (step + 1)
            put(number)
            x, y = torch.randn(9, 5), torch.randint(4, (9,))
            pipe.zero_grad()
            eager.zero_grad()
            loss = pipe.forward_backward((x,), label=y, loss_fn=make(), loss_reduction=reduction)
            if reduction == "sum":
                expected = sum(
                    make()(*pair) for pair in zip(eager(x).chunk(num_microbatch), y.chunk(num_microbatch), strict=True)
                )
            else:
                expected = make()(eager(x), y)
            expected.backward()
            assert_close((loss, gradients(model)), (expected.detach(), gradients(eager)))
            assert type(BETA) is float and type(settings.beta) is float  # no symbol is left
    traced_again = [each for each in caplog.records if "tracing a loss function again" in each.message]
    assert len(traced_again) <= 1 and not any("one after the other" in each.message for each in caplog.records)
