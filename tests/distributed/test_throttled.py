"""Over slow links a step takes what `plan --hosts` says, and ranks send what it counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from roundpipe.tools.hosts import Network
from tests.distributed.ranks import Ranks
from tests.distributed.throttled import NUM_PARAMETERS, train

TRIES = 5

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")


@pytest.mark.parametrize("shards", [False, True])
def test_a_throttled_link_takes_the_time_that_is_planned(two: Ranks, shards: bool) -> None:
    _compare(two, shards)


@pytest.mark.long
@pytest.mark.parametrize("shards", [False, True])
def test_so_it_does_over_four_ranks(tmp_path: Path, shards: bool) -> None:
    ranks = Ranks(4, tmp_path)
    try:
        _compare(ranks, shards)
    finally:
        ranks.kill()


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
