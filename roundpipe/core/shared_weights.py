"""Weights that several layers have, such as an embedding that is the head's as well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from roundpipe.core.module_tree import buffers_in, parameters_in
from roundpipe.core.storages import bytes_of


class SharedWeight(NamedTuple):
    """A tensor that several layers of a chain have."""

    number: int
    """The same in each of these layers."""
    num_bytes: int
    is_trained: bool


def shared_weights(layers: Iterable[nn.Module]) -> list[tuple[SharedWeight, ...]]:
    """Per layer, those of its parameters and buffers that others have too."""
    tensors = [{id(each): each for each in (*parameters_in(layer), *buffers_in(layer))} for layer in layers]
    counts = Counter(key for own in tensors for key in own)
    shared: dict[int, SharedWeight] = {}
    for key, tensor in ((key, tensor) for own in tensors for key, tensor in own.items() if counts[key] > 1):
        is_trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        shared.setdefault(key, SharedWeight(len(shared), bytes_of(tensor), is_trained))
    return [tuple(shared[key] for key in own if key in shared) for own in tensors]


def counted_again(weights: Iterable[SharedWeight]) -> int:
    """Bytes that a sum over layers has too many, each of which counts these of its weights."""
    weights = list(weights)
    return sum(each.num_bytes for each in weights) - sum(each.num_bytes for each in set(weights))
