"""Where the first NaN or Inf arises, for ``RoundPipeRunConfig(check_finite=True)``.

Each layer's outputs are looked at as soon as they are there, and so is each gradient that passes from layer to layer.
What takes no part in autograd, such as a mask with -inf in it, is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from roundpipe.core import trees
from roundpipe.core.errors import NonFiniteError, enumerated
from roundpipe.core.layers import Carry, is_differentiable
from roundpipe.runtime.engine.spec import StepSpec
from roundpipe.runtime.weights.replica import BoundLayer


def check_losses(losses: Iterable[torch.Tensor], place: str) -> None:
    """Raise `NonFiniteError` for a loss that is NaN or Inf."""
    for loss in losses:
        if found := _found_in([loss]):
            raise NonFiniteError(f"the loss is {found}, and what the layers before it made is finite: {place}")


def check_made(spec: StepSpec, index: int, layer: BoundLayer, reads: Carry, made: Carry, place: str) -> None:
    """Raise `NonFiniteError` if a layer's outputs hold NaN or Inf, but for inputs that it hands on."""
    given_ids = {id(tensor) for value in reads.values() for tensor in trees.tensors(value)}
    for name, value in made.items():
        tensors = [tensor for tensor in trees.tensors(value) if id(tensor) not in given_ids]
        if name in spec.with_gradient and (found := _found_in(tensors)):
            given = [read for read in reads if _found_in(trees.tensors(reads[read]))]
            weights = [name for name, weight in layer.module.named_parameters() if _found_in([weight])]
            causes = [f"its input {each} holds one" for each in given] + [f"its {each} holds one" for each in weights]
            why = f"; {enumerated(causes)}" if causes else "; what it was given and its weights are finite"
            which = f"layer {index} ({spec.chain.specs[index].name})"
            raise NonFiniteError(f"the output of {which} holds {found}{why}: {place}")


def watch_gradients(spec: StepSpec, values: Carry, place: str) -> None:
    """Have the backward raise `NonFiniteError` at the first gradient of these values that holds NaN or Inf."""
    for name, value in values.items():
        readers = [f"layer {i} ({each.name})" for i, each in enumerate(spec.chain.specs) if name in each.reads]
        for tensor in trees.tensors(value):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(_check_gradient, enumerated(readers) or "the loss", place))


def _check_gradient(readers: str, place: str, gradient: torch.Tensor) -> None:
    if found := _found_in([gradient]):
        raise NonFiniteError(f"the backward of {readers} gave a gradient with {found}: {place}")


def check_weights(spec: StepSpec, layers: Sequence[tuple[int, BoundLayer]], place: str) -> None:
    """Raise `NonFiniteError` if the gradient of a layer's weight holds NaN or Inf; the last layer first."""
    for index, layer in reversed(layers):
        for slot, parameter in layer.parameters.items():
            if parameter.grad is not None and (found := _found_in([parameter.grad])):
                name = layer.weights.slots[slot].attributes[0].name
                which = f"layer {index} ({spec.chain.specs[index].name})"
                raise NonFiniteError(f"the backward of {which} gave {name} a gradient with {found}: {place}")


def _found_in(tensors: Iterable[torch.Tensor]) -> str:
    """``"NaN"`` or ``"Inf"``; nothing if all is finite."""
    for tensor in tensors:
        if is_differentiable(tensor) and not tensor.isfinite().all():
            return "NaN" if tensor.isnan().any() else "Inf"
    return ""
