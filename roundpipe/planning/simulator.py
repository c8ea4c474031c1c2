"""Replays schedules against compute, links, host memory and the optimizer: what a plan will take.

Every round is the same `Schedule` that the engine walks; the next one begins when the losses are known, and, if a step
of the optimizer lies between them, when the step before that is done. Each worker computes its ops in the order of its
tasks and has one link up and one down; values that stages hand on go before weights, which go before
gradients. All links and the optimizer share the host's memory bandwidth. Left out: the cost of starting
anything, the allocator, and values that skip stages beyond what ``carry_bytes`` counts.

Invariant: with links that take no time and no optimizer, a round takes what `stage_cost.round_seconds` says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd, inf
from typing import Any, Literal, Protocol

from roundpipe.core.errors import ConfigError
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import MAX_RESIDENT_JOBS, Job, Phase, Schedule
from roundpipe.planning.events import Clock, Link, Node, Op, Transfer
from roundpipe.planning.stage_costs import RecomputeGrain, StageCosts, num_trained

Cause = Literal["weights", "activations", "optimizer", "no_work"]

_SAME = 5e-4
"""Share of a round within which all ends of two rounds must agree for the replay to be steady."""

_NUM_ALIKE, _SAME_LENGTH = 12, 1e-7
"""So many rounds in a row whose lengths differ by this share are taken as steady, too."""

_MAX_ROUNDS, _MAX_TURNS = 32, 4
"""Rounds after which a replay that is not steady is averaged: as many, and as many as the workers need for so many
times the visits that each of them may have under way."""

_MIN_ROUNDS, _NUM_OPS = 6, 30_000
"""Fewer if they have many ops, since then the rotation's start counts less; but never as few as that."""


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
    """Traffic of one step per trained parameter: 44 for copy, gradient and Adam in three passes, 28 in one; 0 = no
    optimizer."""
    prefetch_across_rounds: bool = True
    """Whether a worker's first weights of a round come up while it still runs the round before."""
    gradients_stay: bool = True
    """Whether a visit's gradients take device memory until they are down; CPU workers give it back with the visit."""
    inputs_ahead: int = 1
    """Ops whose inputs may come up before their turn: an accelerator's queue runs ahead, a CPU worker has none."""

    @classmethod
    def of_devices(cls, are_accelerators: bool, **known: Any) -> HardwareProfile:
        """A profile of what is known of some devices; CPU workers have no queue that runs ahead of its thread."""
        return cls(gradients_stay=are_accelerators, inputs_ahead=int(are_accelerators), **known)

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


CAUSES: tuple[Cause, ...] = ("weights", "activations", "optimizer", "no_work")


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
    optimizer_bytes: float
    """Host memory traffic of the optimizer, per round."""
    peak_bytes: tuple[int, ...]
    """Per device: weights, gradients (the visit's and those still on their way down), what the running stage holds."""
    peak_carried_bytes: int
    """Host memory for values and gradients between stages."""

    @property
    def mean_idle(self) -> Idle:
        """The mean over the devices."""
        return Idle(*(sum(getattr(one, cause) for one in self.idle) / len(self.idle) for cause in CAUSES))


Work = Literal["recompute", "compute", "upload", "download", "kept", "weights", "gradients", "update"]


class Watcher(Protocol):
    """Is told what a replay consists of."""

    def add(self, node: Node, work: Work, job: Job | None, microbatch: int | None) -> None:
        """Some work; when it begins and ends is known to the node once the replay is over."""

    def wait(self, worker: int, cause: Cause, start_s: float, end_s: float) -> None:
        """A worker computed nothing."""


@dataclass(slots=True)
class _Visit:
    """A job as the later jobs on its worker see it."""

    last_op: Node
    gradients: Node | None
    """Their way down."""
    gradient_bytes: int


