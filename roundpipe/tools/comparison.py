"""Schedules side by side for the same layers, devices and links: why the rotation, and what replicas would bring.

    rotation               the plan that a run uses
    rotation, replicas     heavy stages in several consecutive slots, where their microbatches run at the same time
    rotation, greedy       the simplest plan: as few stages as the heaviest allows
    GPipe, 1F1B, interleaved
                           each device owns a part of the model, with gradients and optimizer states

Invariant: rows differ in the schedule alone; all of them do the same samples in a step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from roundpipe.core.errors import ConfigError, DeviceMemoryError
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import Schedule, make_schedule
from roundpipe.planning.machine import HardwareProfile
from roundpipe.planning.planner import PlanArguments, plan_greedy
from roundpipe.planning.planner import plan as choose_plan
from roundpipe.planning.residency import Residency, choose_residency
from roundpipe.planning.simulator import Simulation, simulate
from roundpipe.planning.stage_costs import RecomputeGrain, StageCosts
from roundpipe.planning.static_schedules import HostNetwork, StaticKind, simulate_static
from roundpipe.reports.memory import DeviceMemory
from roundpipe.reports.tables import format_bytes, format_seconds, format_share, table

_STATIC: tuple[tuple[str, StaticKind, int], ...] = (
    ("GPipe", "gpipe", 1),
    ("1F1B", "1f1b", 1),
    ("interleaved 1F1B", "interleaved", 2),
)
"""Name, kind, and parts of the model per device."""


@dataclass(frozen=True, slots=True)
class ComparedSchedule:
    """One schedule; figures are None where it can't be made."""

    name: str
    microbatches: int
    seconds_per_step: float | None = None
    idle: float | None = None
    peak_bytes: int | None = None
    fits: bool = False
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is planned for and compared on."""

    costs: tuple[LayerCost, ...]
    """Of the layers, for one microbatch."""
    num_workers: int
    num_microbatches: int
    budget_bytes: int | None
    """Of each device; None = no limit."""
    profile: HardwareProfile
    recompute_grain: RecomputeGrain = "stage"
    state_bytes_per_parameter: float = 0.0
    """What an optimizer on the device keeps per trained parameter: its copy and its states."""
    names: tuple[str, ...] | None = None
    """Of the layers, for messages."""
    stays: Residency | None = None
    """What stays on the devices beside the plan of a run; None: frozen weights, as far as there is room."""

    def planner_arguments(self) -> PlanArguments:
        return {
            "num_workers": self.num_workers,
            "num_microbatches": self.num_microbatches,
            "memory_budget_bytes": self.budget_bytes,
            "recompute_grain": self.recompute_grain,
            "names": self.names,
        }

    def schedule(self, plan: ExecutePlan) -> Schedule:
        return make_schedule(plan, self.num_workers, self.num_microbatches)

    def residency(self, plan: ExecutePlan) -> Residency:
        if self.stays is not None:
            return self.stays
        return choose_residency(self.schedule(plan), self.stage_costs(), self.budget_bytes)

    def stage_costs(self) -> StageCosts:
        return StageCosts(self.costs, self.recompute_grain, is_alone=self.num_microbatches == 1)

    def device_memory(self, plan: ExecutePlan) -> dict[str, DeviceMemory]:
        """In use while each stage runs."""
        return self.residency(plan).stage_memory(plan, self.stage_costs(), self.num_workers)

    def simulate(self, plan: ExecutePlan) -> Simulation:
        grain, residency = self.recompute_grain, self.residency(plan)
        return simulate(self.schedule(plan), self.costs, self.profile, recompute_grain=grain, residency=residency)

    def fastest_plan(self) -> ExecutePlan:
        """The fastest without replicas that is found: with links by the simulator, else by the recurrence."""
        link_bytes_per_s = min(self.profile.upload_bytes_per_s, self.profile.download_bytes_per_s)
        predict = None if link_bytes_per_s == inf else lambda plan: self.simulate(plan).seconds_per_step
        arguments = self.planner_arguments()
        return choose_plan(self.costs, predict=predict, link_bytes_per_s=link_bytes_per_s, **arguments)

    def has_room_for(self, peak_bytes: int) -> bool:
        return self.budget_bytes is None or peak_bytes <= self.budget_bytes


def compare_schedules(setting: Setting, chosen: ExecutePlan | None) -> list[ComparedSchedule]:
    """All schedules on the same setting; ``chosen`` is the plan of a run, None: none fits."""
    rows = [] if chosen is None else [_rotation("rotation", setting, chosen)]
    if setting.stays is not None and setting.stays.trained:
        setting = replace(setting, stays=None)  # which was chosen for that plan
    replicated = functools.partial(choose_plan, replicate=True)
    for name, planner in (("rotation, replicas", replicated), ("rotation, greedy", plan_greedy)):
        try:
            rows.append(_rotation(name, setting, planner(setting.costs, **setting.planner_arguments())))
        except DeviceMemoryError:
            rows.append(ComparedSchedule(name, setting.num_microbatches, remark="no plan fits"))
    return rows + compare_static(setting)


def compare_static(setting: Setting, network: HostNetwork | None = None) -> list[ComparedSchedule]:
    """The schedules in which each device owns a part of the model; with a network, as torch runs them."""
    return [_static(name, kind, chunks, setting, network) for name, kind, chunks in _STATIC]


def _rotation(name: str, setting: Setting, plan: ExecutePlan) -> ComparedSchedule:
    simulation, costs = setting.simulate(plan), setting.stage_costs()
    peak_bytes = setting.residency(plan).peak_bytes(setting.schedule(plan), costs)
    remark = f"{plan.num_stages} stages" + (f" in {sum(plan.replicas)} slots" if plan.replicas else "")
    seconds, idle, fits = simulation.seconds_per_step, simulation.mean_idle.total, setting.has_room_for(peak_bytes)
    return ComparedSchedule(name, setting.num_microbatches, seconds, idle, peak_bytes, fits, remark)


def _static(
    name: str, kind: StaticKind, chunks: int, setting: Setting, network: HostNetwork | None
) -> ComparedSchedule:
    """A static schedule, with recomputation if it does not fit without."""
    num_workers, number, costs = setting.num_workers, setting.num_microbatches, setting.costs
    if kind == "interleaved" and number % num_workers:
        number = max(round(number / num_workers), 1) * num_workers
        costs = tuple(cost.scaled(setting.num_microbatches / number) for cost in costs)
    for recompute in (False, True):
        try:
            simulation = simulate_static(
                kind,
                costs,
                num_workers=num_workers,
                num_microbatches=number,
                num_chunks=chunks,
                recompute=recompute,
                link_bytes_per_s=min(setting.profile.upload_bytes_per_s, setting.profile.download_bytes_per_s),
                network=network,
                state_bytes_per_parameter=setting.state_bytes_per_parameter,
            )
        except ConfigError as error:
            return ComparedSchedule(name, number, remark=str(error))
        peak_bytes = max(simulation.peak_bytes)
        fits = setting.has_room_for(peak_bytes)
        if fits:
            break
    remark = f"{num_workers * chunks} stages" + (", recomputing" if recompute else "")
    return ComparedSchedule(name, number, simulation.seconds_per_step, simulation.mean_idle, peak_bytes, fits, remark)


def comparison_text(rows: Sequence[ComparedSchedule], per_step: float | None = None, unit: str = "tokens") -> str:
    """The comparison as a table, with a rate where it is known how many of a unit a step trains on."""
    headers = ["schedule", "microbatches", "round", f"{unit}/s", "idle", "device memory", "fits", "with"]
    cells = []
    for row in rows:
        seconds, idle, peak_bytes = row.seconds_per_step, row.idle, row.peak_bytes
        figures = ["-"] * 4
        if seconds is not None and idle is not None and peak_bytes is not None:
            rate = "" if per_step is None else f"{per_step / seconds:,.0f}"
            figures = [format_seconds(seconds), rate, format_share(idle), format_bytes(peak_bytes)]
        cells.append([row.name, str(row.microbatches), *figures, "yes" if row.fits else "no", row.remark])
    if per_step is None:
        for line in (headers, *cells):
            del line[3]
    return table(headers, cells)


def comparison_json(rows: Sequence[ComparedSchedule], per_step: float | None = None) -> list[dict[str, Any]]:
    """The same as plain values."""
    documents = []
    for row in rows:
        document = {name.replace("per_step", "per_round"): value for name, value in asdict(row).items()}
        if per_step is not None:
            document["per_s"] = per_step / row.seconds_per_step if row.seconds_per_step else None
        documents.append(document)
    return documents
