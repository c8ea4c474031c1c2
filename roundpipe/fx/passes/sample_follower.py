"""What rules of operators ask of the run that follows samples through a model; see `dependence_rules`."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class SampleFollower(Protocol):
    """What a rule asks of the run that it is part of."""

    prime: int
    number: int
    """How many samples there are: a multiple of the prime."""
    has_others: bool
    """Whether there are arguments with another number of something than there are samples, such as of images."""
    is_of_loss: bool
    """Whether what is computed is a loss, so that a sum over all may be added to each, or divide it."""

    def counts_samples(self, size: int) -> bool: ...

    def dims(self, tensor: torch.Tensor) -> list[int]: ...

    def is_sum(self, tensor: torch.Tensor) -> bool: ...

    def is_learned(self, tensor: torch.Tensor) -> bool: ...

    def is_learned_sum(self, tensor: torch.Tensor) -> bool: ...

    def is_shuffle(self, tensor: torch.Tensor) -> bool: ...

    def is_found(self, tensor: torch.Tensor) -> bool: ...

    def is_picked(self, tensor: torch.Tensor) -> bool: ...

    def is_torchs(self, tensor: Any) -> bool: ...

    def is_stored(self, tensor: torch.Tensor) -> bool: ...

    def is_their_number(self, value: Any) -> bool: ...

    def compares(self, tensor: torch.Tensor) -> bool: ...
