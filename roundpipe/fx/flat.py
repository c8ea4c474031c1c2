"""The tensors and symbolic numbers in arguments."""

from __future__ import annotations

from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.fx.sizes import Symbolic

_VALUES = (torch.Tensor, *Symbolic)


def flat_values(*values: Any) -> list[Any]:
    """The tensors and symbolic numbers in some arguments, fast for the usual containers."""
    result: list[Any] = []
    for value in values:
        if isinstance(value, _VALUES):
            result.append(value)
        elif isinstance(value, (list, tuple)):
            result += flat_values(*value)
        elif type(value) is dict:
            result += flat_values(*value.values())
        elif not isinstance(value, trees.PLAIN):
            result += [leaf for leaf in trees.leaves(value) if isinstance(leaf, _VALUES)]
    return result


def flat_tensors(*values: Any) -> list[torch.Tensor]:
    """The tensors in some arguments."""
    return [value for value in flat_values(*values) if isinstance(value, torch.Tensor)]


def flat_sizes(*values: Any) -> list[Any]:
    """The symbolic numbers in some arguments, and every dimension of the tensors."""
    flat = flat_values(*values)
    return [size for value in flat for size in (value.shape if isinstance(value, torch.Tensor) else (value,))]
