"""Carried values and their gradients while they wait on the host between stages."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe.runtime.device.backend import Event

Gradients = list[torch.Tensor | None]
"""One entry per tensor of a carried value."""


@dataclass(slots=True, eq=False)
class HostValue:
    """A carried value, or its gradients, on the host, and the copies that must be done before its use."""

    value: Any
    events: tuple[Event, ...] = ()

    def synchronize(self) -> Any:
        """The value, once its copies are done."""
        for event in self.events:
            event.synchronize()
        self.events = ()
        return self.value


HostValues = list[dict[str, HostValue]]
"""Per microbatch: carried values on the host, by name."""
HostGradients = list[dict[str, list[HostValue]]]
"""Per microbatch: `Gradients` of carried values on the host, one entry per reader, to be summed in order."""


def sum_gradients(parts: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """The sum of those that are there, in their order; None if none is."""
    present = [part for part in parts if part is not None]
    return functools.reduce(operator.add, present) if present else None
