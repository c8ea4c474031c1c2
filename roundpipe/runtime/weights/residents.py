"""Weights that stay on a device from visit to visit, as far as the plan has left room for them.

A layer's frozen weights are a part of their own, uploaded as a whole, but for tensors that other layers have too: each
of these is a part by itself, which all of its layers take. A visit takes a part as it lies on the device as long as the
host's tensors are what was uploaded: the same objects, in the same memory, not written since. Else the part is uploaded
again, into new memory, since an earlier visit may still read the old.

Invariant: a part that no layer asks for any more is dropped; so is one that a forward has written.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import nn

from roundpipe.core.storages import stored_tensors
from roundpipe.runtime.device.backend import Backend, Lane
from roundpipe.runtime.weights.fingerprint import Fingerprint, any_marked
from roundpipe.runtime.weights.layer_weights import LayerWeights, Views
from roundpipe.runtime.weights.slots import places_of, version_of
from roundpipe.runtime.weights.twins import Twins

PURPOSE = "resident weights"

Key = tuple[int, ...]
"""Identities of a part's tensors on the host, which it keeps alive."""


class PartOf(NamedTuple):
    """Which part of a layer."""

    is_trained: bool
    shared: int | None = None
    """The slot that other layers have too; None: all that this one has alone."""


class StayingSlots(NamedTuple):
    """Slots of a layer that stay, and change together."""

    place: PartOf
    indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stay:
    """What of a layer stays on devices in a step, and what each visit uploads."""

    parts: tuple[StayingSlots, ...]
    streamed: tuple[int, ...]
    streamed_bytes: int
    twins: tuple[int, ...] = ()
    """Slots of parameters that live there."""

    @classmethod
    def of(
        cls,
        weights: LayerWeights,
        frozen: Sequence[int] = (),
        trained: Sequence[int] = (),
        twins: tuple[int, ...] = (),
        shared: Container[int] = (),
    ) -> Self:
        """``shared`` has the identities of tensors that other layers have too."""
        parts = (*_parts(weights, frozen, shared, is_trained=False), *_parts(weights, trained, shared, is_trained=True))
        staying = {*frozen, *trained, *twins}
        streamed = tuple(index for index in range(len(weights.slots)) if index not in staying)
        return cls(parts, streamed, weights.bytes_of(streamed), twins)


@dataclass(slots=True, eq=False)
class ResidentPart:
    """Slots of a layer on a device."""

    key: Key
    """Of its tensors; empty if it must not be taken again."""
    memory: torch.Tensor
    prints: list[Fingerprint]
    """Of the host's tensors, taken before they were uploaded."""
    tensors: list[torch.Tensor | None]
    marks: tuple[object, ...]
    """Of the tensors, when they were uploaded."""
    checked_in: int
    """The step in which samples of the host's values were last compared."""
    views: Views | None = None
    """Where the tensors are kept for those that bring the same to the same memory."""

    @classmethod
    def upload(
        cls,
        backend: Backend,
        weights: LayerWeights,
        indexes: Sequence[int],
        memory: torch.Tensor,
        step: int,
        *,
        with_samples: bool,
        views: Views | None = None,
    ) -> tuple[Self, list[torch.Tensor]]:
        """Slots of a layer, brought into some memory in a step; and the copies that were made.

        ``views`` are those of earlier times into this memory.
        """
        tensors = (weights.slots[index].current for index in indexes)
        stored = (part for each in tensors if each is not None for part in stored_tensors(each) or [each])
        prints = [Fingerprint.of(part, with_sample=with_samples) for part in stored]
        found, copies = weights.upload(backend, memory, indexes, views)
        on_device = [found[index] for index in indexes]
        return cls(_key(weights, indexes), memory, prints, on_device, _marks_of(on_device), step, views), copies

    @classmethod
    def nothing(cls, memory: torch.Tensor, step: int) -> Self:
        """No slots of a layer, since all of them stay."""
        return cls((), memory, [], [], _marks_of(()), step)

    @property
    def is_marked(self) -> bool:
        """Whether the host's tensors were written since, as far as versions and memory tell."""
        return any_marked(self.prints)

    def is_current(self, step: int) -> bool:
        """Whether the host's tensors are what was uploaded; samples of their values are compared once per step."""
        if self.is_marked or (self.checked_in != step and any(print.has_other_values for print in self.prints)):
            return False
        self.checked_in = step
        return True

    def is_of(self, weights: LayerWeights, indexes: Sequence[int]) -> bool:
        """Whether it has these slots of a layer, as the layer is now."""
        return bool(self.key or not indexes) and self.key == _key(weights, indexes)

    @property
    def is_written(self) -> bool:
        """Whether a forward has written the device's tensors, or given them other memory."""
        return _marks_of(self.tensors) != self.marks

    def replace_tensors(self, tensors: list[torch.Tensor | None]) -> None:
        """Have others in the same memory."""
        self.tensors, self.marks = tensors, _marks_of(tensors)


