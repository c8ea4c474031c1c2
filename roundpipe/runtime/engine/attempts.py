"""Tasks of backward stages that run out of memory are done again by their worker, each time with less on its device.

    at first    what the task does not need is let go of, and stages run layer by layer (`MicrobatchRunner.run_again`)
    once more   weights that stay there for other visits are dropped, too

Each task of a step is done so often, so that there is an end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from roundpipe.core.errors import release_frames, said
from roundpipe.core.schedule import Task
from roundpipe.runtime.device.backend import OUT_OF_MEMORY, Backend
from roundpipe.runtime.engine.pace import Pace
from roundpipe.runtime.engine.step import StepState
from roundpipe.runtime.profiling.meter import Meter
from roundpipe.runtime.weights.residency import Arena, Visit

MOST_ATTEMPTS = 3

_Result = TypeVar("_Result")


class Attempts:
    """Those of one worker; ``visits`` are the ones that it has begun."""

    def __init__(
        self, backend: Backend, meter: Meter, pace: Pace, arena: Arena, visits: Callable[[], Iterable[Visit]]
    ) -> None:
        self._backend = backend
        self._meter = meter
        self._pace = pace
        self._arena = arena
        self._visits = visits

    def do(
        self, step: StepState, task: Task, act: Callable[[], _Result], again: Callable[[], _Result] | None = None
    ) -> _Result:
        """Do something for a task; if memory runs out and its step allows that, do it, or ``again``, once more."""
        number = 1
        while True:
            try:
                return act()
            except OUT_OF_MEMORY as error:
                if number == MOST_ATTEMPTS or not step.kept.may_run_again(task):
                    raise
                self.note(step, error)
            self._backend.synchronize()
            self._meter.abandon()
            self._pace.abandon()
            if number > 1:
                self._arena.residents.drop_others(part for visit in self._visits() for part in visit.parts)
            self._backend.release_cached()
            number += 1
            act = again or act

    def note(self, step: StepState, error: BaseException) -> None:
        """Take in that something that is done again, or later, ran out of memory; what it had made is let go of."""
        step.kept.note_shortage(said(error).partition("\n")[0])
        if isinstance(error, torch.OutOfMemoryError):
            self._backend.note_failure()
        release_frames(error)
