"""How the weights of a worker's visits come up: layer by layer, as the optimizer's thread gives them back.

A visit that begins a step often finds only some of its weights written. Its first layers are uploaded and run then,
and each of the others when it is called, or between two tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from roundpipe.core.schedule import Job
from roundpipe.runtime.device.backend import Lane
from roundpipe.runtime.engine.stage import Stage
from roundpipe.runtime.engine.step import StepState
from roundpipe.runtime.profiling.meter import Meter
from roundpipe.runtime.weights.gate import Gate
from roundpipe.runtime.weights.residency import Visit


@dataclass(slots=True)
class OpenVisit:
    """A visit that has begun."""

    step: StepState
    """Which may follow the one that its worker is at."""
    job: Job
    visit: Visit
    side: int
    """Of the arena."""
    stage: Stage | None = None


class Arrivals:
    """Of one worker, which has a name for messages; ``gate`` is that of the weights."""

    def __init__(self, gate: Gate, meter: Meter, name: str) -> None:
        self._gate = gate
        self._meter = meter
        self._name = name

    def may_begin(self, step: StepState, job: Job) -> bool:
        """Whether the optimizer's thread has given the weights of a job's first layer back."""
        return self._gate.is_open(step.spec.weights[job.start].parameters(), step.closings[0])

    def has_all(self, step: StepState, job: Job) -> bool:
        """Whether it has given all of a job's weights back."""
        parameters = (tensor for index in job.layers for tensor in step.spec.weights[index].parameters())
        return self._gate.is_open(parameters, step.closings[0])

    def bring(self, step: StepState, job: Job, visit: Visit) -> None:
        """Upload what the optimizer's thread has given back of the layers that come next."""
        gate, closings = self._gate, step.closings[0]
        rest = visit.layers[visit.num_brought :]
        ready = len(rest)
        if not gate.is_all_open:
            ready = sum(1 for _ in takewhile(lambda layer: gate.is_open(layer.weights.parameters(), closings), rest))
        if not ready:
            return
        start, pieces = job.start + visit.num_brought, visit.num_pieces
        args: dict[str, Any] = {"layers": [start, start + ready]} | ({"piece": pieces} if pieces else {})
        self._meter.moved(Lane.WEIGHTS, "weights of", *visit.bring(ready), job, **args)
        if visit.is_whole:
            step.begin_upload(job.index, visit.uploaded)

    def arrive(self, step: StepState, job: Job, visit: Visit, position: int, *, waits: bool = True) -> bool:
        """Let COMPUTE wait for a layer's weights; whether they come, which without ``waits`` they may not do yet."""
        if visit.has_arrived(position):
            return True
        with torch.no_grad(), self._meter.backend.uncounted(), self._meter.interrupted():
            while visit.num_brought <= position:
                parameters = visit.layers[visit.num_brought].weights.parameters()
                if not self._gate.is_open(parameters, step.closings[0]):
                    if not waits:
                        return False
                    self._meter.until("overhead")
                    self._gate.wait(parameters, self._name, step.closings[0])
                    self._meter.until("optimizer")
                self.bring(step, job, visit)
            if (arrived := visit.arrive(position)) is not None:
                self._meter.until("weights", arrived)
        return True
