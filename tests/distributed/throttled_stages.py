"""Torch's schedules on stages whose layers take a given time, over links as slow as wanted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import schedules

from roundpipe.distributed import pipeline_stage
from tests.distributed.models import SCHEDULES, TWO_STAGES_PER_RANK

WIDTH, MICROBATCH = 256, 64
CARRY_BYTES = 4 * WIDTH * MICROBATCH
NUM_STEPS = 2


class _Link:
    """What a rank receives by: one transfer at a time."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.lock = threading.Lock()

    def throttled(self, work: dist.Work, num_bytes: int) -> _Transfer:
        return _Transfer(self, work, num_bytes)


class _Transfer:
    """Arrives some time after both sides have asked for it."""

    def __init__(self, link: _Link, work: dist.Work, num_bytes: int) -> None:
        self.thread = threading.Thread(target=self._arrive, args=(link, work, num_bytes))
        self.thread.start()

    def _arrive(self, link: _Link, work: dist.Work, num_bytes: int) -> None:
        work.wait()
        with link.lock:
            time.sleep(num_bytes / link.bytes_per_s)

    def wait(self) -> None:
        self.thread.join()


def train(schedule_name: str, num_microbatches: int, forward_s: float, bytes_per_s: float) -> float:
    """Seconds of a step, with stages that each take ``forward_s``, and twice that in a backward."""
    rank, size = dist.get_rank(), dist.get_world_size()
    num_stages = 2 * size if schedule_name in TWO_STAGES_PER_RANK else size
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_stages)))
    example = (torch.ones(MICROBATCH, WIDTH),)
    stages = [pipeline_stage(model, i, num_stages, example_args=example) for i in range(rank, num_stages, size)]
    for stage in stages:
        stage.submod.register_forward_pre_hook(lambda *_: time.sleep(forward_s))
        stage.submod.register_full_backward_hook(lambda *_: time.sleep(2 * forward_s))
    schedule = SCHEDULES[schedule_name](
        stages if num_stages > size else stages[0], num_microbatches, loss_fn=F.mse_loss
    )
    batch = torch.ones(num_microbatches * MICROBATCH, WIDTH)
    link, send = _Link(bytes_per_s), schedules._batch_p2p  # private: all that schedules send goes through it

    def slow(ops: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        works = send(ops, *args, **kwargs)
        assert len(works) == len(ops)
        return [
            link.throttled(work, op.tensor.nbytes) if op.op is dist.irecv else work
            for op, work in zip(ops, works, strict=True)
        ]

    began_s = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "_batch_p2p", slow)
        for step in range(NUM_STEPS + 1):
            if step == 1:  # the first finds out shapes
                dist.barrier()
                began_s = time.monotonic()
            schedule.step(*[batch] * (rank == 0), target=batch if any(s.is_last for s in stages) else None)
    dist.barrier()
    return (time.monotonic() - began_s) / NUM_STEPS
