"""Gradients and buffers of a visit on their way to the host, and into the model there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from roundpipe.core.storages import is_plain
from roundpipe.core.together import Together, scale_all
from roundpipe.runtime.device.backend import Backend, Event, Lane, Moment
from roundpipe.runtime.device.host_memory import convert
from roundpipe.runtime.weights.slots import Attribute

PIECE_BYTES = 2**28
"""Of gradients that are added and converted while those behind them are on their way."""

NoteMoved = Callable[[int, Moment, Moment], None]
"""Told how many bytes a device has brought home, and from when to when."""


@dataclass(slots=True)
class Addends:
    """A replica's gradients on its device, until the sums are home."""

    backend: Backend
    computed: Event
    """When they are there."""
    note_moved: NoteMoved
    gradients: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Host parameter, and what to add up."""

    def take(self, host: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Whether this gradient can be added up on devices; if so, it is one of these."""
        if not is_plain(gradient):
            return False
        self.gradients.append((host, gradient.detach()))
        return True


@dataclass(slots=True)
class Download:
    """Gradients and buffers of a visit on their way to the host, the last of its pieces."""

    event: Event | None = None
    moments: tuple[Moment, Moment] | None = None
    """When the copies began, and when they were done."""
    num_bytes: int = 0
    gradients: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Host parameter, who has its gradient, which is the twin if it has one, and what to add to that."""
    on_device: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """Makes a context for what is done to twins, for each piece its own."""
    buffers: list[tuple[list[Attribute], torch.Tensor | None]] = field(default_factory=list)
    """Attributes of the original tree, downloaded value."""
    dtypes: list[tuple[torch.Tensor, torch.dtype]] = field(default_factory=list)
    """Host parameter, what a forward converted it to, as some that route to experts do."""
    addends: Addends | None = None
    """Gradients that are added up with those of other replicas before they come; see `replica_sums`."""
    earlier: list[Download] = field(default_factory=list)
    """Gradients that come before the others, in pieces."""
    _uncut_bytes: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.parameters or self.buffers or self.dtypes)

    @property
    def stays_there(self) -> bool:
        """Whether it brings nothing to the host: it has gradients of twins alone."""
        return not (self.event or self.buffers or self.dtypes or self.addends is not None and self.addends.gradients)

    @property
    def pieces(self) -> list[Download]:
        """All, in the order in which they come."""
        return [*self.earlier, self]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Of the host's, those that it has gradients of, those of earlier pieces and of addends among them."""
        there = [] if self.addends is None else [parameter for parameter, _ in self.addends.gradients]
        return [parameter for piece in self.pieces for parameter, _, _ in piece.gradients] + there

    def add(self, host: torch.Tensor, gradient: torch.Tensor, backend: Backend) -> None:
        """Note a gradient that a backend brings to the host."""
        self.gradients.append((host, host, gradient))
        self._uncut_bytes += gradient.nbytes if gradient.layout is torch.strided else 0
        if self._uncut_bytes >= PIECE_BYTES:
            event, gradients = backend.record(Lane.GRADIENTS), self.gradients
            self.earlier.append(Download(event, gradients=gradients, on_device=self.on_device))
            self.gradients, self._uncut_bytes = [], 0

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def drop_addends(self) -> None:
        """Give back the memory of what was added up on devices, behind that."""
        if self.addends is not None:
            self.wait()
            self.addends = None

    def settle(self, scale: float = 1.0) -> None:
        """Wait for the copies, add gradients times ``scale`` to ``.grad`` and write buffers back."""
        self.wait()
        with self.on_device(), torch.no_grad(), Together() as together:
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
    if old is None or value is None:
        attribute.set(value)
    elif old.shape != value.shape or old.dtype != value.dtype:
        old.data = value.to(old.device)  # generated layers and the model have the same tensor
    elif not (is_plain(old) and torch.equal(old, value)):  # a write would end the backward of another forward
        old.copy_(value)
