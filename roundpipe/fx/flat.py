"""The tensors and symbolic numbers in arguments, fast for the usual containers."""

from __future__ import annotations

from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.fx.sizes import Symbolic


def flat_values(*values: Any) -> list[Any]:
    """The tensors and symbolic numbers in some arguments, fast for the usual containers."""
    result: list[Any] = []
    for value in values:
        _collect(value, result)
    return result


def flat_tensors(*values: Any) -> list[torch.Tensor]:
    """The tensors in some arguments."""
    return [value for value in flat_values(*values) if isinstance(value, torch.Tensor)]


def flat_sizes(*values: Any) -> list[Any]:
    """The symbolic numbers in some arguments, and every dimension of the tensors."""
    flat = flat_values(*values)
    return [size for value in flat for size in (value.shape if isinstance(value, torch.Tensor) else (value,))]


_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


def _collect(value: Any, result: list[Any]) -> None:
    if isinstance(value, (torch.Tensor, *Symbolic)):
        result.append(value)
    elif isinstance(value, _PLAIN):
        return
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, result)
    elif type(value) is dict:
        for item in value.values():
            _collect(item, result)
    else:
        result.extend(leaf for leaf in trees.leaves(value) if isinstance(leaf, (torch.Tensor, *Symbolic)))
