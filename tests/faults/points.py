"""Places in users' code where a fault can be raised: an operator in every layer, and plain calls elsewhere.

The operator is a custom one, so that tracing keeps it as it is and every way of running a model calls it: in the
forward, in the recomputation and, through its gradient, in the backward.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class InjectedFault(Exception):
    """Raised by the campaign."""


class InjectedBaseFault(BaseException):
    """Raised by the campaign; no `Exception`."""


class Points:
    """Counts visits of each place, and raises at one of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.visits: Counter[str] = Counter()
        self._place = ""
        self._visit = -1
        self._fault: BaseException | None = None
        self.raised = False

    def visit(self, place: str) -> None:
        """Called by users' code; raises if the fault is due here."""
        with self._lock:
            number = self.visits[place]
            self.visits[place] += 1
            due = self._fault is not None and place == self._place and number == self._visit
            if not due:
                return
            fault, self._fault, self.raised = self._fault, None, True
        assert fault is not None
        try:
            raise fault
        finally:
            del fault

    @contextmanager
    def armed(self, place: str, visit: int, fault: BaseException) -> Iterator[None]:
        """Inside, the given visit of a place raises."""
        with self._lock:
            self.visits.clear()
            self._place, self._visit, self._fault, self.raised = place, visit, fault, False
        del fault
        try:
            yield
        finally:
            with self._lock:
                self._fault = None


POINTS = Points()


@torch.library.custom_op("roundpipe_faults::point", mutates_args=())
def point(x: torch.Tensor, layer: int) -> torch.Tensor:
    """A copy of ``x``."""
    POINTS.visit(f"forward of layer {layer}")
    return x.clone()


@point.register_fake
def _(x: torch.Tensor, layer: int) -> torch.Tensor:
    return torch.empty_like(x)


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[torch.Tensor, int], output: object) -> None:
    ctx.layer = inputs[1]  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    POINTS.visit(f"backward of layer {ctx.layer}")  # type: ignore[attr-defined]
    return gradient.clone(), None


point.register_autograd(_backward, setup_context=_setup_context)
