"""What backward stages take from the host, kept so that a worker that runs out of memory can run its stage again.

Once a call has returned it can't run its round again: the optimizer's thread writes the next weights as soon as the
round has uploaded the ones before for the last time. But a worker that runs out of memory in a stage still has them on
its device, and with what is kept here it runs the stage again itself, layer by layer, from the first microbatch on.

Invariant: what a stage has left for the stages before it is left once; a second run only makes what was not left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from roundpipe.core import trees
from roundpipe.core.schedule import Job, Phase, Task, TaskKind
from roundpipe.core.storages import bytes_of
from roundpipe.runtime.device.host_limit import HOST_LIMIT
from roundpipe.runtime.engine.host_values import HostValue
from roundpipe.runtime.engine.recompute import ForwardRecord, RecordEntries
from roundpipe.runtime.engine.spec import StepSpec
from roundpipe.runtime.threads import Board


@dataclass(slots=True, eq=False)
class KeptRun:
    """What a run of one microbatch takes."""

    microbatch: int
    values: dict[str, HostValue]
    record: RecordEntries
    gradients: dict[str, list[HostValue]] | None = None
    """Those that were there when the stage before had left its own; None: it has not."""


class KeptRuns:
    """Those of one step, by job; a job's are used by its worker."""

    def __init__(
        self, spec: StepSpec, values: Sequence[dict[str, HostValue]], forward: ForwardRecord, board: Board
    ) -> None:
        self._spec = spec
        self._values = values
        self._forward = forward
        self._board = board
        self._runs: dict[int, list[KeptRun]] = {}
        self._without: set[int] = set()
        """Jobs for which the host has no room."""
        self.shortage = ""
        """Why something was done again, or not ahead. Later runs of backward stages are layer by layer at once."""

    def keep(self, job: Job, microbatch: int) -> KeptRun | None:
        """Keep what a run is about to take, if the stage may be run again.

        The host must have room for as much as the job would give back: the rest is kept for others anyway.
        """
        if not self._spec.runs_again or job.index in self._without:
            return None
        there = self._values[microbatch]
        flow, kept = self._spec.flow_of(job), {run.microbatch for run in self.of(job)}
        names = flow.takes.intersection(there)
        dropped = [there[name].value for name in names.intersection(flow.drops) if microbatch not in kept]
        if not HOST_LIMIT.has_room(sum(map(bytes_of, trees.tensors(dropped)))):
            self._without.add(job.index)
            self.end(job)
            return None
        record = self._forward.entries(job.layers, microbatch)
        with self._board.lock:  # the caller may be about to put copies in the place of its own
            run = KeptRun(microbatch, {name: there[name] for name in names}, record)
            others = [each for each in self._runs.get(job.index, ()) if each.microbatch != microbatch]
            self._runs[job.index] = [*others, run]
        return run

    def of(self, job: Job) -> list[KeptRun]:
        """In the order of their microbatches."""
        return self._runs.get(job.index, [])

    def values(self) -> Iterator[dict[str, HostValue]]:
        """What all of them take; asked for with the board's lock held."""
        return (run.values for runs in self._runs.values() for run in runs)

    def end(self, job: Job) -> None:
        """A job's microbatches are through: none is run again."""
        with self._board.lock:
            self._runs.pop(job.index, None)

    def may_run_again(self, task: Task) -> bool:
        """Whether a task that ran out of memory may be run again."""
        job = self._spec.schedule.job(task.job_index)
        if not self._spec.runs_again or job.phase is Phase.FORWARD:
            return False
        return task.kind is not TaskKind.RUN or (job.phase is Phase.BACKWARD and bool(self.of(job)))

    def note_shortage(self, reason: str) -> None:
        """Memory ran out, for a reason, and the step goes on."""
        if self._spec.runs_again:
            self.shortage = self.shortage or reason
