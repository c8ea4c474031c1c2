"""The layers of one visit of a stage, each bound to its weights when it is first asked for.

So the first microbatch of a visit begins as soon as its first layer is bound, and the device runs that layer while the
next one is bound, or its weights are still on their way. A worker that has to wait for the stage before binds what
comes next meanwhile.
"""

from __future__ import annotations

from typing import Protocol

import torch

from roundpipe.core.schedule import Job, Phase
from roundpipe.runtime.engine.step import StepState
from roundpipe.runtime.weights.replica import BoundLayer
from roundpipe.runtime.weights.residency import Visit


class Arrive(Protocol):
    """Has COMPUTE wait for the weights of a layer, by its position in the job.

    False: they are not on their way yet, and nobody ``waits`` until they are.
    """

    def __call__(self, position: int, *, waits: bool = True) -> bool: ...


class StageLayers:
    """Layers of a job by index; what a visit brings of them is told by ``arrive``."""

    def __init__(self, step: StepState, job: Job, visit: Visit, arrive: Arrive) -> None:
        self._step = step
        self._job = job
        self._visit = visit
        self._arrive = arrive
        segments = step.spec.flow_of(job).segments
        self._order = [index for segment in segments for index in segment.layers]
        """In which they are first called."""

    def __getitem__(self, index: int) -> BoundLayer:
        """A layer, bound to its weights."""
        layer = self._layer(index)
        if not layer.is_bound:
            position = index - self._job.start
            self._arrive(position)
            step, with_gradients = self._step, self._job.phase is not Phase.FORWARD
            with step.modules_lock, torch.no_grad():
                self._visit.bind(position, with_gradients, step.frozen)
        return layer

    def bind_next(self) -> bool:
        """Bind one more layer, if not all are, and its weights come."""
        index = next((index for index in self._order if not self._layer(index).is_bound), None)
        if index is None or not self._arrive(index - self._job.start, waits=False):
            return False
        return self[index].is_bound

    def _layer(self, index: int) -> BoundLayer:
        return self._visit.layers[index - self._job.start]
