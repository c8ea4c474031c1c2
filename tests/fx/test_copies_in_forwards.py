"""Copies that a forward makes by ``copy.deepcopy``."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from roundpipe.core.errors import TraceError
from roundpipe.fx.trace.tracer import trace
from tests.fx.against_eager import check, vectors
from tests.fx.test_shapes import Layers


def test_a_copy_of_a_submodule_is_traced_and_its_weights_get_no_gradient_from_it() -> None:
    class Copies(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            frozen = copy.deepcopy(self.layers[0]).requires_grad_(False)
            return self.layers[2](copy.deepcopy(self.layers[1])(x) + self.layers[1](frozen(x)))

    assert not check(Copies).fell_back


def test_a_leaf_may_copy_its_own_submodule() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return copy.deepcopy(self.inner)(x) + self.outer(x)

    class Holds(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.block(self.layers[0](x)))

    assert not check(Holds).fell_back


def test_a_copy_of_tensors_that_require_no_gradients_is_recorded() -> None:
    class Keeps(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = copy.deepcopy({"x": x.detach()})
            before["x"].mul_(2)
            return self.layers[1](self.layers[0](x)) + before["x"]

    assert not check(Keeps).fell_back


def test_an_activation_can_not_be_copied_as_in_eager_mode() -> None:
    class Copies(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return copy.deepcopy(self.layers[0](x))

    with pytest.raises(TraceError, match="graph leaves"):
        trace(Copies().double(), (), vectors(4, 6))
