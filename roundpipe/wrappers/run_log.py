"""What calls of a model bring, for its report and its tables."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roundpipe.core.layers import LayerChain
from roundpipe.core.schedule import Schedule
from roundpipe.core.tiling import Tiles
from roundpipe.planning.residency import Residency
from roundpipe.planning.stage_costs import StageCosts
from roundpipe.reports.memory import DeviceMemory
from roundpipe.runtime.config import RecomputeGrain
from roundpipe.runtime.engine.plan_choice import PlanChooser
from roundpipe.runtime.profiling.meter import MeterReading


@dataclass(slots=True)
class RunLog:
    """What calls brought since the last report."""

    num_steps_before: int = 0
    """Steps that were made when the last report was."""
    optimizer_before: Mapping[str, float] = field(default_factory=dict)
    start_before: Mapping[str, float] = field(default_factory=dict)
    meters_before: Sequence[MeterReading] = ()
    retries_before: int = 0
    latest: LatestStep | None = None
    """The latest training step."""
    num_calls: int = 0
    num_samples: int | None = 0
    num_tokens: int = 0
    tokens_of: str | None = None


@dataclass(frozen=True, slots=True)
class LatestStep:
    """What the predictions are about."""

    schedule: Schedule
    chain: weakref.ref[LayerChain]
    elements: int
    """Of the tensor arguments of its largest microbatch."""
    recompute_grain: RecomputeGrain
    tiles: Tiles
    overlaps: bool
    """Whether the next step begins beside it."""
    residency: Residency
    allocator_bytes: int
    """Of each device, what its plan leaves to the allocator."""
    plans: PlanChooser
    """Know what its layers take."""

    def device_memory(self) -> dict[str, DeviceMemory] | None:
        """Device memory by stage, as planned; None: what layers take was not computed."""
        chain, known, schedule = self.chain(), self.plans.costs, self.schedule
        if chain is None or known.record(chain).memory_at(self.elements, self.tiles) is None:
            return None
        costs, is_alone = known.of(chain, self.elements, self.tiles), schedule.num_microbatches == 1
        stage_costs = StageCosts(costs, self.recompute_grain, is_alone=is_alone)
        stages = self.residency.stage_memory(schedule.plan, stage_costs, schedule.num_workers)
        return {name: memory._replace(allocator=self.allocator_bytes) for name, memory in stages.items()}
