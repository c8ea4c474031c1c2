"""Where a layer's weights are on a device, and where its gradients go.

Each worker has one arena, as large as the two largest consecutive visits together: odd visits
lie at its low end, even ones at its high end, so the weights of the next visit come up while this one
runs, and no allocator call stands in the way.

A visit's states, each set here and nowhere else:

    state      set by                 awaited by
    UPLOADING  `Arena.begin` (issued) `Visit.arrive`, through the WEIGHTS event
    RESIDENT   `Visit.ready`          the stage, before its first microbatch
    RELEASED   `Visit.release`        the next upload into the same memory, through the last reader's event

Gradients: autograd accumulates them in the device parameters of one visit; `Visit.release` brings them
down once and `Pending.settle` adds them to the host parameters' ``.grad``.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe.runtime.device.backend import Backend, Event, Lane, Moment
from roundpipe.runtime.device.host_memory import convert, is_plain
from roundpipe.runtime.weights.host_weights import ALIGNMENT, Entry, LayerWeights, aligned
from roundpipe.runtime.weights.replica import Frozen, Replica


class State(enum.Enum):
    """Where a visit's weights are."""

    UPLOADING = "uploading"
    RESIDENT = "resident"
    RELEASED = "released"


@dataclass(slots=True)
class Pending:
    """Gradients and buffers on their way to the host."""

    event: Event | None = None
    moments: tuple[Moment, Moment] | None = None
    """When the copies began, and when they were done."""
    num_bytes: int = 0
    gradients: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Host parameter, downloaded gradient."""
    buffers: list[tuple[list[tuple[nn.Module, str]], torch.Tensor | None]] = field(default_factory=list)
    """Places in the original tree, downloaded value."""
    dtypes: list[tuple[torch.Tensor, torch.dtype]] = field(default_factory=list)
    """Host parameter, what a forward converted it to, as some that route to experts do."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is on its way."""
        return not (self.gradients or self.buffers or self.dtypes)

    def wait(self) -> None:
        """Wait for the copies."""
        if self.event is not None:
            self.event.synchronize()

    def settle(self) -> None:
        """Wait for the copies, add gradients to ``.grad`` and write buffers back."""
        self.wait()
        with torch.no_grad():
            for parameter, dtype in self.dtypes:
                convert(parameter, dtype)
            for parameter, gradient in self.gradients:
                if parameter.dtype != gradient.dtype:  # the forward's visit may still be on its way here
                    convert(parameter, gradient.dtype)
                if parameter.grad is None:
                    parameter.grad = gradient
                elif gradient.layout is torch.strided and parameter.grad.layout is torch.strided:
                    parameter.grad.add_(gradient)
                else:
                    parameter.grad = parameter.grad + gradient
            for places, value in self.buffers:
                _write_buffer(places, value)
        self.gradients.clear()
        self.buffers.clear()
        self.dtypes.clear()


def _write_buffer(places: list[tuple[nn.Module, str]], value: torch.Tensor | None) -> None:
    for module, name in places:
        old = module._buffers.get(name)
        if old is not None and value is not None and old.shape == value.shape and old.dtype == value.dtype:
            if not (is_plain(old) and torch.equal(old, value)):  # a write would end the backward of another forward
                old.copy_(value)
        else:
            module._buffers[name] = value


