"""What holds a tensor's elements: its own memory or, of a subclass such as a quantized weight, other tensors' memory.

Such a subclass follows torch's protocol of ``__tensor_flatten__`` and ``__tensor_unflatten__``; its dtype, and the
number of its elements, are those that it stands for and say nothing of its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no subclass and has strided memory, so that it may be packed and copied with others."""
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided


def is_made_of_others(tensor: torch.Tensor) -> bool:
    """Whether it is of a subclass that says which tensors it holds."""
    return hasattr(tensor, "__tensor_flatten__")


def stored_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold a tensor's elements, maybe itself; none if there is another that does."""
    if is_plain(tensor):
        return [tensor]
    parts = _held_by(tensor) if is_made_of_others(tensor) else []
    return parts if all(map(is_plain, parts)) else []


def _held_by(tensor: Any) -> list[torch.Tensor]:
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def rebuilt(tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor made like another one, of other `stored_tensors`."""
    if is_plain(tensor):
        return parts[0]
    subclass: Any = type(tensor)
    names, context = subclass.__tensor_flatten__(tensor)
    inner = dict(zip(names, parts, strict=True))
    made: torch.Tensor = subclass.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    return made


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the elements that a tensor stores."""
    if is_made_of_others(tensor):
        return sum(map(bytes_of, _held_by(tensor)))
    if tensor.layout is torch.strided:
        return tensor.nbytes
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices().nbytes + tensor.col_indices().nbytes + tensor.values().nbytes
    return tensor.ccol_indices().nbytes + tensor.row_indices().nbytes + tensor.values().nbytes
