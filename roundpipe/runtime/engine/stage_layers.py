"""The layers of one visit of a stage, each bound to its weights when it is first asked for.

So the first microbatch of a visit begins as soon as its first layer is bound, and the device runs that layer while the
next one is bound. A worker that has to wait for the stage before binds what comes next meanwhile.
"""

from __future__ import annotations

import torch

from roundpipe.core.schedule import Job, Phase
from roundpipe.runtime.engine.step import StepState
from roundpipe.runtime.weights.replica import BoundLayer
from roundpipe.runtime.weights.residency import Visit


class StageLayers:
    """Layers of a job by index; the weights that a visit brings must be ready for COMPUTE."""

    def __init__(self, step: StepState, job: Job, visit: Visit) -> None:
        self._step = step
        self._job = job
        self._visit = visit
        segments = step.spec.flow_of(job).segments
        self._order = [index for segment in segments for index in segment.layers]
        """In which they are first called."""

    def __getitem__(self, index: int) -> BoundLayer:
        """A layer, bound to its weights."""
        layer = self._layer(index)
        if not layer.is_bound:
            step, with_gradients = self._step, self._job.phase is not Phase.FORWARD
            with step.modules_lock, torch.no_grad():
                self._visit.bind(index - self._job.start, with_gradients, step.frozen)
        return layer

    def bind_next(self) -> bool:
        """Bind one more layer, if not all are."""
        index = next((index for index in self._order if not self._layer(index).is_bound), None)
        return index is not None and self[index].is_bound

    def _layer(self, index: int) -> BoundLayer:
        return self._visit.layers[index - self._job.start]
