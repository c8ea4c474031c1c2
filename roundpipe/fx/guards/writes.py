"""Writes in place that a trace saw, and whether they would change other tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe.fx.flat import flat_values

MAX_COMPARED_WEIGHT = 1 << 14
"""Elements of a weight that is looked at in each call, since a forward may write it."""


@dataclass(frozen=True, slots=True)
class Write:
    """A call that wrote a tensor in place."""

    tensor: torch.Tensor
    function: Callable[..., Any]
    args: Any
    kwargs: Any

    def leaves_alone(self, real: torch.Tensor) -> bool:
        """Whether it would change nothing of this tensor, as clamping weights that are small does."""
        if real.is_meta or real.numel() > MAX_COMPARED_WEIGHT or self.tensor.shape != real.shape:
            return False
        if not self.args or self.args[0] is not self.tensor or flat_values(self.args[1:], self.kwargs):
            return False
        with torch.no_grad():
            written = real.detach().clone()
            self.function(written, *self.args[1:], **self.kwargs)
            return torch.equal(written, real)
