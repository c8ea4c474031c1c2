"""Over slow links a step takes what `plan --hosts` says, and ranks send what it counts."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from roundpipe.tools.hosts import Network
from tests.distributed.ranks import Ranks
from tests.distributed.throttled import NUM_PARAMETERS, train

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")


@pytest.mark.parametrize("shards", [False, True])
def test_a_throttled_link_takes_the_time_that_is_planned(two: Ranks, shards: bool) -> None:
    """The link is so slow that a step on this machine, whatever runs beside it, is short beside it."""
    network = Network(2, 6e6)
    free, measured = (two.run(train, shards, rate)[0] for rate in (None, network.bytes_per_s))
    size = 4 * NUM_PARAMETERS
    planned_bytes = network.sharding_bytes(size, size) if shards else network.averaging_bytes(size)
    assert measured.sent_bytes == pytest.approx(planned_bytes, rel=0.01)
    planned_s = network.step_s(free.seconds_per_step, 0.0, planned_bytes)
    assert planned_s == planned_bytes / network.bytes_per_s
    assert planned_s <= measured.seconds_per_step <= 2 * planned_s
