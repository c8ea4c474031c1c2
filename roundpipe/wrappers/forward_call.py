"""One ``forward`` call through the pipeline: outputs out, as a node of the caller's autograd graph.

The backward of the node is a step of its own (`DeferredBackward`), made when autograd reaches it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.schedule import ExecutePlan
from roundpipe.runtime.engine.builder import StepBuilder
from roundpipe.runtime.engine.call import Call
from roundpipe.runtime.engine.step import HostGradients, StepState
from roundpipe.runtime.microbatch.split import tensors_of_inputs
from roundpipe.runtime.weights.replica import FrozenLayers
from roundpipe.wrappers import autograd
from roundpipe.wrappers.session import Session

OutputPlace = tuple[int, str, int]
"""Microbatch, name of a carried value, and position of a tensor within it."""


@dataclass(slots=True)
class DeferredBackward:
    """The backward of a ``forward`` that has run, until it runs itself."""

    session: Session
    builder: StepBuilder
    call: Call
    forward: StepState
    plan: ExecutePlan
    frozen: FrozenLayers
    """The user's modules as they were then: the caller may set other modes before the backward."""
    places: Sequence[OutputPlace]
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
                    incoming[m][name] = [([None] * self.num_tensors[m, name], None)]
                incoming[m][name][0][0][position] = gradient.to("cpu")
        spec = self.builder.backward_step(forward.spec, self.call, self.plan, self.frozen)
        with contextlib.nullcontext() if accumulates else self.session.optimizer.gradients_aside():
            step = self.session.engine.run(spec, forward.values, incoming, forward.forward)
        self.session.optimizer.end_call()
        return step.input_gradients()


def run_forward(session: Session, builder: StepBuilder, call: Call) -> list[Any]:
    """The outputs of each microbatch of a call."""
    exit, config = call.chain.exit, call.config
    spec, values = builder.forward_step(call, with_backward=config.requires_grad)
    plan = builder.last_plan
    assert plan is not None
    step = session.engine.run(spec, values)
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
            frozen = FrozenLayers.of(call.chain)
            backward = DeferredBackward(session, builder, call, step, plan, frozen, list(outputs), num_tensors)
            _join(backward, outputs, carries)
    if config.output_device.type != "cpu":
        carries = [trees.map_tensors(carry, lambda tensor: tensor.to(config.output_device)) for carry in carries]
    return [exit(carry) for carry in carries]


def _join(backward: DeferredBackward, outputs: dict[OutputPlace, torch.Tensor], carries: list[dict[str, Any]]) -> None:
    """Put the outputs in the carries into the caller's graph."""
    call, spec = backward.call, backward.forward.spec
    read: autograd.Read = [
        *((name, tensor, None) for name, tensor in tensors_of_inputs(call.args, call.kwargs)),
        *(entry for weights in spec.weights for entry in weights.recomputation_inputs()),
    ]
    inputs = [item.tensor for item in spec.inputs]
    tensors = autograd.join(lambda: tuple(outputs.values()), backward.run, read, inputs)
    in_graph = dict(zip(outputs, tensors, strict=True))
    for m, name in backward.num_tensors:

        def replacement(position: int, tensor: torch.Tensor, m: int = m, name: str = name) -> torch.Tensor:
            return in_graph.get((m, name, position), tensor)

        carries[m][name] = trees.map_numbered(carries[m][name], replacement)
