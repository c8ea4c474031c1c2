"""A training loop under random timing, compared bit by bit with the same undisturbed, on one worker if it may be."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import roundpipe
from roundpipe import ExecutePlan, RoundPipeRunConfig
from roundpipe.runtime.config import RECOMPUTE_GRAINS, RecomputeGrain
from tests.faults.cases import draw_plan
from tests.races.timing import shaken

WIDTH = 6
NUM_LAYERS = 6
NUM_STEPS = 5
WAYS = ("async", "async", "async", "add", "sync", "forward")


class Block(nn.Module):
    """Draws random numbers, and keeps a running mean."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return x + self.dropout(self.linear(x - self.mean).tanh())


@dataclass(frozen=True)
class Schedule:
    """What is run."""

    seed: int
    num_workers: int
    num_microbatches: int
    grain: RecomputeGrain
    plan: ExecutePlan
    ways: tuple[str, ...]
    """Per step, one of `WAYS`; after ``add`` gradients accumulate, the backward of ``forward`` is the caller's."""
    is_tied: bool
    has_norms: bool
    """Whether blocks change buffers; if not, calls return before their last backward stages are done."""
    reduction: Any

    @classmethod
    def draw(cls, seed: int) -> Schedule:
        """A random one."""
        rng = random.Random(f"schedule {seed}")
        return cls(
            seed=seed,
            num_workers=rng.randint(2, 4),
            num_microbatches=rng.randint(1, 5),
            grain=rng.choice(RECOMPUTE_GRAINS),
            plan=draw_plan(rng, NUM_LAYERS),
            ways=tuple(rng.choices(WAYS, k=NUM_STEPS)),
            is_tied=rng.random() < 0.3,
            has_norms=rng.random() < 0.4,
            reduction=rng.choice(("sum", "mean")),
        ).with_replicas(rng)

    def with_replicas(self, rng: random.Random) -> Schedule:
        """The same, with some stages that several workers share, unless blocks change buffers; or as it is."""
        if rng.random() < 0.5:
            return self
        replicas = rng.choices((1, 1, 2, 3), k=self.plan.num_stages)
        return replace(self, plan=replace(self.plan, replicas=replicas))

    def make_model(self) -> nn.Module:
        """The model, the same at every call."""
        torch.manual_seed(self.seed)
        blocks = [Block() if self.has_norms else nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
        if self.is_tied:
            first, last = (block.linear if self.has_norms else block for block in (blocks[0], blocks[-1]))
            last.weight = first.weight
        return nn.Sequential(*blocks)

    def train(self, num_workers: int) -> list[torch.Tensor]:
        """Losses, then all that is left in the model."""
        model, seen = self.make_model(), []
        config = RoundPipeRunConfig(
            num_microbatch=self.num_microbatches,
            recompute_grain=self.grain,
            execute_plan=self.plan,
            loss_reduction=self.reduction,
        )
        with roundpipe.RoundPipe(model, devices=["cpu"] * num_workers, model_run_config=config, name="races") as pipe:
            optimizer = torch.optim.AdamW(pipe.optim_parameters(), lr=0.05)
            for way in self.ways:
                seen.append(self._step(pipe, optimizer, way))
            pipe.synchronize()
            seen += [tensor.detach().clone() for tensor in model.state_dict().values()]
            seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return seen

    def _step(self, pipe: Any, optimizer: torch.optim.Optimizer, way: str) -> torch.Tensor:
        x = torch.randn(7, WIDTH)
        if way == "forward":
            loss = pipe(x).square().sum()
            loss.backward()
        else:
            loss = pipe.forward_backward((x,), label=x, loss_fn=loss_of)
        x.fill_(float("nan"))  # the caller's own again
        if way != "add":
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=way == "async")
        return loss.detach()


def loss_of(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Of a microbatch."""
    return (outputs - label.detach()).square().sum()


def problem_of(seed: int) -> str:
    """What differs under random timing; empty: nothing."""
    schedule = Schedule.draw(seed)
    # sums of several workers' sums are rounded otherwise
    expected = schedule.train(schedule.num_workers if schedule.plan.replicas else 1)
    try:
        with shaken(seed):
            found = schedule.train(schedule.num_workers)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if len(expected) != len(found):
        return f"{len(found)} values for {len(expected)}"
    different = [i for i, pair in enumerate(zip(expected, found, strict=True)) if not torch.equal(*pair)]
    return f"values {different} of {len(expected)} are others" if different else ""
