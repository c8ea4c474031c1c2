"""What the tests beside it share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from roundpipe import (
    AutoRoundPipe,
    RoundPipeRunConfig,
)
from roundpipe.wrappers.auto import PartsProgram

WIDTH = 6


def auto(model: nn.Module, **options: Any) -> AutoRoundPipe:
    parts = {module: RoundPipeRunConfig() for module in model.children()}
    return AutoRoundPipe(PartsProgram(model, parts), name="whole", devices=["cpu"], **options)


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.factor = 1.0
        self.aux: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x) * self.factor
        self.aux = out.sum()
        return out
