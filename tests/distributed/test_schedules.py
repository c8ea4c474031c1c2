"""Torch's schedules train stages as one process trains the model: losses, gradients, weights, buffers."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from tests.distributed.models import SCHEDULES, train_on_ranks
from tests.distributed.ranks import Ranks

TOLERANCE = 1e-5

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")


MODELS = ["llama", "gpt2", "t5", "mixture_of_experts", "unet"]
ALWAYS_RUN = {
    *(("llama", schedule) for schedule in SCHEDULES),
    ("gpt2", "ScheduleZBVZeroBubble"),
    ("unet", "ScheduleInterleaved1F1B"),
}
CASES = [(model, schedule) for model in MODELS for schedule in SCHEDULES]


def test_every_schedule_is_run() -> None:
    assert {schedule for _, schedule in ALWAYS_RUN} == set(SCHEDULES)
    assert set(CASES) > ALWAYS_RUN


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        pytest.param(*case, marks=() if case in ALWAYS_RUN else pytest.mark.long)
        for case in [*CASES, ("resnet", "ScheduleLoopedBFS")]
    ],
)
def test_stages_train_as_one_process(two: Ranks, model: str, schedule: str) -> None:
    assert max(two.run(train_on_ranks, model, schedule)) <= TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleInterleavedZeroBubble"])
def test_stages_that_no_gradient_goes_into(two: Ranks, schedule: str) -> None:
    """The way down is frozen, so that a stage behind the first one gets nothing with a gradient."""
    assert max(two.run(train_on_ranks, "unet", schedule, ("down",))) <= TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_schedule_evaluates_before_it_trains(two: Ranks, model: str, schedule: str) -> None:
    assert max(two.run(train_on_ranks, model, schedule, (), True)) <= TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize(("model", "schedule"), CASES)
def test_four_ranks(four: Ranks, model: str, schedule: str) -> None:
    assert max(four.run(train_on_ranks, model, schedule)) <= TOLERANCE


def test_torch_has_what_a_stage_overrides() -> None:
    """If this fails: torch finds out shapes another way, and `ModelStage` must keep that run without effect again."""
    if hasattr(PipelineStage, "_compute_outputs"):  # private: the only call that tells such a run from a real one
        return
    # before torch 2.12; all private but the last two
    names = ("_shape_inference", "_prepare_forward_infra", "_get_init_p2p_neighbors_ops")
    for name in (*names, "forward_one_chunk", "backward_one_chunk"):
        assert callable(getattr(PipelineStage, name))
