"""Joins the pipeline to the caller's autograd graph.

One node stands for a whole forward over all microbatches: its inputs are the arguments that require grad,
its outputs the values the model's outputs are made of. Its backward runs the backward stages. What is
in front of the node and behind it (splitting, merging, other modules) is ordinary autograd.

The model's parameters are not in the caller's graph: their gradients come home beside it. So that they add up in
``.grad`` where eager's would, and only there, the node has one more input, the anchor: a leaf as the parameters would
be, which a backward reaches, and which ``torch.autograd.grad(outputs, inputs)`` does not. For the same reason
``torch.autograd.grad`` can't be asked for the gradients of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from roundpipe.core.errors import BackwardError, enumerated
from roundpipe.core.layers import is_differentiable

ForwardRun = Callable[[], tuple[torch.Tensor, ...]]
BackwardRun = Callable[[Sequence[torch.Tensor | None], bool], Sequence[torch.Tensor | None]]
Read = Sequence[tuple[str, torch.Tensor, Callable[[], torch.Tensor | None] | None]]
"""Names and tensors, and what gives the tensor that the model holds in their place by now."""


class _Pipeline(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, outputs: ForwardRun, backward: BackwardRun, read: Read, anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.run_backward = backward
        ctx.anchor = anchor
        tensors = outputs()
        ctx.read = [(*entry, entry[1]._version) for entry in read if not entry[1].is_inference()]
        ctx.mark_non_differentiable(*(tensor for tensor in tensors if not is_differentiable(tensor)))
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise BackwardError(
                "backward with create_graph=True through a RoundPipe forward: its gradients can't be differentiated "
                "again. Call backward without create_graph, or use the wrapped module itself for this loss"
            )
        run, ctx.run_backward = ctx.run_backward, None
        if run is None:
            raise BackwardError(
                "backward through a RoundPipe forward a second time: what it needs was freed by the first backward. "
                "Sum the losses and call backward once, or run forward again"
            )
        changed = {
            name: None
            for name, tensor, current, version in ctx.read
            if tensor._version != version or _is_replaced(tensor, current)
        }
        if changed:
            raise BackwardError(
                f"{enumerated(list(changed))}: replaced or changed in place since the RoundPipe forward. Its backward "
                "runs the layers again on what they were given and on their weights. Call backward before (also "
                "before step and synchronize, which bring new weights), or change a copy (x = x + y, not x += y)"
            )
        ctx.read = []
        anchor = torch.autograd.graph.get_gradient_edge(ctx.anchor).node
        accumulates = bool(
            torch._C._will_engine_execute_node(anchor)
        )  # not if only other leaves' gradients are asked for
        return (None, None, None, None, *run(gradients, accumulates))


def _is_replaced(tensor: torch.Tensor, current: Callable[[], torch.Tensor | None] | None) -> bool:
    now = None if current is None else current()
    return now is not None and now is not tensor


def join(
    outputs: ForwardRun, backward: BackwardRun, read: Read, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Run ``outputs`` as a node of the caller's graph.

    Args:
        outputs: runs the forward and gives the output tensors.
        backward: takes one gradient (or None) per output, and whether gradients of parameters are to be added to
            their ``.grad``; gives one (or None) per input.
        read: tensors that the backward reads, which must not be written or replaced before; see `Read`.
        inputs: tensors of the arguments that gradients flow to.
    """
    anchor = torch.empty(0, requires_grad=True)  # also makes the node require grad
    return tuple(_Pipeline.apply(outputs, backward, read, anchor, *inputs))
