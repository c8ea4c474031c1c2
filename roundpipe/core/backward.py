"""Backward from results whose memory nobody needs any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def backward_from(
    results: list[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor] | None = None,
) -> None:
    """As `torch.autograd.backward`, which keeps the results until its end: here they are let go of at its begin.

    Args:
        results: is empty afterwards.
        gradients: one for each.
        inputs: the only leaves that get gradients; None: all do.
    """
    torch.autograd.backward([rooted(results, gradients)], inputs=inputs)


def rooted(results: list[torch.Tensor], gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """What a backward from results with these gradients can begin from in their place; the list of them is emptied."""
    with torch.enable_grad():
        root: torch.Tensor = _Root.apply(list(gradients), *results)
    results.clear()
    return root


class _Root(torch.autograd.Function):
    """In place of results, from which a backward begins: it has their gradients, and nothing of them."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *results: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=results[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return None, *gradients
