"""Joins the pipeline to the caller's autograd graph.

One node stands for a whole forward over all microbatches: its inputs are the arguments that require grad,
its outputs the values the model's outputs are made of. Its backward runs the backward stages. What is
in front of the node and behind it (splitting, merging, other modules) is ordinary autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from roundpipe.layers import is_differentiable

ForwardRun = Callable[[], tuple[torch.Tensor, ...]]
BackwardRun = Callable[[Sequence[torch.Tensor | None]], Sequence[torch.Tensor | None]]


class _Pipeline(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: ForwardRun, backward: BackwardRun, *inputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.run_backward = backward
        tensors = outputs()
        ctx.mark_non_differentiable(*(tensor for tensor in tensors if not is_differentiable(tensor)))
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        run, ctx.run_backward = ctx.run_backward, None
        if run is None:
            raise RuntimeError(
                "backward through a RoundPipe forward a second time: what it needs was freed by the first backward. "
                "Sum the losses and call backward once, or run forward again"
            )
        # the first input is the anchor, which only makes the node require grad
        return (None, None, None, *run(gradients))


def join(outputs: ForwardRun, backward: BackwardRun, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run ``outputs`` as a node of the caller's graph.

    Args:
        outputs: runs the forward and gives the output tensors.
        backward: takes one gradient (or None) per output, gives one (or None) per input.
        inputs: tensors of the arguments that gradients flow to.
    """
    anchor = torch.empty(0, requires_grad=True)
    result = _Pipeline.apply(outputs, backward, anchor, *inputs)
    return tuple(result)
