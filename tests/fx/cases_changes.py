"""What the tests beside it share."""

from __future__ import annotations

import collections
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.fx.test_shapes import Layers

GAIN = 1.0


TABLE = {"gain": 1.0}


def doubled(module: Any, inputs: Any, output: Any) -> Any:
    return output * 2


def gain_of(module: Any) -> float:
    return float(module.gain)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Reads(Layers):
    """Reads all kinds of places in its forward."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0
        self.config = types.SimpleNamespace(gain=1.0)
        self.settings = collections.namedtuple("Settings", "gain")(1.0)
        self.options: dict[str, Any] = {"gain": 1.0, "table": torch.ones(8).double()}
        self.scales = [1.0, 1.0]
        self.sides = (1.0, 1.0)
        self.offset = torch.ones(8).double()
        self.inner = Inner()
        self.norm = nn.LayerNorm(8)
        self.pair = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.layers[0](x)) * self.config.gain * self.settings.gain * self.options["gain"]
        x = x * self.scales[1] * self.sides[1] + self.offset * self.options["table"]
        x = x * GAIN * TABLE["gain"] * self.factor * gain_of(self) * getattr(self, "extra", 1.0)
        return self.layers[1](self.pair(F.layer_norm(x * self.inner.gain, (8,), eps=self.norm.eps)))


class Inside(Layers):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.inner(self.layers[0](x)))
