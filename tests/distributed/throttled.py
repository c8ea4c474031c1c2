"""A training on the ranks of the default group, over links as slow as wanted."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from roundpipe import RoundPipe
from roundpipe.runtime.ranks.group import RankGroup

WIDTH, NUM_LAYERS, NUM_STEPS = 256, 6, 4
NUM_PARAMETERS = NUM_LAYERS * WIDTH**2


@dataclass(frozen=True)
class Measured:
    """Of one rank."""

    seconds_per_step: float
    sent_bytes: float
    """Per step, to other ranks."""


def train(shards: bool, bytes_per_s: float) -> Measured:
    """Asynchronous steps, from the first whose exchange waits for another one."""
    size, sent = dist.get_world_size(), [0.0]
    add_up, swap, collect = RankGroup.add_up, RankGroup.swap, RankGroup.collect

    def travel(num_bytes: float) -> None:
        sent[0] += num_bytes
        time.sleep(num_bytes / bytes_per_s)

    def slow_add_up(group: RankGroup, flats: list[torch.Tensor], divisor: int = 1) -> None:
        add_up(group, flats, divisor)
        travel(2 * sum(flat.nbytes for flat in flats) * (size - 1) / size)

    def slow_swap(group: RankGroup, received: torch.Tensor, parts: torch.Tensor, lengths: list[int]) -> None:
        swap(group, received, parts, lengths)
        travel(parts.nbytes - lengths[group.rank] * parts.itemsize)

    def slow_collect(group: RankGroup, found: torch.Tensor, own: torch.Tensor) -> None:
        collect(group, found, own)
        travel(own.nbytes * (size - 1))

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    x = torch.ones(2, WIDTH)
    with (
        pytest.MonkeyPatch.context() as patch,
        RoundPipe(model, devices=["cpu"], process_group="world", shard_optimizer=shards) as pipe,
    ):
        patch.setattr(RankGroup, "add_up", slow_add_up)
        patch.setattr(RankGroup, "swap", slow_swap)
        patch.setattr(RankGroup, "collect", slow_collect)
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=1e-3)
        began = 0.0
        for step in range(NUM_STEPS + 2):
            pipe.forward_backward((x,), label=x, loss_fn=F.mse_loss)
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))  # from the third on, waits for the one before
            if step == 1:
                began, sent[0] = time.monotonic(), 0.0
        seconds = time.monotonic() - began
        sent_bytes = sent[0]
    return Measured(seconds / NUM_STEPS, sent_bytes / NUM_STEPS)
