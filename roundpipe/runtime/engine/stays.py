"""Which weights of a step's layers stay on devices."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence

from roundpipe.core.layers import LayerChain
from roundpipe.runtime.weights.layer_weights import Habits, LayerWeights
from roundpipe.runtime.weights.residents import Stay

MOST_KEPT = 8
"""Of one chain: of plans by turns, in training and without."""


class KeptStays:
    """The stays of a chain's layers, made anew where something that they depend on is otherwise."""

    def __init__(self) -> None:
        self._weights: Sequence[LayerWeights] = ()
        self._modes: list[bool] = []
        self._habits: list[Habits] = []
        self._known: dict[tuple[object, ...], list[Stay]] = {}

    def of(
        self,
        chain: LayerChain,
        weights: Sequence[LayerWeights],
        modes: list[bool],
        layers: Collection[int],
        *,
        with_trained: bool,
        staying: Collection[int],
    ) -> list[Stay]:
        """See `stays_of`; the same ``weights`` have the same tensors, and ``modes`` are those of all modules."""
        if weights is not self._weights or modes != self._modes:
            self._weights, self._modes = weights, modes
            self._habits = [one.habits_of(one.modules) for one in weights]
            self._known.clear()
        writes = tuple([habits.writes_buffers for habits in self._habits])
        key = frozenset(layers), with_trained, frozenset(staying), writes
        if (stays := self._known.get(key)) is None:
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            stays = stays_of(chain, weights, layers, with_trained=with_trained, staying=staying)
            self._known[key] = stays
        return stays


def stays_of(
    chain: LayerChain,
    weights: Sequence[LayerWeights],
    layers: Collection[int],
    *,
    with_trained: bool = False,
    staying: Collection[int] = (),
) -> list[Stay]:
    """What of each layer stays, where the frozen weights of some do, or those that are trained as well.

    ``staying`` are parameters that live on the device, by their identities, whichever layers have them.
    """
    stays, shared = [], _shared(chain, weights) if layers else frozenset()
    for index, one in enumerate(weights):
        frozen = one.frozen_slots() if index in layers else ()
        twins = tuple(slot for slot in one.trained_slots() if id(one.slots[slot].tensor) in staying) if staying else ()
        trained = {*one.steady_slots()}.difference(frozen, twins) if index in layers and with_trained else ()
        stays.append(Stay.of(one, frozen, sorted(trained), twins, shared))
    return stays


def _shared(chain: LayerChain, weights: Sequence[LayerWeights]) -> frozenset[int]:
    """Identities of tensors that several layers have, of those for which plans know that layers share something."""
    tensors = (
        {id(slot.current) for slot in one.slots} for one, cost in zip(weights, chain.costs, strict=True) if cost.shared
    )
    counts = Counter(itertools.chain.from_iterable(tensors))
    return frozenset(tensor for tensor, count in counts.items() if count > 1)
