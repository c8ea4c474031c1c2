"""What the tests beside it share."""

from __future__ import annotations

import torch
from torch import nn

from roundpipe.core.errors import TraceError
from tests.fx.test_shapes import Layers


def _raise(error: TraceError) -> None:
    raise error


class Holds(Layers):
    """A module that remembers, between two that don't."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.inner(self.layers[0](x)))
