"""The tensors and symbolic numbers in arguments, fast for the usual containers."""

from __future__ import annotations

from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.fx.sizes import Symbolic


def flat_values(*values: Any) -> list[Any]:
    """The tensors and symbolic numbers in some arguments, fast for the usual containers."""
    found: list[Any] = []
    for value in values:
        _collect(value, found)
    return found


def flat_tensors(*values: Any) -> list[torch.Tensor]:
    """The tensors in some arguments."""
    return [value for value in flat_values(*values) if isinstance(value, torch.Tensor)]


_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


def _collect(value: Any, found: list[Any]) -> None:
    if isinstance(value, (torch.Tensor, *Symbolic)):
        found.append(value)
    elif isinstance(value, _PLAIN):
        return
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif type(value) is dict:
        for item in value.values():
            _collect(item, found)
    else:
        found.extend(leaf for leaf in trees.leaves(value) if isinstance(leaf, (torch.Tensor, *Symbolic)))
