"""The part of every parameter that one rank's optimizer has, where ranks divide the optimizer's side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

OF_THE_WHOLE = ("step", "mu_product", "eta", "mu")
"""Fields in the states of torch's optimizers that have one value per parameter, whatever its shape."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``count`` parts, about equally long, of each parameter's elements in their order; it may be empty."""

    index: int
    count: int

    def bounds(self, num_elements: int, index: int | None = None) -> slice:
        """Where the part lies, or another rank's, in a parameter of so many elements."""
        length = -(-num_elements // self.count)
        start = min((self.index if index is None else index) * length, num_elements)
        return slice(start, min(start + length, num_elements))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor that has a parameter's shape, in one dimension; a view if that is contiguous."""
        return tensor.reshape(-1)[self.bounds(tensor.numel())]

    def of_state(self, state: Mapping[str, Any], shape: torch.Size) -> dict[str, Any]:
        """An optimizer's state of a parameter of this shape, cut to the part; what is no moment stays."""
        return {
            key: self.of(value).clone() if _is_moment(key, value) and value.shape == shape else value
            for key, value in state.items()
        }

    def moments(self, state: Mapping[str, Any], num_elements: int) -> list[str]:
        """The fields of an optimizer's state of the part that are parts themselves, of so many elements in all."""
        bounds = self.bounds(num_elements)
        parts = (bounds.stop - bounds.start,)
        return [key for key, value in state.items() if _is_moment(key, value) and value.shape == parts]


def _is_moment(key: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and key not in OF_THE_WHOLE
