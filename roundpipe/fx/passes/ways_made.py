"""Whether a loop over samples makes the same of each; see `dependence_watch`.

The way in which a tensor was made is the operator, its numbers, and the ways of its inputs. Of a sample, that it was
taken counts, not at which place. Where what was made of several samples is joined, or written into one tensor, the ways
have to be equal, and samples in the order in which they were taken.

Invariant: nothing is followed before a sample is taken, so that models without such loops cost nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from roundpipe.fx.passes.dependence_rules import DependenceCall

_MOST_VALUES = 64
"""Of a tensor that is made of numbers, above which it counts as another object each time."""

SampleOf = Callable[[torch.Tensor], int | None]


class WaysMade:
    """Ways in which tensors were made, by their identity; whoever has this keeps them alive."""

    def __init__(self, sample_of: SampleOf) -> None:
        self._sample_of = sample_of
        self._ways: dict[int, Hashable] = {}
        self._alive: list[torch.Tensor] = []
        self._written: dict[Hashable, Hashable] = {}
        """By place in what each sample has a part of, how it was made."""

    def note(self, call: DependenceCall, taken: Sequence[int | None], target: int | None) -> bool:
        """Note a call; whether it joins, or writes, what is made of samples in several ways or in another order.

        Args:
            taken: which sample each of its results is taken of, if any.
            target: the sample whose place it writes to, if any.
        """
        if not self._ways and not any(sample is not None for sample in taken):
            return False
        way = self._way_of_call(call)
        differs = call.name in ("cat", "stack") and self._differ(call.inputs)
        if target is not None and (given := call.inputs[1:]):
            place = self._of(call.inputs[0])
            samples = {self._sample_of(tensor) for tensor in given} - {None, target}
            differs = bool(samples) or self._written.setdefault(place, way) != way
        for position, (tensor, sample) in enumerate(zip(call.outputs, taken, strict=True)):
            self._put(tensor, hash((way, position)) if sample is None else hash(("a sample", self._of(call.first))))
        return differs

    def note_made(self, made: torch.Tensor, data: torch.Tensor) -> None:
        """Note a tensor that is made of numbers."""
        if self._ways and data.numel() <= _MOST_VALUES:
            self._put(made, hash((made.dtype, tuple(made.shape), *data.flatten().tolist())))

    def _differ(self, joined: Iterable[torch.Tensor]) -> bool:
        parts = [(sample, self._of(each)) for each in joined if (sample := self._sample_of(each)) is not None]
        samples = [sample for sample, _ in parts]
        by_sample = {sample: [way for one, way in parts if one == sample] for sample in dict.fromkeys(samples)}
        first, *others = by_sample.values() or [[]]
        falls = (later for earlier, later in itertools.pairwise(samples) if later < earlier)
        return any(ways != first for ways in others) or len(others) > 0 and {samples[0], *falls} != {min(samples)}

    def _way_of_call(self, call: DependenceCall) -> int:
        return hash((call.name, *map(self._frozen, call.values.values())))

    def _frozen(self, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            return self._of(value)
        if isinstance(value, (list, tuple)):
            return tuple(map(self._frozen, value))
        return value if isinstance(value, Hashable) else id(value)

    def _of(self, tensor: torch.Tensor) -> Hashable:
        return self._ways.get(id(tensor), id(tensor))

    def _put(self, tensor: torch.Tensor, way: Hashable) -> None:
        self._ways[id(tensor)] = way
        self._alive.append(tensor)
