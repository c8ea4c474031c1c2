"""Steps of models that compute their own loss, in plain PyTorch and compiled, which benchmarks time side by side."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from environment import report
from torch import nn

import roundpipe

Step = Callable[[dict[str, torch.Tensor]], Any]


def plain_step(model: nn.Module, device: str, num_microbatch: int = 1) -> Step:
    """A step of plain PyTorch with everything on a device, and a fused AdamW; it gives the loss.

    That of several microbatches is the mean of theirs.
    """
    model.to(device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step(batch: dict[str, torch.Tensor]) -> Any:
        pieces = zip(*(tensor.to(device).tensor_split(num_microbatch) for tensor in batch.values()), strict=True)
        losses = []
        for piece in pieces:
            loss = model(**dict(zip(batch, piece, strict=True))).loss / num_microbatch
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return sum(losses)

    return step


def compiled_step(piped: roundpipe.RoundPipe, *, is_async: bool = False) -> Step:
    """The same of a compiled model, whose updates are waited for if they are not asynchronous."""
    optimizer = torch.optim.AdamW(piped.optim_parameters(), lr=1e-4, fused=True)

    def step(batch: dict[str, torch.Tensor]) -> Any:
        loss = piped.forward_backward(input_kwargs=batch, loss_fn=lambda outputs, _: outputs.loss)
        piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
        return loss

    return step


def measure_ways(options: argparse.Namespace, measure: Callable[[str, argparse.Namespace], dict[str, Any]]) -> int:
    """Measures each of the ways that were asked for, shows and writes what was found; for a command to return."""
    results = {way: measure(way, options) for way in options.ways}
    for way, found in results.items():
        print(way, found)
    report(options.json, results)
    return 0
