"""What a sharded optimizer's side does on the ranks of the default group."""

from __future__ import annotations

import copy
import functools
import gc
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import roundpipe
from roundpipe import RoundPipe
from roundpipe.core.errors import ConfigError, RankError
from roundpipe.runtime.ranks import buckets
from tests.distributed.data_parallel import WIDTH, make_model, note_error

NUM_STEPS = 6


class Scaled(nn.Module):
    """Parameters of all sizes: a number, fewer elements than ranks, one that no loss reaches, one with rows apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first = make_model()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.mixed = nn.Parameter(torch.randn(WIDTH, 4, dtype=torch.float64).T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.scale + self.shift + (x @ self.mixed.T).mean(-1, keepdim=True)


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x, y


def _group_options(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    named = list(named)
    return [
        {"params": [each for name, each in named if name.endswith("bias")], "lr": 0.01},
        {"params": [each for name, each in named if not name.endswith("bias")], "weight_decay": 0.1},
    ]


def reference(norm_type: float, optimizer_class: Callable[..., torch.optim.Optimizer]) -> dict[str, Any]:
    """Weights and norms of plain PyTorch, in one process."""
    torch.manual_seed(0)
    model = Scaled()
    optimizer = optimizer_class(_group_options(model.named_parameters()), lr=0.05)
    norms = []
    for step in range(NUM_STEPS):
        x, y = _batch(step)
        F.mse_loss(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3, norm_type))
        optimizer.step()
        optimizer.zero_grad()
    return {**model.state_dict(), "norms": torch.stack(norms)}


def train_with_checkpoint(
    folder: str, norm_type: float, optimizer_class: Callable[..., torch.optim.Optimizer], steps: tuple[int, int]
) -> dict[str, Any]:
    """Train these steps from the checkpoint, if they are not the first, and save another behind them.

    Without process group if the default group has one rank.
    """
    torch.manual_seed(0)
    model, size, rank = Scaled(), dist.get_world_size(), dist.get_rank()
    options: dict[str, Any] = {"process_group": "world", "shard_optimizer": True} if size > 1 else {}
    norms = []
    with (
        pytest.MonkeyPatch.context() as patch,
        RoundPipe(model, devices=["cpu"], **options) as pipe,
    ):
        patch.setattr(buckets, "BUCKET_BYTES", 128)  # so that large parameters travel in pieces
        optimizer = optimizer_class(_group_options(pipe.optim_named_parameters()), lr=0.05)
        if steps[0]:
            assert pipe.load_checkpoint(folder, optimizer).step == steps[0]

        def update() -> None:
            clip = nn.utils.clip_grad_norm_ if len(norms) % 2 else roundpipe.clip_grad_norm_
            norms.append(clip(pipe.parameters(), 0.3, norm_type))
            optimizer.step()
            optimizer.zero_grad()

        for step in range(*steps):
            x, y = (each.tensor_split(size)[rank] for each in _batch(step))
            pipe.forward_backward((x,), label=y, loss_fn=F.mse_loss, loss_reduction="mean")
            pipe.step(update, is_async=False)
        pipe.save_checkpoint(folder, optimizer, step=steps[1])
        return {**{name: each.clone() for name, each in model.state_dict().items()}, "norms": torch.stack(norms)}


def bytes_per_parameter(shards: bool) -> tuple[float, float]:
    """Bytes of all tensors of this process, per parameter, inside ``step_fn`` and where all gradients have come."""
    before = _live_bytes()
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8))).bfloat16()
    num_parameters = sum(each.numel() for each in model.parameters())
    x = torch.ones(2, 256, dtype=torch.bfloat16)
    with (
        pytest.MonkeyPatch.context() as patch,
        RoundPipe(model, torch.float32, devices=["cpu"], process_group="world", shard_optimizer=shards) as pipe,
    ):
        patch.setattr(buckets, "BUCKET_BYTES", 2**15)
        optimizer = torch.optim.Adam(pipe.optim_parameters())
        found = []

        def update() -> None:
            optimizer.step()
            found.append((_live_bytes() - before) / num_parameters)
            optimizer.zero_grad()

        for _ in range(3):
            pipe.forward_backward((x,), label=x, loss_fn=F.mse_loss)
            pipe.step(update, is_async=False)
        pipe.forward_backward((x,), label=x, loss_fn=F.mse_loss)
        return found[-1], (_live_bytes() - before) / num_parameters


def _live_bytes() -> int:
    """Of the memory that tensors lie in."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    memory = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(memory.values())


def overflow_in_one_shard() -> tuple[float, torch.Tensor]:
    """The scale, and a weight, where one gradient of the last rank's shard becomes infinite in the second step."""
    model = make_model().float()
    with RoundPipe(model, devices=["cpu"], process_group="world", shard_optimizer=True) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        scaler, x = roundpipe.GradScaler(init_scale=8.0), torch.ones(2, WIDTH)
        last = dist.get_world_size() - 1

        def update(step: int) -> None:
            if step == 1 and dist.get_rank() == last:
                optimizer.param_groups[0]["params"][0].grad[-1] = math.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        for step in range(3):
            pipe.forward_backward((x,), label=x, loss_fn=lambda out, label: scaler.scale(out.sum()))
            pipe.step(update, False, step)
        return scaler.get_scale(), model.state_dict()["0.weight"].clone()


def misuse() -> list[str]:
    """The errors that wrong use of shards raises; training goes on behind those that change nothing."""
    messages: list[str] = []
    note = functools.partial(note_error, messages)
    rank, x = dist.get_rank(), torch.ones(2, WIDTH, dtype=torch.float64)
    options: dict[str, Any] = {"devices": ["cpu"], "process_group": "world", "shard_optimizer": True}

    def call(pipe: RoundPipe) -> None:
        pipe.forward_backward((x,), label=x, loss_fn=F.mse_loss, loss_reduction="mean")

    with RoundPipe(make_model(), **options) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        call(pipe)
        note(ConfigError, lambda: pipe.step(lambda: pipe(x), is_async=False))
        with torch.no_grad():
            next(iter(pipe.optim_parameters())).add_(1.0)
        note(ConfigError, lambda: pipe(x))
        note(ConfigError, lambda: pipe.step(torch.optim.Adafactor(pipe.optim_parameters()).step, is_async=False))
        call(pipe)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))  # or it knows no scale
        note(ConfigError, lambda: pipe.step(lambda: scaler.step(optimizer), is_async=False))
    with RoundPipe(make_model(), **options) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        call(pipe)
        pipe.step(optimizer.step)
        note(RankError, lambda: (call(pipe) if rank else None, pipe.synchronize()))
    with RoundPipe(make_model(), **options) as pipe:
        call(pipe)

        def fails() -> None:
            if rank:
                raise ValueError("on one rank")
            roundpipe.clip_grad_norm_(pipe.parameters(), 1.0)

        note(ValueError if rank else RankError, lambda: pipe.step(fails, is_async=False))
    adopted = make_model()
    mine = torch.optim.Adam(adopted.parameters(), lr=0.1)
    F.mse_loss(adopted(x), x).backward()
    mine.step()
    expected = copy.deepcopy(adopted)
    other = torch.optim.Adam(expected.parameters(), lr=0.1)
    other.load_state_dict(copy.deepcopy(mine.state_dict()))
    mine.zero_grad()
    with RoundPipe(adopted, **options) as pipe:
        pipe.adopt(mine)
        call(pipe)
        pipe.step(mine.step, is_async=False)
    F.mse_loss(expected(x), x).backward()
    other.step()
    for one, two in zip(adopted.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    return messages
