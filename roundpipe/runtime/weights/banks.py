"""Memory that is got ready while other memory is in use: a parameter's next weights, and a copy's next gradient.

Both hold what would be converted later. Whoever needs it asks whether it still is what was converted; if not, the
conversion is made then.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.graph import increment_version

from roundpipe.core.together import Together
from roundpipe.runtime.weights.fingerprint import Fingerprint


@dataclass(slots=True)
class Banks:
    """Two places for a parameter's weights: its own, and one for the weights of the step after next."""

    parameter: torch.Tensor
    own: torch.Tensor
    second: torch.Tensor
    staged: Fingerprint | None = None
    """What `stage` has had converted."""

    @property
    def other(self) -> torch.Tensor | None:
        """The place that the parameter does not lie in; None: it lies in neither by now."""
        now = self.parameter
        if now.dtype != self.own.dtype or now.shape != self.own.shape:
            return None
        address = now.data_ptr()
        if address == self.own.data_ptr():
            return self.second
        return self.own if address == self.second.data_ptr() else None

    def stage(self, copy: torch.Tensor, together: Together) -> None:
        """Have the optimizer's copy written where the parameter does not lie; `has_staged` is told when it is."""
        self.staged = None
        if (other := self.other) is not None:
            together.copy(other, copy)

    def has_staged(self, copy: torch.Tensor) -> None:
        if self.other is not None:
            self.staged = Fingerprint.of(copy)

    def is_ready(self, copy: torch.Tensor | None) -> bool:
        """Whether `stage` has written what the copy holds now."""
        staged = self.staged
        return (
            staged is not None
            and staged.parameter is copy
            and self.other is not None
            and not (staged.is_marked or staged.has_other_values)
        )

    def swap(self) -> None:
        """Let the parameter lie in the other place."""
        other, self.staged = self.other, None
        assert other is not None
        self.parameter.data = other
        increment_version(self.parameter)  # autograd sees a change, as after a write

    @property
    def is_home(self) -> bool:
        """Whether the parameter does not lie in the second place."""
        return self.other is not self.own

    def go_home(self, keeps_values: bool = True) -> None:
        """Let the parameter lie in its own place."""
        if not self.is_home:
            if keeps_values:
                self.own.copy_(self.second)
            self.swap()


@dataclass(slots=True)
class EarlyGradient:
    """A gradient of the model, converted as it came home in the hope that it was whole."""

    memory: torch.Tensor | None = None
    of: tuple[torch.Tensor, int] | None = None
    """The gradient whose values it has, and its version then; None: it has none."""
    num_came: int = 0
    """How often something was added to the model's gradient since the copy took the last one."""
    num_expected: int = 1
    """How often that was before."""

    def convert(self, gradient: torch.Tensor, together: Together) -> bool:
        """Have it converted, if there is memory for it; `converted` is told when it is."""
        self.of = None
        if self.memory is None:
            return False
        together.copy(self.memory, gradient)
        return True

    def converted(self, gradient: torch.Tensor) -> None:
        self.of = gradient, gradient._version

    def take(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """The converted gradient, if it is what ``gradient`` is now; the next one is awaited then."""
        of, self.of = self.of, None
        self.num_came, self.num_expected = 0, max(self.num_came, 1)
        return self.memory if of is not None and of[0] is gradient and of[1] == gradient._version else None


@dataclass(slots=True)
class LateGradient:
    """A gradient in the model's dtype that stands for the copy's: the update reads it, and converts it in pieces."""

    gradient: torch.Tensor
    factor: torch.Tensor | None = None
    """What it is to be multiplied by once it is converted, as by clipping; None: nothing."""
