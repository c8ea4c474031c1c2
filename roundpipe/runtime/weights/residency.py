"""Where a layer's weights are on a device, and where its gradients go.

Each worker has one arena, as large as the two largest consecutive visits together. Visits lie at its low and high end
in turn, so the next one's weights come up while this one runs, without a call of the allocator. What stays on the
device between visits (`Residents`) has memory of its own.

A visit goes through these calls:

    call              does                              order on the device
    `Arena.begin`     finds room for the weights        WEIGHTS after the last reader of the same memory
    `Visit.bring`     uploads those of some layers
    `Visit.arrive`    nothing more than order           COMPUTE after the upload
    `Visit.bind`      binds a replica's tensors
    `Visit.release`   downloads gradients, unbinds      GRADIENTS after COMPUTE and DOWNLOAD
    `Arena.end`       notes the events of the readers
    `Download.settle` adds the gradients to the host parameters' ``.grad`` (`download.py`)
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from roundpipe.core.storages import bytes_of
from roundpipe.runtime.device.backend import Backend, Event, Lane, Moment
from roundpipe.runtime.weights.download import Addends, Download, NoteMoved
from roundpipe.runtime.weights.frozen_layers import FrozenLayers
from roundpipe.runtime.weights.known_views import KnownViews
from roundpipe.runtime.weights.replica import BoundLayer
from roundpipe.runtime.weights.residents import ResidentPart, Residents
from roundpipe.runtime.weights.slots import ALIGNMENT, aligned
from roundpipe.runtime.weights.twins import Twins


class _Brought(NamedTuple):
    """Layers of a visit that were brought at once, behind those before them."""

    stop: int
    """The first layer behind them."""
    uploaded: Event
    arrived: Moment
    copies: list[torch.Tensor]


class Visit:
    """The weights of one stage on one device, from upload to release; made by `Arena.begin`.

    Layers are brought one after the other, as many at once as may be read on the host.
    """

    def __init__(
        self,
        backend: Backend,
        region: torch.Tensor,
        layers: list[BoundLayer],
        residents: Residents,
        step: int,
        there: Sequence[ResidentPart] = (),
        with_samples: bool = False,
        known: KnownViews | None = None,
    ) -> None:
        self._backend = backend
        self._region = region
        self.memory = [region]
        """All that its weights lie in."""
        self.num_bytes = region.numel()
        self.layers = layers
        self._residents = residents
        self._step = step
        self._with_samples = with_samples
        self._known = known
        self.streamed = list(there)
        """Per layer, what lies in the region."""
        self.parts: list[ResidentPart] = []
        """All that it reads."""
        self._tensors: list[list[torch.Tensor | None]] = []
        """Per layer that was brought, in the order of slots."""
        self._offset = 0
        self._batches: list[_Brought] = []
        self._num_arrived = 0
        """Batches that COMPUTE waits for."""

    @property
    def num_brought(self) -> int:
        """Layers whose upload has begun."""
        return len(self._tensors)

    @property
    def num_pieces(self) -> int:
        """In which they were brought."""
        return len(self._batches)

    @property
    def is_whole(self) -> bool:
        """Whether all layers were brought."""
        return len(self._tensors) == len(self.layers)

    @property
    def uploaded(self) -> Event:
        """When all that was brought so far is on the device."""
        return self._batches[-1].uploaded

    def bring(self, number: int) -> tuple[int, Moment, Moment]:
        """Start uploading so many more layers; returns the bytes, and when they begin and end."""
        backend = self._backend
        began, moved_bytes = backend.moment(Lane.WEIGHTS), backend.moved_bytes[Lane.WEIGHTS]
        stop = self.num_brought + number
        copies: list[torch.Tensor] = []
        for position in range(self.num_brought, stop):
            self._bring_one(position, copies)
        uploaded, arrived = backend.record(Lane.WEIGHTS), backend.moment(Lane.WEIGHTS)
        self._batches.append(_Brought(stop, uploaded, arrived, copies))
        return backend.moved_bytes[Lane.WEIGHTS] - moved_bytes, began, arrived

    def _bring_one(self, position: int, copies: list[torch.Tensor]) -> None:
        layer = self.layers[position]
        weights, stay = layer.weights, layer.stay
        if position == len(self.streamed) and not stay.streamed:
            self.streamed.append(ResidentPart.nothing(self._region, self._step))
        elif position == len(self.streamed):
            part_of = self._region[self._offset : self._offset + stay.streamed_bytes]
            known = self._known
            views = None if known is None else known.at(int(part_of.storage_offset()), weights, stay.streamed)
            part, made = ResidentPart.upload(
                self._backend,
                weights,
                stay.streamed,
                part_of,
                self._step,
                with_samples=self._with_samples,
                views=views,
            )
            copies += made
            self.streamed.append(part)
        part = self.streamed[position]
        self.parts.append(part)
        tensors: dict[int, torch.Tensor | None] = dict(zip(stay.streamed, part.tensors, strict=True))
        for slots in stay.parts:
            part, made = self._residents.bring(weights, slots, self._step)
            copies += made
            self.memory.append(part.memory)
            is_others = part in self.parts  # a layer's that has the same weights, and its gradients are its own
            own = [each if each is None else each.detach() for each in part.tensors] if is_others else part.tensors
            self.parts.append(part)
            tensors.update(zip(slots.indexes, own, strict=True))
        if stay.twins:
            brought, made = self._residents.twins.bring(weights, stay.twins, self._step)
            copies += made
            tensors.update(zip(stay.twins, brought, strict=True))
        self._tensors.append([tensors[index] for index in range(len(weights.slots))])
        self._offset += stay.streamed_bytes

    def twins(self) -> list[torch.Tensor]:
        """Parameters whose twins it runs on."""
        return [each for one in self.layers if one.stay.twins for each in one.weights.tensors_at(one.stay.twins)]

    def has_arrived(self, position: int) -> bool:
        """Whether COMPUTE waits for a layer, or has."""
        return self._num_arrived > 0 and self._batches[self._num_arrived - 1].stop > position

    def arrive(self, position: int) -> Moment | None:
        """Let COMPUTE wait for the layers up to one that was brought; returns when they are there, None: it has."""
        since = self._num_arrived
        while not self.has_arrived(position):
            batch = self._batches[self._num_arrived]
            self._backend.wait(Lane.COMPUTE, batch.uploaded)
            self._backend.check_ready(batch.copies)
            batch.copies.clear()
            self._num_arrived += 1
        return self._batches[self._num_arrived - 1].arrived if self._num_arrived > since else None

    def bind(self, position: int, with_gradients: bool, frozen: FrozenLayers | None = None) -> None:
        """Bind one layer's weights, behind `arrive`, to its modules as they were when ``frozen``; None: as they are."""
        self.layers[position].bind(self._tensors[position], with_gradients, frozen)

    def unbind(self) -> None:
        """Let go of gradients, and have each layer bound anew."""
        for layer in self.layers:
            layer.unbind()

    def release(
        self, keep_buffers: bool, added: Collection[int] = (), note_sums: NoteMoved | None = None
    ) -> tuple[Download, list[Event], list[Any]]:
        """Download gradients (and, after a forward, changed buffers and attributes); unbind.

        Gradients of layers at positions in ``added`` are dropped: an attempt before has brought them. With
        ``note_sums`` they are left on the device, to be added up with other replicas'. Returns the downloads, events
        after which the memory may be written again, and device tensors that must live until then.
        """
        backend = self._backend
        twins = self._residents.twins
        computed = backend.record(Lane.COMPUTE)
        addends = None if note_sums is None else Addends(backend, computed, note_sums)
        download, events = Download(on_device=twins.activate, addends=addends), [computed]
        sources: list[Any] = []
        backend.wait(Lane.GRADIENTS, computed)
        # links serve in order of arrival: the last values, which the next stage waits for, go before
        backend.wait(Lane.GRADIENTS, backend.record(Lane.DOWNLOAD))
        began = backend.moment(Lane.GRADIENTS)

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            sources.append(tensor)
            return backend.download(tensor, Lane.GRADIENTS)

        for position, layer in enumerate(self.layers):
            parameters = {} if position in added else layer.parameters
            gradients = {slot: each.grad for slot, each in parameters.items() if each.grad is not None}
            for host, gradient in zip(layer.weights.tensors_at(gradients), gradients.values(), strict=True):
                if twins and (twin := twins.get(host)) is not None:
                    download.gradients.append((host, twin.weights, gradient))
                elif addends is None or not addends.take(host, gradient):
                    download.add(host, copy(gradient), backend)
            if keep_buffers and layer.is_bound:
                buffers = list(layer.changed_buffers())
                download.buffers += [(places, None if value is None else copy(value)) for places, value in buffers]
                download.dtypes += layer.converted_parameters()
                for module, name, value in (attributes := layer.replica.changed_attributes()):
                    module.__dict__[name] = value
                layer.habits.has_side_effects = bool(layer.habits.has_side_effects or buffers or attributes)
        if sources:
            download.event = backend.record(Lane.GRADIENTS)
            download.moments = began, backend.moment(Lane.GRADIENTS)
            download.num_bytes = sum(map(bytes_of, sources))
            events.append(download.event)
        self.drop()
        return download, events, sources

    def drop(self) -> None:
        """Let go of all device memory, whatever one of the layers raises."""
        for part in self.parts:
            if part.is_written:
                self._residents.drop(part)
                part.key = ()
                if part.views is not None:
                    part.views.clear()
        self.parts.clear()
        self.streamed = []
        self._tensors.clear()
        self._batches.clear()
        with contextlib.ExitStack() as rest:
            for layer in self.layers:
                rest.callback(layer.unbind)


