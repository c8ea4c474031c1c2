"""What a plan will take: schedules against compute, links, host memory and the optimizer.

Left out: the cost of starting anything but a stage's visit, the allocator, and values that skip stages beyond what
``carry_bytes`` counts.

Invariant: with links that take no time and no optimizer, a step takes what `step_times.step_seconds` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

from roundpipe.core.contexts import garbage_collected_behind
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import Phase, Schedule
from roundpipe.planning.machine import HardwareProfile, LinkTransfer
from roundpipe.planning.replay import StepReplay
from roundpipe.planning.replayed import CAUSES, Activity, Cause
from roundpipe.planning.residency import STREAMED, Residency
from roundpipe.planning.stage_costs import RecomputeGrain, StageCosts, beside_bytes
from roundpipe.reports.timeline import OPTIMIZER, WAIT_NAMES, Span, Timeline

SHOWN_STEPS = 3
"""The last ones of a replay, which are steady."""

_PREFIXES: dict[Activity, str] = {
    "upload": "values for ",
    "download": "values of ",
    "kept": "kept values of ",
    "weights": "weights of ",
    "gradients": "gradients of ",
    "added": "convert gradients of ",
}
_OF_UPDATES: dict[Activity, tuple[str, str]] = {
    "update": ("update", "optimizer step {}"),
    "hand-over": ("hand-over", "weights into the model"),
    "update there": ("update", "optimizer step {} of what lives there"),
    "home": ("home", "weights of optimizer step {}"),
}
"""Lane and name."""
_PARTS = {Phase.FORWARD: "forward", Phase.FUSED: "fused", Phase.BACKWARD: "backward"}


@dataclass(frozen=True, slots=True)
class Idle:
    """Shares of a device's time in which it computes nothing, by what it waits for."""

    weights: float
    activations: float
    optimizer: float
    no_work: float
    """No microbatch is ready: the stage before is not done."""
    gradients: float = 0.0
    """Those of the job before the last are not yet home."""

    @property
    def total(self) -> float:
        return self.weights + self.activations + self.optimizer + self.no_work + self.gradients


@dataclass(frozen=True, slots=True)
class Simulation:
    """The steady state of a replay."""

    seconds_per_step: float
    idle: tuple[Idle, ...]
    """Per device."""
    uploaded_bytes: float
    downloaded_bytes: float
    """Per step, all devices."""
    optimizer_bytes: float
    """Host memory traffic of the optimizer, per step."""
    peak_bytes: tuple[int, ...]
    """Per device: weights, those that stay included, gradients (the visit's and those of the one before), what the
    running stage holds."""
    peak_carried_bytes: int

    @property
    def mean_idle(self) -> Idle:
        return Idle(*(sum(getattr(idle, cause) for idle in self.idle) / len(self.idle) for cause in CAUSES))


def simulate(
    schedule: Schedule,
    costs: Sequence[LayerCost],
    profile: HardwareProfile | None = None,
    *,
    recompute_grain: RecomputeGrain = "stage",
    residency: Residency = STREAMED,
) -> Simulation:
    """Replays a step, whose stages may have replicas, again and again until that is steady.

    Costs are for one microbatch. Without a profile transfers take no time, and there is no optimizer. A `ConfigError`
    if the costs are not those of the schedule's layers. What stays on devices is taken to be there.
    """
    stage_costs = StageCosts(residency.streamed(costs), recompute_grain, is_alone=schedule.num_microbatches == 1)
    with garbage_collected_behind():
        profile = profile or HardwareProfile()
        return _steady_state(StepReplay(schedule, stage_costs, profile, residency), profile, residency)


