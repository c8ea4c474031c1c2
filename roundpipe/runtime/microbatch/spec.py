"""What splitting and merging share: specs of torch's pipelining, packed data, and containers of values.

The specs (``TensorChunkSpec``, ``_Replicate``, ``_CustomReducer``) are classes of torch's private
``torch.distributed.pipelining.microbatch``, whose import takes nearly as long as torch's own. A user who
holds one has imported it already, so it is looked up and never imported. This file is its only user.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.errors import MicrobatchError, quoted
from roundpipe.core.trees import Access, Path
from roundpipe.runtime.device.backend import Event

_SPEC_MODULE = "torch.distributed.pipelining.microbatch"


class RoundPipePackedData(list[Any]):
    """One leaf of an output, kept as the list of its values per microbatch.

    The values may still be on their way: call `synchronize` before reading them. Another RoundPipe takes
    packed data as an argument as it is.

    Args:
        values: one per microbatch.
        events: end of the transfer of each value; None is one that has arrived.
    """

    def __init__(self, values: Iterable[Any] = (), events: Sequence[Event | None] | None = None) -> None:
        super().__init__(values)
        self.events: list[Event | None] = [None] * len(self) if events is None else list(events)
        if len(self.events) != len(self):
            raise MicrobatchError(f"packed data of {len(self)} values was given {len(self.events)} events")

    def synchronize(self) -> None:
        """Wait until every value has arrived."""
        wait_for(self.events)
        self.events = [None] * len(self)


def is_spec_of(spec: Any, name: str) -> bool:
    """Whether a spec is of the class of torch's with this name, or that class itself."""
    kind = getattr(sys.modules.get(_SPEC_MODULE), name, None)
    return kind is not None and (spec is kind or isinstance(spec, kind))


def is_spec(spec: Any) -> bool:
    """Whether this is one of torch's specs; asked before `callable`, since a class is callable."""
    return any(is_spec_of(spec, name) for name in ("TensorChunkSpec", "_Replicate", "_CustomReducer"))


def is_function(rule: Any) -> bool:
    """Whether a rule of the user's is a function and not a spec."""
    return callable(rule) and not is_spec(rule)


def spec_children(spec: Any, below: list[tuple[Access, Any]], where: str) -> list[Any]:
    """The spec of each child of a container; None is the automatic rule."""
    if spec is None or is_spec_of(spec, "_Replicate"):
        return [spec] * len(below)
    keys = [access.key for access, _ in below]
    if isinstance(spec, Mapping):
        if set(spec) == set(keys):
            return [spec[key] for key in keys]
        raise MicrobatchError(f"{where} has the keys {keys} but its spec has {list(spec)}; they must be the same")
    if isinstance(spec, list | tuple):
        if len(spec) == len(below):
            return list(spec)
        raise MicrobatchError(f"{where} has {len(below)} items but its spec has {len(spec)}; give one for each")
    raise MicrobatchError(
        f"{where} is a container with the items {keys} but its spec is {spec!r}; "
        "give a spec of the same structure, or None in its place for the automatic rule"
    )


def check_leaf_spec(spec: Any, where: str, allowed: tuple[str, ...]) -> None:
    """Raise unless a leaf's spec is None or of one of the classes allowed."""
    if spec is None or any(is_spec_of(spec, name) for name in allowed):
        return
    if isinstance(spec, list | tuple | Mapping):
        raise MicrobatchError(f"{where} is a single value but its spec is the structure {spec!r}; give one spec")
    raise MicrobatchError(f"{where} has the spec {spec!r}; allowed: {', '.join(allowed)} (from {_SPEC_MODULE}) or None")


def checked_dim_size(tensor: torch.Tensor, spec: Any, where: str) -> int:
    """Length of the dimension that a `TensorChunkSpec` names; an error if the tensor has none such."""
    dim = spec.split_dim
    if not -tensor.ndim <= dim < tensor.ndim:
        allowed = f"{-tensor.ndim} to {tensor.ndim - 1}" if tensor.ndim else "_Replicate, since it is a scalar"
        raise MicrobatchError(
            f"{where} has shape {tuple(tensor.shape)} but its spec takes dim {dim}; allowed: {allowed}"
        )
    return tensor.shape[dim]


def array_leaves(value: Any, depth: int = 0) -> Iterator[torch.Tensor | RoundPipePackedData]:
    """The tensors and packed data of a structure, in order."""
    if isinstance(value, torch.Tensor | RoundPipePackedData):
        yield value
    elif depth < trees.MAX_DEPTH:
        for _, child in trees.children(value) or ():
            yield from array_leaves(child, depth + 1)


def holds_array(value: Any) -> bool:
    """Whether there is a tensor, or packed data, anywhere in a structure."""
    return any(True for _ in array_leaves(value))


def wait_for(events: Iterable[Event | None]) -> None:
    """Return when all have happened."""
    for event in events:
        if event is not None:
            event.synchronize()


def shape_of(value: Any) -> Any:
    """Shape of a tensor, or the shapes of a list of tensors, for messages."""
    return tuple(value.shape) if isinstance(value, torch.Tensor) else [shape_of(item) for item in value]


def described(value: Any) -> str:
    """A value in few words, for messages."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if trees.tensors(value):
        return f"a {type(value).__name__} of tensors"
    return quoted(value, most=60)


def input_name(path: Path) -> str:
    """A leaf as the user would write it: ``args[0]``, ``kwargs['mask']`` or ``label[1]``."""
    if path and path[0].key == "label":
        return "label" + trees.path_string(path[1:])
    return ("args", "kwargs")[path[0].key] + trees.path_string(path[1:]) if path else "(args, kwargs)"
