"""What the tests beside it share."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipeRunConfig

DTYPE = torch.float64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Skipping(nn.Module):
    """Blocks, of which the first feeds the last as well; any batch, any length."""

    def __init__(self, width: int = 16, num_blocks: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = self.dropout(block(x))
        return {"scores": self.head(x + first) * scale, "hidden": x}


def loss_of(outputs: Any, label: Any = None) -> torch.Tensor:
    tensor = outputs["scores"] if isinstance(outputs, dict) else outputs
    return tensor.square().sum()


def batch(size: int = 6, length: int = 5) -> torch.Tensor:
    return torch.randn(size, length, 16, dtype=DTYPE)


def compiled(model: nn.Module, *, workers: int = 2, **options: Any) -> Any:
    return roundpipe.compile(model, devices=["cpu"] * workers, **options)


def assert_a_call_is_eager(pipe: Any, model: nn.Module, x: torch.Tensor) -> None:
    """One forward and backward against the same microbatches in eager."""
    reference = copy.deepcopy(model)
    reference.zero_grad()
    pipe.zero_grad()
    expected = torch.zeros((), dtype=DTYPE)
    for piece in torch.tensor_split(x, 2):
        loss = loss_of(reference(piece))
        loss.backward()
        expected += loss.detach()
    found = pipe.forward_backward((x,), loss_fn=loss_of, run_config=RoundPipeRunConfig(num_microbatch=2))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    pipe.synchronize()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: name + text
        )


def chain_of(pipe: Any) -> Any:
    chain = pipe._runner.source.latest  # the layers as values: tables show them only as text
    assert chain is not None
    return chain
