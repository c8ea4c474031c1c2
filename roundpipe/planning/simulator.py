"""What a plan will take: schedules against compute, links, host memory and the optimizer.

    simulate -> replay.StepReplay     steps of a schedule, one after the other, until they are steady
             -> discrete_events       compute on workers, transfers on links, and what waits for what

Left out: the cost of starting anything, the allocator, and values that skip stages beyond what ``carry_bytes`` counts.

Invariant: with links that take no time and no optimizer, a step takes what `stage_costs.step_seconds` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from roundpipe.core.errors import ConfigError
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import Schedule
from roundpipe.planning.hardware import HardwareProfile
from roundpipe.planning.replay import CAUSES, Cause, StepReplay
from roundpipe.planning.stage_costs import RecomputeGrain, StageCosts


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
        return self.weights + self.activations + self.optimizer + self.no_work


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
    """Per device: weights, gradients (the visit's and those still on their way down), what the running stage holds."""
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
    steps_per_update: int = 1,
) -> Simulation:
    """Replays steps of a schedule until they are steady.

    Args:
        schedule: of one step; the others are the same with the rotation going on. Its stages may have replicas.
        costs: of the layers, for one microbatch.
        profile: what the machine can do; None = transfers take no time, no optimizer.
        recompute_grain: as for the planner.
        steps_per_update: steps that add up their gradients before each update by the optimizer.

    Raises:
        ConfigError: the costs are not those of the schedule's layers, or a count is not positive.
    """
    return steady_state(replay(schedule, costs, profile, recompute_grain, steps_per_update))


def replay(
    schedule: Schedule,
    costs: Sequence[LayerCost],
    profile: HardwareProfile | None,
    recompute_grain: RecomputeGrain,
    steps_per_update: int = 1,
    *,
    record: bool = False,
) -> StepReplay:
    """The replay behind `simulate`; with ``record``, it keeps its activities and waits."""
    if len(costs) != schedule.num_layers:
        raise ConfigError(f"costs of {len(costs)} layers for a schedule of {schedule.num_layers} layers")
    if steps_per_update < 1:
        raise ConfigError(f"steps_per_update is {steps_per_update}; there must be at least 1")
    stage_costs = StageCosts(costs, recompute_grain)
    steps = StepReplay(schedule, stage_costs, profile or HardwareProfile(), steps_per_update, record)
    steps.run()
    return steps


def steady_state(steps: StepReplay) -> Simulation:
    """Means over the steps from the one that the last one is like."""
    num_steps = steps.age or max(len(steps.over) // 2 // steps.steps_per_update, 1) * steps.steps_per_update
    last, old = steps.over[-1], steps.over[-1 - num_steps]
    seconds = (last.end_s - old.end_s) / num_steps
    schedule = steps.schedule
    num_workers, num_jobs = schedule.num_workers, len(schedule.jobs)
    turns = num_workers // gcd(num_jobs, num_workers)  # steps until a worker has the same jobs again
    lost_s: list[dict[Cause, float]] = [dict.fromkeys(CAUSES, 0.0) for _ in range(num_workers)]
    busy_s = [0.0] * num_workers
    arena_bytes, working_bytes = [0] * num_workers, [0] * num_workers
    weights = [stage.weight_bytes for stage in steps.stages]
    for slot in range(turns * num_jobs):
        worker, position = slot % num_workers, slot % num_jobs
        following = weights[position + num_workers] if position + num_workers < num_jobs else 0
        arena_bytes[worker] = max(arena_bytes[worker], weights[position] + following)
        working_bytes[worker] = max(working_bytes[worker], steps.job_bytes[position])
        visits = len(schedule.microbatches(schedule.jobs[position]))
        busy_s[worker] += visits * steps.stages[position].seconds / turns
        for cause in CAUSES:
            lost_s[worker][cause] += sum(step.lost_s[position][cause] for step in steps.over[-num_steps:])
    uploaded, downloaded, by_optimizer = (
        (now - then) / num_steps for now, then in zip(last.moved_bytes, old.moved_bytes, strict=True)
    )
    return Simulation(
        seconds_per_step=seconds,
        idle=tuple(_idle(busy, seconds, lost) for busy, lost in zip(busy_s, lost_s, strict=True)),
        uploaded_bytes=uploaded,
        downloaded_bytes=downloaded,
        optimizer_bytes=by_optimizer,
        peak_bytes=tuple(map(sum, zip(arena_bytes, working_bytes, strict=True))),
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
