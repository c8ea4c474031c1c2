"""What the planner and the simulator say about a run's latest round, from what was measured so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from roundpipe.core.tiling import Tiles
from roundpipe.planning.machine import HardwareProfile
from roundpipe.planning.residency import DEVICE_BYTES_PER_S
from roundpipe.planning.simulator import simulate, simulate_timeline, step_alone_s
from roundpipe.planning.stage_costs import StageCosts, num_trained
from roundpipe.reports.memory import DeviceMemory
from roundpipe.runtime.profiling.meter import MeterReading, link_speeds, visit_seconds
from roundpipe.wrappers.run_log import LatestStep
from roundpipe.wrappers.session import Session


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the planner and the simulator say about the latest training round."""

    round_s: float | None
    """Seconds per round in steady state; None before layers were measured."""
    idle: float | None
    """Mean share of the devices' time without compute."""
    uploaded_bytes: float | None
    """Per round, all devices."""
    downloaded_bytes: float | None
    """Per round, all devices."""
    device_memory: DeviceMemory | None
    """What the plan counts with for the stage that needs the most; None: nothing is known of what layers keep for
    backward, as of a model that was not traced."""
    device_bytes: tuple[int, ...] | None
    """Per worker, the most that is in use at once."""
    rests_on: str
    """Where the costs of layers come from."""
    tiles: Tiles
    """Into how many tiles rows were cut."""
    visit_s: float = 0.0
    """What beginning a visit of a stage was measured to take a worker."""

    @property
    def peak_device_bytes(self) -> int | None:
        """The total of `device_memory`."""
        return None if self.device_memory is None else self.device_memory.total


def predict(latest: LatestStep | None, session: Session, meters: Sequence[MeterReading]) -> Prediction | None:
    """The simulator's figures for steps like the latest, with links and an optimizer as fast as they were measured."""
    engine = session.engine
    chain = None if latest is None else latest.chain()
    if latest is None or chain is None:
        return None
    plans, schedule, grain = latest.plans, latest.schedule, latest.recompute_grain
    costs = plans.costs.of(chain, latest.elements, latest.tiles)
    knows_memory = any(cost.activation_bytes for cost in costs)
    overlaps = latest.overlaps and session.optimizer.is_async
    profile = HardwareProfile(prefetch_across_steps=overlaps, has_peers=engine.has_peers)
    residency, memory = latest.residency, None
    if knows_memory:
        stage_costs = StageCosts(costs, grain, is_alone=schedule.num_microbatches == 1)
        needs = residency.stage_memory(schedule.plan, stage_costs, schedule.num_workers)
        memory = max(needs.values(), key=lambda need: need.total)._replace(allocator=latest.allocator_bytes)
    if not plans.costs.is_measured(chain, latest.tiles):
        device_bytes = None
        if knows_memory:
            device_bytes = simulate(schedule, costs, profile, recompute_grain=grain, residency=residency).peak_bytes
        rests_on = "bytes of layers; their seconds are not measured yet"
        return Prediction(None, None, None, None, memory, device_bytes, rests_on, latest.tiles)
    up, down = link_speeds(meters)
    trained = sum(num_trained(cost) for cost in residency.streamed(costs))
    there_bytes_per_s = DEVICE_BYTES_PER_S if engine.has_accelerators else inf  # CPU workers' is the optimizer's thread
    profile = replace(
        profile,
        upload_bytes_per_s=up,
        download_bytes_per_s=down,
        device_bytes_per_s=there_bytes_per_s,
        visit_s=visit_seconds(meters),
    )
    chain_s = session.optimizer.times.per_round() if session.optimizer.is_async else None
    if overlaps and trained and chain_s is not None:
        profile = profile.with_optimizer(trained, chain_s)
    if overlaps:
        simulation = simulate(schedule, costs, profile, recompute_grain=grain, residency=residency)
        round_s, idle = simulation.seconds_per_step, simulation.mean_idle.total
    else:
        simulation, timeline = simulate_timeline(schedule, costs, profile, recompute_grain=grain, residency=residency)
        round_s = step_alone_s(timeline, schedule)
        computed_s = sum(
            span.seconds for span in timeline.spans if span.lane == "compute" and span.args["job"] < schedule.next_job
        )
        idle = 1.0 - computed_s / (round_s * schedule.num_workers)
    if chain_s is not None and not (overlaps and trained):  # then it is not simulated
        busy_s = (1.0 - idle) * round_s
        round_s = max(round_s, chain_s.update_s) + (0.0 if overlaps else chain_s.hand_over_s)
        idle = 1.0 - busy_s / round_s
    return Prediction(
        round_s,
        idle,
        simulation.uploaded_bytes,
        simulation.downloaded_bytes,
        memory,
        simulation.peak_bytes if knows_memory else None,
        "measured times of layers, links and the optimizer",
        latest.tiles,
        profile.visit_s,
    )
