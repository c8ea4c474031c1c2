"""Measured seconds of layers: what the calls of a step took, and their exponential mean over steps.

The workers note in a step's `StepTimes` when each call began and ended: two marks on the device's stream, no waiting.
After the step `LayerTimes.learn` takes it in: forwards (and recomputations) by layer; the backward of several layers
at once is dealt out by the seconds known so far; the loss belongs to the last layer.

Invariant: costs keep all bytes; only seconds are replaced by measured ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from roundpipe.core.layers import LayerCost
from roundpipe.runtime.device.backend import Moment

LATEST_SHARE = 0.3
"""Weight of the latest step in the mean."""

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
        by_call: dict[tuple[Kind, tuple[int, ...]], list[float]] = {}
        for kind, layers, began, ended in self._spans:
            by_call.setdefault((kind, tuple(layers)), []).append(ended.seconds_since(began))
        return {key: sum(seconds) / len(seconds) for key, seconds in by_call.items()}


class LayerTimes:
    """Exponential means over the measured steps of one chain.

    The estimated costs are for a microbatch of ``example_elements``; 0: that of the first measured step.
    """

    def __init__(self, costs: Sequence[LayerCost], example_elements: int) -> None:
        self._estimated = tuple(costs)
        self._example_elements = example_elements
        self._forward_s: dict[int, float] = {}
        self._backward_s: dict[int, float] = {}
        self._loss_s: float | None = None
        self._seen = 0

    @property
    def example_elements(self) -> int:
        return self._example_elements

    @property
    def num_steps(self) -> int:
        """Steps in the means; the first one measured is not, since it warms up."""
        return max(self._seen - 1, 0)

    def learn(self, times: StepTimes, elements: int) -> None:
        """Take in a step that is over; its seconds scale with the elements of its largest microbatch's arguments."""
        self._seen += 1
        if self._seen == 1:
            return
        if not self._example_elements:
            self._example_elements = max(elements, 1)
        scale = self._example_elements / max(elements, 1)
        for (kind, layers), seconds in times.means().items():
            seconds *= scale
            if kind == "forward":
                (layer,) = layers
                self._forward_s[layer] = _mixed(self._forward_s.get(layer), seconds)
            elif kind == "loss":
                self._loss_s = _mixed(self._loss_s, seconds)
            else:
                for layer, share in zip(layers, self._shares(layers), strict=True):
                    self._backward_s[layer] = _mixed(self._backward_s.get(layer), seconds * share)

    def _shares(self, layers: Sequence[int]) -> list[float]:
        seconds = [self._backward_s.get(layer, self._estimated[layer].backward_s) for layer in layers]
        is_known = [layer in self._backward_s for layer in layers]
        if any(is_known) and not all(is_known):  # measured and estimated seconds are not of one scale
            seconds = [self._estimated[layer].backward_s for layer in layers]
        total = sum(seconds)
        return [layer_s / total if total else 1 / len(layers) for layer_s in seconds]

    def costs(self, elements: int) -> list[LayerCost]:
        """Costs for a microbatch of so many elements: measured seconds where there are any, else estimated ones."""
        factor = elements / self._example_elements if self._example_elements else 1.0
        costs = []
        for layer, cost in enumerate(self._estimated):
            forward_s = self._forward_s.get(layer, cost.forward_s)
            # seconds that were estimated go with those that were measured
            estimated_s = cost.backward_s * (forward_s / cost.forward_s if cost.forward_s else 1.0)
            backward_s = self._backward_s.get(layer, estimated_s)
            if layer == len(self._estimated) - 1:
                forward_s += self._loss_s or 0.0
            costs.append(replace(cost, forward_s=forward_s, backward_s=backward_s).scaled(factor))
        return costs


def _mixed(mean: float | None, latest: float) -> float:
    return latest if mean is None else mean + LATEST_SHARE * (latest - mean)
