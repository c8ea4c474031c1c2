"""What code does outside of its tensors is seen while it runs, and nothing else is."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

from roundpipe.effects.outside import OutsideEffect
from roundpipe.fx.trace.loss import LossCall


@pytest.fixture
def collections() -> Iterator[list[float]]:
    """The times at which garbage was collected, which is at each new object."""
    times: list[float] = []

    def ask_for_the_time(phase: str, info: dict[str, int]) -> None:
        times.append(time.perf_counter())

    thresholds = gc.get_threshold()
    gc.callbacks.append(ask_for_the_time)
    gc.set_threshold(1)
    yield times
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(ask_for_the_time)


def test_a_collection_of_garbage_is_not_the_code_s_doing(collections: list[float]) -> None:
    def count_collections(outputs: object, label: int) -> int:
        count = len(collections)
        [[number] for number in range(label)]
        return len(collections) - count

    assert count_collections(None, 100) > 0
    assert LossCall(count_collections)(None, 100) == 0
    assert gc.isenabled() and count_collections(None, 100) > 0


def test_asking_for_the_time_is() -> None:
    with pytest.raises(OutsideEffect, match="perf_counter"):
        LossCall(lambda outputs, label: time.perf_counter())(None, None)
    assert gc.isenabled()
