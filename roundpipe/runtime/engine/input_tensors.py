"""Tensors of arguments and labels that gradients flow to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from roundpipe.core import trees
from roundpipe.runtime.engine.host_values import HostValues


@dataclass(frozen=True, slots=True)
class InputTensor:
    """A tensor of a microbatch's arguments or label that requires grad."""

    microbatch: int
    name: str
    """Of the carried value that it is in."""
    position: int
    """Among the tensors of that value."""
    tensor: torch.Tensor


def inputs_of(values: HostValues) -> list[InputTensor]:
    """Those of some values, by microbatch."""
    return [
        InputTensor(microbatch, name, position, tensor)
        for microbatch, carry in enumerate(values)
        for name, value in carry.items()
        for position, tensor in enumerate(trees.tensors(value.value))
        if tensor.requires_grad
    ]
