"""Where a layer's weights are on a device, and where its gradients go.

Each worker has one arena, as large as the two largest consecutive visits together. Visits lie at its low and high end
in turn, so the next one's weights come up while this one runs, without a call of the allocator. What stays on the
device between visits (`Residents`) has memory of its own.

A visit goes through these calls:

    call              does                              order on the device
    `Arena.begin`     uploads the weights               after the last reader of the same memory
    `Visit.arrive`    nothing more than order           COMPUTE after the upload
    `Visit.bind`      binds a replica's tensors
    `Visit.release`   downloads gradients, unbinds      GRADIENTS after COMPUTE and DOWNLOAD
    `Arena.end`       notes the events of the readers
    `Download.settle` adds the gradients to the host parameters' ``.grad``
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe.core.storages import is_plain
from roundpipe.core.together import Together, scale_all
from roundpipe.runtime.device.backend import Backend, Event, Lane, Moment
from roundpipe.runtime.device.host_memory import convert
from roundpipe.runtime.weights.known_views import KnownViews
from roundpipe.runtime.weights.replica import BoundLayer, FrozenLayers
from roundpipe.runtime.weights.residents import ResidentPart, Residents
from roundpipe.runtime.weights.slots import ALIGNMENT, Attribute, aligned
from roundpipe.runtime.weights.twins import Twins


@dataclass(slots=True)
class Download:
    """Gradients and buffers of a visit on their way to the host."""

    event: Event | None = None
    moments: tuple[Moment, Moment] | None = None
    """When the copies began, and when they were done."""
    num_bytes: int = 0
    gradients: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Host parameter, who has its gradient, which is the twin if it has one, and what to add to that."""
    on_device: AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)
    """For what is done to twins."""
    buffers: list[tuple[list[Attribute], torch.Tensor | None]] = field(default_factory=list)
    """Attributes of the original tree, downloaded value."""
    dtypes: list[tuple[torch.Tensor, torch.dtype]] = field(default_factory=list)
    """Host parameter, what a forward converted it to, as some that route to experts do."""

    @property
    def is_empty(self) -> bool:
        return not (self.gradients or self.buffers or self.dtypes)

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def settle(self, scale: float = 1.0) -> None:
        """Wait for the copies, add gradients times ``scale`` to ``.grad`` and write buffers back."""
        self.wait()
        with self.on_device, torch.no_grad(), Together() as together:
            for parameter, dtype in self.dtypes:
                convert(parameter, dtype)
            if scale != 1:
                scale_all((gradient for _, _, gradient in self.gradients), scale)
            for _, holder, gradient in self.gradients:
                _add_gradient(holder, gradient, together)
            for attributes, value in self.buffers:
                for attribute in attributes:
                    write_buffer(attribute, value)


