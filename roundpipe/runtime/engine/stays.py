"""Which weights of a step's layers stay on devices."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence

from roundpipe.core.layers import LayerChain
from roundpipe.runtime.weights.layer_weights import LayerWeights
from roundpipe.runtime.weights.residents import Stay


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