@dataclass(slots=True)
class _Content:
    """What a visit has brought to one side of an arena."""

    start: int
    region: torch.Tensor
    parts: list[ResidentPart]
    has_samples: bool
    """Whether samples of the host's values were taken, by which a write through ``.data`` shows."""
    was_taken: bool = False
    """Whether a visit of a later step has taken it, or would have taken the one before it if that had samples."""

    def is_of(self, layers: Sequence[BoundLayer]) -> bool:
        """Whether it is of these layers as they are now, none of which writes what a visit has brought."""
        return len(self.parts) == len(layers) and all(
            part.is_of(layer.weights, layer.stay.streamed)
            and not (layer.stay.streamed and {*layer.stay.streamed}.difference(layer.weights.steady_slots()))
            for part, layer in zip(self.parts, layers, strict=True)
        )


class Arena:
    """One worker's memory for weights: two regions that grow toward each other, and what stays beside them.

    What a visit has brought lies there until another overwrites it; a visit of the same layers takes it as it is, if
    the host has not changed since: a backward behind its forward, a round behind one without an update.
    """

    def __init__(self, backend: Backend, twins: Twins | None = None) -> None:
        self._backend = backend
        self.residents = Residents(backend, Twins(backend) if twins is None else twins)
        self._buffer: torch.Tensor | None = None
        self._readers: list[list[Event]] = [[], []]
        self._latest = 1
        """The side of the visit that was begun last."""
        self._there: list[_Content | None] = [None, None]
        self._known = KnownViews()
        self._lacked_samples = False
        """Whether a visit that was begun would have taken what is there, but for samples."""
        self._takes_samples = False
        """Whether weights outlast steps, so that samples of what is brought are worth their time."""

    @staticmethod
    def room(sizes_bytes: Sequence[int]) -> int:
        """Bytes for visits of which at most two, one after the other, are there at once."""
        sizes = [aligned(size) for size in sizes_bytes] or [0]
        return max(a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True))

    def has_room(self, sizes_bytes: Sequence[int]) -> bool:
        """Whether visits of these sizes fit one after the other."""
        return self._buffer is not None and self._buffer.numel() >= self.room(sizes_bytes)

    def reserve(self, sizes_bytes: Sequence[int], spare_bytes: int | None = None) -> None:
        """Make room for visits of these sizes one after the other; while no visit is open, if it has to be changed.

        What was made for larger ones before is kept, as far as there are ``spare_bytes``; None: in any case.
        """
        self._known.keep_for([*sizes_bytes])
        surplus_bytes = -1 if self._buffer is None else self._buffer.numel() - self.room(sizes_bytes)
        if surplus_bytes < 0 or self._buffer is None or (spare_bytes is not None and surplus_bytes > spare_bytes):
            if self._buffer is not None:
                self._free_regions()
                self._backend.release_cached()  # or activations are put where it was, and its room is taken twice
            self._buffer = self._backend.allocate(self.room(sizes_bytes), "weights")
            allocated = self._backend.record(Lane.COMPUTE)  # whoever had the memory before used it on COMPUTE
            self._readers = [[allocated], [allocated]]

    @property
    def num_bytes(self) -> int:
        buffer_bytes = 0 if self._buffer is None else self._buffer.numel()
        return buffer_bytes + self.residents.num_bytes + self.residents.twins.num_bytes

    @property
    def resident_bytes(self) -> int:
        """Of weights that stay."""
        return self.residents.num_bytes + self.residents.twins.weights_bytes

    def free(self) -> None:
        self._free_regions()
        self.residents.free()

    def _free_regions(self) -> None:
        if self._buffer is not None:
            self._backend.free(self._buffer, "weights")
            self._buffer = None
            self.forget_visits()

    def forget(self, layer: nn.Module) -> None:
        """Drop what is known of a layer."""
        self.residents.forget(layer)
        self.residents.twins.forget(layer)
        self.forget_visits()

    def forget_visits(self) -> None:
        """Let no visit take what one before has brought."""
        self._there = [None, None]
        self._known.clear()

    def begin(self, layers: list[BoundLayer], step: int = 0, *, may_take: bool = True) -> tuple[Visit, int]:
        """A visit in a step, of which nothing was brought yet, and the side of the arena that it lies at.

        ``may_take``: whether it may take what an earlier one has brought, because all is on the host that it would be
        compared with.
        """
        assert self._buffer is not None
        side = self._side_with(layers, step) if may_take else None
        if side is not None and (content := self._there[side]) is not None:
            self._latest = side
            return Visit(self._backend, content.region, layers, self.residents, step, content.parts), side
        num_bytes = sum(layer.stay.streamed_bytes for layer in layers)
        side = 1 - self._latest
        start = 0 if side == 0 else (self._buffer.numel() - num_bytes) // ALIGNMENT * ALIGNMENT
        other = self._there[1 - side]
        self._there[side] = None
        if other is not None and other.start < start + num_bytes and start < other.start + other.region.numel():
            self._there[1 - side] = None
        for event in self._readers[side]:
            self._backend.wait(Lane.WEIGHTS, event)
        region = self._buffer.data[start : start + num_bytes]
        visit = Visit(
            self._backend, region, layers, self.residents, step, with_samples=self._takes_samples, known=self._known
        )
        self._latest = side
        streamed = (layer.weights for layer in layers if layer.stay.streamed)
        if not any(weights.has_loose for weights in streamed):  # whose memory would not be given back
            self._there[side] = _Content(start, region, visit.streamed, self._takes_samples, self._lacked_samples)
        return visit, side

    def _side_with(self, layers: Sequence[BoundLayer], step: int) -> int | None:
        """The side that has what a visit would bring, if there is one."""
        self._lacked_samples = False
        for side, content in enumerate(self._there):
            if content is None or not content.is_of(layers):
                continue
            is_later = any(part.checked_in != step for part in content.parts)
            is_marked = any(part.is_marked for part in content.parts)
            if is_later:
                self._takes_samples = content.was_taken or not is_marked
            lacks_samples = is_later and not content.has_samples
            self._lacked_samples |= lacks_samples and not is_marked
            if is_marked or lacks_samples:
                continue
            if all(part.is_current(step) for part in content.parts):
                content.was_taken = content.was_taken or is_later
                return side
        return None

    def end(self, side: int, events: list[Event]) -> None:
        """Note the events after which a side may be written again."""
        self._readers[side] = events
