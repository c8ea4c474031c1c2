"""Who runs what, when: plans and schedules as plain data.

A plan says which layers form a stage in forward, in the fused tail and in backward. A schedule gives job K (one stage
times all microbatches) to worker ``K mod N``, as a list of tasks in order. The engine walks those lists and the
simulator replays the same ones, so that what is predicted is what runs.

Invariant: a schedule runs every microbatch of every job exactly once, never has the weights of more than
two jobs on a worker, and can't deadlock. `tests/runtime/schedule_rules.py` has the rules one by one.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from roundpipe.core.checks import check_count, items_of
from roundpipe.core.errors import ScheduleError, shown

LayerRange = tuple[int, int]
"""Consecutive layers: index of the first, index behind the last."""

ScheduleKind = Literal["train", "forward", "backward"]

MAX_RESIDENT_JOBS = 2
"""Jobs whose weights a worker may hold at once: the one that runs and the one that is uploaded."""


def _parse_range(where: str, spec: object) -> LayerRange:
    if isinstance(spec, range) and spec.step == 1:
        start, stop = spec.start, spec.stop
    elif isinstance(spec, tuple | list) and len(spec) == 2 and all(type(edge) is int for edge in spec):
        start, stop = spec
    else:
        raise ScheduleError(f"{where} is {spec!r}; give range(start, stop) or a pair (start, stop)")
    if not 0 <= start < stop:
        raise ScheduleError(f"{where} is ({start}, {stop}); a range needs 0 <= start < stop")
    return start, stop


def _parse_ranges(what: str, specs: Iterable[object]) -> tuple[LayerRange, ...]:
    if isinstance(specs, range):
        raise ScheduleError(f"{what} is {specs!r}; give a sequence of ranges, such as [range(0, 2)]")
    ranges = items_of(what, specs, "a sequence of ranges, such as [range(0, 2)]", ScheduleError)
    return tuple(_parse_range(f"{what} range {index}", spec) for index, spec in enumerate(ranges))


@dataclass(frozen=True, slots=True, init=False)
class ExecutePlan:
    """Which layers are visited together, and in which phase.

    Forward and backward ranges are independent of each other. The fused tail starts behind the last
    forward range and ends with the last layer; backward goes on from where it starts. It may be written
    as ``fused`` or as the first backward range, which is the same plan:

        ExecutePlan(forward=[range(0, 4)], fused=range(4, 6), backward=[range(2, 4), range(0, 2)])
        ExecutePlan(forward=[range(0, 4)], backward=[range(4, 6), range(2, 4), range(0, 2)])

    A plan without a fused tail has forward ranges over all layers and backward ranges over all layers: it
    serves ``forward`` and ``backward`` as separate calls, but not ``forward_backward``.

    Several workers may share the microbatches of a stage; each brings the stage's weights up and its gradients down:

        ExecutePlan(fused=range(0, 6), replicas=[2])

    Args:
        forward: ranges of layers, ascending; each a ``range`` or a pair ``(start, stop)``.
        fused: the range that runs forward, loss and backward in one visit, or None.
        backward: ranges of layers, descending.
        replicas: per stage of a training step, in order, how many workers share its microbatches, as far as there are
            workers and microbatches for them; empty: one each.

    Raises:
        ScheduleError: something given is not a range, or the replicas are not one count per stage.
    """

    forward: tuple[LayerRange, ...]
    """Forward stages, shallow to deep, without the fused tail; each a pair ``(start, stop)``."""
    fused: LayerRange | None
    """The stage that runs forward, loss and backward in one visit; None: the plan has none."""
    backward: tuple[LayerRange, ...]
    """Backward stages, deep to shallow, without the fused tail."""
    replicas: tuple[int, ...]
    """Per stage of a training step, how many workers share its microbatches; empty: one each."""

    def __init__(
        self,
        forward: Iterable[range | LayerRange] = (),
        fused: range | LayerRange | None = None,
        backward: Iterable[range | LayerRange] = (),
        replicas: Iterable[int] = (),
    ) -> None:
        forward_ranges = _parse_ranges("forward", forward)
        backward_ranges = _parse_ranges("backward", backward)
        fused_range = None if fused is None else _parse_range("fused range", fused)
        forward_stop = forward_ranges[-1][1] if forward_ranges else 0
        if fused_range is None and backward_ranges and backward_ranges[0][0] == forward_stop:
            fused_range, backward_ranges = backward_ranges[0], backward_ranges[1:]
        object.__setattr__(self, "forward", forward_ranges)
        object.__setattr__(self, "fused", fused_range)
        object.__setattr__(self, "backward", backward_ranges)
        counts = tuple(items_of("replicas", replicas, "one count of at least 1 per stage, or ()", ScheduleError))
        if counts and (len(counts) != self.num_stages or not all(type(count) is int and count > 0 for count in counts)):
            raise ScheduleError(
                f"replicas={shown(list(counts))} for {self.num_stages} stages: give one count of at least 1 per "
                "stage, or none"
            )
        object.__setattr__(self, "replicas", counts if any(count > 1 for count in counts) else ())

    @property
    def num_layers(self) -> int:
        """The number of layers that the plan covers."""
        return max((stop for _, stop in (*self.forward_stages, *self.backward_stages)), default=0)

    @property
    def num_stages(self) -> int:
        """The number of visits in a training step."""
        return len(self.forward) + (self.fused is not None) + len(self.backward)

    @property
    def forward_stages(self) -> tuple[LayerRange, ...]:
        """The ranges of a forward pass on its own, ascending, the fused tail among them."""
        return self.forward if self.fused is None else (*self.forward, self.fused)

    @property
    def backward_stages(self) -> tuple[LayerRange, ...]:
        """The ranges of a backward pass on its own, descending, the fused tail among them."""
        return self.backward if self.fused is None else (self.fused, *self.backward)

    def named_stages(self) -> list[tuple[str, LayerRange]]:
        """The stages of a training step in order, by name: F0, F1, .., U, B1, B2, .."""
        return [
            *((f"F{index}", layers) for index, layers in enumerate(self.forward)),
            *([] if self.fused is None else [("U", self.fused)]),
            *((f"B{index}", layers) for index, layers in enumerate(self.backward, 1)),
        ]

    def shares(self, kind: ScheduleKind, most: int) -> list[int]:
        """Per stage of such a step, how many workers share its microbatches, each at most so many."""
        counts = [min(count, most) for count in self.replicas or (1,) * self.num_stages]
        first = len(self.forward)
        return {"train": counts, "forward": counts[: len(self.forward_stages)], "backward": counts[first:]}[kind]

    def with_fewer_replicas(self, most: int, alone: Container[int]) -> ExecutePlan:
        """The same with at most so many per stage, and without for stages that have one of the layers in ``alone``."""
        stages = zip(self.named_stages(), self.replicas, strict=False)
        counts = [1 if any(i in alone for i in range(*layers)) else min(n, most) for (_, layers), n in stages]
        return ExecutePlan(self.forward, self.fused, self.backward, counts)

    def validate(self, num_layers: int) -> None:
        """Check that the plan covers each layer of a model once in forward and once in backward.

        Raises:
            ScheduleError: naming the range that leaves a gap, overlaps or is out of order.
        """
        check_count("num_layers", num_layers, "the number of layers of a model", error=ScheduleError)
        covered = 0
        for index, (start, stop) in enumerate(self.forward):
            if start != covered:
                raise ScheduleError(
                    f"forward range {index} is ({start}, {stop}) but must start at layer {covered}: "
                    "forward ranges ascend from layer 0 without gap or overlap"
                )
            covered = stop
        uncovered, deepest = num_layers, "the last forward range"
        if self.fused is not None:
            if self.fused[0] != covered:
                raise ScheduleError(
                    f"the fused range is {self.fused} but must start at layer {covered}, right behind the "
                    "last forward range"
                )
            (uncovered, covered), deepest = self.fused, "the fused range"
        if covered != num_layers:
            raise ScheduleError(
                f"{deepest} ends at layer {covered}, but the model has {num_layers} layers: it must end at {num_layers}"
            )
        for index, (start, stop) in enumerate(self.backward):
            if stop != uncovered:
                raise ScheduleError(
                    f"backward range {index} is ({start}, {stop}) but must stop at layer {uncovered}: "
                    "backward ranges descend from the fused range to layer 0 without gap or overlap"
                )
            uncovered = start
        if uncovered != 0:
            last = f"the last backward range is {self.backward[-1]}" if self.backward else "there are none"
            raise ScheduleError(
                f"backward ranges leave out layers 0 to {uncovered - 1} ({last}): they must go down to 0"
            )


ModelExecutePlan = ExecutePlan


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
    """Counts over steps; the worker is ``index mod N``."""
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


@dataclass(frozen=True, slots=True)
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
        ScheduleError: the plan does not cover its layers, has no fused tail to train with, or a count is not positive.
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
    jobs = tuple(
        Job(index, Phase(name[0]), start, stop, index % num_workers, name, replica, count)
        for index, (name, (start, stop), replica, count) in enumerate(slots, first_job)
    )
    worker_tasks = tuple(tuple(_worker_tasks(jobs, worker, num_microbatches)) for worker in range(num_workers))
    return Schedule(kind, plan, num_workers, num_microbatches, jobs, worker_tasks, first_job)
