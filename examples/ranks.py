"""What the examples for several processes share: their model, and the same steps in one process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from command_line import Parser, Refused
from language import batches, byte_llama, next_token_loss
from torch import nn

CHECK_TOLERANCE = 1e-4


def options_of(description: str | None, batch: int) -> Parser:
    """A parser with the options that both have."""
    parser = Parser(description)
    parser.add_text_options(50, batch, 1e-3)
    return parser


def llama() -> nn.Module:
    """A small Llama with random weights."""
    model, _ = byte_llama(hidden_size=128)
    model.config.use_cache = False
    return model


def compare(options: argparse.Namespace, tokens: torch.Tensor, model: nn.Module, losses: Sequence[float]) -> None:
    """Take the same steps in one process, in plain PyTorch; other losses than the ranks' end the program."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=options.lr)
    data = batches(tokens, options.batch, options.seq, options.seed)
    worst = torch.tensor(0.0)
    for loss, (inputs, labels) in zip(losses, data, strict=False):
        expected = next_token_loss(model(**inputs), labels)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        worst = torch.maximum(worst, (expected.detach() - loss).abs())  # a NaN stays one
    print(f"losses differ from one process by at most {float(worst):.1e}")
    if not worst <= CHECK_TOLERANCE:
        raise Refused(f"the check failed: the tolerance is {CHECK_TOLERANCE:.0e}")
