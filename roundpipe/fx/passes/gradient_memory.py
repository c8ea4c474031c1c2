"""Memory of a backward where gradients of weights are there before it, and where they only come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from roundpipe.core.allocations import Allocations
from roundpipe.core.contexts import contextmanager


class BackwardAllocations(Allocations):
    """Allocations of a run whose weights have gradients already, with what it would take if they had none."""

    def __init__(self, known: Iterable[torch.Tensor], rounding: int) -> None:
        super().__init__(known, rounding)
        self._come_bytes = self._first_peak_bytes = 0

    @property
    def unmade_bytes(self) -> int:
        """Of gradients that it makes, what would not be there at its peak if none had been there before."""
        return self.peak_bytes + self._come_bytes - max(self._first_peak_bytes, self._come_bytes)

    @contextmanager
    def gradients_followed(self, leaves: Iterable[torch.Tensor]) -> Iterator[None]:
        """Around the backward: a gradient of these that are weights is there from when it is added to the old one."""
        handles = []
        for leaf in leaves:
            if leaf.grad is not None:
                handles.append(leaf.register_hook(lambda gradient, leaf=leaf: self._comes(leaf, gradient)))
                handles.append(leaf.register_post_accumulate_grad_hook(self._has_come))
        yield
        for handle in handles:
            handle.remove()

    def _comes(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        if gradient.layout is not leaf.layout or gradient.stride() != leaf.stride():  # the first one is copied
            self._note(leaf.nbytes)

    def _has_come(self, leaf: torch.Tensor) -> None:
        self._come_bytes += leaf.nbytes

    def grow(self, num_bytes: int) -> None:
        super().grow(num_bytes)
        self._note(0)

    def _note(self, num_bytes: int) -> None:
        self._first_peak_bytes = max(self._first_peak_bytes, self.live_bytes + self._come_bytes + num_bytes)
