"""The weights of all ranks as one checkpoint, and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import roundpipe
from roundpipe.core.errors import CheckpointError
from roundpipe.distributed import parameters_on_meta, partition_stages, pipeline_stage, save_stages
from tests.distributed.ranks import Ranks
from tests.models import SharedTwice

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")


def shared_twice() -> SharedTwice:
    torch.manual_seed(0)
    return SharedTwice()


def save_and_read(folder: str) -> int:
    """Save the stages of both ranks; read them as one stage per rank, and as three; number of tensors compared."""
    rank = dist.get_rank()
    example = {"input_ids": torch.zeros(2, 6, dtype=torch.long)}
    model = shared_twice()
    save_stages(pipeline_stage(model, rank, 2, example_kwargs=example), folder)
    with pytest.raises(CheckpointError, match="rank 0: .* is not empty; give a new folder"):
        save_stages(pipeline_stage(model, rank, 2, example_kwargs=example), folder)
    expected = model.state_dict()
    compared = 0
    for num_stages in (2, 3):
        with parameters_on_meta():
            empty = SharedTwice()
        parts = partition_stages(empty, num_stages, example_kwargs=example)
        for index in range(rank, num_stages, 2):
            stage = pipeline_stage(parts, index, num_stages, weights=folder)
            for key, value in stage.submod.state_dict().items():
                assert torch.equal(value, expected[key]), key
                compared += 1
    return compared


@pytest.mark.long
def test_what_all_ranks_save_is_read_by_any_number(two: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    assert min(two.run(save_and_read, str(folder))) > 0
    saved = shared_twice()
    torch.manual_seed(1)
    model = SharedTwice()
    with roundpipe.compile(model, devices=["cpu"]) as pipe:
        pipe.load_checkpoint(folder, weights_only=True)
    for key, value in model.state_dict().items():
        assert torch.equal(value, saved.state_dict()[key]), key