class BoundLayer:
    """A replica whose parameters and buffers are views of device memory, for one visit."""

    def __init__(self, weights: LayerWeights, replica: Replica) -> None:
        self.weights = weights
        self.replica = replica
        self.parameters: list[tuple[Entry, nn.Parameter]] = []
        self._buffers: list[tuple[list[tuple[nn.Module, str]], torch.Tensor | None, int]] = []
        """Places in the original tree, what was bound, and its version."""
        self._places: list[list[tuple[nn.Module, str]]] = []
        """Their places in the replica."""
        self._filled: list[tuple[dict[str, Any], str]] = []
        """Where the replica's modules have what was bound, to be emptied."""
        self._is_training = False

    @property
    def module(self) -> nn.Module:
        """The layer to call."""
        return self.replica.module

    def bind(
        self,
        region: torch.Tensor,
        loose: dict[int, torch.Tensor | None],
        with_gradients: bool,
        frozen: Frozen | None = None,
    ) -> None:
        """Point the replica at the weights in ``region``."""
        bound: list[tuple[Entry, torch.Tensor | None]] = []
        for index, entry in enumerate(self.weights.entries):
            tensor = loose[index] if index in loose else entry.view(region)
            if entry.is_parameter and tensor is not None:
                trained = entry.tensor.requires_grad if frozen is None else entry.tensor in frozen.trained
                tensor = self._as_parameter(tensor, entry, trained, with_gradients)
            bound.append((entry, tensor))
        tensors = {id(entry.tensor): tensor for entry, tensor in bound if tensor is not None and entry.fits}
        self.replica.refresh(tensors, frozen)
        self._is_training = any(module.training for module in self.replica.module.modules())
        twin = self.replica.twin
        for entry, tensor in bound:
            if isinstance(tensor, nn.Parameter) and entry.is_parameter:
                for module, name in entry.places:
                    self._fill(twin(module), "_parameters", name, tensor)
            else:
                self._bind_buffer(entry.places, tensor)
        for place in self.weights.empty:
            self._bind_buffer([place], None)

    def _as_parameter(self, tensor: torch.Tensor, entry: Entry, trained: bool, with_gradients: bool) -> nn.Parameter:
        """The parameter to call with; it requires grad also where no backward follows, for code that asks."""
        if not isinstance(tensor, nn.Parameter) or tensor.requires_grad != trained:
            tensor = nn.Parameter(tensor.detach(), requires_grad=trained)
        if trained and with_gradients:
            self.parameters.append((entry, tensor))
            if tensor is not entry.tensor:
                for hook in (entry.tensor._backward_hooks or {}).values():
                    tensor.register_hook(hook)  # as on the original, once per microbatch
        return tensor

    def _bind_buffer(self, places: list[tuple[nn.Module, str]], tensor: torch.Tensor | None) -> None:
        twins = [(self.replica.twin(module), name) for module, name in places]
        for module, name in twins:
            self._fill(module, "_buffers", name, tensor)
        self._buffers.append((places, tensor, -1 if tensor is None else tensor._version))
        self._places.append(twins)

    def _fill(self, twin: nn.Module, kind: str, name: str, tensor: torch.Tensor | None) -> None:
        held = getattr(twin, kind)
        held[name] = tensor
        if not isinstance(twin, torch.jit.ScriptModule):  # can't be without; has views of the worker's memory
            self._filled.append((held, name))

    @property
    def has_buffers(self) -> bool:
        """Whether there is any buffer to look after."""
        return bool(self._buffers)

    @property
    def writes_buffers(self) -> bool | None:
        """Whether a forward in the current mode writes buffers; None: not known yet."""
        return self.weights.writes_buffers.get(self._is_training)

    @writes_buffers.setter
    def writes_buffers(self, value: bool) -> None:
        self.weights.writes_buffers[self._is_training] = value

    @property
    def versions_tell(self) -> bool:
        """Whether a forward is known to have written none so far, and the buffers' versions would tell if one did."""
        return self.writes_buffers is False and not self.weights.may_write_unseen

    def left_traces(self, did: bool) -> None:
        """A forward in the current mode left other buffers or attributes behind, or did not."""
        known = self.weights.leaves_traces
        known[self._is_training] = did or known.get(self._is_training, False)

    @property
    def draws_python(self) -> bool | None:
        """Whether a forward in the current mode draws from Python's or NumPy's generators; None: not known yet."""
        return self.weights.draws_python.get(self._is_training)

    @draws_python.setter
    def draws_python(self, value: bool) -> None:
        self.weights.draws_python[self._is_training] = value

    def buffer_versions(self) -> list[tuple[int, int]]:
        """Identity and version of every buffer, to tell whether a forward wrote one."""
        current = (places[0][0]._buffers[places[0][1]] for places in self._places)
        return [(id(buffer), -1 if buffer is None else buffer._version) for buffer in current]

    def buffer_values(self) -> list[torch.Tensor | None]:
        """The buffers as they are now, on the device."""
        return [places[0][0]._buffers[places[0][1]] for places in self._places]

    def buffers_on_host(self) -> list[torch.Tensor | None]:
        """Copies of the buffers as they were uploaded for this visit."""
        held = [module._buffers[name] for ((module, name), *_), _, _ in self._buffers]
        return [None if buffer is None else buffer.detach().clone() for buffer in held]

    def set_buffers(self, values: Sequence[torch.Tensor | None]) -> None:
        """Rebind the replica's buffers to other device tensors."""
        for places, value in zip(self._places, values, strict=True):
            for module, name in places:
                module._buffers[name] = value

    def changed_buffers(self) -> Iterable[tuple[list[tuple[nn.Module, str]], torch.Tensor | None]]:
        """Buffers that were written or replaced during the visit, with their places in the original tree."""
        all_of_them = self.writes_buffers is not False
        for (originals, bound, version), places in zip(self._buffers, self._places, strict=True):
            module, name = places[0]
            now = module._buffers[name]
            if now is None:
                if bound is not None:
                    yield originals, None
            elif all_of_them or now is not bound or now._version != version:
                yield originals, now

    def converted_parameters(self) -> Iterator[tuple[torch.Tensor, torch.dtype]]:
        """Parameters of the original tree that the forward gave another dtype, and which."""
        for entry in self.weights.entries:
            if entry.is_parameter and not entry.loose and entry.fits:
                module, name = entry.places[0]
                now = self.replica.twin(module)._parameters[name]
                if now is not None and now.dtype != entry.dtype:
                    yield entry.tensor, now.dtype

    def unbind(self) -> None:
        """Drop every reference to device memory, also if `bind` did not come to its end."""
        for _, parameter in self.parameters:
            parameter.grad = None  # whoever still holds the parameter does not hold its gradient
        for held, name in self._filled:
            held[name] = None
        self._filled.clear()
        self.parameters.clear()
        self._buffers.clear()
        self._places.clear()
        self.replica.let_go()


