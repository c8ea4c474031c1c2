"""Places in users' code where a fault can be raised: an operator in every layer, and plain calls elsewhere.

The operator is a custom one, so that tracing keeps it as it is and every way of running a model calls it: in the
forward, in the recomputation and, through its gradient, in the backward. The first value of a sample says which it is,
in every layer, so that a place knows in which microbatch it was visited without asking the library.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import roundpipe

SAMPLE_STEP = 0.01
"""Between the first values of one sample and the next."""
DELAY_S = 0.15
HOOK = 100
"""Added to a layer's number for the operator in its hook."""


class InjectedFault(Exception):
    """Raised by the campaign."""


class InjectedBaseFault(BaseException):
    """Raised by the campaign; no `Exception`."""


@dataclass(frozen=True)
class FrozenFault(Exception):
    """Raised by the campaign; can't be changed on its way."""

    text: str


class Delay(Exception):
    """Not raised: the visit takes longer."""


@dataclass(frozen=True)
class Visit:
    """Where a fault was raised."""

    place: str
    sample: int | None
    is_recomputation: bool


class Points:
    """Counts visits of each place, and raises at one of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.visits: Counter[str] = Counter()
        self._place = ""
        self._visit = -1
        self._fault: BaseException | None = None
        self.raised: Visit | None = None

    def visit(self, place: str, value: torch.Tensor | None = None) -> None:
        """Called by users' code, with a value that begins with a sample; raises if the fault is due here."""
        with self._lock:
            number = self.visits[place]
            self.visits[place] += 1
            due = self._fault is not None and place == self._place and number == self._visit
            if not due:
                return
            sample = None if value is None else round(float(value.flatten()[0]) / SAMPLE_STEP)
            fault, self._fault = self._fault, None
            self.raised = Visit(place, sample, roundpipe.doing_recompute())
        assert fault is not None
        if isinstance(fault, Delay):
            time.sleep(DELAY_S)
            return
        try:
            raise fault
        finally:
            del fault

    @contextmanager
    def armed(self, place: str, visit: int, fault: BaseException) -> Iterator[None]:
        """Inside, the given visit of a place raises."""
        with self._lock:
            self.visits.clear()
            self._place, self._visit, self._fault, self.raised = place, visit, fault, None
        del fault
        try:
            yield
        finally:
            with self._lock:
                self._fault = None


POINTS = Points()


def _name(layer: int) -> str:
    return f"hook of layer {layer - HOOK}" if layer >= HOOK else f"layer {layer}"


@torch.library.custom_op("roundpipe_faults::point", mutates_args=())
def point(x: torch.Tensor, layer: int) -> torch.Tensor:
    """A copy of ``x``."""
    POINTS.visit(f"forward of {_name(layer)}", x)
    return x.clone()


@point.register_fake
def _(x: torch.Tensor, layer: int) -> torch.Tensor:
    return torch.empty_like(x)


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor, int], output: object) -> None:
    ctx.layer = inputs[1]
    ctx.save_for_backward(inputs[0])


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    POINTS.visit(f"backward of {_name(ctx.layer)}", ctx.saved_tensors[0])
    return gradient.clone(), None


point.register_autograd(_backward, setup_context=_setup_context)


class PointFunction(torch.autograd.Function):
    """The same as a Function, whose Python runs in the layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: int) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        POINTS.visit(f"forward of a function of layer {layer}", x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        POINTS.visit(f"backward of a function of layer {ctx.layer}", ctx.saved_tensors[0])
        return gradient.clone(), None
