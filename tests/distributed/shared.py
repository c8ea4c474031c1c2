"""Transfers of a rank through memory that ranks share, and training on ranks that share none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

from roundpipe.runtime.ranks import group as group_module
from roundpipe.runtime.ranks import shared_memory
from roundpipe.runtime.ranks.group import RankGroup
from tests.distributed.data_parallel import Kind, train

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
SLOT_BYTES = 192


def connect(shares: bool) -> RankGroup:
    """Ranks of this machine, with or without memory that they share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "SLOT_BYTES", SLOT_BYTES)
        if not shares:
            patch.setattr(group_module, "open_all", lambda addresses: None)
        group = RankGroup("world", nn.Linear(2, 2), ())
    assert (group._memory is not None) == shares  # private: nothing but time shows which way is taken
    return group


def transfers(shares: bool) -> list[torch.Tensor]:
    """What arrives at this rank, of tensors larger and smaller than a slot, some of them empty."""
    group, rank, size = connect(shares), dist.get_rank(), dist.get_world_size()
    arrived = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "SLOT_BYTES", SLOT_BYTES)
        for dtype in DTYPES:
            for count in (0, 1, 7, 500):
                own = (torch.arange(count) % 11 + 100 * rank).to(dtype)
                total = own.clone()
                group.add_up([total])
                several = [own.clone(), own[: count // 3].clone(), own.new_empty(0), own.clone()]
                group.add_up(several, size if dtype.is_floating_point else 1)
                lengths = [count // size + (index == 0) for index in range(size)]
                sent = torch.arange(sum(lengths)).remainder(13).add(50 * rank).to(dtype)
                received = torch.empty(size, lengths[rank], dtype=dtype)
                group.swap(received, sent, lengths)
                found = torch.empty(size, count, dtype=dtype)
                group.collect(found, own)
                arrived += [total, *several, received, found]
    group.close()
    return arrived


def train_without(kinds: Sequence[Kind]) -> list[dict[str, torch.Tensor]]:
    """`train` on ranks that don't find each other's memory, such as those of several hosts."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank():  # only some, as where two of three ranks are on one host
            # private: in the place of a second machine
            patch.setattr(shared_memory, "_host", lambda: "another machine")
        return train(kinds)
