"""Ranks that each train on a part of the batch end where one process ends that trains on all of it."""

from __future__ import annotations

import datetime
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import roundpipe
from roundpipe.core.errors import ConfigError
from roundpipe.runtime.ranks.group import _advice_on_threads, _timeout_of
from tests.distributed.data_parallel import (
    Kind,
    averages_during_the_backward,
    hangs,
    misuse,
    other_averages,
    overflow_on_one_rank,
    reference,
    train,
)
from tests.distributed.ranks import Ranks
from tests.equality import difference

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")

TOLERANCE = 1e-5
KINDS = [
    Kind(),
    Kind(is_async=True, num_calls=2, loss="weights"),
    Kind(is_async=True, loss="sum"),
    Kind(loss="weights", scope="batch", num_calls=2),
    Kind(is_async=True, wrapper=roundpipe.AutoRoundPipe),
    Kind(loss="weights", wrapper=roundpipe.AutoRoundPipe),
    Kind(shard=True, loss="weights", num_calls=2),
    Kind(shard=True, is_async=True),
    Kind(loss="own", num_calls=2, wrapper=roundpipe.compile),
    Kind(loss="own", is_async=True, microbatches=1, devices=1, wrapper=roundpipe.compile),
]


def references(kinds: list[Kind]) -> list[dict[str, torch.Tensor]]:
    return [reference(kind) for kind in kinds]


def assert_trained_as_one_process(ranks: Ranks, kinds: list[Kind]) -> None:
    found, expected = ranks.run(train, kinds), ranks.run(references, kinds)[0]
    for kind, state, *of_ranks in zip(kinds, expected, *found, strict=True):
        for name, tensor in state.items():
            assert difference(of_ranks[0][name], tensor) <= TOLERANCE, (kind, name)
            assert all(torch.equal(of_rank[name], of_ranks[0][name]) for of_rank in of_ranks), (kind, name)


def test_training_is_that_of_one_process(two: Ranks) -> None:
    assert_trained_as_one_process(two, KINDS)


@pytest.mark.long
def test_more_kinds_of_training(two: Ranks) -> None:
    assert_trained_as_one_process(two, [replace(kind, is_async=not kind.is_async, devices=1) for kind in KINDS])


@pytest.mark.long
def test_four_ranks(four: Ranks) -> None:
    assert_trained_as_one_process(four, KINDS)


def test_gradients_are_averaged_while_the_backward_runs(two: Ranks) -> None:
    assert two.run(averages_during_the_backward) == [[True, True], [True, True]]


def test_an_overflow_on_one_rank_skips_the_update_of_all(two: Ranks) -> None:
    (scale, weight), (other_scale, other_weight) = two.run(overflow_on_one_rank)
    assert scale == other_scale == 4.0
    assert weight.isfinite().all() and torch.equal(weight, other_weight)


def test_a_rank_that_hangs_ends_the_others_after_the_group_s_timeout(two: Ranks) -> None:
    (message, seconds), (late, _) = two.run(hangs, 1.5, 4.0)
    assert "hangs for longer than the timeout" in message and 1.5 <= seconds < 4.0
    assert "another rank has ended, failed or closed its model" in late


def test_wrong_use_is_refused_on_all_ranks(two: Ranks) -> None:
    for rank, messages in enumerate(two.run(misuse)):
        print(rank, *messages, sep="\n")
        model, options, loop, inside, calls, again, steps, raised, *ended = messages
        assert "theirs are different: rank 1 has 0.0.weight" in model
        assert "torch.float32" in options
        assert "put optimizer.step() into a step_fn" in loop
        assert "gradients are not averaged over ranks" in inside
        assert "rank 0 makes update 1 of" in calls and "after call 2 of forward_backward" in calls and again == calls
        assert "rank 0 runs call 1 of forward_backward, by samples; rank 1 makes update 1" in steps
        assert "rank 1 has failed" in raised or rank
        assert rank or "another rank has ended, failed or closed its model" in ended[0]


def test_what_torch_would_average_is_refused(two: Ranks) -> None:
    for inside, around, sharded in two.run(other_averages):
        assert "its module 0 is a DistributedDataParallel, whose backward never runs" in inside
        assert "around is inside a DistributedDataParallel" in around and "process_group='world'" in around
        assert ".weight is a DTensor, of which each rank has a part" in sharded


def test_what_is_no_group_is_refused() -> None:
    for group, message in (("world", "start the program with torchrun"), ("all", "give 'world'"), (-100, "is not in")):
        with pytest.raises(ConfigError, match=message):
            roundpipe.RoundPipe(nn.Linear(2, 2), devices=["cpu"], process_group=group)


def test_one_thread_that_torchrun_gives_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(32)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert not _advice_on_threads()  # private: a warning of `RankGroup`, which takes torchrun to see
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert "With 32 cores for 4 ranks, start torchrun with OMP_NUM_THREADS=8" in _advice_on_threads()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    assert not _advice_on_threads()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not _advice_on_threads()


def test_torch_has_what_ranks_are_connected_by() -> None:
    """If this fails: `RankGroup` must get the default group's store, or a store of its own, another way."""
    assert callable(dist.distributed_c10d._get_default_store)  # private: where new groups meet
    assert callable(dist.distributed_c10d._get_default_group)  # private: that of "world"
    assert dist.GroupMember.NON_GROUP_MEMBER == -100


def test_torch_tells_the_timeout_of_a_group(tmp_path: Path) -> None:
    """If this fails: `_timeout_of` must find it another way; until then ranks wait for 30 minutes."""
    timeout = datetime.timedelta(seconds=77)
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1, timeout=timeout)
    try:
        group: Any = dist.distributed_c10d._get_default_group()
        # private: what `RankGroup` takes of torch
        assert [group._get_backend(device).options._timeout for device in group._device_types] == [timeout] * 2
        shorter = dist.new_group([0], timeout=timeout / 7)
        assert _timeout_of(shorter) == timeout / 7  # private: what `RankGroup` takes
    finally:
        dist.destroy_process_group()
