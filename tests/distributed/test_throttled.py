"""Over slow links a step takes what `plan --hosts` says, and ranks send what it counts."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from roundpipe.core.layers import LayerCost
from roundpipe.planning.static_schedules import HostNetwork, StaticKind, simulate_static
from roundpipe.tools.hosts import Network
from tests.distributed import throttled_stages
from tests.distributed.ranks import Ranks
from tests.distributed.throttled import NUM_PARAMETERS, train

TRIES = 5

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")


@pytest.mark.parametrize("shards", [False, True])
def test_a_throttled_link_takes_the_time_that_is_planned(two: Ranks, shards: bool) -> None:
    _compare(two, shards)


@pytest.mark.long
@pytest.mark.parametrize("shards", [False, True])
def test_so_it_does_over_four_ranks(four: Ranks, shards: bool) -> None:
    _compare(four, shards)


def _compare(ranks: Ranks, shards: bool) -> None:
    """The link is so slow that a step on this machine is short beside it; other processes may take the cores."""
    network = Network(ranks.size, 6e6)
    size = 4 * NUM_PARAMETERS
    planned_bytes = network.sharding_bytes(size, size) if shards else network.averaging_bytes(size)
    planned_s = network.step_s(0.0, 0.0, planned_bytes)
    assert planned_s == planned_bytes / network.bytes_per_s
    for _ in range(TRIES):
        measured = ranks.run(train, shards, network.bytes_per_s)[0]
        assert measured.sent_bytes == pytest.approx(planned_bytes, rel=0.01)
        assert measured.seconds_per_step >= planned_s
        if measured.seconds_per_step <= 2 * planned_s:
            return
    pytest.fail(f"{planned_s} s planned, {measured.seconds_per_step} s measured, {TRIES} times")


STATIC: list[tuple[str, StaticKind, int]] = [
    ("ScheduleGPipe", "gpipe", 1),
    ("Schedule1F1B", "1f1b", 1),
    ("ScheduleInterleaved1F1B", "interleaved", 2),
]
FORWARD_S, HOP_S = 0.05, 0.15


@pytest.mark.long
@pytest.mark.parametrize("case", STATIC)
def test_torchs_schedules_take_the_time_that_is_planned(two: Ranks, case: tuple[str, StaticKind, int]) -> None:
    _compare_static(two, *case)


@pytest.mark.long
@pytest.mark.parametrize("case", STATIC)
def test_so_they_do_over_four_ranks(four: Ranks, case: tuple[str, StaticKind, int]) -> None:
    _compare_static(four, *case)


def _compare_static(ranks: Ranks, schedule: str, kind: StaticKind, num_chunks: int) -> None:
    """Layers and links sleep, so that a run can't be shorter; other processes may take the cores."""
    size, forward_s, bytes_per_s = ranks.size, FORWARD_S / num_chunks, throttled_stages.CARRY_BYTES / HOP_S
    cost = LayerCost(
        forward_s=forward_s,
        backward_s=2 * forward_s,
        num_parameters=0,
        weight_bytes=0,
        gradient_bytes=0,
        activation_bytes=0,
        carry_bytes=throttled_stages.CARRY_BYTES,
    )
    planned_s = simulate_static(
        kind,
        [cost] * (size * num_chunks),
        num_workers=size,
        num_microbatches=2 * size,
        num_chunks=num_chunks,
        network=HostNetwork(bytes_per_s, devices_per_host=1),
    ).seconds_per_step
    for _ in range(TRIES):
        measured_s = ranks.run(throttled_stages.train, schedule, 2 * size, forward_s, bytes_per_s)[0]
        print(f"{size} ranks, {schedule}: {planned_s:.3f} s planned, {measured_s:.3f} s measured")
        assert measured_s >= 0.95 * planned_s
        if measured_s <= 1.5 * planned_s:
            return
    pytest.fail(f"{planned_s} s planned, {measured_s} s measured, {TRIES} times")
