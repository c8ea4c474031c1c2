"""What the tests beside it share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig
from tests.equality import eager_forward_backward

DEVICES = ["cpu", "cpu"]


class Model(nn.Module):
    """Blocks with a skip, a buffer, dropout, and attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(8, 2)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden + first) * self.scale

    def describe(self) -> str:
        return f"scale {self.scale}"


class Branching(Model):
    """The same around a decision by data, so that it is not one graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if out.abs().sum() > 0:
            out = out * 2
        return out


def squared(output: torch.Tensor, label: Any = None) -> torch.Tensor:
    return output.square().sum()


def inputs(batch: int = 6) -> torch.Tensor:
    return torch.randn(batch, 6, dtype=torch.float64)


def made(kind: str) -> tuple[nn.Module, Any]:
    """A model and its wrapper: compiled, compiled without an example, in parts, by hand."""
    if kind == "by hand":
        model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2))
        return model.double(), RoundPipe(model.double(), devices=DEVICES, name=kind)
    model = (Branching() if "parts" in kind else Model()).double()
    example = () if kind.endswith("first call") else (inputs(),)
    if "parts" in kind and example:
        with pytest.warns(UserWarning, match="module by module"):
            return model, roundpipe.compile(model, example_args=example, devices=DEVICES, name=kind)
    return model, roundpipe.compile(model, example_args=example, devices=DEVICES, name=kind)


def assert_trains_like(pipe: Any, reference: nn.Module, steps: int = 2) -> None:
    """Two synchronous steps against eager with the same microbatches."""
    ours = torch.optim.SGD(pipe.optim_parameters(), lr=1e-2, momentum=0.9)
    theirs = torch.optim.SGD(reference.parameters(), lr=1e-2, momentum=0.9)
    for _ in range(steps):
        x = inputs()
        loss = pipe.forward_backward((x,), loss_fn=squared, run_config=RoundPipeRunConfig(num_microbatch=3))
        expected = eager_forward_backward(
            reference, {"x": x} if isinstance(reference, Model) else {"input": x}, squared, num_microbatches=3
        )
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
        pipe.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
        theirs.step()
        theirs.zero_grad()
    pipe.synchronize()
    for (name, one), two in zip(pipe.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
