"""Carried values and their gradients between a device and the host, where they wait for the next stage.

Each direction has a stream of its own, ordered against COMPUTE by events. What a stream still reads must live until it
has: `InFlight` keeps it, so that no memory is marked as used by a stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.layers import Carry
from roundpipe.runtime.device.backend import Backend, Event, Lane
from roundpipe.runtime.engine.step import Gradients, HostValue, StepState, sum_gradients
from roundpipe.runtime.profiling.meter import Meter


class InFlight:
    """Device tensors that must live until an event: that of their last copy or reader."""

    def __init__(self) -> None:
        self._entries: deque[tuple[Event, Any]] = deque()

    def add(self, event: Event, tensors: Any) -> None:
        self._entries.append((event, tensors))

    def release(self) -> None:
        """Let go of the oldest ones, as far as they are done; waits for nothing."""
        while self._entries and self._entries[0][0].is_done():
            self._entries.popleft()

    def wait(self) -> None:
        """Let go of all, each when it is done."""
        while self._entries:
            self._entries[0][0].synchronize()
            self._entries.popleft()

    def take(self) -> InFlight:
        """All of them, for another thread to wait for; none is left here."""
        rest = InFlight()
        rest._entries, self._entries = self._entries, rest._entries
        return rest

    def clear(self) -> None:
        """Let go of all at once; the device must be done."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


class Offload:
    """Brings one worker's carried values up and down."""

    def __init__(self, backend: Backend, meter: Meter, in_flight: InFlight) -> None:
        self._backend = backend
        self._meter = meter
        self._in_flight = in_flight

    def upload_values(self, step: StepState, names: Iterable[str], microbatch: int) -> tuple[Carry, list[torch.Tensor]]:
        """Values of a microbatch on the device, ready for COMPUTE; and the tensors in them."""
        backend = self._backend
        carry: Carry = {}
        for name in names:
            value, is_lent = step.begin_read(microbatch, name)
            for event in value.events:
                backend.wait(Lane.UPLOAD, event)
            with self._meter.copying(Lane.UPLOAD, "values for"):
                carry[name] = trees.map_tensors(value.value, backend.upload)
            if is_lent:
                step.end_read(backend.record(Lane.UPLOAD))
        backend.wait(Lane.COMPUTE, backend.record(Lane.UPLOAD))
        tensors = trees.tensors(carry)
        backend.check_ready(tensors)
        return carry, tensors

    def upload_label(self, label: Any) -> tuple[Any, bool]:
        """A label on the device, ready for COMPUTE; and whether it collects gradients, as it was to require some."""
        backend = self._backend
        with self._meter.copying(Lane.UPLOAD, "labels of"):
            uploaded = trees.map_tensors(label, backend.upload)
        backend.wait(Lane.COMPUTE, backend.record(Lane.UPLOAD))
        tensors = trees.tensors(uploaded)
        backend.check_ready(tensors)
        pairs = zip(trees.tensors(label), tensors, strict=True)
        leaves = [tensor.requires_grad_() for original, tensor in pairs if original.requires_grad]
        return uploaded, bool(leaves)

    def download(self, value: Any, what: str = "values of") -> HostValue:
        """A device value on the host, with the event of its copy."""
        tensors = trees.tensors(value)
        if not tensors:
            return HostValue(value)
        backend = self._backend
        backend.wait(Lane.DOWNLOAD, backend.record(Lane.COMPUTE))
        with self._meter.copying(Lane.DOWNLOAD, what):
            copies = trees.map_tensors(value, backend.download)
        copied = backend.record(Lane.DOWNLOAD)
        self._in_flight.add(copied, tensors)
        return HostValue(copies, (copied,))

    def download_outputs(self, outputs: Any, device: torch.device | None) -> HostValue:
        """The model's outputs, detached, on the device that the caller wants them on."""
        outputs = trees.map_tensors(outputs, torch.Tensor.detach)
        if device is None or device.type == "cpu":
            return self.download(outputs)
        copies = trees.map_tensors(outputs, lambda tensor: tensor.to(device))
        return HostValue(copies, (self._backend.record(Lane.COMPUTE),))

    def upload_gradients(self, step: StepState, names: Iterable[str], microbatch: int) -> dict[str, Gradients]:
        """Gradients of values that a segment made, summed over their readers, on the device."""
        backend = self._backend
        on_host = step.gradients[microbatch]
        by_reader: dict[str, list[Gradients]] = {}
        for name in names:
            for gradients, event in on_host.pop(name, ()):
                if event is not None:
                    backend.wait(Lane.UPLOAD, event)
                with self._meter.copying(Lane.UPLOAD, "gradients for"):
                    uploaded = [None if gradient is None else backend.upload(gradient) for gradient in gradients]
                by_reader.setdefault(name, []).append(uploaded)
        backend.wait(Lane.COMPUTE, backend.record(Lane.UPLOAD))
        backend.check_ready(trees.tensors(by_reader))
        return {name: [sum_gradients(parts) for parts in zip(*each, strict=True)] for name, each in by_reader.items()}

    def download_gradients(self, step: StepState, gradients: dict[str, Gradients], microbatch: int) -> None:
        """Leave gradients of values that a segment took on the host, for the stages that made them."""
        if not gradients:
            return
        backend = self._backend
        backend.wait(Lane.DOWNLOAD, backend.record(Lane.COMPUTE))
        with self._meter.copying(Lane.DOWNLOAD, "gradients of"):
            copies = {
                name: [None if gradient is None else backend.download(gradient) for gradient in each]
                for name, each in gradients.items()
            }
        copied = backend.record(Lane.DOWNLOAD)
        on_host = step.gradients[microbatch]
        for name, each in copies.items():
            on_host.setdefault(name, []).append((each, copied))
        self._in_flight.add(copied, gradients)
