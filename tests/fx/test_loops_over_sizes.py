"""Custom autograd functions and small modules that loop over a size: one trace for every size, found without a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.fx.trace.verify import ShapeVerifier
from tests.fx.against_eager import check
from tests.fx.modules import LogProbs

SIZES = [(4, 6), (3, 9), (2, 11), (5, 4)]


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Gets an entry for each run of a graph on fakes of other sizes."""
    runs: list[Any] = []
    verify = ShapeVerifier.__call__
    monkeypatch.setattr(ShapeVerifier, "__call__", lambda self, arguments: runs.append(self) or verify(self, arguments))
    return runs


def tokens(batch: int, length: int) -> dict[str, Any]:
    return {"ids": torch.randint(0, 9, (batch, length)), "labels": torch.randint(0, 9, (batch, length))}


class RowByRow(torch.autograd.Function):
    """Doubles its argument in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        for index in range(len(x)):
            x[index] *= 2
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class RowsOfAModule(nn.Module):
    """Loops over all rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        return torch.stack([self.weight @ row for row in rows]).view_as(x)


class Tokens(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(9, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.rows = RowsOfAModule() if kind == "module" else None

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        if self.kind == "in place":
            return RowByRow.apply(x.reshape(-1, 8) + 1).view_as(x)
        if self.rows is not None:
            return self.rows(x)
        hidden, labels = x[:, :-1], labels[:, 1:]
        found = LogProbs.apply(hidden.reshape(-1, 8), self.embed.weight, labels.reshape(-1))
        log_probs, best = (each.view(labels.shape) for each in found[:2])
        return log_probs.masked_fill(best, 0)


@pytest.mark.parametrize("kind", ["function", "module"])
def test_one_trace_serves_all_sizes(kind: str, verified: list[Any]) -> None:
    seen = check(lambda: Tokens(kind), tokens, sizes=SIZES, num_microbatches=1)
    assert not seen.fell_back and seen.trace_count == 1 and not verified


def test_a_function_that_writes_its_argument_is_right_at_all_sizes(verified: list[Any]) -> None:
    """Its result is its argument, which no result at other sizes can stand for."""
    seen = check(lambda: Tokens("in place"), tokens, sizes=SIZES[:3], num_microbatches=1)
    assert not seen.fell_back and seen.trace_count == 1 and len(verified) == 2


@pytest.mark.parametrize("kind", ["function", "module"])
def test_to_try_code_at_several_sizes_makes_it_draw_no_random_numbers(kind: str) -> None:
    """Or calls would take some from the caller's generator, and what a loop draws next would be others."""
    with roundpipe.compile(Tokens(kind), devices=["cpu"]) as piped:
        for batch, length in SIZES[:2]:
            given, state = tokens(batch, length), torch.get_rng_state()
            piped.forward_backward(input_kwargs=given, loss_fn=lambda outputs, _: outputs.sum())
            assert torch.equal(torch.get_rng_state(), state)