def _add_gradient(parameter: torch.Tensor, gradient: torch.Tensor, together: Together) -> None:
    if parameter.dtype != gradient.dtype:  # the forward's visit may still be on its way here
        together.finish()
        convert(parameter, gradient.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    elif gradient.device.type == "cpu" and is_plain(gradient) and is_plain(parameter.grad):
        together.add(parameter.grad, gradient)  # of tied weights to the same tensor again, one behind the other
    elif gradient.layout is torch.strided and parameter.grad.layout is torch.strided:
        parameter.grad.add_(gradient)
    else:
        parameter.grad = parameter.grad + gradient


def write_buffer(attribute: Attribute, value: torch.Tensor | None) -> None:
    """Give a buffer of the user's model another value, in place if that is possible and needed."""
    old = attribute.get()
    if old is None or value is None or old.shape != value.shape or old.dtype != value.dtype:
        attribute.set(value)
    elif not (is_plain(old) and torch.equal(old, value)):  # a write would end the backward of another forward
        old.copy_(value)


class Visit:
    """The weights of one stage on one device, from upload to release; made by `Arena.begin`."""

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
        self.memory = [region]
        """All that its weights lie in."""
        self.num_bytes = region.numel()
        self.layers = layers
        self._residents = residents
        self.streamed = list(there)
        """Per layer, what lies in the region."""
        self.parts: list[ResidentPart] = []
        """All that it reads."""
        self._tensors: list[dict[int, torch.Tensor | None]] = []
        """Per layer, by slot."""
        self._copies: list[torch.Tensor] = []
        offset = 0
        moved_bytes = backend.moved_bytes[Lane.WEIGHTS]
        self.began = backend.moment(Lane.WEIGHTS)
        for position, layer in enumerate(layers):
            weights, stay = layer.weights, layer.stay
            copies: list[torch.Tensor] = []
            if not there:
                part_of = region[offset : offset + stay.streamed_bytes]
                views = None if known is None else known.at(int(part_of.storage_offset()), weights, stay.streamed)
                part, copies = ResidentPart.upload(
                    backend, weights, stay.streamed, part_of, step, with_samples=with_samples, views=views
                )
                self.streamed.append(part)
            part = self.streamed[position]
            self.parts.append(part)
            tensors = dict(zip(stay.streamed, part.tensors, strict=True))
            for slots in stay.parts:
                part, uploaded = residents.bring(weights, slots, step)
                copies += uploaded
                self.memory.append(part.memory)
                is_others = part in self.parts  # a layer's that has the same weights, and its gradients are its own
                own = [each if each is None else each.detach() for each in part.tensors] if is_others else part.tensors
                self.parts.append(part)
                tensors.update(zip(slots.indexes, own, strict=True))
            if stay.twins:
                brought, uploaded = residents.twins.bring(weights, stay.twins, step)
                copies += uploaded
                tensors.update(zip(stay.twins, brought, strict=True))
            self._tensors.append(tensors)
            self._copies += copies
            offset += stay.streamed_bytes
        self.uploaded = backend.record(Lane.WEIGHTS)
        self.uploaded_bytes = backend.moved_bytes[Lane.WEIGHTS] - moved_bytes
        self.arrived = backend.moment(Lane.WEIGHTS)

    def twins(self) -> list[torch.Tensor]:
        """Parameters whose twins it runs on."""
        return [layer.weights.slots[index].tensor for layer in self.layers for index in layer.stay.twins]

    def arrive(self) -> None:
        self._backend.wait(Lane.COMPUTE, self.uploaded)
        self._backend.check_ready(self._copies)
        self._copies.clear()

    def bind(self, position: int, with_gradients: bool, frozen: FrozenLayers | None = None) -> None:
        """Bind one layer's weights, behind `arrive`, to its modules as they were when ``frozen``; None: as they are."""
        self.layers[position].bind(self._tensors[position], with_gradients, frozen)

    def unbind(self) -> None:
        """Let go of gradients, and have each layer bound anew."""
        for layer in self.layers:
            layer.unbind()

    def release(self, keep_buffers: bool, added: Collection[int] = ()) -> tuple[Download, list[Event], list[Any]]:
        """Download gradients (and, after a forward, changed buffers and attributes); unbind.

        Gradients of layers at positions in ``added`` are dropped: an attempt before has brought them.

        Returns the downloads, the events after which the memory may be written again, and the device tensors that
        must live until then.
        """
        backend = self._backend
        twins = self._residents.twins
        download = Download(on_device=twins.activate())
        computed = backend.record(Lane.COMPUTE)
        events = [computed]
        sources: list[Any] = []
        backend.wait(Lane.GRADIENTS, computed)
        # links serve in order of arrival: the last values, which the next stage waits for, go before
        backend.wait(Lane.GRADIENTS, backend.record(Lane.DOWNLOAD))
        began, moved_bytes = backend.moment(Lane.GRADIENTS), backend.moved_bytes[Lane.GRADIENTS]

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            sources.append(tensor)
            return backend.download(tensor, Lane.GRADIENTS)

        for position, layer in enumerate(self.layers):
            for slot, parameter in layer.parameters if position not in added else ():
                if (gradient := parameter.grad) is None:
                    continue
                host = holder = slot.tensor
                if twins and (twin := twins.get(host)) is not None:
                    holder = twin.weights
                else:
                    gradient = copy(gradient)
                download.gradients.append((host, holder, gradient))
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
            download.num_bytes = backend.moved_bytes[Lane.GRADIENTS] - moved_bytes
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
        self._copies.clear()
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

    def begin(self, layers: list[BoundLayer], step: int = 0) -> tuple[Visit, int]:
        """Start uploading a visit's weights in a step; returns it and the side of the arena it lies at."""
        assert self._buffer is not None
        if (side := self._side_with(layers, step)) is not None and (content := self._there[side]) is not None:
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
        if not any(layer.weights.has_loose for layer in layers):  # whose memory would not be given back
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
