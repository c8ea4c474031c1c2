"""What a plan takes: seconds per step by the recurrence, and device memory by stage."""

from __future__ import annotations

from collections.abc import Sequence

from roundpipe.core.errors import ConfigError
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import ExecutePlan
from roundpipe.planning.stage_costs import RecomputeGrain, StageCost, StageCosts, device_memory, step_seconds
from roundpipe.reports.memory import DeviceMemory


def training_stages(plan: ExecutePlan, costs: StageCosts) -> list[StageCost]:
    """Costs of the jobs of a training step, in order."""
    plan.validate(len(costs.layers))
    if plan.fused is None:
        raise ConfigError("the plan has no fused range: only plans that train in one call have a round")
    return [
        *(costs.forward(*layers) for layers in plan.forward),
        costs.fused(*plan.fused),
        *(costs.backward(*layers) for layers in plan.backward),
    ]


def plan_seconds(
    plan: ExecutePlan,
    costs: Sequence[LayerCost],
    *,
    num_workers: int,
    num_microbatches: int,
    replicas: Sequence[int] | None = None,
) -> float:
    """Seconds per step of a training plan in steady state, transfers left out."""
    stages = training_stages(plan, StageCosts(costs))
    return step_seconds(stages, len(plan.forward), num_workers, num_microbatches, replicas)


def plan_memory(
    plan: ExecutePlan,
    costs: Sequence[LayerCost],
    *,
    num_workers: int,
    recompute_grain: RecomputeGrain = "stage",
    replicas: Sequence[int] | None = None,
) -> list[DeviceMemory]:
    """Device memory while each job of a training step runs, in order."""
    stages = training_stages(plan, StageCosts(costs, recompute_grain))
    counts = [1] * len(stages) if replicas is None else replicas
    slots = [stage for stage, count in zip(stages, counts, strict=True) for _ in range(count)]
    return device_memory(slots, num_workers)


def plan_peak_bytes(
    plan: ExecutePlan,
    costs: Sequence[LayerCost],
    *,
    num_workers: int,
    recompute_grain: RecomputeGrain = "stage",
    replicas: Sequence[int] | None = None,
) -> int:
    """Peak of device memory of a training plan: that of the job that needs the most."""
    jobs = plan_memory(plan, costs, num_workers=num_workers, recompute_grain=recompute_grain, replicas=replicas)
    return max(memory.total for memory in jobs)
