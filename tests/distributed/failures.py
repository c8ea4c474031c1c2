"""A training on ranks of which one is killed, and the same from its latest checkpoint."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from roundpipe import RoundPipe
from roundpipe.core.errors import CheckpointNotFoundError, RankError
from tests.distributed.data_parallel import NUM_STEPS, Kind, make_model

SAVE_EVERY = 3


def train_with_checkpoints(folder: str, is_async: bool, killed_at: int | None = None) -> dict[str, torch.Tensor]:
    """Train from the latest checkpoint there is to the end; the last rank is killed in the middle of a backward.

    The other ranks write the seconds until their error, and the error, into the folder; all write the steps they begin.
    """
    kind, model, rank = Kind(is_async=is_async), make_model(), dist.get_rank()
    checkpoint, last = Path(folder) / "checkpoint", dist.get_world_size() - 1
    began_s = time.monotonic()
    Path(folder).mkdir(exist_ok=True)
    try:
        with RoundPipe(model, devices=["cpu"] * 2, process_group="world") as pipe:
            optimizer = torch.optim.Adam(pipe.optim_parameters(), lr=0.05)
            first = 0
            try:
                first = pipe.load_checkpoint(checkpoint, optimizer).step or 0
            except CheckpointNotFoundError:
                pass

            def update() -> None:
                optimizer.step()
                optimizer.zero_grad()

            for step in range(first, NUM_STEPS):
                began_s = time.monotonic()
                with (Path(folder) / f"steps of rank {rank}").open("a") as steps:
                    steps.write(f"{step} ")
                inputs, target = kind.batches(step)[0][rank]

                def loss_fn(outputs: Any, label: Any, step: int = step) -> Any:
                    if step == killed_at and rank == last:
                        outputs.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
                    return F.mse_loss(outputs, label)

                pipe.forward_backward((inputs,), label=target, loss_fn=loss_fn, loss_reduction="mean")
                pipe.step(update, is_async=is_async)
                if (step + 1) % SAVE_EVERY == 0:
                    pipe.save_checkpoint(checkpoint, optimizer, step=step + 1)
            pipe.synchronize()
            return {name: tensor.clone() for name, tensor in model.state_dict().items()}
    except RankError as error:
        (Path(folder) / f"rank {rank}").write_text(f"{time.monotonic() - began_s} {error}")
        raise


if __name__ == "__main__":  # as torchrun starts it: in the first attempt the last rank is killed
    dist.init_process_group("gloo")
    state = train_with_checkpoints(sys.argv[1], False, 7 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else None)
    if dist.get_rank() == 0:
        torch.save(state, Path(sys.argv[1]) / "weights.pt")
