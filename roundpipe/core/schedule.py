"""Who runs what, when: schedules as plain data.

A plan says which layers form a stage in forward, in the fused tail and in backward. A schedule gives job K (one stage
times all microbatches) to worker ``K mod N``, or to the worker that has its layers, as a list of tasks in order. The
engine walks those lists and the simulator replays the same ones, so that what is predicted is what runs.

Invariant: a schedule runs every microbatch of every job exactly once, never has the weights of more than
two jobs on a worker, and can't deadlock. `tests/runtime/schedule_rules.py` has the rules one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from roundpipe.core.errors import ScheduleError
from roundpipe.core.execute_plan import ExecutePlan, Ring, ScheduleKind

MAX_RESIDENT_JOBS = 2
"""Jobs whose weights a worker may hold at once: the one that runs and the one that is uploaded."""


class Phase(Enum):
    """What a stage does in a visit."""

    FORWARD = "F"
    """Forward without autograd; its inputs are kept if a backward follows."""
    FUSED = "U"
    """Forward, loss and backward, nothing recomputed."""
    BACKWARD = "B"
    """Recomputation of the forward, then backward."""


class TaskKind(Enum):
    """What a worker is told to do; RUN is of one microbatch."""

    PREFETCH = "prefetch"
    """Start the upload of a job's weights."""
    RUN = "run"
    RELEASE = "release"
    """Bring gradients down and give the weights' memory back."""


@dataclass(frozen=True, slots=True)
class Job:
    """One stage times all microbatches (or its replica's share of them), on one worker."""

    index: int
    """Counts over steps; the worker is ``index mod N``, unless each layer has one worker."""
    phase: Phase
    start: int
    stop: int
    worker: int
    name: str
    """Within its step: F0, F1, .., U, B1, B2, .."""
    replica: int = 0
    """Which of the stage's jobs this is, where several share its microbatches."""
    num_replicas: int = 1
    """Consecutive jobs that share the stage's microbatches: microbatch m belongs to replica m mod r."""

    @property
    def layers(self) -> range:
        return range(self.start, self.stop)

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Task:
    """One entry of a worker's list."""

    kind: TaskKind
    job_index: int
    microbatch: int | None = None
    """For RUN alone."""

    def __str__(self) -> str:
        where = f"job {self.job_index}"
        return f"{self.kind.value} {where}" + ("" if self.microbatch is None else f" microbatch {self.microbatch}")


