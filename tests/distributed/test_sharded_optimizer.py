"""Ranks that each have a part of the optimizer's side train as one process does, in less host memory."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import roundpipe
from roundpipe.core.errors import ConfigError
from tests.distributed import sharded
from tests.distributed.ranks import Ranks
from tests.equality import difference

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")

ADAM = partial(torch.optim.AdamW, amsgrad=True)


def test_checkpoints_go_from_two_ranks_to_one_process_and_back(
    two: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "checkpoint")
    expected = sharded.reference(2.0, ADAM)
    norms = [two.run(sharded.train_with_checkpoint, folder, 2.0, ADAM, (0, 2))[0]["norms"]]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        norms.append(sharded.train_with_checkpoint(folder, 2.0, ADAM, (2, 4))["norms"])
    finally:
        dist.destroy_process_group()
    first, second = two.run(sharded.train_with_checkpoint, folder, 2.0, ADAM, (4, 6))
    for name, tensor in {**expected, "norms": expected["norms"][4:]}.items():
        assert difference(first[name], tensor) <= 1e-5, name
        assert torch.equal(first[name], second[name]), name
    assert difference(torch.cat([*norms, first["norms"]]), expected["norms"]) <= 1e-5


def test_host_memory_falls_to_the_share(two: Ranks) -> None:
    for inside, outside in two.run(sharded.bytes_per_parameter, True):
        # the model's weights and gradients; this rank's part of copies, their gradients and two states
        assert max(inside, outside) <= 4 + 16 / 2 + 0.1


def test_an_overflow_in_one_shard_skips_the_update_of_all(two: Ranks) -> None:
    (scale, weight), (other_scale, other_weight) = two.run(sharded.overflow_in_one_shard)
    assert scale == other_scale == 4.0
    assert weight.isfinite().all() and torch.equal(weight, other_weight)


def test_wrong_use_of_shards_is_refused(two: Ranks) -> None:
    for rank, (inside, written, by_tensor, scaler, alone, failed) in enumerate(two.run(sharded.misuse)):
        assert "new weights of its own shard only" in inside
        assert "0.weight" in written and "written outside of step_fn" in written
        assert "Adafactor" in by_tensor and "element by element" in by_tensor
        assert "torch.amp.GradScaler looks for overflows in this rank's part" in scaler
        assert "rank 0 reads the latest weights" in alone and "rank 1 runs call" in alone
        assert ("on one rank" if rank else "raised in its step_fn") in failed


def test_shards_need_ranks() -> None:
    for wrong in (True, 2):
        with pytest.raises(ConfigError, match=f"shard_optimizer={wrong} with process_group=None"):
            roundpipe.RoundPipe(nn.Linear(2, 2), devices=["cpu"], shard_optimizer=wrong)


@pytest.mark.parametrize("norm_type", [1.0, 3, math.inf])
def test_clipping_in_one_process_is_torchs(norm_type: float) -> None:
    weight = torch.nn.Parameter(torch.randn(3))
    weight.grad = torch.tensor([1.0, -2.0, 4.0])
    norm = roundpipe.clip_grad_norm_(weight, 0.5, norm_type)
    clipped, weight.grad = weight.grad.clone(), torch.tensor([1.0, -2.0, 4.0])
    assert torch.equal(norm, nn.utils.clip_grad_norm_(weight, 0.5, norm_type))
    assert torch.equal(clipped, weight.grad)
    with pytest.raises(ConfigError, match="norm_type=0"):
        roundpipe.clip_grad_norm_(weight, 0.5, 0)


@pytest.mark.long
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_and_norms(tmp_path: Path, size: int) -> None:
    ranks = Ranks(size, tmp_path)
    try:
        for norm_type in (1.0, 2.0, math.inf):
            for kind in (ADAM, torch.optim.NAdam, partial(torch.optim.SGD, momentum=0.9), torch.optim.RMSprop):
                folder = str(tmp_path / f"checkpoint {os.urandom(4).hex()}")
                expected = sharded.reference(norm_type, kind)
                ranks.run(sharded.train_with_checkpoint, folder, norm_type, kind, (0, 3))
                for found in ranks.run(sharded.train_with_checkpoint, folder, norm_type, kind, (3, 6)):
                    for name, tensor in {**expected, "norms": expected["norms"][3:]}.items():
                        assert difference(found[name], tensor) <= 1e-5, (name, norm_type, kind)
    finally:
        ranks.kill()
