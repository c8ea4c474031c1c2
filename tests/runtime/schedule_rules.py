"""The rules of a schedule: what each task waits for, a walk that holds every rule, and the schedule as a table.

Nothing in the library asks for these: the engine's workers wait for values and memory as they come. Here the rules
stand by themselves, so that schedules, simulated runs and recorded ones can be held against them.
"""

from __future__ import annotations

from roundpipe.core.errors import ScheduleError
from roundpipe.core.schedule import MAX_RESIDENT_JOBS, Job, Phase, Schedule, Task, TaskKind


def last_run(schedule: Schedule, job: Job) -> Task:
    """The RUN of a job's last microbatch."""
    return Task(TaskKind.RUN, job.index, schedule.microbatches(job)[-1])


def waits(schedule: Schedule, task: Task) -> tuple[Task, ...]:
    """The tasks of this step that must end before a task may begin.

    RUN (K, m) waits for (K, m - 1) and (K - 1, m); the first microbatch of K also for K's weights and
    for the end of job K - N, which held the worker before. PREFETCH K waits for the release of job
    K - 2N, whose memory it takes. Where stages have r replicas, read the job's microbatch before for
    m - 1, and the replica of the stage before that runs m for K - 1. Where layers have one worker each,
    read that worker's job before for K - N, and the one before that for K - 2N.
    """
    job_index = task.job_index
    if task.kind is TaskKind.PREFETCH:
        earlier = job_index
        for _ in range(MAX_RESIDENT_JOBS):
            earlier = _worker_before(schedule, earlier) if schedule.has_job(earlier) else -1
        return (Task(TaskKind.RELEASE, earlier),) if schedule.has_job(earlier) else ()
    job = schedule.job(job_index)
    if task.kind is TaskKind.RELEASE:
        return (last_run(schedule, job),)
    microbatch = task.microbatch
    assert microbatch is not None, f"a RUN task without microbatch: {task}"
    tasks = []
    if microbatch >= job.num_replicas:
        tasks.append(Task(TaskKind.RUN, job_index, microbatch - job.num_replicas))
    else:
        tasks.append(Task(TaskKind.PREFETCH, job_index))
        if schedule.has_job(before := _worker_before(schedule, job_index)):
            tasks.append(last_run(schedule, schedule.job(before)))
    behind = job.index - job.replica - 1  # the last replica of the stage before
    if schedule.has_job(behind):
        count = schedule.job(behind).num_replicas
        tasks.append(Task(TaskKind.RUN, behind - count + 1 + microbatch % count, microbatch))
    return tuple(tasks)


def _worker_before(schedule: Schedule, job_index: int) -> int:
    """The job of this step that a job's worker has before it; -1: none."""
    worker = schedule.job(job_index).worker
    return max((job.index for job in schedule.jobs if job.worker == worker and job.index < job_index), default=-1)


def check(schedule: Schedule) -> None:
    """Holds every rule against a schedule by walking it.

    Each layer is forwarded once and backwarded once; each microbatch of each job runs once, on the worker of
    the rotation or the one that has the layers, while the job's weights are there; no worker holds the
    weights of more than two jobs; each job is released; and the waits leave a way to the end.

    Raises:
        ScheduleError: what is broken, with the schedule printed up to the bad step.
    """
    walk = _Walk(schedule)
    broken = _broken_jobs(schedule) or walk.to_the_end() or _missing(schedule, walk.done)
    if broken is not None:
        raise ScheduleError(f"{broken}\n{walk.table()}")


def table(schedule: Schedule) -> str:
    """Workers as rows, slots as columns, every run taking one slot."""
    walk = _Walk(schedule)
    walk.to_the_end()
    return walk.table()


