"""Values on the device that several readers of one stage visit share, so that they come up once.

What is not split, such as a mask for the whole batch, is the same for all microbatches of a visit. Where layers are
recomputed one by one, several of them read the same values of one microbatch: encoder states, masks.

Invariant: no reader sees what another one has written. Autograd counts writes, and a value that was written is uploaded
again; host memory has it as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.storages import bytes_of, is_plain
from roundpipe.runtime.device.backend import Backend
from roundpipe.runtime.weights.slots import version_of

Place = tuple[str, int]
"""Name of a carried value, and the position of one of its tensors."""


def places_not_split(carries: Sequence[Mapping[str, Any]]) -> frozenset[Place]:
    """Where all microbatches have the same tensor; a microbatch may lack it, if others have it."""
    found: dict[Place, list[Any]] = {}
    for carry in carries:
        for name, value in carry.items():
            for position, tensor in enumerate(trees.tensors(value)):
                found.setdefault((name, position), []).append(_memory_of(tensor))
    return frozenset(place for place, each in found.items() if len(each) > 1 and len(set(each)) == 1)


def _memory_of(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same view of the same memory, such as pieces of one that was expanded."""
    if not is_plain(tensor) or tensor.device.type == "meta":
        return id(tensor)
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


@dataclass(slots=True)
class _Scope:
    """For how long some values are kept: a visit, or one microbatch of it."""

    tensors: dict[Place, tuple[torch.Tensor, int]] = field(default_factory=dict)
    """What came up, and how often it had been written then."""
    written: list[torch.Tensor] = field(default_factory=list)
    """What nobody gets any more, but the device may still read."""
    counted: ExitStack = field(default_factory=ExitStack)

    def end(self) -> list[torch.Tensor]:
        self.counted.close()
        tensors = [*self.written, *(tensor for tensor, _ in self.tensors.values())]
        self.tensors.clear()
        self.written.clear()
        return tensors


class SharedValues:
    """Those of one visit: places ``not_split``, which microbatches share, and names ``read_again`` for one of them."""

    def __init__(self, backend: Backend, not_split: frozenset[Place], read_again: frozenset[str]) -> None:
        self._backend = backend
        self._not_split = not_split
        self._read_again = read_again
        self._visit = _Scope()
        self._microbatch = _Scope()

    def upload(self, name: str, value: Any) -> tuple[Any, int]:
        """A value on the device, and bytes of those of its tensors that are not shared, which nobody has counted."""
        own_bytes = 0

        def one(position: int, source: torch.Tensor) -> torch.Tensor:
            nonlocal own_bytes
            scope = self._scope((name, position))
            if scope is None:
                tensor = self._backend.upload(source)
                own_bytes += bytes_of(tensor)
                return tensor
            return self._shared(scope, (name, position), source)

        return trees.map_numbered(value, one), own_bytes

    def stays(self, tensor: torch.Tensor) -> bool:
        """Whether it is there for all microbatches."""
        return any(tensor is other for other, _ in self._visit.tensors.values())

    def end_microbatch(self) -> list[torch.Tensor]:
        """Let go of what only this microbatch reads; returns what must live until the device is past it."""
        return self._microbatch.end()

    def end(self) -> list[torch.Tensor]:
        """Let go of all; returns what must live until the device is past the visit."""
        return [*self._microbatch.end(), *self._visit.end()]

    def _scope(self, place: Place) -> _Scope | None:
        if place in self._not_split:
            return self._visit
        return self._microbatch if place[0] in self._read_again else None

    def _shared(self, scope: _Scope, place: Place, source: torch.Tensor) -> torch.Tensor:
        if place in scope.tensors:
            tensor, version = scope.tensors[place]
            if version_of(tensor) == version and not tensor.requires_grad:  # a model may ask for that, too
                return tensor
            scope.written.append(tensor)
        tensor = self._backend.upload(source)
        scope.counted.enter_context(self._backend.hold(bytes_of(tensor), "carried values"))
        scope.tensors[place] = tensor, version_of(tensor)
        return tensor