class Residents:
    """The parts on one worker's device."""

    def __init__(self, backend: Backend, twins: Twins) -> None:
        self._backend = backend
        self.twins = twins
        self._parts: dict[Key, ResidentPart] = {}
        """The one used last at the end."""
        self._keys: dict[int, dict[PartOf, Key]] = {}
        """By the identity of a layer, what it last asked for."""
        self.num_bytes = 0

    def make_room(self, stays: Iterable[tuple[LayerWeights, Stay]], others_bytes: int | None) -> int:
        """Drop what steps like one do not use where that takes more than so many bytes; returns those that it keeps.

        ``stays`` are of all layers that the worker runs in such steps; without a limit everything is kept.
        """
        used: set[Key] = set()
        for weights, stay in stays:
            asked = {place: _key(weights, indexes) for place, indexes in stay.parts}
            self._let_go_of_others(weights, asked)
            used.update(asked[place] for place, _ in stay.parts)
        if others_bytes is None:
            return 0
        others = [part for key, part in self._parts.items() if key not in used]
        other_bytes = sum(part.memory.numel() for part in others)
        for part in others:
            if other_bytes <= others_bytes:
                break
            other_bytes -= part.memory.numel()
            self.drop(part)
        return other_bytes

    def _let_go_of_others(self, weights: LayerWeights, asked: Mapping[PartOf, Key]) -> None:
        """Drop what a layer will not ask for again: it is trained or gone by now, or in another part."""
        known = self._keys.get(id(weights.layer), {})
        if not (others := {place: key for place, key in known.items() if place not in asked}):
            return
        elsewhere = {tensor for key in asked.values() for tensor in key}
        frozen = {*_key(weights, weights.frozen_slots())}
        for place, key in others.items():
            if not elsewhere.isdisjoint(key) or not (place.is_trained or frozen.issuperset(key)):
                self._let_go(weights.layer, place)

    def has_all(self, weights: LayerWeights, stay: Stay) -> bool:
        """Whether a layer's parts are on the device, as they may have been on the host before."""
        return all(_key(weights, indexes) in self._parts for _, indexes in stay.parts)

    def bring(self, weights: LayerWeights, slots: StayingSlots, step: int) -> tuple[ResidentPart, list[torch.Tensor]]:
        """A part of a layer as it is on the host now, uploaded if need be, and the copies that were made."""
        place, indexes = slots
        key, keys = _key(weights, indexes), self._keys.setdefault(id(weights.layer), {})
        if keys.get(place, key) != key:
            self._let_go(weights.layer, place)
        keys[place] = key
        part = self._parts.pop(key, None)
        copies: list[torch.Tensor] = []
        if part is None or not part.is_current(step):
            if part is not None:
                self._free(part)
            part, copies = self._upload(weights, indexes, step)
        self._parts[key] = part
        return part, copies

    def _upload(
        self, weights: LayerWeights, indexes: tuple[int, ...], step: int
    ) -> tuple[ResidentPart, list[torch.Tensor]]:
        backend = self._backend
        memory = backend.allocate(weights.bytes_of(indexes), PURPOSE)
        try:
            backend.wait(Lane.WEIGHTS, backend.record(Lane.COMPUTE))  # whoever had the memory before used it on COMPUTE
            part, copies = ResidentPart.upload(backend, weights, indexes, memory.data, step, with_samples=True)
        except BaseException:
            backend.free(memory, PURPOSE)
            raise
        self.num_bytes += memory.numel()
        return part, copies

    def forget(self, layer: nn.Module) -> None:
        """Drop a layer's parts that no other layer has."""
        for place in list(self._keys.get(id(layer), ())):
            self._let_go(layer, place)
        self._keys.pop(id(layer), None)

    def _let_go(self, layer: nn.Module, place: PartOf) -> None:
        key = self._keys[id(layer)].pop(place)
        is_asked_for = any(key in keys.values() for keys in self._keys.values())
        if not is_asked_for and (part := self._parts.get(key)) is not None:
            self.drop(part)

    def drop(self, part: ResidentPart) -> None:
        """Give a part's memory back, behind the visits that read it."""
        if self._parts.get(part.key) is part:
            del self._parts[part.key]
            self._free(part)

    def _free(self, part: ResidentPart) -> None:
        self._backend.free(part.memory, PURPOSE)
        self.num_bytes -= part.memory.numel()

    def drop_others(self, used: Iterable[ResidentPart]) -> None:
        """Drop all but what visits use; later ones bring theirs again."""
        kept = {*used}
        for part in [part for part in self._parts.values() if part not in kept]:
            self.drop(part)

    def free(self) -> None:
        """Drop everything."""
        for part in list(self._parts.values()):
            self.drop(part)
        self._keys.clear()


def _parts(
    weights: LayerWeights, slots: Sequence[int], shared: Container[int], *, is_trained: bool
) -> Iterator[StayingSlots]:
    apart = [index for index in slots if id(weights.slots[index].current) in shared]
    if own := tuple(index for index in slots if index not in apart):
        yield StayingSlots(PartOf(is_trained), own)
    for index in apart:
        yield StayingSlots(PartOf(is_trained, index), (index,))


def _marks_of(tensors: Sequence[torch.Tensor | None]) -> tuple[object, ...]:
    return [*map(version_of, tensors)], places_of(tensors)


def _key(weights: LayerWeights, indexes: Iterable[int]) -> Key:
    ids = [*map(id, weights.tensors())]
    return tuple([ids[index] for index in indexes])
