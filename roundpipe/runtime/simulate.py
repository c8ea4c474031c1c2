"""Replays schedules against compute, links, host memory and the optimizer: what a plan will take.

Every round is the same `Schedule` that the engine walks. Each worker computes its ops in the order of its tasks and
has one link up and one down; values that stages hand on go before weights, which go before gradients.
All links and the optimizer share the host's memory bandwidth. Left out: the cost of starting
anything, the allocator, and values that skip stages beyond what ``carry_bytes`` counts.

Invariant: with links that take no time and no optimizer, a round takes what `stage_cost.round_seconds` says.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf

from roundpipe.errors import ConfigError
from roundpipe.layers import LayerCost
from roundpipe.runtime.schedule import ExecutePlan, Job, Phase, Schedule, Task, TaskKind, make_schedule
from roundpipe.runtime.stage_cost import RecomputeGrain, StageCost, StageCosts


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """What a machine's links and memory can do; the default takes no time."""

    upload_bytes_per_s: float = inf
    """Host to device, per device."""
    download_bytes_per_s: float = inf
    """Device to host, per device."""
    host_bytes_per_s: float = inf
    """What all transfers and the optimizer together may take of host memory."""
    optimizer_bytes_per_s: float = inf
    """Host memory traffic of the optimizer alone."""
    optimizer_bytes_per_parameter: int = 0
    """Traffic of one step: 44 for copy, gradient and Adam in three passes, 28 in one; 0 = no optimizer."""
    prefetch_across_rounds: bool = True
    """Whether a worker's first weights of a round come up while it still runs the round before."""

    def __post_init__(self) -> None:
        for name in ("upload_bytes_per_s", "download_bytes_per_s", "host_bytes_per_s", "optimizer_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; a bandwidth must be above 0 (inf: no limit)")


