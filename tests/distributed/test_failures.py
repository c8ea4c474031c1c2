"""A rank that is killed ends the others, and a restart from the latest checkpoint ends where no failure would have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.failures import train_with_checkpoints
from tests.distributed.ranks import Ranks

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo"),
    pytest.mark.long,
]

DEADLINE_S = 30.0


@pytest.mark.parametrize(("size", "is_async"), [(2, False), (2, True), (3, True)])
def test_a_killed_rank_ends_the_others_and_a_restart_goes_on(tmp_path: Path, size: int, is_async: bool) -> None:
    ranks = Ranks(size, tmp_path)
    try:
        undisturbed = ranks.run(train_with_checkpoints, str(tmp_path / "undisturbed"), is_async)
        with pytest.raises(AssertionError, match=f"rank {size - 1}: it ended"):
            ranks.run(train_with_checkpoints, str(tmp_path), is_async, 7)
        for rank in range(size - 1):
            seconds, _, message = (tmp_path / f"rank {rank}").read_text().partition(" ")
            assert float(seconds) < DEADLINE_S
            assert "another rank has ended, failed or closed its model" in message
        restarted = ranks.run(train_with_checkpoints, str(tmp_path), is_async)
        for found in restarted:
            assert all(torch.equal(found[name], tensor) for name, tensor in undisturbed[0].items())
    finally:
        ranks.kill()