@dataclass(slots=True)
class _Round:
    """One round of the replay."""

    schedule: Schedule
    start: Node = field(default_factory=Node)
    losses: Node = field(default_factory=Node)
    ends: list[Node] = field(default_factory=list)
    """Of each job's compute, then of everything else that must be as before in a steady round."""
    uploads: dict[int, list[Node]] = field(default_factory=dict)
    """Per layer, those of its weights."""
    lost_s: list[dict[Cause, float]] = field(default_factory=list)
    """Per job, what its ops waited."""
    moved_bytes: tuple[float, ...] = ()
    """Up, down and by the optimizer, until its end."""
    relative_ends_s: list[float] = field(default_factory=list)
    """All ends, from the last job's on, once it is over."""

    @property
    def end_s(self) -> float:
        """When its last job was done."""
        end_s = self.ends[len(self.schedule.jobs) - 1].over_s
        assert end_s is not None
        return end_s

    def note_ends(self) -> None:
        """Fills in all ends."""
        end_s = self.end_s
        self.relative_ends_s = [(node.over_s or 0.0) - end_s for node in (*self.ends, self.start, self.losses)]


class _Replay:
    """Rounds of a schedule, until some in a row are like those before them.

    One alone says nothing where a round has fewer jobs than there are workers: the first ones find idle workers.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: StageCosts,
        profile: HardwareProfile,
        rounds_per_step: int,
        watcher: Watcher | None = None,
    ) -> None:
        self.first = schedule
        self.watcher = watcher
        self.costs = costs
        self.profile = profile
        self.rounds_per_step = rounds_per_step
        num_workers = schedule.num_workers
        self.clock = Clock(num_workers, profile.host_bytes_per_s)
        self.up = [Link(profile.upload_bytes_per_s) for _ in range(num_workers)]
        self.down = [Link(profile.download_bytes_per_s) for _ in range(num_workers)]
        self.optimizer = Link(profile.optimizer_bytes_per_s)
        phases = {Phase.FORWARD: costs.forward, Phase.FUSED: costs.fused, Phase.BACKWARD: costs.backward}
        self.stages = [phases[job.phase](job.start, job.stop) for job in schedule.jobs]
        self.on_host = _values_on_host(schedule, costs)
        trained = sum(num_trained(cost) for cost in costs.layers) if schedule.kind == "train" else 0
        self.step_bytes = trained * profile.optimizer_bytes_per_parameter
        self.updates: list[Node] = []
        self.gradients: list[Node] = []
        """Those that the next step waits for."""
        self.visits: list[deque[_Visit]] = [deque(maxlen=2) for _ in range(num_workers)]
        self.recent_ops: list[deque[Node]] = [deque(maxlen=profile.inputs_ahead + 1) for _ in range(num_workers)]
        self.free_s = [0.0] * num_workers
        self.job_bytes = [0] * len(schedule.jobs)
        """Most that a worker held beside weights while it ran the job."""
        self.carried_bytes = self.peak_carried_bytes = 0
        self.num_rounds = 0
        num_ops = sum(len(schedule.microbatches(job)) for job in schedule.jobs)
        self.num_in_a_row = -(-MAX_RESIDENT_JOBS * num_workers // len(schedule.jobs))
        """Rounds with all the visits that workers may have under way; what follows depends on them."""
        most = max(_MAX_ROUNDS, _MAX_TURNS * self.num_in_a_row)
        self.max_rounds = max(_MIN_ROUNDS, 2 * rounds_per_step + 2, min(most, _NUM_OPS // num_ops))
        self.unfinished: deque[_Round] = deque()
        self.over: list[_Round] = []
        self.age = 0
        """How many rounds before the last ones there were ones like them; 0: not steady yet."""
        self.num_alike: dict[int, int] = {}
        """Per age, how many of the last rounds in a row were like those so many rounds before them."""

    def run(self) -> None:
        """Plays them."""
        self._add_round(None)
        while not self.age and self.clock.advance():
            pass

    # ------------------------------------------------------------------------------------ adding

    def _add_round(self, before: _Round | None) -> None:
        """Adds a round; when it begins, it adds the one behind it, whose first weights may come up meanwhile."""
        schedule = self.first
        if before is not None:
            schedule = before.schedule.following()
        made = _Round(schedule)
        self.unfinished.append(made)
        self.num_rounds += 1
        is_stepped = before is not None and self.step_bytes > 0 and (self.num_rounds - 1) % self.rounds_per_step == 0
        updated = self.updates[-2:-1] if is_stepped else []  # a call to step waits for the step before
        if self.num_rounds < self.max_rounds:
            made.start.then = lambda: self._add_round(made)
        given: dict[int, _Given] = {}
        losses: list[Node] = []
        others: list[Node] = []
        for position, job in enumerate(schedule.jobs):
            if job.replica == 0:
                taken, given = given, {}
            visits = self.visits[job.worker]
            gate = self._add_gate(job, before, updated) if is_stepped and before is not None else None
            weights = self._add_weights(made, position, gate)
            source = _Source(
                before.losses if before is not None else None, made.start, weights, gate, visits[-1] if visits else None
            )
            last = self._add_ops(made, position, source, taken, given)
            made.ends.append(last)
            is_last = job.index >= schedule.next_job - job.num_replicas
            if job.phase is Phase.FUSED or (schedule.kind != "train" and is_last):
                losses.append(last)
            gradients = None
            if self.stages[position].gradient_bytes:
                gradients = Transfer(self.down[job.worker], self.stages[position].gradient_bytes, 2)
                self._watch(gradients, "gradients", job)
                self.clock.add(gradients, last)
                others.append(gradients)
            visits.append(_Visit(last, gradients, self.stages[position].gradient_bytes))
        self.clock.add(made.losses, *losses)
        self.gradients += others
        if self.step_bytes and self.num_rounds % self.rounds_per_step == 0:
            update = Transfer(self.optimizer, self.step_bytes)
            self._watch(update, "update")
            self.clock.add(update, *self.gradients, *self.updates[-1:])
            self.updates.append(update)
            self.gradients = []
            others.append(update)
        made.ends += others
        self.clock.add(Node(lambda: self._note_moved(made)), made.ends[len(schedule.jobs) - 1])
        self.clock.add(Node(self._finish), *made.ends)
        self.clock.add(made.start, *([] if before is None else [before.losses, *updated]))

    def _watch(self, node: Node, work: Work, job: Job | None = None, microbatch: int | None = None) -> None:
        if self.watcher is not None:
            self.watcher.add(node, work, job, microbatch)

    def _add_gate(self, job: Job, before: _Round, updated: Sequence[Node]) -> Node | None:
        """When a step's weights are copied in: the step is done, and the round before has read the old ones."""
        layers = [layer for layer in job.layers if self.costs.layers[layer].gradient_bytes]
        if not layers:
            return None
        gate = Node()
        self.clock.add(gate, *updated, *(upload for layer in layers for upload in before.uploads[layer]))
        return gate

    def _add_weights(self, made: _Round, position: int, gate: Node | None) -> Node:
        """The upload of a job's weights, into the memory of the worker's visit before last."""
        job = made.schedule.jobs[position]
        visits = list(self.visits[job.worker])
        needs = [] if gate is None else [gate]
        is_first = position < made.schedule.num_workers
        if is_first:  # a round's weights are asked for when it is made, with the losses of the round before
            needs.append(made.start)
        if not is_first or self.profile.prefetch_across_rounds:
            visits = visits[:-1] if len(visits) == 2 else []
        for visit in visits:
            needs += [visit.last_op, *([visit.gradients] if visit.gradients is not None else [])]
        weights = Transfer(self.up[job.worker], self.stages[position].weight_bytes, 1)
        self._watch(weights, "weights", job)
        self.clock.add(weights, *needs)
        for layer in job.layers:
            made.uploads.setdefault(layer, []).append(weights)
        return weights

    def _add_ops(
        self, made: _Round, position: int, source: _Source, taken: dict[int, _Given], given: dict[int, _Given]
    ) -> Op:
        """A job's microbatches: inputs come up, they run, outputs go down; returns the last op."""
        job, stage, layers = made.schedule.jobs[position], self.stages[position], self.costs.layers
        carry_in = layers[job.start - 1].carry_bytes if job.start else 0
        carry_out = layers[job.stop - 1].carry_bytes
        is_backward = job.phase is Phase.BACKWARD
        read_bytes, written_bytes = (carry_out, carry_in) if is_backward else (carry_in, carry_out)
        if job.phase is Phase.FUSED:
            written_bytes = carry_in
        clock, recent = self.clock, self.recent_ops[job.worker]
        lost: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
        made.lost_s.append(lost)

        def add(seconds: float, inputs: Transfer, made_by: Node | None, is_last: bool) -> Op:
            op = Op(job.worker, seconds)
            self._watch(op, "compute" if is_last else "recompute", job, microbatch)
            waited = () if made_by is source.losses else (inputs,)
            op.then = lambda: self._book(op, position if is_last else -1, lost, source, made_by, waited)
            clock.add(op, source.weights, inputs)
            recent.append(op)
            return op

        def bring(num_bytes: int, *after: Node) -> Transfer:
            is_free = (recent[0],) if len(recent) == recent.maxlen else ()
            values = Transfer(self.up[job.worker], num_bytes)
            self._watch(values, "upload", job, microbatch)
            clock.add(values, *after, *is_free)
            return values

        op: Op | None = None
        for microbatch in made.schedule.microbatches(job):
            before = taken.get(microbatch)
            arrived = source.start if before is None else before.on_host
            made_by = source.losses if before is None else before.op
            if is_backward and self.profile.inputs_ahead:
                saved, incoming = bring(carry_in), bring(read_bytes, arrived)
                add(stage.early_s, saved, None, is_last=False)
            elif is_backward:
                add(stage.early_s, bring(carry_in), None, is_last=False)
                incoming = bring(read_bytes, arrived)
            else:
                incoming = bring(read_bytes, arrived)
            op = add(stage.seconds - stage.early_s, incoming, made_by, is_last=True)
            on_host = Transfer(self.down[job.worker], written_bytes)
            self._watch(on_host, "download", job, microbatch)
            clock.add(on_host, op)
            given[microbatch] = _Given(op, on_host)
            if self.on_host[position].kept_bytes:
                kept = Transfer(self.down[job.worker], self.on_host[position].kept_bytes, 1)
                self._watch(kept, "kept", job, microbatch)
                clock.add(kept, op)
        assert op is not None
        return op

    # ----------------------------------------------------------------------------------- booking

    def _book(
        self,
        op: Op,
        position: int,
        lost: dict[Cause, float],
        source: _Source,
        made_by: Node | None,
        inputs: tuple[Node, ...],
    ) -> None:
        """Notes what an op that is over had waited for; at the end of a microbatch also what was held meanwhile."""
        since = self.free_s[op.worker]
        self.free_s[op.worker] = self.clock.now_s
        if op.started_s > since:
            gates = [source.gate] if inputs or made_by is None else [source.gate, source.start]
            marks: tuple[tuple[Cause, Sequence[Node | None]], ...] = (
                ("no_work", (made_by,)),
                ("activations", inputs),
                ("optimizer", gates),
                ("weights", (source.weights,)),
            )
            for cause, nodes in marks:
                until = max((node.over_s or 0.0 for node in nodes if node is not None), default=0.0)
                if until > since:
                    lost[cause] += until - since
                    if self.watcher is not None:
                        self.watcher.wait(op.worker, cause, since, until)
                    since = until
        if position < 0:
            return
        stage, before = self.stages[position], source.visit
        held_bytes = stage.gradient_bytes + stage.working_bytes
        if before is not None and before.gradients is not None and self.profile.gradients_stay:
            down_s = before.gradients.over_s
            if down_s is None or down_s > op.started_s:
                held_bytes += before.gradient_bytes
        self.job_bytes[position] = max(self.job_bytes[position], held_bytes)
        self.carried_bytes += self.on_host[position].born_bytes
        self.peak_carried_bytes = max(self.peak_carried_bytes, self.carried_bytes)
        self.carried_bytes -= self.on_host[position].freed_bytes

    def _note_moved(self, made: _Round) -> None:
        links = (self.up, self.down, [self.optimizer])
        made.moved_bytes = tuple(sum(link.moved_bytes for link in each) for each in links)

    def _finish(self) -> None:
        """Rounds that are over, in their order, are looked at: is one like an earlier one?"""
        while self.unfinished and all(node.over_s is not None for node in self.unfinished[0].ends):
            self._look_at(self.unfinished.popleft())

    def _look_at(self, made: _Round) -> None:
        self.over.append(made)
        made.uploads.clear()
        made.note_ends()
        if self.age:
            return
        ends_s, step = made.relative_ends_s, self.rounds_per_step
        for age in range(step, len(self.over), step):
            old = self.over[-1 - age]
            within_s = _SAME * (made.end_s - old.end_s) / age
            is_like = all(abs(now - then) <= within_s for now, then in zip(ends_s, old.relative_ends_s, strict=True))
            self.num_alike[age] = self.num_alike.get(age, 0) + 1 if is_like else 0
            if self.num_alike[age] >= self.num_in_a_row:
                self.age = age
                return
        num_alike = max(_NUM_ALIKE, 2 * self.num_in_a_row)
        past = [one.end_s for one in self.over[::-step][: num_alike + 1]]
        if len(past) > num_alike:  # some ends may drift where nothing depends on them
            gains = [now - then for now, then in pairwise(past)]
            if max(gains) - min(gains) <= _SAME_LENGTH * max(gains):
                self.age = step

    # ----------------------------------------------------------------------------------- results

    def result(self) -> Simulation:
        """Means over the rounds from the one that the last one is like."""
        num_rounds = self.age or max(len(self.over) // 2 // self.rounds_per_step, 1) * self.rounds_per_step
        last, old = self.over[-1], self.over[-1 - num_rounds]
        seconds = (last.end_s - old.end_s) / num_rounds
        num_workers, num_jobs = self.first.num_workers, len(self.first.jobs)
        turns = num_workers // gcd(num_jobs, num_workers)  # rounds until a worker has the same jobs again
        lost_s: list[dict[Cause, float]] = [dict.fromkeys(CAUSES, 0.0) for _ in range(num_workers)]
        busy_s = [0.0] * num_workers
        arena_bytes, held_bytes = [0] * num_workers, [0] * num_workers
        weights = [stage.weight_bytes for stage in self.stages]
        for slot in range(turns * num_jobs):
            worker, position = slot % num_workers, slot % num_jobs
            following = weights[position + num_workers] if position + num_workers < num_jobs else 0
            arena_bytes[worker] = max(arena_bytes[worker], weights[position] + following)
            held_bytes[worker] = max(held_bytes[worker], self.job_bytes[position])
            visits = len(self.first.microbatches(self.first.jobs[position]))
            busy_s[worker] += visits * self.stages[position].seconds / turns
            for cause in CAUSES:
                lost_s[worker][cause] += sum(one.lost_s[position][cause] for one in self.over[-num_rounds:])
        moved = [(now - then) / num_rounds for now, then in zip(last.moved_bytes, old.moved_bytes, strict=True)]
        return Simulation(
            seconds_per_round=seconds,
            idle=tuple(_idle(busy, seconds, lost) for busy, lost in zip(busy_s, lost_s, strict=True)),
            uploaded_bytes=moved[0],
            downloaded_bytes=moved[1],
            optimizer_bytes=moved[2],
            peak_bytes=tuple(map(sum, zip(arena_bytes, held_bytes, strict=True))),
            peak_carried_bytes=self.peak_carried_bytes,
        )


def _idle(busy_s: float, seconds: float, lost_s: dict[Cause, float]) -> Idle:
    """What of a device's time it doesn't compute, shared among causes as the seconds are that were lost to them.

    Those seconds alone would not do: what a visit waited may have begun in a round before those that are looked at.
    """
    share = min(max(1.0 - busy_s / seconds, 0.0), 1.0) if seconds else 0.0
    known_s = sum(lost_s.values())
    if not known_s:
        return Idle(0.0, 0.0, 0.0, no_work=share)
    return Idle(**{cause: share * (one_s / known_s) for cause, one_s in lost_s.items()})


@dataclass(frozen=True, slots=True)
class _Source:
    """What all ops of a job wait for, or take from."""

    losses: Node | None
    """Of the round before."""
    start: Node
    weights: Node
    gate: Node | None
    visit: _Visit | None
    """The worker's visit before."""


@dataclass(frozen=True, slots=True)
class _Given:
    """A microbatch's output: when it is made, and when it is on the host."""

    op: Op
    on_host: Node


@dataclass(slots=True)
class _ValuesOnHost:
    """What each microbatch of a job puts on the host for others, and what nobody reads after it."""

    born_bytes: int = 0
    freed_bytes: int = 0
    kept_bytes: int = 0
    """Inputs of backward stages between the job's own cuts: they go down too."""


def _values_on_host(schedule: Schedule, costs: StageCosts) -> list[_ValuesOnHost]:
    """Per job, the values and gradients that it puts on the host and that it is the last to read."""
    jobs, layers = schedule.jobs, costs.layers
    found = [_ValuesOnHost() for _ in jobs]
    starts = {job.start for job in jobs if job.phase is Phase.BACKWARD}
    kept = starts if costs.grain == "stage" else set(range(schedule.num_layers))
    last_reader: dict[int, int] = {}
    first = [position for position, job in enumerate(jobs) if job.replica == 0]
    for position in first:
        job = jobs[position]
        inner = [cut for cut in range(job.start + 1, job.stop) if cut in kept]
        reads = [job.start, *(inner if job.phase is Phase.BACKWARD else [])]
        last_reader.update((cut, position) for cut in reads if cut)
    made: set[int] = set()
    for position in first:
        job, one = jobs[position], found[position]
        carry_in = layers[job.start - 1].carry_bytes if job.start else 0
        if job.phase is Phase.FORWARD:
            inner = [cut for cut in range(job.start + 1, job.stop) if cut in kept]
            one.kept_bytes = sum(layers[cut - 1].carry_bytes for cut in inner)
            cuts = [cut for cut in (*inner, job.stop) if cut in last_reader]
            made.update(cuts)
            one.born_bytes = sum(layers[cut - 1].carry_bytes for cut in cuts)
        else:
            one.born_bytes = carry_in  # the gradient
            if job.phase is Phase.BACKWARD:
                one.freed_bytes = layers[job.stop - 1].carry_bytes if job.stop < schedule.num_layers else 0
    for cut, position in last_reader.items():
        if cut in made:
            found[position].freed_bytes += layers[cut - 1].carry_bytes
    return [found[position - jobs[position].replica] for position in range(len(jobs))]


def simulate(
    schedule: Schedule,
    costs: Sequence[LayerCost],
    profile: HardwareProfile | None = None,
    *,
    recompute_grain: RecomputeGrain = "stage",
    rounds_per_step: int = 1,
    watcher: Watcher | None = None,
) -> Simulation:
    """Replays rounds of a schedule until they are steady.

    Args:
        schedule: of one round; the others are the same with the rotation going on. Its stages may have replicas.
        costs: of the layers, for one microbatch.
        profile: what the machine can do; None = transfers take no time, no optimizer.
        recompute_grain: as for the planner.
        rounds_per_step: rounds that add up their gradients before each step of the optimizer.
        watcher: is told what the replay consists of.

    Raises:
        ConfigError: the costs are not those of the schedule's layers, or a count is not positive.
    """
    if len(costs) != schedule.num_layers:
        raise ConfigError(f"costs of {len(costs)} layers for a schedule of {schedule.num_layers} layers")
    if rounds_per_step < 1:
        raise ConfigError(f"rounds_per_step is {rounds_per_step}; there must be at least 1")
    stage_costs = StageCosts(costs, recompute_grain)
    replay = _Replay(schedule, stage_costs, profile or HardwareProfile(), rounds_per_step, watcher)
    replay.run()
    return replay.result()
