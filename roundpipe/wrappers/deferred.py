"""The node of a ``forward`` in the caller's autograd graph, and the backward that it runs later.

The node stands for all microbatches: its inputs are the arguments that require grad, its outputs the values the
model's outputs are made of. Its backward is a step of its own (`DeferredBackward`), made when autograd reaches it.
What is in front of the node and behind it (splitting, merging, other modules) is ordinary autograd.

The model's parameters are not in the caller's graph: their gradients come home beside it. So that they add up in
``.grad`` where eager's would, and only there, the node has one more input, the anchor: a leaf as the parameters would
be, which a backward reaches, and which ``torch.autograd.grad(outputs, inputs)`` does not. For the same reason
``torch.autograd.grad`` can't be asked for the gradients of parameters.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.errors import BackwardError, add_note, enumerated
from roundpipe.core.layers import is_differentiable
from roundpipe.runtime.device.backend import OUT_OF_MEMORY
from roundpipe.runtime.engine.builder import StepBuilder
from roundpipe.runtime.engine.host_values import HostGradients, HostValue
from roundpipe.runtime.engine.spec import Call
from roundpipe.runtime.engine.step import StepState
from roundpipe.runtime.microbatch.leaves import tensors_of_inputs
from roundpipe.runtime.weights.frozen_layers import FrozenLayers
from roundpipe.wrappers.recovery import LateShortage, run_step
from roundpipe.wrappers.session import Session

_OutputPlace = tuple[int, str, int]
"""Microbatch, name of a carried value, and position of a tensor within it."""
_Read = tuple[str, torch.Tensor, Callable[[], torch.Tensor | None] | None]
"""Name and tensor that a backward reads, and what gives the tensor that the model holds in its place by now."""


@dataclass(slots=True)
class DeferredBackward:
    """The backward of a ``forward`` that has run, until it runs itself."""

    session: Session
    builder: StepBuilder
    call: Call
    forward: StepState
    frozen: FrozenLayers
    """The user's modules as they were then: the caller may set other modes before the backward."""
    places: Sequence[_OutputPlace]
    """Of the outputs that gradients come for."""
    num_tensors: dict[tuple[int, str], int]
    """By microbatch and name, the tensors in the values of these outputs."""

    def run(self, gradients: Sequence[torch.Tensor | None], accumulates: bool) -> list[torch.Tensor | None]:
        """Gradients of the arguments, from one per place; ``accumulates``: those of parameters go to ``.grad``."""
        forward = self.forward
        incoming: HostGradients = [{} for _ in forward.values]
        for (m, name, position), gradient in zip(self.places, gradients, strict=True):
            if gradient is not None:
                if name not in incoming[m]:
                    incoming[m][name] = [HostValue([None] * self.num_tensors[m, name])]
                incoming[m][name][0].value[position] = gradient.to("cpu")
        if self.call.before_backward is not None:
            self.call.before_backward()
        if accumulates:
            self.session.optimizer.begin_backward()
        spec = self.builder.backward_step(forward.spec, self.call, self.frozen)
        with contextlib.nullcontext() if accumulates else self.session.optimizer.gradients_aside():
            shortage = LateShortage(self.session, self.builder.plans, self.call, spec.schedule.plan)
            try:
                step = self.session.engine.run(spec, forward.values, incoming, forward.forward, when_short=shortage)
            except OUT_OF_MEMORY as error:
                add_note(error, "roundpipe: only forward_backward is planned anew, not the backward of a forward")
                if not self.builder.plans.has_budget:
                    raise
                raise shortage.refusal(error) from error
        # behind all of the backward: modules on the host have gradients, too
        _call_at_end(self.session.optimizer.end_call)
        return step.input_gradients()


def call_behind_backward(outputs: Any, function: Callable[[], None]) -> None:
    """Have a function called at the end of each backward that comes to one of these outputs."""

    def reached(gradient: torch.Tensor) -> None:
        _call_at_end(function)

    for tensor in trees.tensors(outputs):
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(reached)