@dataclass(frozen=True, slots=True)
class Idle:
    """Shares of a device's time in which it computes nothing, by what it waits for."""

    weights: float
    activations: float
    optimizer: float
    no_work: float
    """No microbatch is ready: the stage before is not done."""

    @property
    def total(self) -> float:
        """All causes together."""
        return self.weights + self.activations + self.optimizer + self.no_work


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a replay found, in steady state."""

    seconds_per_round: float
    idle: tuple[Idle, ...]
    """Per device."""
    uploaded_bytes: float
    """Per round, all devices."""
    downloaded_bytes: float
    """Per round, all devices."""
    peak_bytes: tuple[int, ...]
    """Per device."""


Event = tuple[str, int, int]
"""What happened, job index, microbatch (or layer; -1: none)."""


@dataclass(slots=True)
class _Op:
    """A piece of compute: one microbatch of a job, or one half of a backward one."""

    job: Job
    microbatch: int
    seconds: float
    needs: tuple[Event, ...]
    """What must be on the device."""
    produced_by: Event | None
    """The compute that makes its input, which tells missing work from slow links."""
    gives: Event


@dataclass(order=True, slots=True)
class _Transfer:
    priority: int
    number: int
    bytes_left: float
    done: Event


class _Replay:
    """A discrete-event run; transfers are fluid, so that shared bandwidth is shared at every moment."""

    def __init__(self, rounds: Sequence[Schedule], costs: StageCosts, profile: HardwareProfile) -> None:
        self.rounds = rounds
        self.costs = costs
        self.profile = profile
        self.num_workers = rounds[0].num_workers
        self.num_microbatches = rounds[0].num_microbatches
        self.now = 0.0
        self.done: dict[Event, float] = {}
        self.followers: dict[Event, list[Callable[[], None]]] = {}
        self.finishing: list[tuple[float, int, int, _Op]] = []
        self.links: dict[tuple[str, int], list[_Transfer]] = {}
        self.num_transfers = 0
        self.moved_bytes = {"up": 0.0, "down": 0.0, "optimizer": 0.0}
        self.free_since = [0.0] * self.num_workers
        self.running = [False] * self.num_workers
        self.ops: list[list[_Op]] = [[] for _ in range(self.num_workers)]
        self.position = [0] * self.num_workers
        self.gaps: list[tuple[int, float, str, float]] = []
        self.ends: list[tuple[float, dict[str, float]]] = []
        self.jobs: list[list[Job]] = [[] for _ in range(self.num_workers)]

    # ------------------------------------------------------------------------------------ events

    def when(self, needs: Sequence[Event], action: Callable[[], None]) -> None:
        """Runs an action once all events have happened."""
        missing = [event for event in needs if event not in self.done]
        if not missing:
            action()
            return
        self.followers.setdefault(missing[0], []).append(lambda: self.when(missing[1:], action))

    def happen(self, event: Event) -> None:
        self.done[event] = self.now
        for action in self.followers.pop(event, ()):
            action()

    def transfer(self, link: str, worker: int, num_bytes: float, priority: int, done: Event) -> None:
        self.moved_bytes[link] += num_bytes
        if num_bytes == 0 or self.bandwidth(link) == self.profile.host_bytes_per_s == inf:
            self.happen(done)
            return
        self.num_transfers += 1
        queue = self.links.setdefault((link, worker), [])
        heapq.heappush(queue, _Transfer(priority, self.num_transfers, num_bytes, done))

    def bandwidth(self, link: str) -> float:
        profile = self.profile
        if link == "optimizer":
            return profile.optimizer_bytes_per_s
        return profile.upload_bytes_per_s if link == "up" else profile.download_bytes_per_s

    def run(self) -> None:
        """Plays all rounds."""
        for schedule in self.rounds:
            self.plan_round(schedule)
        for worker in range(self.num_workers):
            self.start_next(worker)
        while self.finishing or any(self.links.values()):
            self.advance()

    def advance(self) -> None:
        """Moves on to the next end of an op or of a transfer."""
        host = self.profile.host_bytes_per_s
        active = [(min(self.bandwidth(link), host), queue) for (link, _), queue in self.links.items() if queue]
        total = sum(rate for rate, _ in active)
        share = min(1.0, host / total) if total else 1.0
        step_s = min((queue[0].bytes_left / (rate * share) for rate, queue in active), default=inf)
        if self.finishing and self.finishing[0][0] - self.now <= step_s:
            step_s, ended = max(self.finishing[0][0] - self.now, 0.0), None
        else:
            ended = min(active, key=lambda entry: entry[1][0].bytes_left / entry[0])[1]
        self.now += step_s
        for rate, queue in active:
            queue[0].bytes_left -= rate * share * step_s
        if ended is not None:
            self.happen(heapq.heappop(ended).done)
        else:
            _, _, worker, op = heapq.heappop(self.finishing)
            self.running[worker], self.free_since[worker] = False, self.now
            self.happen(op.gives)
        for worker in range(self.num_workers):
            self.start_next(worker)

    def start_next(self, worker: int) -> None:
        """Starts a worker's next op if all that it needs is there, and books what it waited for."""
        while not self.running[worker] and self.position[worker] < len(self.ops[worker]):
            op = self.ops[worker][self.position[worker]]
            if any(event not in self.done for event in op.needs):
                return
            self.position[worker] += 1
            self.running[worker] = True
            self.book_gap(worker, op)
            heapq.heappush(self.finishing, (self.now + op.seconds, len(self.done), worker, op))

    def book_gap(self, worker: int, op: _Op) -> None:
        since = self.free_since[worker]
        weights, optimizer = ("weights", op.job.index, -1), ("gate", op.job.index, -1)
        inputs = [self.done[event] for event in op.needs if event != weights]
        marks = [
            ("no_work", self.done[op.produced_by] if op.produced_by else 0.0),
            ("activations", max(inputs, default=0.0)),
            ("optimizer", self.done.get(optimizer, 0.0)),
            ("weights", self.done[weights]),
        ]
        for cause, until in marks:
            if until > since:
                self.gaps.append((worker, until, cause, until - since))
                since = until

    # ------------------------------------------------------------------------------------ rounds

    def stage(self, job: Job) -> StageCost:
        phases = {Phase.FORWARD: self.costs.forward, Phase.FUSED: self.costs.fused, Phase.BACKWARD: self.costs.backward}
        return phases[job.phase](job.start, job.stop)

    def plan_round(self, schedule: Schedule) -> None:
        """Sets up the ops, uploads and downloads of one round, each waiting for what it needs."""
        start = ("losses", schedule.first_job - 1, -1)
        if start not in self.done and schedule is self.rounds[0]:
            self.happen(start)
        starts = {job.start for job in schedule.jobs if job.phase is Phase.BACKWARD}
        kept = starts if self.costs.grain == "stage" else set(range(schedule.num_layers))
        for job in schedule.jobs:
            self.plan_weights(schedule, job)
            first = job.index == schedule.first_job
            for microbatch in range(self.num_microbatches):
                source = start if first else ("op", job.index - 1, microbatch)
                self.plan_op(job, microbatch, source, kept)
            end = ("op", job.index, self.num_microbatches - 1)
            if self.stage(job).gradient_bytes:
                self.when([end], lambda job=job: self.download_gradients(job))  # type: ignore[misc]
        losses_job = next((job for job in schedule.jobs if job.phase is Phase.FUSED), schedule.jobs[-1])
        losses = ("op", losses_job.index, self.num_microbatches - 1)
        self.when([losses], lambda: self.happen(("losses", schedule.next_job - 1, -1)))
        last = ("op", schedule.next_job - 1, self.num_microbatches - 1)
        self.when([last], lambda: self.ends.append((self.now, dict(self.moved_bytes))))

    def plan_op(self, job: Job, microbatch: int, source: Event, kept: set[int]) -> None:
        """One microbatch of a job: its input comes up, it runs, its output goes down."""
        stage, layers, ops = self.stage(job), self.costs.layers, self.ops[job.worker]
        carry_in = layers[job.start - 1].carry_bytes if job.start else 0
        carry_out = layers[job.stop - 1].carry_bytes
        buffer_free = [ops[-2].gives] if len(ops) > 1 else []
        weights, here = ("weights", job.index, -1), ("input", job.index, microbatch)
        op_done, host = ("op", job.index, microbatch), ("host", job.index - 1, microbatch)
        produced = [source] if source[0] == "losses" else [host]

        def upload(num_bytes: int, event: Event, needs: list[Event]) -> None:
            self.when(needs, lambda: self.transfer("up", job.worker, num_bytes, 0, event))

        if job.phase is Phase.BACKWARD:
            saved, halfway = ("saved", job.index, microbatch), ("recomputed", job.index, microbatch)
            upload(carry_in, saved, buffer_free)
            ops.append(_Op(job, microbatch, stage.early_s, (weights, saved), None, halfway))
            upload(carry_out, here, [*produced, *buffer_free])
            ops.append(_Op(job, microbatch, stage.seconds - stage.early_s, (weights, here), source, op_done))
        else:
            upload(carry_in, here, [*produced, *buffer_free])
            ops.append(_Op(job, microbatch, stage.seconds, (weights, here), source, op_done))
        given = carry_out if job.phase is Phase.FORWARD else carry_in
        out = ("host", job.index, microbatch)
        self.when([op_done], lambda: self.transfer("down", job.worker, given, 0, out))
        inner = sum(layers[cut - 1].carry_bytes for cut in kept if job.start < cut < job.stop)
        if job.phase is Phase.FORWARD and inner:
            extra = ("kept", job.index, microbatch)
            self.when([op_done], lambda: self.transfer("down", job.worker, inner, 1, extra))

    def plan_weights(self, schedule: Schedule, job: Job) -> None:
        """The upload of a job's weights: after what precedes its PREFETCH in the worker's list, and the step."""
        tasks = schedule.tasks(job.worker)
        before = tasks[: tasks.index(Task(TaskKind.PREFETCH, job.index))]
        released = [task.job_index for task in before if task.kind is TaskKind.RELEASE]
        mine = self.jobs[job.worker]
        if not released and self.profile.prefetch_across_rounds:
            released = [one.index for one in mine[:-1]]
        elif not released:
            released = [one.index for one in mine if one.index < schedule.first_job]
        mine.append(job)
        needs: list[Event] = [("op", index, self.num_microbatches - 1) for index in released[-1:]]
        num_layers, num_jobs = schedule.num_layers, len(schedule.jobs)
        round_index = (job.index - self.rounds[0].first_job) // num_jobs
        gates: list[Event] = []
        if round_index >= 2 and self.profile.optimizer_bytes_per_parameter:
            trained = [layer for layer in job.layers if self.costs.layers[layer].gradient_bytes]
            gates = [("stepped", (round_index - 2) * num_layers + layer, -1) for layer in trained]
        gate = ("gate", job.index, -1)
        if gates:
            self.when(gates, lambda: self.happen(gate))
            needs.append(gate)
        weights, num_bytes = ("weights", job.index, -1), self.stage(job).weight_bytes
        begun = ("upload", job.index, -1)

        def start_upload() -> None:
            self.happen(begun)
            self.transfer("up", job.worker, num_bytes, 1, weights)

        self.when(needs, start_upload)

    def download_gradients(self, job: Job) -> None:
        """Gradients come down, then the optimizer steps the job's layers."""
        down = ("gradients", job.index, -1)
        self.transfer("down", job.worker, self.stage(job).gradient_bytes, 2, down)
        per_parameter = self.profile.optimizer_bytes_per_parameter
        if not per_parameter:
            return
        num_jobs, num_layers = len(self.rounds[0].jobs), self.rounds[0].num_layers
        round_index = (job.index - self.rounds[0].first_job) // num_jobs

        def step() -> None:
            for layer in job.layers:
                traffic = self.costs.layers[layer].num_parameters * per_parameter
                stepped = ("stepped", round_index * num_layers + layer, -1)
                self.transfer("optimizer", 0, traffic, 0, stepped)

        self.when([down], step)

    # ----------------------------------------------------------------------------------- results

    def peak_bytes(self, worker: int) -> int:
        """Largest need of a device: memory for two visits' weights, and the gradients and values of a running job."""
        arena_bytes = working_bytes = 0
        for schedule in self.rounds:
            stages = [self.stage(job) for job in schedule.jobs if job.worker == worker]
            weights = [stage.weight_bytes for stage in stages]
            arena_bytes = max([arena_bytes, *map(sum, zip(weights, [*weights[1:], 0], strict=False))])
            working_bytes = max([working_bytes, *(stage.gradient_bytes + stage.working_bytes for stage in stages)])
        return arena_bytes + working_bytes

    def result(self) -> Simulation:
        """What happened in steady state; the last round is left out because nothing follows it."""
        num_rounds = _num_measured(self.num_workers)
        (since, moved_then), (until, moved) = self.ends[-2 - num_rounds], self.ends[-2]
        seconds = until - since
        idle = []
        for worker in range(self.num_workers):
            lost = dict.fromkeys(("weights", "activations", "optimizer", "no_work"), 0.0)
            for who, gap_until, cause, gap_s in self.gaps:
                if who == worker:
                    lost[cause] += max(min(gap_until, until) - max(gap_until - gap_s, since), 0.0)
            idle.append(Idle(**{cause: lost_s / seconds for cause, lost_s in lost.items()}))
        return Simulation(
            seconds_per_round=seconds / num_rounds,
            idle=tuple(idle),
            uploaded_bytes=(moved["up"] - moved_then["up"]) / num_rounds,
            downloaded_bytes=(moved["down"] - moved_then["down"]) / num_rounds,
            peak_bytes=tuple(self.peak_bytes(worker) for worker in range(self.num_workers)),
        )


