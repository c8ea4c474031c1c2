"""The weights of all ranks as one checkpoint, and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import roundpipe
from roundpipe.core.errors import CheckpointError
from roundpipe.distributed import StageState, parameters_on_meta, partition_stages, pipeline_stage, save_stages
from tests.distributed.ranks import Ranks
from tests.models import SharedTwice

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")


EXAMPLE = {"input_ids": torch.zeros(2, 6, dtype=torch.long)}


def shared_twice() -> SharedTwice:
    torch.manual_seed(0)
    return SharedTwice()


def save_and_read(folder: str) -> int:
    """Save the stages of both ranks; read them as one stage per rank, and as three; number of tensors compared."""
    rank = dist.get_rank()
    model = shared_twice()
    save_stages(pipeline_stage(model, rank, 2, example_kwargs=EXAMPLE), folder)
    with pytest.raises(CheckpointError, match="rank 0: .* is not empty; give a new folder"):
        save_stages(pipeline_stage(model, rank, 2, example_kwargs=EXAMPLE), folder)
    expected = model.state_dict()
    compared = 0
    for num_stages in (2, 3):
        with parameters_on_meta():
            empty = SharedTwice()
        parts = partition_stages(empty, num_stages, example_kwargs=EXAMPLE)
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


def train_from(folder: str, num_stages: int, steps: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Weights of this rank's stages after steps with given gradients, from the checkpoint if they are not the first.

    Half of them at another learning rate. What the ranks have before they load is different, and is not the model's.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 + rank)
    parts = partition_stages(SharedTwice() if steps[0] else shared_twice(), num_stages, example_kwargs=EXAMPLE)
    stages = [pipeline_stage(parts, index, num_stages) for index in range(rank, num_stages, size)]
    named = [each for stage in stages for each in stage.submod.named_parameters()]
    groups = [[each for name, each in named if name.endswith("bias") is biases] for biases in (False, True)]
    optimizer = torch.optim.AdamW([{"params": group, "lr": 0.01 + 0.02 * steps[0]} for group in groups if group])
    StageState(stages, None).state_dict()  # of a rank that trains nothing
    state = {"training": StageState(stages, optimizer)}
    if steps[0]:
        dcp.load(state, checkpoint_id=folder)
    for step in range(*steps):
        for name, weight in named:
            generator = torch.Generator().manual_seed(100 * step + len(name))
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()
    if not steps[0]:
        dcp.save(state, checkpoint_id=folder)
    found: dict[str, torch.Tensor] = {}
    for name, weight in named:
        assert torch.equal(found.setdefault(name, weight.detach().clone()), weight), name
    return found


def test_torch_s_checkpoints_are_read_by_any_number_of_stages(two: Ranks, tmp_path: Path) -> None:
    """Also where several stages of a rank share weights."""

    def joined(folder: str, num_stages: int, steps: tuple[int, int]) -> dict[str, torch.Tensor]:
        return {name: each for found in two.run(train_from, folder, num_stages, steps) for name, each in found.items()}

    folder = str(tmp_path / "first")
    joined(folder, 2, (0, 3))
    expected = joined(str(tmp_path / "undisturbed"), 2, (0, 5))
    for num_stages in (2, 3, 4):
        found = joined(folder, num_stages, (3, 5))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), num_stages
