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
    with torch.enable_grad():
        root = _Root.apply(list(gradients), *results)
    results.clear()
    torch.autograd.backward([root], inputs=inputs)


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
