"""Data parallel training on the ranks of the default group, and the same in one process."""

from __future__ import annotations

import copy
import datetime
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.core.errors import ConfigError, RankError
from roundpipe.runtime.ranks import buckets
from roundpipe.runtime.ranks.group import RankGroup
from roundpipe.runtime.weights.download import Download
from tests.equality import difference

NUM_STEPS = 10
MAX_NORM = 0.3
WIDTH = 6


class WithUnused(nn.Sequential):
    """Layers with a parameter that nothing uses."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self[0].register_parameter("unused", nn.Parameter(torch.ones(3)))


class WithLoss(WithUnused):
    """Computes its own loss, a mean over the targets that count."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(super().forward(x), target)


def make_model(seed: int = 0, kind: type[nn.Sequential] = WithUnused) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH)]
    return kind(*layers).double()


def masked_error(outputs: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean over targets that are numbers, and how many there are."""
    mask = ~target.isnan()
    return (outputs[mask] - target[mask]).square().sum() / mask.sum().clamp(min=1), mask.sum()


@dataclass(frozen=True)
class Kind:
    """How a training goes."""

    is_async: bool = False
    num_calls: int = 1
    """Per update."""
    loss: str = "samples"
    """What the mean is over, ``samples`` or ``weights``, or targets that the model counts, ``own``; or ``sum``."""
    scope: str = "microbatch"
    devices: int = 2
    wrapper: Callable[..., Any] = RoundPipe
    shard: bool = False
    microbatches: int = 2

    def make_model(self, seed: int = 0) -> nn.Module:
        return make_model(seed, WithLoss if self.loss == "own" else WithUnused)

    def batches(self, step: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Per call, each rank's inputs and targets; ranks have different numbers of samples, the last few at the end.

        With weights, the last rank has no target in one of the steps.
        """
        generator = torch.Generator().manual_seed(step)
        size, calls = dist.get_world_size(), []
        for _ in range(self.num_calls):
            parts = []
            for rank in range(size):
                num_samples = 4 if self.loss == "sum" else 1 + rank if step == NUM_STEPS - 1 else 5 - rank
                x, y = torch.randn(2, num_samples, WIDTH, dtype=torch.float64, generator=generator)
                if self.loss == "weights":
                    y[torch.rand(y.shape, generator=generator) < 0.3] = torch.nan
                    y[:] = torch.nan if step == 4 and rank == size - 1 else y
                if self.loss == "own":
                    ignored = torch.rand(num_samples, generator=generator) < 0.4
                    y = y.argmax(-1).masked_fill(ignored | (step == 4 and rank == size - 1), -100)
                parts.append((x, y))
            calls.append(parts)
        return calls


def loss_of(kind: Kind) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    if kind.loss == "weights":
        return masked_error
    if kind.loss == "own":
        return lambda outputs, target: outputs
    return F.mse_loss if kind.loss == "samples" else lambda outputs, target: (outputs - target).square().sum()


def reference(kind: Kind) -> dict[str, torch.Tensor]:
    """The weights after training in one process, on what all ranks have together; one step stale if asynchronous."""
    model = kind.make_model()
    trained, optimizer = copy.deepcopy(model), torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(NUM_STEPS):
        for parts in kind.batches(step):
            inputs, target = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
            loss = trained(inputs, target) if kind.loss == "own" else loss_of(kind)(trained(inputs), target)
            loss = loss[0] if kind.loss == "weights" else loss
            (loss / len(parts) if kind.loss == "sum" else loss).backward()
        for parameter, other in zip(model.parameters(), trained.parameters(), strict=True):
            parameter.grad, other.grad = other.grad, None
        if kind.is_async:
            trained.load_state_dict(model.state_dict())
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        if not kind.is_async:
            trained.load_state_dict(model.state_dict())
    return model.state_dict()


def train(kinds: Iterable[Kind]) -> list[dict[str, torch.Tensor]]:
    """The weights after each training on these ranks; every rank starts with others."""
    results = []
    for kind in kinds:
        model = kind.make_model(seed=dist.get_rank())
        config = RoundPipeRunConfig(num_microbatch=kind.microbatches, loss_scope=kind.scope)
        has_gpu = dist.get_backend() == "nccl"
        devices = [f"cuda:{torch.cuda.current_device()}"] if has_gpu else ["cpu"] * (kind.devices + dist.get_rank())
        options: dict[str, Any] = {"devices": devices, "process_group": "world", "shard_optimizer": kind.shard}
        with kind.wrapper(model, model_run_config=config, **options) as pipe:
            optimizer = torch.optim.Adam(pipe.optim_parameters(), lr=0.05)

            def update(optimizer: torch.optim.Optimizer = optimizer) -> None:
                roundpipe.clip_grad_norm_(optimizer.param_groups[0]["params"], MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()

            reduction = "sum" if kind.loss == "sum" else "mean"
            for step in range(NUM_STEPS):
                for parts in kind.batches(step):
                    inputs, target = parts[dist.get_rank()]
                    args = (inputs, target) if kind.loss == "own" else (inputs,)
                    pipe.forward_backward(args, label=target, loss_fn=loss_of(kind), loss_reduction=reduction)
                pipe.step(update, is_async=kind.is_async)
            pipe.synchronize()
            results.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return results


def averages_during_the_backward() -> list[bool]:
    """Whether gradients of the last layers are averaged while those of the first layer can't come home."""
    add_up, settle, averaged, waits = RankGroup.add_up, Download.settle, threading.Event(), []
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    plan = roundpipe.ExecutePlan(forward=[(0, 2)], fused=(2, 4), backward=[(0, 2)])
    config, x = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan), torch.ones(2, WIDTH)

    def noted(group: RankGroup, flats: Sequence[torch.Tensor], divisor: int = 1) -> None:
        add_up(group, flats, divisor)
        if all(flat.is_floating_point() for flat in flats):
            averaged.set()

    def late(download: Download, scale: float = 1.0) -> None:
        if any(parameter is model[0].weight for parameter, *_ in download.gradients):
            waits.append(averaged.wait(30))
        settle(download, scale)

    with (
        pytest.MonkeyPatch.context() as patch,
        RoundPipe(model, model_run_config=config, devices=["cpu"] * 2, process_group="world") as pipe,
    ):
        patch.setattr(buckets, "BUCKET_BYTES", 1)
        patch.setattr(RankGroup, "add_up", noted)
        patch.setattr(Download, "settle", late)
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        averaged.set()
        for _ in range(2):
            pipe.forward_backward((x,), label=x, loss_fn=F.mse_loss)
            pipe.step(optimizer.step)
            pipe.synchronize()
            averaged.clear()
    return waits


def overflow_on_one_rank() -> tuple[float, torch.Tensor]:
    """The scale, and a weight, after a step whose gradients are infinite on the last rank."""
    model = make_model().float()
    group = dist.new_group(range(dist.get_world_size()))
    with RoundPipe(model, devices=["cpu"], process_group=group) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        scaler = roundpipe.GradScaler(init_scale=8.0)
        for step in range(3):
            x = torch.full((2, WIDTH), torch.inf if step == 1 and dist.get_rank() else 1.0)
            pipe.forward_backward((x,), label=x, loss_fn=lambda out, label: scaler.scale(out.sum()))
            pipe.step(lambda: (scaler.step(optimizer), scaler.update(), optimizer.zero_grad()), is_async=False)
        return scaler.get_scale(), model.state_dict()["0.weight"].clone()


def hangs(timeout_s: float, hang_s: float) -> tuple[str, float]:
    """The error of each rank, and its seconds, where the last one hangs in its loop for longer than the timeout."""
    group = dist.new_group(range(dist.get_world_size()), timeout=datetime.timedelta(seconds=timeout_s))
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    with RoundPipe(make_model(), devices=["cpu"], process_group=group) as pipe:
        for step in range(2):
            began_s = time.monotonic()
            pipe.forward_backward((x,), label=x, loss_fn=F.mse_loss)
            if step and dist.get_rank() == dist.get_world_size() - 1:
                time.sleep(hang_s)
            if not step:
                pipe.step(lambda: None, is_async=False)
        with pytest.raises(RankError) as raised:
            pipe.step(lambda: None, is_async=False)
    return str(raised.value), time.monotonic() - began_s


def note_error(messages: list[str], kind: type[BaseException], do: Callable[[], object]) -> None:
    """Add the message of the error that ``do`` must raise."""
    with pytest.raises(kind) as raised:
        do()
    messages.append(str(raised.value))


def misuse() -> list[str]:
    """The errors that wrong use raises; each rank has a wrapper that works before and after."""
    messages: list[str] = []
    note = functools.partial(note_error, messages)
    rank, x = dist.get_rank(), torch.ones(2, WIDTH, dtype=torch.float64)

    def call(pipe: RoundPipe, **options: Any) -> None:
        pipe.forward_backward((x,), label=x, loss_fn=F.mse_loss, **options)

    def other_model() -> RoundPipe:
        model = make_model()
        return RoundPipe(nn.Sequential(model, nn.Linear(WIDTH, 2)) if rank else model, process_group="world")

    note(ConfigError, other_model)
    note(ConfigError, lambda: RoundPipe(make_model(), optim_dtype=(None, torch.float32)[rank], process_group="world"))
    with RoundPipe(make_model(), devices=["cpu"], process_group="world") as pipe:
        call(pipe)
        note(ConfigError, torch.optim.SGD(pipe.optim_parameters(), lr=0.1).step)
        note(ConfigError, lambda: pipe.step(lambda: call(pipe), is_async=False))
    with RoundPipe(make_model(), devices=["cpu"], process_group="world", name="calls") as pipe:
        for _ in range(1 + rank):
            call(pipe)
        note(RankError, lambda: pipe.step(lambda: None, is_async=False))
        note(RankError, lambda: pipe.step(lambda: None, is_async=False))
    with RoundPipe(make_model(), devices=["cpu"], process_group="world", name="steps") as pipe:
        note(RankError, lambda: pipe.step(lambda: None, is_async=False) if rank else call(pipe, loss_reduction="mean"))
    with RoundPipe(make_model(), devices=["cpu"], process_group="world", name="raises") as pipe:
        wrong = torch.ones(2, WIDTH + 1, dtype=torch.float64)
        if rank:
            note(
                RuntimeError,
                lambda: pipe.forward_backward((wrong,), label=x, loss_fn=F.mse_loss, loss_reduction="mean"),
            )
        else:
            note(RankError, lambda: call(pipe, loss_reduction="mean"))
    with RoundPipe(make_model(), devices=["cpu"], process_group="world", name="ended") as pipe:
        call(pipe)
        if not rank:
            pipe.step(lambda: None)
            note(RankError, pipe.synchronize)
    return messages


def other_averages() -> list[str]:
    """The errors where torch's own wrapper is around the model, or the library's is around that."""
    messages: list[str] = []
    model, x = make_model(), torch.ones(2, WIDTH, dtype=torch.float64)
    parallel = nn.parallel.DistributedDataParallel
    note_error(messages, ConfigError, lambda: RoundPipe(nn.Sequential(parallel(model)), devices=["cpu"]))
    with RoundPipe(model, devices=["cpu"], name="around") as pipe:
        around = parallel(pipe)
        note_error(messages, ConfigError, lambda: around(x))
        pipe(x)
    fully_shard(model)
    note_error(messages, ConfigError, lambda: RoundPipe(model, devices=["cpu"]))
    return messages


if __name__ == "__main__":  # under torchrun, with the backend of the user's group: gloo, or nccl with a GPU per rank
    if sys.argv[1] == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(sys.argv[1])
    kinds = [Kind(), Kind(is_async=True, loss="weights"), Kind(shard=True), Kind(shard=True, is_async=True)]
    for kind, state in zip(kinds, train(kinds), strict=True):
        worst = max(difference(state[name], tensor) for name, tensor in reference(kind).items())
        print(f"rank {dist.get_rank()}, {kind}: differs from one process by {worst:.1e}")
        assert worst <= 1e-5
