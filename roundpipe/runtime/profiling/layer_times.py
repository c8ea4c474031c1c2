"""Measured seconds of layers: what the calls of a step took, and what they take in the quieter of the latest steps.

The workers note in a step's `StepTimes` when each call began and ended: two marks on the device's stream, no waiting.
After the step `LayerTimes.learn` takes it in: forwards (and recomputations) by layer; the backward of several layers
at once is dealt out by the seconds known so far; the loss belongs to the last layer.

A device that waits for its worker's Python within a layer is measured as if the layer took so long: other threads, such
as one that plans, can double that for some steps. So it is no mean that counts, but the lower quarter.

Invariant: costs keep all bytes; only seconds are replaced by measured ones.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Literal

from roundpipe.core.layers import LayerCost
from roundpipe.runtime.device.backend import Moment

KEPT = 5
"""Steps whose seconds are kept."""
MANY_STEPS = 1000
"""Steps that times count as which are known without any."""

Kind = Literal["forward", "loss", "backward"]


class StepTimes:
    """What the calls of one step took; all its workers add to it."""

    def __init__(self) -> None:
        self._spans: list[tuple[Kind, Sequence[int], Moment, Moment]] = []
        self._is_over = False
        self.failed = False
        """Whether an error ended the step, so that not all calls were made."""

    def end(self, *, failed: bool) -> None:
        self._is_over, self.failed = True, failed

    def add(self, kind: Kind, layers: Sequence[int], began: Moment, ended: Moment) -> None:
        """One call of these layers with one microbatch."""
        self._spans.append((kind, layers, began, ended))

    @property
    def is_done(self) -> bool:
        """Whether the step is over and every moment has come."""
        return self._is_over and all(ended.is_done() for *_, ended in self._spans)

    def means(self) -> dict[tuple[Kind, tuple[int, ...]], float]:
        """Mean seconds per call, by kind and layers."""
        by_call: defaultdict[tuple[Kind, tuple[int, ...]], list[float]] = defaultdict(list)
        for kind, layers, began, ended in self._spans:
            by_call[kind, tuple(layers)].append(ended.seconds_since(began))
        return {key: fmean(seconds) for key, seconds in by_call.items()}


class LayerTimes:
    """What layers take in the measured steps of one chain.

    The estimated costs are for a microbatch of ``example_elements``; 0: that of the first measured step.
    """

    def __init__(self, costs: Sequence[LayerCost], example_elements: int) -> None:
        self._estimated = tuple(costs)
        self.example_elements = example_elements
        self._kept: defaultdict[tuple[Kind, int], deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._seconds: dict[tuple[Kind, int], float] = {}
        """By layer; the loss is of the last one."""
        self._seen = 0

    @classmethod
    def known(cls, costs: Sequence[LayerCost], example_elements: int) -> LayerTimes:
        """Seconds that need not be measured: as after many steps."""
        times = cls(costs, example_elements)
        times._seen = MANY_STEPS
        return times

    @property
    def num_steps(self) -> int:
        """Steps that count; the first one measured does not, since it warms up."""
        return max(self._seen - 1, 0)

    def learn(self, times: StepTimes, elements: int) -> None:
        """Take in a step that is over; its seconds scale with the elements of its largest microbatch's arguments."""
        self._seen += 1
        if self._seen == 1:
            return
        self.example_elements = self.example_elements or max(elements, 1)
        scale = self.example_elements / max(elements, 1)
        for (kind, layers), seconds in times.means().items():
            for layer, share in zip(layers, self._shares(layers), strict=True):
                kept = self._kept[kind, layer]
                kept.append(seconds * scale * share)
                self._seconds[kind, layer] = sorted(kept)[(len(kept) - 1) // 4]

    def _shares(self, layers: Sequence[int]) -> list[float]:
        """How the seconds of layers that ran backward at once are dealt out."""
        known = [self._seconds.get(("backward", layer)) for layer in layers]
        seconds = [value for value in known if value is not None]
        if len(seconds) < len(layers):  # measured and estimated seconds are not of one scale
            seconds = [self._estimated[layer].backward_s for layer in layers]
        total = sum(seconds)
        return [layer_s / total if total else 1 / len(layers) for layer_s in seconds]

    def costs(self, elements: int) -> list[LayerCost]:
        """Costs for a microbatch of so many elements: measured seconds where there are any, else estimated ones."""
        factor = elements / self.example_elements if self.example_elements else 1.0
        costs = []
        for layer, cost in enumerate(self._estimated):
            forward_s = self._seconds.get(("forward", layer), cost.forward_s)
            # seconds that were estimated go with those that were measured
            estimated_s = cost.backward_s * (forward_s / cost.forward_s if cost.forward_s else 1.0)
            backward_s = self._seconds.get(("backward", layer), estimated_s)
            forward_s += self._seconds.get(("loss", layer), 0.0)
            costs.append(replace(cost, forward_s=forward_s, backward_s=backward_s).scaled(factor))
        return costs
