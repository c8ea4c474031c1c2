"""A rank that is killed ends the others, and a restart from the latest checkpoint ends where no failure would have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.data_parallel import NUM_STEPS
from tests.distributed.failures import train_with_checkpoints
from tests.distributed.ranks import Ranks

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")

DEADLINE_S = 30.0


def test_a_killed_rank_ends_the_other_and_a_restart_goes_on(two: Ranks, tmp_path: Path) -> None:
    _kill_and_restart(two, tmp_path, is_async=False)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3])
def test_so_it_is_with_asynchronous_steps_and_more_ranks(tmp_path: Path, size: int) -> None:
    ranks = Ranks(size, tmp_path)
    try:
        _kill_and_restart(ranks, tmp_path, is_async=True)
    finally:
        ranks.kill()


def _kill_and_restart(ranks: Ranks, folder: Path, is_async: bool) -> None:
    undisturbed = ranks.run(train_with_checkpoints, str(folder / "undisturbed"), is_async)
    with pytest.raises(AssertionError, match=f"rank {ranks.size - 1}: it ended"):
        ranks.run(train_with_checkpoints, str(folder), is_async, 7)
    for rank in range(ranks.size - 1):
        seconds, _, message = (folder / f"rank {rank}").read_text().partition(" ")
        assert float(seconds) < DEADLINE_S
        assert "another rank has ended, failed or closed its model" in message
    restarted = ranks.run(train_with_checkpoints, str(folder), is_async)
    for found in restarted:
        assert all(torch.equal(found[name], tensor) for name, tensor in undisturbed[0].items())


@pytest.mark.long
def test_torchrun_restarts_from_the_last_whole_checkpoint(two: Ranks, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts"]
    command = [*launch, "1", "-m", "tests.distributed.failures", str(tmp_path / "restarted")]
    # a store for each attempt: torch 2.13 else finds the addresses of ranks that have ended
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    undisturbed = two.run(train_with_checkpoints, str(tmp_path / "undisturbed"), False)[0]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    steps = (tmp_path / "restarted" / "steps of rank 0").read_text().split()
    assert steps == [*map(str, range(8)), *map(str, range(6, NUM_STEPS))]
    found = torch.load(tmp_path / "restarted" / "weights.pt")
    assert found.keys() == undisturbed.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in undisturbed.items())
