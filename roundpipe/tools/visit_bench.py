"""What a worker takes to begin a visit of a stage, measured on a small model of which each layer is a stage."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.runtime.config import RoundPipeRunConfig
from roundpipe.wrappers.pipe import RoundPipe

NUM_LAYERS, NUM_LINEAR, WIDTH, NUM_STEPS = 8, 6, 64, 32
"""Of the model: layers, parts of each, as many as of a transformer's block, and their size. On accelerators one step of
eight is measured."""


def visit_seconds_on(device: str) -> float:
    """Mean seconds beyond what any microbatch takes; takes a second or two."""
    layers = [nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LINEAR)]) for _ in range(NUM_LAYERS)]
    ranges = [*pairwise(range(NUM_LAYERS + 1))]
    run = RoundPipeRunConfig(num_microbatch=2, execute_plan=ExecutePlan(ranges[:-1], ranges[-1], ranges[-2::-1]))
    with RoundPipe(nn.Sequential(*layers), torch.float32, "visits", model_run_config=run, devices=[device]) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.0)
        batch = torch.zeros(4, WIDTH)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(NUM_STEPS):
            pipe.forward_backward((batch,), label=batch, loss_fn=nn.functional.mse_loss)
            pipe.step(update)
        pipe.synchronize()
        predicted = pipe.report().predicted
        return 0.0 if predicted is None else predicted.visit_s
