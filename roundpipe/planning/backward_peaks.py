"""What layers with autograd hold at most: each keeps some for its backward, which needs more."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add

from roundpipe.core.layers import LayerCost
from roundpipe.planning.value_lives import Gradients, ValueLives


class BackwardPeaks:
    """Peaks of ranges of a chain's layers, beside values that come up; if a run ``is_alone``, a visit is one run.

    Gradients of weights are counted elsewhere as if all of a range's were there. The only run of a visit does not have
    those of the layers in front of one yet, and not all of its own: they come as its backward makes them. Further runs
    find those of the run before.
    """

    def __init__(self, costs: Sequence[LayerCost], lives: ValueLives, *, is_alone: bool) -> None:
        self._lives = lives
        self._results = list(accumulate((cost.activation_bytes for cost in costs), initial=0))
        never = (lives.released_bytes(made, len(costs)) for made in lives.made)
        kept = (cost.activation_bytes - released for cost, released in zip(costs, never, strict=True))
        self._kept = list(accumulate(kept, initial=0))
        """Of all layers in front of one, until their backward; by what graphs of any layers hold."""
        self._missing = list(accumulate((cost.gradient_bytes * is_alone for cost in costs), initial=0))
        own = (_unmade_bytes(cost) * is_alone for cost in costs)
        missing = map(add, self._missing, own)
        self.needs = [cost.training_bytes - num_bytes for cost, num_bytes in zip(costs, missing, strict=True)]
        """Of each layer, less its own gradients that are not there, and those of all in front of it."""
        self._largest = RangeMaximum(self.needs)
        self._rows: dict[int, _PeaksToCut] = {}

    def largest(self, start: int, stop: int) -> int:
        """Of layers that run one by one."""
        return self._largest.of(start, stop) + self._missing[start]

    def fused(self, start: int) -> int:
        """Of all layers from one on, up to the loss."""
        return self._peak(start, len(self.needs))

    def recomputed(self, start: int, stop: int, incoming: Gradients) -> int:
        """Of a recomputed range: it ends with all results there, and gradients of what the range gives come up."""
        results_bytes = self._results[stop] - self._results[start] - (self._missing[stop] - self._missing[start])
        return max(self._peak(start, stop), results_bytes) + incoming.up + incoming.sums

    def _peak(self, start: int, stop: int) -> int:
        """Of the layers one after the other; gradients that come up are counted elsewhere."""
        row = self._rows.setdefault(stop, _PeaksToCut())
        for layer in reversed(range(start, stop - len(row.most))):
            self._extend(row, layer, stop)
        position = stop - start - 1
        return row.most[position] - self._kept[start] - row.spared[position] + self._missing[start]

    def _extend(self, row: _PeaksToCut, layer: int, stop: int) -> None:
        lives, behind, made = self._lives, self._lives.behind(stop), self._lives.made[layer]
        spared_bytes = row.spared[-1] if row.spared else 0
        spared_bytes += lives.released_bytes(made, stop) - lives.released_bytes(made, len(self.needs))
        given = [value for value in made if value.gradient_bytes and value.last_reader >= behind]
        row.bytes[layer] = (
            self._kept[layer]
            + spared_bytes
            + self.needs[layer]
            + lives.pending_gradient_bytes(layer, behind)
            - sum(value.gradient_bytes for value in given)
        )
        for value in given:  # the last of the range to read it adds its gradient to what came up, in new memory
            if (position := bisect_left(value.readers, stop)) > 0:
                row.bytes[value.readers[position - 1]] += value.gradient_bytes
                row.most[-1] = max(row.most[-1], row.bytes[value.readers[position - 1]])
        row.most.append(max(row.most[-1] if row.most else 0, row.bytes[layer]))
        row.spared.append(spared_bytes)


def _unmade_bytes(cost: LayerCost) -> int:
    """Gradients that a layer's first run has yet to make, but for those of weights that another may have run before."""
    shared_bytes = sum(weight.num_bytes for weight in cost.shared if weight.is_trained)
    return max(min(cost.unmade_bytes, cost.gradient_bytes) - shared_bytes, 0)


@dataclass(slots=True)
class _PeaksToCut:
    """Of ranges that end at one cut, by how many layers they have."""

    most: list[int] = field(default_factory=list)
    """Peaks, with what all layers in front of the range keep."""
    spared: list[int] = field(default_factory=list)
    """Results that are not kept, since only layers behind the cut save something of them."""
    bytes: dict[int, int] = field(default_factory=dict)
    """By layer, what there is while it runs backward."""


class RangeMaximum:
    """The largest of any run of numbers, without looking at them all: the maxima of runs of 1, 2, 4, .. are kept."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._runs = [list(numbers)]
        length = 1
        while 2 * length <= len(numbers):
            shorter = self._runs[-1]
            self._runs.append(list(map(max, shorter, shorter[length:])))
            length *= 2

    def of(self, start: int, stop: int) -> int:
        level = (stop - start).bit_length() - 1
        run = self._runs[level]
        return max(run[start], run[stop - (1 << level)])
