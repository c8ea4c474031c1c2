"""What holds a tensor's elements: its own memory or, of a subclass such as a quantized weight, other tensors' memory.

Such a subclass follows torch's protocol of ``__tensor_flatten__`` and ``__tensor_unflatten__``; its dtype, and the
number of its elements, are those that it stands for and say nothing of its bytes. The parameters of bitsandbytes do not
follow it: they are packed bytes, and an object in their ``quant_state`` has the tensors that say what these stand for.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from roundpipe.core.watched import LateGradientParameter, WatchedParameter

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer, WatchedParameter, LateGradientParameter)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no subclass and has strided memory, so that it may be packed and copied with others."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


def without_memory(
    kind: type[torch.Tensor],
    shape: Sequence[Any],
    stride: Sequence[Any],
    *,
    dtype: torch.dtype,
    device: torch.device,
    offset: Any = None,
    num_bytes: Any = None,
) -> Any:
    """A tensor of a subclass that holds no elements.

    Args:
        offset: of its first element; None = 0.
        num_bytes: how large its memory says that it is; None = what the elements would take.
    """
    return torch.Tensor._make_wrapper_subclass(
        kind, shape, stride, offset, dtype=dtype, device=device, storage_size=num_bytes
    )


def is_made_of_others(tensor: torch.Tensor) -> bool:
    """Whether it is of a subclass that says which tensors it holds, beside its own memory or instead of it."""
    return not is_plain(tensor) and (hasattr(tensor, "__tensor_flatten__") or quant_state_of(tensor) is not None)


def quant_state_of(tensor: torch.Tensor) -> Any:
    """The object with the tensors that a packed parameter needs; None if it is none."""
    is_other = is_plain(tensor) or hasattr(tensor, "__tensor_flatten__")
    return None if is_other else getattr(tensor, "quant_state", None)


def stored_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that hold a tensor's elements, maybe itself first; none if there is another that does."""
    if is_plain(tensor):
        return [tensor]
    parts = _held_by(tensor) if is_made_of_others(tensor) else []
    return parts if all(part is tensor or is_plain(part) for part in parts) else []


def _held_by(tensor: Any) -> list[torch.Tensor]:
    if (state := quant_state_of(tensor)) is not None:
        return [tensor, *(part for _, _, part in _places_in(state))]
    names, _ = tensor.__tensor_flatten__()
    held = (getattr(tensor, name) for name in names)
    return [each for each in held if isinstance(each, torch.Tensor)]  # a DTensor also names its mesh


def _places_in(state: Any) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """An object, an attribute of it, and the tensor there; scales that are quantized too have a state of their own."""
    for name, value in vars(state).items():
        if isinstance(value, torch.Tensor):
            yield state, name, value
        elif type(value) is type(state):
            yield from _places_in(value)


def _copy_of(state: Any) -> Any:
    made = copy.copy(state)
    vars(made).update({name: _copy_of(value) for name, value in vars(state).items() if type(value) is type(state)})
    return made


def rebuilt(tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor made like another one, of other `stored_tensors`."""
    if is_plain(tensor):
        return parts[0]
    subclass: Any = type(tensor)
    made: Any
    if (state := quant_state_of(tensor)) is not None:
        made = parts[0].detach().as_subclass(subclass).requires_grad_(tensor.requires_grad)
        made.__dict__.update(vars(tensor), quant_state=_copy_of(state))
        for (owner, name, _), part in zip(list(_places_in(made.quant_state)), parts[1:], strict=True):
            setattr(owner, name, part)
    else:
        names, context = subclass.__tensor_flatten__(tensor)
        inner = dict(zip(names, parts, strict=True))
        made = subclass.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    return cast(torch.Tensor, made)


_OWN = "_roundpipe_own"
"""An attribute of tensors that `unshare` has made."""


def unshare(tensor: torch.Tensor) -> None:
    """Give a packed parameter objects of its own for its tensors, of which several may share one: a table of codes.

    Once they are its own, they stay the same objects, which graphs go by.
    """
    if (state := quant_state_of(tensor)) is not None:
        for owner, name, part in list(_places_in(state)):
            if _OWN not in part.__dict__:
                own = part.detach()
                own.__dict__[_OWN] = True
                setattr(owner, name, own)


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the elements that a tensor stores."""
    if is_made_of_others(tensor):
        return sum(part.nbytes if part is tensor else bytes_of(part) for part in _held_by(tensor))
    if tensor.layout is torch.strided:
        return tensor.nbytes
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices().nbytes + tensor.col_indices().nbytes + tensor.values().nbytes
    return tensor.ccol_indices().nbytes + tensor.row_indices().nbytes + tensor.values().nbytes