def _steady_state(steps: StepReplay, profile: HardwareProfile, residency: Residency) -> Simulation:
    """Means over the steps from the one that the last one is like.

    Workers hold what a visit leaves through two runs of the next one, when the gradients of both are there, however
    fast it goes down; steps that do not overlap end when all is gone.
    """
    num_steps = steps.finished.age or max(len(steps.finished.steps) // 2, 1)
    last, old = steps.finished.steps[-1], steps.finished.steps[-1 - num_steps]
    seconds = (last.end_s - old.end_s) / num_steps
    schedule = steps.schedule
    num_workers = schedule.num_workers
    lost_s: list[dict[Cause, float]] = [dict.fromkeys(CAUSES, 0.0) for _ in range(num_workers)]
    busy_s = [0.0] * num_workers
    arena_bytes, working_bytes = [0] * num_workers, [0] * num_workers
    weights = [stage.weight_bytes for stage in steps.stages]
    for ring in schedule.rings:
        num_taking, num_jobs = len(ring.workers), len(ring.positions)
        turns = num_taking // gcd(num_jobs, num_taking)  # steps until a worker has the same jobs again
        for slot in range(turns * num_jobs):
            worker, number = ring.workers[slot % num_taking], slot % num_jobs
            position = ring.positions[number]
            following = weights[ring.positions[number + num_taking]] if number + num_taking < num_jobs else 0
            arena_bytes[worker] = max(arena_bytes[worker], weights[position] + following)
            stage, before = steps.stages[position], steps.stages[ring.before(number)]
            finds_any = number >= num_taking or profile.prefetch_across_steps
            used_bytes = stage.gradient_bytes + stage.working_bytes + finds_any * beside_bytes(stage, before)
            working_bytes[worker] = max(working_bytes[worker], used_bytes)
            visits = len(schedule.microbatches(schedule.jobs[position]))
            busy_s[worker] += steps.update_there_s(worker) / num_jobs / turns
            busy_s[worker] += visits * steps.stages[position].seconds / turns
            for cause in CAUSES:
                lost_s[worker][cause] += sum(step.lost_s[position][cause] for step in steps.finished.steps[-num_steps:])
    uploaded, downloaded, by_optimizer = (
        (now - then) / num_steps for now, then in zip(last.moved_bytes, old.moved_bytes, strict=True)
    )
    return Simulation(
        seconds_per_step=seconds,
        idle=tuple(_idle(busy, seconds, lost) for busy, lost in zip(busy_s, lost_s, strict=True)),
        uploaded_bytes=uploaded,
        downloaded_bytes=downloaded,
        optimizer_bytes=by_optimizer,
        peak_bytes=tuple(residency.num_bytes + sum(each) for each in zip(arena_bytes, working_bytes, strict=True)),
        peak_carried_bytes=steps.peak_carried_bytes,
    )


def _idle(busy_s: float, seconds: float, lost_s: dict[Cause, float]) -> Idle:
    """What of a device's time it doesn't compute, shared among causes as the seconds are that were lost to them.

    Those seconds alone would not do: what a visit waited may have begun in a step before those that are looked at.
    """
    share = min(max(1.0 - busy_s / seconds, 0.0), 1.0) if seconds else 0.0
    known_s = sum(lost_s.values())
    if not known_s:
        return Idle(0.0, 0.0, 0.0, no_work=share)
    return Idle(**{cause: share * (cause_s / known_s) for cause, cause_s in lost_s.items()})


def simulate_timeline(
    schedule: Schedule,
    costs: Sequence[LayerCost],
    profile: HardwareProfile | None = None,
    *,
    recompute_grain: RecomputeGrain = "stage",
    residency: Residency = STREAMED,
) -> tuple[Simulation, Timeline]:
    """`simulate`, and what it played from the first step on; arguments and errors are the same."""
    stage_costs = StageCosts(residency.streamed(costs), recompute_grain, is_alone=schedule.num_microbatches == 1)
    profile = profile or HardwareProfile()
    steps = StepReplay(schedule, stage_costs, profile, residency, record=True)
    return _steady_state(steps, profile, residency), Timeline(_spans(steps))


def _spans(steps: StepReplay) -> Iterator[Span]:
    for wait in steps.waits:
        device, cause = f"worker {wait.worker}", wait.cause
        yield Span(device, "waits", WAIT_NAMES[cause], wait.start_s, wait.end_s, {"cause": cause})
    num_updates: Counter[tuple[Activity, int | None]] = Counter()
    for node, activity, job, microbatch, num_bytes, worker in steps.activities:
        start_s = node.sent_s if isinstance(node, LinkTransfer) else node.started_s
        if node.over_s is None or start_s is None or node.over_s <= start_s:
            continue
        if job is None:
            num_updates[activity, worker] += 1
            device, (update_lane, title) = OPTIMIZER if worker is None else f"worker {worker}", _OF_UPDATES[activity]
            yield Span(device, update_lane, title.format(num_updates[activity, worker]), start_s, node.over_s)
            continue
        args: dict[str, object] = {"layers": [job.start, job.stop], "job": job.index}
        name = f"{_PREFIXES.get(activity, '')}{job}"
        if microbatch is not None:
            name += f" m{microbatch}"
            args["microbatch"] = microbatch
        if num_bytes is not None:
            args["bytes"] = round(num_bytes)
        else:
            args["part"] = activity if activity == "recompute" else _PARTS[job.phase]
        lane: str = "converted" if activity == "added" else activity
        if activity == "recompute":
            name, lane = f"{name} recompute", "compute"
        yield Span(f"worker {job.worker}", lane, name, start_s, node.over_s, args)


def steady(timeline: Timeline, schedule: Schedule, num_steps: int = SHOWN_STEPS) -> Timeline:
    """The last whole steps of a simulated run, up to so many; ``schedule`` is that of its first step."""
    computed = [
        ((span.args["job"] - schedule.first_job) // len(schedule.jobs), span)
        for span in timeline.spans
        if span.lane == "compute"
    ]
    counts = Counter(number for number, _ in computed)
    shown = sorted(number for number, count in counts.items() if count == counts[0])[-num_steps:]
    start_s = next(span.start_s for number, span in computed if number == shown[0])
    return timeline.between(start_s, max(span.end_s for number, span in computed if number == shown[-1]))


def step_alone_s(timeline: Timeline, schedule: Schedule) -> float:
    """Seconds of a step beside which no other runs, until its gradients are home: the first of a simulated run."""
    return max(
        span.end_s
        for span in timeline.spans
        if span.lane in ("compute", "gradients") and span.args["job"] < schedule.next_job
    )
