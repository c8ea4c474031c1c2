"""Where the values between layers live on a device, for ranges of a chain's layers.

A visit has those that its layers read of others (*taken*) and those that they make. Of the latter, others read some
(*given*): a forward leaves them on the host, a backward has their gradients from there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from roundpipe.core.layers import CarriedValue, LayerCost


class Gradients(NamedTuple):
    """Bytes of gradients that come up for what a range gives."""

    up: int
    """One from each backward stage that reads a value."""
    sums: int
    """Of those that there are several of."""
    last: int
    """What is counted with the last layer's backward, as with that of any other: a gradient of each value it makes."""


class ValueLives:
    """The values of a chain, by the cuts between its layers that they live across."""

    def __init__(self, costs: Sequence[LayerCost]) -> None:
        self.num_layers = len(costs)
        values = [value for cost in costs for value in cost.values]
        self.is_known = bool(values)
        """Else each layer is taken to make what is live behind it, for the next one alone."""
        if not values:
            values = [*_chained(costs)]
        self._live: list[list[CarriedValue]] = [[] for _ in range(len(costs) + 1)]
        self.made: list[list[CarriedValue]] = [[] for _ in costs]
        """By layer."""
        for value in values:
            for cut in range(value.maker + 1, value.last_reader + 1):
                self._live[cut].append(value)
            if value.maker >= 0:
                self.made[value.maker].append(value)
        runs = [
            not self.is_known or cost.gradient_bytes > 0 or any(value.gradient_bytes for value in made)
            for cost, made in zip(costs, self.made, strict=True)
        ]
        self._num_running = list(accumulate(runs, initial=0))
        self._workspace = [cost.workspace_bytes for cost in costs]
        self._forward_peaks: dict[tuple[int, int, int], int] = {}
        self._rows: dict[int, list[int]] = {}
        self._read_apart: dict[int, list[tuple[int, int, int]]] = {}
        """By cut, of values that several layers behind it read: their maker, and the first and last of these."""

    def runs_backward(self, start: int, stop: int) -> bool:
        """Whether anything runs in a backward of a range: a gradient flows to some of its weights or values."""
        return self._num_running[stop] > self._num_running[start]

    def behind(self, stop: int) -> int:
        """A reader's position from which on it is behind a range: the outputs are made with the last layer."""
        return stop + (stop == self.num_layers)

    def taken(self, start: int, stop: int) -> list[CarriedValue]:
        behind = self.behind(stop)
        return [value for value in self._live[start] if value.is_read(start, behind)]

    def given(self, start: int, stop: int) -> list[CarriedValue]:
        return [value for value in self._live[stop] if value.maker >= start]

    def incoming(self, start: int, stop: int, cuts: Sequence[int]) -> Gradients:
        """Gradients of what a range gives; behind it backward stages begin at these cuts, ascending."""
        up = sums = last = 0
        for value in self.given(start, stop):
            number = len({bisect_right(cuts, reader) for reader in value.readers if reader >= stop})
            up += number * value.gradient_bytes
            sums += value.gradient_bytes * (number > 1)
            last += value.gradient_bytes * (value.maker == stop - 1)
        return Gradients(up, sums, last)

    def telling_cuts(self, start: int, stop: int, cuts: Sequence[int]) -> tuple[int, ...]:
        """Of cuts behind a range, those between readers of what it gives: they tell how many gradients come up."""
        if stop not in self._read_apart:
            values = [value for value in self._live[stop] if value.gradient_bytes and len(value.readers) > 1]
            readers = [(value.maker, value.readers[bisect_left(value.readers, stop)]) for value in values]
            self._read_apart[stop] = [
                (maker, first, value.last_reader)
                for (maker, first), value in zip(readers, values, strict=True)
                if first < value.last_reader
            ]
        spans = [(first, last) for maker, first, last in self._read_apart[stop] if maker >= start]
        return tuple(cut for cut in cuts if any(first < cut <= last for first, last in spans)) if spans else ()

    def reads(self, layer: int) -> list[CarriedValue]:
        return self.taken(layer, layer + 1)

    def pending_gradient_bytes(self, layer: int, behind: int) -> int:
        """Of values made in front of a layer, which layers between it and another have read: they are added up."""
        return sum(
            value.gradient_bytes
            for value in self._live[layer + 1]
            if value.gradient_bytes and value.maker < layer and value.is_read(layer + 1, behind)
        )

    def released_bytes(self, made: Iterable[CarriedValue], stop: int) -> int:
        """Of results, those that no graph of a layer in front of a cut holds."""
        return sum(value.own_bytes for value in made if not (value.savers and value.savers[0] < stop))

    def forward_peak(self, start: int, first: int, stop: int) -> int:
        """The most that layers of a range have without autograd from one on, beside what the range takes."""
        if first == start:
            row = self._rows.setdefault(start, [])
            for layer in range(start + len(row), stop):
                row.append(max(row[-1] if row else 0, self._forward_bytes(start, layer)))
            return row[stop - start - 1]
        key = start, first, stop
        if key not in self._forward_peaks:
            self._forward_peaks[key] = max(self._forward_bytes(start, layer) for layer in range(first, stop))
        return self._forward_peaks[key]

    def _forward_bytes(self, start: int, layer: int) -> int:
        return self._workspace[layer] + sum(
            value.num_bytes for value in self._live[layer] if value.maker >= start and value.maker < layer
        )


def _chained(costs: Sequence[LayerCost]) -> Iterator[CarriedValue]:
    if costs[0].carry_bytes:  # what comes in is not known either
        yield CarriedValue(-1, (0,), costs[0].carry_bytes)
    for layer, cost in enumerate(costs):
        if cost.carry_bytes:
            yield CarriedValue(layer, (layer + 1,), cost.carry_bytes, cost.carry_bytes)