class _Walk:
    """Executes a schedule step by step, a RUN taking one slot, holding every rule as it goes.

    A task starts only after what it waits for, which is how weights come before runs and never for more
    than `MAX_RESIDENT_JOBS` jobs: a list that asks for more stands still, and the walk says where.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.done: set[Task] = set()
        self.tasks = [list(reversed(tasks)) for tasks in schedule.worker_tasks]
        """Per worker, those still to come, the next one last."""
        self.slots: list[dict[int, Task]] = []

    def to_the_end(self) -> str | None:
        """Walks to the end, or to where it breaks: returns what is wrong there."""
        while True:
            broken = self._execute_what_takes_no_slot()
            waiting = [worker for worker, tasks in enumerate(self.tasks) if tasks]
            if broken is not None or not waiting:
                return broken
            slot = {worker: self.tasks[worker][-1] for worker in waiting if not self._missing(worker)}
            if not slot:
                return "deadlock: " + "; ".join(
                    f"worker {worker} stands at {self.tasks[worker][-1]}, which waits for "
                    + ", ".join(map(str, self._missing(worker)))
                    for worker in waiting
                )
            self.slots.append(slot)
            broken = next(filter(None, [self._execute(worker) for worker in slot]), None)
            if broken is not None:
                return broken

    def _execute_what_takes_no_slot(self) -> str | None:
        progress = True
        while progress:
            progress = False
            for worker, tasks in enumerate(self.tasks):
                while tasks and tasks[-1].kind is not TaskKind.RUN and not self._missing(worker):
                    broken = self._execute(worker)
                    if broken is not None:
                        return broken
                    progress = True
        return None

    def _missing(self, worker: int) -> list[Task]:
        """What a worker's next task still waits for."""
        return [before for before in waits(self.schedule, self.tasks[worker][-1]) if before not in self.done]

    def _execute(self, worker: int) -> str | None:
        """Executes a worker's next task; returns what is wrong with that, beyond its waits."""
        schedule, task = self.schedule, self.tasks[worker].pop()
        is_twice = task in self.done
        self.done.add(task)
        if not schedule.has_job(task.job_index) or schedule.job(task.job_index).worker != worker:
            return f"worker {worker} has {task}, which is not its own"
        if is_twice:
            return f"worker {worker} has {task} twice"
        job = schedule.job(task.job_index)
        if task.microbatch is not None and task.microbatch not in schedule.microbatches(job):
            if task.microbatch < schedule.num_microbatches:
                return f"worker {worker} has {task}, which is another replica's"
            return f"worker {worker} has {task}, but there are {schedule.num_microbatches} microbatches"
        return None

    def table(self) -> str:
        """The table up to where the walk stands."""
        schedule = self.schedule
        counts = (
            f"{len(schedule.jobs)} jobs on {schedule.num_workers} workers, {schedule.num_microbatches} microbatches"
        )
        rows = [["", *(str(slot) for slot in range(len(self.slots)))]]
        for worker in range(schedule.num_workers):
            rows.append([f"worker {worker}", *(self._cell(slot.get(worker)) for slot in self.slots)])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"{schedule.kind}: {counts}", " ".join(str(job) for job in schedule.jobs), *lines])

    def _cell(self, task: Task | None) -> str:
        if task is None:
            return "."
        known = self.schedule.has_job(task.job_index)
        name = self.schedule.job(task.job_index).name if known else f"?{task.job_index}"
        return f"{name}.{task.microbatch}"


def _broken_jobs(schedule: Schedule) -> str | None:
    """What is wrong with the jobs, or None."""
    owners = [number % schedule.num_workers for number, _ in enumerate(schedule.plan.forward_stages)]
    ranges = schedule.plan.forward_stages
    for index, job in enumerate(schedule.jobs, schedule.first_job):
        worker = index % schedule.num_workers
        if not schedule.plan.rotates:
            worker = next(
                owner for owner, (start, stop) in zip(owners, ranges, strict=True) if start <= job.start < stop
            )
        if job.index != index or job.worker != worker:
            expected = f"index {index} on worker {worker}"
            return f"{job} has index {job.index} on worker {job.worker}; it must have {expected}"
    stages = [job for job in schedule.jobs if job.replica == 0]
    forward = [layer for job in stages if job.phase is not Phase.BACKWARD for layer in job.layers]
    backward = [layer for job in stages if job.phase is not Phase.FORWARD for layer in reversed(job.layers)]
    layers = list(range(schedule.num_layers))
    if schedule.kind != "backward" and forward != layers:
        return f"the forward visits layers {forward}; it must visit 0 to {layers[-1]} in order, once each"
    if schedule.kind != "forward" and backward != layers[::-1]:
        return f"the backward visits layers {backward}; it must visit {layers[-1]} to 0 in order, once each"
    return None


def _missing(schedule: Schedule, done: set[Task]) -> str | None:
    """A task that no worker's list has, or None."""
    for job in schedule.jobs:
        runs = (Task(TaskKind.RUN, job.index, microbatch) for microbatch in schedule.microbatches(job))
        for task in (*runs, Task(TaskKind.RELEASE, job.index)):
            if task not in done:
                return f"worker {job.worker} never comes to {task}"
    return None