def visit_bytes(layers: Iterable[LayerWeights]) -> int:
    """Device memory for the weights of some layers, one after the other."""
    return sum(aligned(weights.num_bytes) for weights in layers)


class Visit:
    """The weights of one stage on one device, from upload to release."""

    def __init__(self, backend: Backend, region: torch.Tensor, layers: list[BoundLayer]) -> None:
        self._backend = backend
        self._region = region
        self.layers = layers
        self.state = State.UPLOADING
        self._parts: list[tuple[torch.Tensor, dict[int, torch.Tensor | None]]] = []
        self._copies: list[torch.Tensor] = []
        offset = 0
        moved_bytes = backend.moved_bytes[Lane.WEIGHTS]
        self.began = backend.moment(Lane.WEIGHTS)
        """When the copies began."""
        for layer in layers:
            part = region[offset : offset + layer.weights.num_bytes]
            loose, copies = layer.weights.upload(backend, part)
            self._parts.append((part, loose))
            self._copies += copies
            offset += aligned(layer.weights.num_bytes)
        self.uploaded = backend.record(Lane.WEIGHTS)
        """The event after which the weights are on the device."""
        self.uploaded_bytes = backend.moved_bytes[Lane.WEIGHTS] - moved_bytes
        self.arrived = backend.moment(Lane.WEIGHTS)
        """When they were."""
        self._held = contextlib.ExitStack()

    @property
    def num_bytes(self) -> int:
        """Device memory that the weights take."""
        return self._region.numel()

    @property
    def weights_memory(self) -> torch.Tensor:
        """The device memory that the weights are in."""
        return self._region

    def arrive(self) -> None:
        """Let the COMPUTE stream wait for the weights."""
        self._backend.wait(Lane.COMPUTE, self.uploaded)
        self._backend.check_ready(self._copies)
        self._copies.clear()

    def ready(self, with_gradients: bool, frozen: Frozen | None = None) -> None:
        """Bind the weights, behind `arrive`.

        Args:
            with_gradients: whether a backward follows.
            frozen: the user's modules as they are to be taken; None: as they are now.
        """
        for layer, (part, loose) in zip(self.layers, self._parts, strict=True):
            layer.bind(part, loose, with_gradients, frozen)
        gradient_bytes = sum(p.nbytes for layer in self.layers for _, p in layer.parameters)
        self._held.enter_context(self._backend.hold(gradient_bytes, "gradients"))
        self.state = State.RESIDENT

    def release(self, keep_buffers: bool) -> tuple[Pending, list[Event], list[Any]]:
        """Bring gradients (and, after a forward, changed buffers and attributes) down; unbind.

        Returns:
            what is on its way, the events after which the memory may be written again, and the device tensors
            that must live until then.
        """
        backend = self._backend
        pending = Pending()
        computed = backend.record(Lane.COMPUTE)
        events = [computed]
        alive: list[Any] = []
        down: list[torch.Tensor] = []
        backend.wait(Lane.GRADIENTS, computed)
        began, moved_bytes = backend.moment(Lane.GRADIENTS), backend.moved_bytes[Lane.GRADIENTS]
        for layer in self.layers:
            for entry, parameter in layer.parameters:
                gradient = parameter.grad
                if gradient is not None:
                    down.append(gradient)
                    pending.gradients.append((entry.tensor, backend.download(gradient, lane=Lane.GRADIENTS)))
            if keep_buffers:
                buffers = list(layer.changed_buffers())
                attributes = layer.replica.changed_attributes()
                for places, value in buffers:
                    if value is None:
                        pending.buffers.append((places, None))
                        continue
                    down.append(value)
                    pending.buffers.append((places, backend.download(value, lane=Lane.GRADIENTS)))
                pending.dtypes += layer.converted_parameters()
                for module, name, plain in attributes:
                    module.__dict__[name] = plain
                layer.left_traces(bool(buffers or attributes))
        if down:
            pending.event = backend.record(Lane.GRADIENTS)
            pending.moments = began, backend.moment(Lane.GRADIENTS)
            pending.num_bytes = backend.moved_bytes[Lane.GRADIENTS] - moved_bytes
            events.append(pending.event)
            alive = down
        self.drop()
        return pending, events, alive

    def drop(self) -> None:
        """Let go of all device memory, whatever one of the layers raises."""
        self.state = State.RELEASED
        self._parts.clear()
        self._copies.clear()
        with self._held as rest:
            for layer in self.layers:
                rest.callback(layer.unbind)


