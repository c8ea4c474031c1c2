"""Token models whose weights fix the length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from tests.fx.against_eager import check


def tokens(batch: int, length: int) -> dict[str, Any]:
    return {"ids": torch.randint(0, 20, (batch, length))}


class FixedLength(nn.Module):
    """Token models whose weights fix the length, which is a symbol at first as every size of an integer input is."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(20, 8)
        self.mixes = nn.ModuleList(self._mix() for _ in range(3))
        self.head = nn.Linear(48, 3)

    def _mix(self) -> nn.Module:
        if self.kind == "norm":
            return nn.BatchNorm1d(6)
        return nn.Linear(8, 8) if self.kind == "flat" else nn.Linear(6, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for mix in self.mixes:
            if self.kind == "turned":
                h = h + mix(h.transpose(1, 2)).relu().transpose(1, 2)
            else:
                h = h + mix(h).tanh()
        return self.head(h.flatten(1))


@pytest.mark.parametrize("kind", ["flat", "turned", "norm"])
@pytest.mark.parametrize("batch", [6, 4], ids=["as many samples as tokens", "fewer samples"])
def test_token_models_of_a_fixed_length_are_cut(kind: str, batch: int) -> None:
    seen = check(lambda: FixedLength(kind), tokens, sizes=[(batch, 6), (5, 6), (8, 6)])
    assert not seen.fell_back and seen.num_layers > 1 and not seen.opaque
    assert seen.trace_count <= (1 if batch == 4 else 2)


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = FixedLength("turned")
        self.out = nn.Linear(3, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(ids))


def test_one_of_a_fixed_length_in_another_model() -> None:
    seen = check(Inside, tokens, sizes=[(4, 6), (5, 6), (8, 6)])
    assert not seen.fell_back and seen.trace_count == 1


def test_another_length_than_the_fixed_one_is_eagers_error() -> None:
    with roundpipe.compile(FixedLength("flat"), devices=["cpu"]) as pipe:
        pipe(**tokens(4, 6))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            pipe(**tokens(4, 7))