@dataclass(frozen=True)
class Schedule:
    """The jobs of one step, and each worker's tasks in the order in which it executes them."""

    kind: ScheduleKind
    plan: ExecutePlan
    num_workers: int
    num_microbatches: int
    jobs: tuple[Job, ...]
    """In the order of the pipeline: job K takes what job K - 1 gives."""
    worker_tasks: tuple[tuple[Task, ...], ...]
    first_job: int = 0

    @property
    def num_layers(self) -> int:
        return self.plan.num_layers

    @property
    def next_job(self) -> int:
        """Index that the first job of the next step gets."""
        return self.first_job + len(self.jobs)

    def following(self) -> Schedule:
        """The schedule of the same step again, with the rotation going on."""
        counts = self.num_workers, self.num_microbatches
        return make_schedule(self.plan, *counts, first_job=self.next_job, kind=self.kind)

    @cached_property
    def rings(self) -> list[Ring]:
        """Which workers take turns at which jobs."""
        return self.plan.rings(self.kind, self.num_workers, min(self.num_workers, self.num_microbatches))

    @cached_property
    def _before(self) -> list[int]:
        """Per job, the index of the one that its worker runs before it, maybe in the step before."""
        indexes = [0] * len(self.jobs)
        for ring in self.rings:
            turn = len(ring.workers)
            for number, position in enumerate(ring.positions):
                steps_back = -((number - turn) // len(ring.positions))
                indexes[position] = self.first_job + ring.before(number) - steps_back * len(self.jobs)
        return indexes

    @cached_property
    def _next(self) -> dict[int, Job]:
        return dict(zip(self._before, self.jobs, strict=True))

    def worker_before(self, job_index: int) -> int:
        """The job that a job's worker runs before it; below `first_job`: in a step before."""
        return self._before[job_index - self.first_job]

    def worker_next(self, job_index: int) -> Job | None:
        """The job that a job's worker runs after it; None: it is the worker's last in this step."""
        return self._next.get(job_index)

    def is_first(self, position: int) -> bool:
        """Whether a job, given by its position, is its worker's first in the step."""
        return self._before[position] < self.first_job

    def job(self, job_index: int) -> Job:
        if not self.has_job(job_index):
            raise ScheduleError(f"job {job_index} is not in this schedule of {self.first_job}..{self.next_job - 1}")
        return self.jobs[job_index - self.first_job]

    def has_job(self, job_index: int) -> bool:
        return self.first_job <= job_index < self.next_job

    def microbatches(self, job: Job) -> range:
        return range(job.replica, self.num_microbatches, job.num_replicas)

    def visit_sizes(self, worker: int, layer_sizes: Sequence[int]) -> list[int]:
        """What a worker's jobs add up to, in their order, from what layers have."""
        return [sum(layer_sizes[index] for index in job.layers) for job in self.jobs if job.worker == worker]

    def sharer(self, job_index: int, microbatch: int) -> int:
        """Of the jobs that share a job's stage, the one that runs a microbatch."""
        job = self.job(job_index)
        return job_index - job.replica + microbatch % job.num_replicas

    def sharers(self, job: Job) -> list[int]:
        """The workers that share a job's stage, in the order of replicas."""
        first = job.index - job.replica
        return [self.job(index).worker for index in range(first, first + job.num_replicas)]

    def before(self, job: Job, microbatch: int) -> int | None:
        """The job of the stage before that runs a microbatch; None for the first stage."""
        behind = job.index - job.replica - 1
        return self.sharer(behind, microbatch) if self.has_job(behind) else None

    def stage_titles(self) -> tuple[str, ...]:
        """The stages by name, with the number of workers that share each, if there are several."""
        counts = [(job.name, job.num_replicas) for job in self.jobs if job.replica == 0]
        return tuple(name if count == 1 else f"{name} x{count}" for name, count in counts)

    def is_of_last_stage(self, job: Job) -> bool:
        return job.index - job.replica + job.num_replicas == self.next_job

    def tasks(self, worker: int) -> tuple[Task, ...]:
        return self.worker_tasks[worker]


def _worker_tasks(jobs: Sequence[Job], worker: int, num_microbatches: int) -> Iterator[Task]:
    """A worker's list: while a job runs, the weights of the worker's next job come up."""
    own = [job for job in jobs if job.worker == worker]
    prefetches = [Task(TaskKind.PREFETCH, job.index) for job in own]
    yield from prefetches[:1]
    for position, job in enumerate(own, 1):
        yield from prefetches[position : position + 1]
        for microbatch in range(job.replica, num_microbatches, job.num_replicas):
            yield Task(TaskKind.RUN, job.index, microbatch)
        yield Task(TaskKind.RELEASE, job.index)


def make_schedule(
    plan: ExecutePlan,
    num_workers: int,
    num_microbatches: int,
    *,
    first_job: int = 0,
    kind: ScheduleKind = "train",
) -> Schedule:
    """The schedule of one step of a plan.

    ``ExecutePlan([(0, 2), (2, 3)], (3, 4), [(2, 3), (0, 2)])`` on 2 workers with 3 microbatches, every
    run taking one slot (``F0.2``: job F0, microbatch 2; a dot: nothing to do):

        train: 5 jobs on 2 workers, 3 microbatches
        F0[0:2] F1[2:3] U[3:4] B1[2:3] B2[0:2]
                  0     1     2     3     4     5     6     7     8
        worker 0  F0.0  F0.1  F0.2  U.0   U.1   U.2   B2.0  B2.1  B2.2
        worker 1  .     F1.0  F1.1  F1.2  B1.0  B1.1  B1.2  .     .

    Args:
        plan: the stages; checked to cover its layers.
        num_workers: workers in the rotation.
        num_microbatches: microbatches of every job.
        first_job: index of the step's first job; the previous step's `Schedule.next_job` keeps the rotation going.
        kind: which jobs; ``"forward"`` and ``"backward"`` go over all layers and treat the fused tail as any stage.

    Raises:
        ScheduleError: the plan does not cover its layers, has no fused tail to train with, or does not rotate and has
            a backward range with layers of several workers; or a count is not positive.
    """
    if num_workers < 1 or num_microbatches < 1 or first_job < 0:
        raise ScheduleError(
            f"num_workers={num_workers}, num_microbatches={num_microbatches}, first_job={first_job}: "
            "the counts must be at least 1, the first job at least 0"
        )
    if plan.num_layers == 0:
        raise ScheduleError("the plan has no ranges: a schedule needs at least one layer")
    plan.validate(plan.num_layers)
    if kind == "train":
        if plan.fused is None:
            raise ScheduleError(
                "the plan has no fused range, which training needs: give `fused`, or make the first backward "
                "range start where the last forward range stops"
            )
        stages = plan.named_stages()
    elif kind == "forward":
        stages = [(f"F{index}", layers) for index, layers in enumerate(plan.forward_stages)]
    elif kind == "backward":
        stages = [(f"B{index}", layers) for index, layers in enumerate(plan.backward_stages, 1)]
    else:
        raise ScheduleError(f"kind is {kind!r}; allowed are 'train', 'forward' and 'backward'")
    counts = plan.shares(kind, min(num_workers, num_microbatches))
    slots = [(*stage, replica, count) for stage, count in zip(stages, counts, strict=True) for replica in range(count)]
    indexes = range(first_job, first_job + len(slots))
    workers = plan.workers(kind, num_workers) or [index % num_workers for index in indexes]
    jobs = tuple(
        Job(index, Phase(name[0]), start, stop, worker, name, replica, count)
        for index, worker, (name, (start, stop), replica, count) in zip(indexes, workers, slots, strict=True)
    )
    worker_tasks = tuple(tuple(_worker_tasks(jobs, worker, num_microbatches)) for worker in range(num_workers))
    return Schedule(kind, plan, num_workers, num_microbatches, jobs, worker_tasks, first_job)
