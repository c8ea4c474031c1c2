"""What code does outside of its tensors is seen while it runs, and nothing else is."""

from __future__ import annotations

import cProfile
import gc
import sys
import time
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from roundpipe.core.errors import TraceError
from roundpipe.effects.outside import OutsideEffect
from roundpipe.fx.trace.loss import LossCall, trace_loss


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


def asking(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    time.perf_counter()
    return (first - second).abs().sum(-1)


def test_so_it_is_in_a_function_that_torch_calls() -> None:
    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.triplet_margin_with_distance_loss(outputs, label, -label, distance_function=asking)

    with pytest.raises(TraceError, match="perf_counter"):
        trace_loss(loss_fn, torch.randn(4, 3), torch.randn(4, 3))


def test_torch_itself_is_not_watched() -> None:
    """A trace would take three times as long."""
    watches = set()

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs, label)

    original = torch._C._nn.mse_loss

    def noting(*args: object, **kwargs: object) -> torch.Tensor:
        watches.add(sys.getprofile())
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C._nn, "mse_loss", noting)
        trace_loss(loss_fn, torch.randn(4, 3), torch.randn(4, 3))
    assert watches == {None}


def test_a_profiler_goes_on_behind_it() -> None:
    with cProfile.Profile() as profile:
        trace_loss(F.mse_loss, torch.randn(4, 3), torch.randn(4, 3))
        asking(torch.ones(1), torch.ones(1))
    profile.create_stats()
    assert any(name == "asking" for _, _, name in profile.stats)  # type: ignore[attr-defined]
