"""What the tests beside it share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from roundpipe.core.layers import LayerChain
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.passes import codegen
from roundpipe.fx.passes.cost import measure
from roundpipe.fx.passes.partition import partition
from tests.fx import handmade


def chain_of(traced: TracedGraph, **options: Any) -> LayerChain:
    costs = measure(traced)
    return codegen.generate(traced, partition(traced, costs, **options), costs)


def compile_by_hand(model: nn.Module, *args: torch.Tensor, leaves: Any = (), **options: Any) -> LayerChain:
    return chain_of(handmade.trace(model, *args, leaves=leaves), **options)


class Block(nn.Module):
    """A pre-norm transformer block with a boolean mask."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q = self.mix(self.norm_1(x))
        weights = (q @ q.transpose(-1, -2)).masked_fill(mask, -1e4).softmax(-1)
        x = x + weights @ q
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    """A small language model with a mask made from its inputs and tied embeddings."""

    def __init__(self, width: int = 16, num_blocks: int = 4, vocabulary: int = 50, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = ids.unsqueeze(1) < 3
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class UNet(nn.Module):
    """Skips that span the whole model."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv1d(4, 4, 3, padding=1) for _ in range(depth)])
        self.up = nn.ModuleList([nn.Conv1d(8, 4, 3, padding=1) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            skips.append(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, skips.pop()], 1)))
        return x


def float64(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return model.double()