def _num_measured(num_workers: int) -> int:
    """Rounds to average over: workers and rounds come back to the same phase within them."""
    return num_workers * ceil(12 / num_workers)


def simulate(
    schedule: Schedule,
    costs: Sequence[LayerCost],
    profile: HardwareProfile | None = None,
    *,
    recompute_grain: RecomputeGrain = "stage",
) -> Simulation:
    """Replays rounds of a schedule until they are steady.

    Args:
        schedule: of one round; the others are the same with the rotation going on.
        costs: of the layers, for one microbatch.
        profile: what the machine can do; None = transfers take no time, no optimizer.
        recompute_grain: as for the planner.

    Raises:
        ConfigError: the costs are not those of the schedule's layers.
    """
    if len(costs) != schedule.num_layers:
        raise ConfigError(f"costs of {len(costs)} layers for a schedule of {schedule.num_layers} layers")
    plan = _plan_of(schedule)
    rounds, num_workers = [schedule], schedule.num_workers
    for _ in range(_num_measured(num_workers) + num_workers + 4):
        again = make_schedule(
            plan, num_workers, schedule.num_microbatches, first_job=rounds[-1].next_job, kind=schedule.kind
        )
        rounds.append(again)
    replay = _Replay(rounds, StageCosts(costs, recompute_grain), profile or HardwareProfile())
    replay.run()
    return replay.result()


def _plan_of(schedule: Schedule) -> ExecutePlan:
    """The plan that a schedule was made from, as far as its kind shows it."""
    ranges = {phase: [(job.start, job.stop) for job in schedule.jobs if job.phase is phase] for phase in Phase}
    whole = [(0, schedule.num_layers)]
    if schedule.kind == "forward":
        return ExecutePlan(ranges[Phase.FORWARD], None, whole)
    if schedule.kind == "backward":
        return ExecutePlan(whole, None, ranges[Phase.BACKWARD])
    return ExecutePlan(ranges[Phase.FORWARD], ranges[Phase.FUSED][0], ranges[Phase.BACKWARD])
