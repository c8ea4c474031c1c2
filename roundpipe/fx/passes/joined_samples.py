"""Parts of a batch that a graph takes, for the number of samples that it was made for.

Samples that it takes one by one, as many as these are, and joins in order are a batch again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from roundpipe.fx.graph.nodes import called_name

_JOINING = frozenset("cat concat concatenate stack".split())


def shape_of_all(
    node: Node,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sample_of: Callable[[torch.Tensor], int | None],
    made_for: int,
    number: int,
) -> list[int] | None:
    """The shape of what a node joins, if there were a ``number`` of samples; None if it does not join them all.

    Args:
        node: of a graph that is made for a number of samples.
        args, kwargs: what it calls its operator with.
        sample_of: which sample a tensor is made of.
        made_for: that number.
        number: another.
    """
    parts = (args or [kwargs.get("tensors")])[0]
    if called_name(node) not in _JOINING or not isinstance(parts, list | tuple) or len(parts) != made_for:
        return None
    if not all(isinstance(part, torch.Tensor) and part.shape == parts[0].shape for part in parts):
        return None
    if [sample_of(part) for part in parts] != [*range(made_for)]:
        return None
    is_new, shape = called_name(node) == "stack", [*parts[0].shape]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    dim += (len(shape) + is_new) * (dim < 0)
    return [*shape[:dim], number if is_new else number * shape[dim], *shape[dim + (not is_new) :]]


def has_other_parts(node: Node, value: Any) -> bool:
    """Whether a tensor was split into more or fewer parts than are taken."""
    if getattr(node.target, "__name__", node.target) != "split" or not isinstance(value, (list, tuple)):
        return False
    return len({user.args[1] for user in node.users if user.target is operator.getitem}) != len(value)