class Arena:
    """One worker's memory for weights: two regions that grow toward each other."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffer: torch.Tensor | None = None
        self._readers: list[list[Event]] = [[], []]
        self._parity = 0

    @staticmethod
    def room(sizes_bytes: Sequence[int]) -> int:
        """Bytes for visits of which at most two, one after the other, are there at once."""
        sizes = [aligned(size) for size in sizes_bytes] or [0]
        return max(a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True))

    def has_room(self, sizes_bytes: Sequence[int]) -> bool:
        """Whether visits of these sizes fit one after the other."""
        return self._buffer is not None and self._buffer.numel() >= self.room(sizes_bytes)

    def reserve(self, sizes_bytes: Sequence[int]) -> None:
        """Make room for visits of these sizes one after the other; while no visit is open, if that needs more."""
        if not self.has_room(sizes_bytes):
            self.free()
            self._buffer = self._backend.allocate(self.room(sizes_bytes), "weights")
            allocated = self._backend.record(Lane.COMPUTE)  # whoever had the memory before used it on COMPUTE
            self._readers = [[allocated], [allocated]]

    def free(self) -> None:
        """Give the memory back."""
        if self._buffer is not None:
            self._backend.free(self._buffer, "weights")
            self._buffer = None

    def begin(self, layers: list[BoundLayer]) -> tuple[Visit, int]:
        """Start uploading a visit's weights; returns it and the side of the arena it lies at."""
        assert self._buffer is not None
        num_bytes = visit_bytes(layer.weights for layer in layers)
        side, self._parity = self._parity, 1 - self._parity
        start = 0 if side == 0 else (self._buffer.numel() - num_bytes) // ALIGNMENT * ALIGNMENT
        for event in self._readers[side]:
            self._backend.wait(Lane.WEIGHTS, event)
        return Visit(self._backend, self._buffer.data[start : start + num_bytes], layers), side

    def released(self, side: int, events: list[Event]) -> None:
        """Note after which events a side may be written again."""
        self._readers[side] = events