def _call_at_end(function: Callable[[], None]) -> None:
    """Have a function called when the backward that is under way has come to its end."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


class _Pipeline(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        backward: DeferredBackward,
        tensors: tuple[torch.Tensor, ...],
        read: Sequence[_Read],
        anchor: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.deferred = backward
        ctx.anchor = anchor
        ctx.read = [(*entry, entry[1]._version) for entry in read if not entry[1].is_inference()]
        # objects of their own: those that are kept for the backward must not refer to this node, which keeps them
        outputs = tuple(tensor.detach() for tensor in tensors)
        ctx.mark_non_differentiable(*(tensor for tensor in outputs if not is_differentiable(tensor)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise BackwardError(
                "backward with create_graph=True through a RoundPipe forward: its gradients can't be differentiated "
                "again. Call backward without create_graph, or use the wrapped module itself for this loss"
            )
        deferred, ctx.deferred = ctx.deferred, None
        if deferred is None:
            raise BackwardError(
                "backward through a RoundPipe forward a second time: what it needs was freed by the first backward, "
                "also with retain_graph=True. Sum the losses and call backward once, or run forward again"
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
        # not if only gradients of other leaves were asked for
        accumulates = bool(torch._C._will_engine_execute_node(anchor))
        return (None, None, None, None, *deferred.run(gradients, accumulates))


def _is_replaced(tensor: torch.Tensor, current: Callable[[], torch.Tensor | None] | None) -> bool:
    now = None if current is None else current()
    return now is not None and now is not tensor


def run_forward(session: Session, builder: StepBuilder, call: Call) -> list[Any]:
    """The outputs of each microbatch of a call."""
    exit = call.chain.exit
    build = functools.partial(builder.forward_step, call, with_backward=call.config.requires_grad)
    spec, step = run_step(session, builder.plans, call, build)
    config = call.config
    carries = [{name: carry[name].synchronize() for name in exit.reads} for carry in step.values]
    if config.requires_grad:
        outputs = {
            (m, name, position): tensor
            for m, carry in enumerate(carries)
            for name in exit.reads
            # arguments may be outputs as they are, with their own graph
            if name in spec.with_gradient and name not in spec.arguments
            for position, tensor in enumerate(trees.tensors(carry[name]))
            if position not in step.forward.plain.get((m, name), ())
        }
        if outputs:
            num_tensors = {(m, name): len(trees.tensors(carries[m][name])) for m, name, _ in outputs}
            frozen = builder.freeze(call.chain)
            backward = DeferredBackward(session, builder, call, step, frozen, list(outputs), num_tensors)
            _join(backward, outputs, carries)
    if config.output_device.type != "cpu":
        carries = [trees.map_tensors(carry, lambda tensor: tensor.to(config.output_device)) for carry in carries]
    return [exit(carry) for carry in carries]


def _join(backward: DeferredBackward, outputs: dict[_OutputPlace, torch.Tensor], carries: list[dict[str, Any]]) -> None:
    """Put the outputs in the carries into the caller's graph."""
    call, spec = backward.call, backward.forward.spec
    read: list[_Read] = [
        *((name, tensor, None) for name, tensor in tensors_of_inputs(call.args, call.kwargs)),
        *(entry for weights in spec.weights for entry in weights.recomputation_inputs()),
    ]
    inputs = [item.tensor for item in spec.inputs]
    anchor = torch.empty(0, requires_grad=True)  # also makes the node require grad
    tensors = _Pipeline.apply(backward, tuple(outputs.values()), read, anchor, *inputs)
    in_graph = dict(zip(outputs, tensors, strict=True))
    for m, name in backward.num_tensors:

        def replacement(position: int, tensor: torch.Tensor, m: int = m, name: str = name) -> torch.Tensor:
            return in_graph.get((m, name, position), tensor)

        carries[m][name] = trees.map_numbered(carries[m][name], replacement)
