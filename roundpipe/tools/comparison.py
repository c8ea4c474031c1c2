"""Schedules side by side for the same layers, devices and links: why the rotation, and what replicas would bring.

    rotation               the plan that a run uses
    rotation, replicas     heavy stages in several consecutive slots (simulated; the runtime gives every stage one slot)
    rotation, greedy       the simplest plan: as few stages as the heaviest allows
    GPipe, 1F1B, interleaved
                           each device owns a part of the model, with gradients and optimizer states

Invariant: rows differ in the schedule alone; all of them do the same samples in a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from roundpipe.core.errors import ConfigError, DeviceMemoryError
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import ExecutePlan, make_schedule
from roundpipe.planning.evaluation import plan_peak_bytes
from roundpipe.planning.planner import plan_greedy, plan_replicated
from roundpipe.planning.simulator import HardwareProfile, simulate
from roundpipe.planning.stage_costs import RecomputeGrain
from roundpipe.planning.static_schedules import StaticKind, simulate_static
from roundpipe.reports.quantities import format_bytes, format_seconds
from roundpipe.reports.tables import columns_table

NUM_CHUNKS = 2
"""Parts of the model per device in the interleaved schedule."""


@dataclass(frozen=True, slots=True)
class ComparedSchedule:
    """One schedule; figures are None where it can't be made."""

    name: str
    microbatches: int
    seconds_per_round: float | None = None
    idle: float | None = None
    """Mean share of a device's time."""
    peak_bytes: int | None = None
    """Of the fullest device."""
    fits: bool = False
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is compared on."""

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


def compare_schedules(setting: Setting, chosen: ExecutePlan | None) -> list[ComparedSchedule]:
    """All schedules on the same setting.

    Args:
        setting: layers, devices, links.
        chosen: the plan of a run; None: none fits.
    """
    limits: dict[str, Any] = {
        "num_workers": setting.num_workers,
        "num_microbatches": setting.num_microbatches,
        "memory_budget_bytes": setting.budget_bytes,
        "recompute_grain": setting.recompute_grain,
    }

    def replicated() -> tuple[ExecutePlan, tuple[int, ...]]:
        found = plan_replicated(setting.costs, **limits)
        return found.plan, found.replicas

    rows = []
    if chosen is not None:
        rows.append(_rotation("rotation", setting, lambda: (chosen, None)))
    rows.append(_rotation("rotation, replicas", setting, replicated))
    rows.append(_rotation("rotation, greedy", setting, lambda: (plan_greedy(setting.costs, **limits), None)))
    for name, kind, chunks in (
        ("GPipe", "gpipe", 1),
        ("1F1B", "1f1b", 1),
        ("interleaved 1F1B", "interleaved", NUM_CHUNKS),
    ):
        rows.append(_static(name, kind, chunks, setting))  # type: ignore[arg-type]
    return rows


def _rotation(
    name: str, setting: Setting, make: Callable[[], tuple[ExecutePlan, tuple[int, ...] | None]]
) -> ComparedSchedule:
    number = setting.num_microbatches
    try:
        plan, replicas = make()
    except DeviceMemoryError:
        return ComparedSchedule(name, number, remark="no plan fits")
    schedule = make_schedule(plan, setting.num_workers, number, replicas=replicas)
    grain = setting.recompute_grain
    found = simulate(schedule, setting.costs, setting.profile, recompute_grain=grain)
    need = plan_peak_bytes(
        plan, setting.costs, num_workers=setting.num_workers, recompute_grain=grain, replicas=replicas
    )
    fits = setting.budget_bytes is None or need <= setting.budget_bytes
    remark = f"{plan.num_stages} stages" + (f" in {sum(replicas)} slots" if replicas and max(replicas) > 1 else "")
    return ComparedSchedule(name, number, found.seconds_per_round, found.mean_idle.total, need, fits, remark)


def _static(name: str, kind: StaticKind, chunks: int, setting: Setting) -> ComparedSchedule:
    """A static schedule, with recomputation if it does not fit without."""
    num_workers, number, costs = setting.num_workers, setting.num_microbatches, setting.costs
    if kind == "interleaved" and number % num_workers:
        number = max(round(number / num_workers), 1) * num_workers
        costs = tuple(cost.scaled(setting.num_microbatches / number) for cost in costs)
    remark = f"{num_workers * chunks} stages"
    for recompute in (False, True):
        try:
            found = simulate_static(
                kind,
                costs,
                num_workers=num_workers,
                num_microbatches=number,
                num_chunks=chunks,
                recompute=recompute,
                link_bytes_per_s=min(setting.profile.upload_bytes_per_s, setting.profile.download_bytes_per_s),
                state_bytes_per_parameter=setting.state_bytes_per_parameter,
            )
        except ConfigError as error:
            return ComparedSchedule(name, number, remark=str(error))
        peak_bytes = max(found.peak_bytes)
        fits = setting.budget_bytes is None or peak_bytes <= setting.budget_bytes
        if fits:
            break
    remark += ", recomputing" if recompute else ""
    return ComparedSchedule(name, number, found.seconds_per_round, found.mean_idle, peak_bytes, fits, remark)


def comparison_text(rows: Sequence[ComparedSchedule], per_round: float | None = None, unit: str = "tokens") -> str:
    """The comparison as a table.

    Args:
        rows: the schedules.
        per_round: what a round trains on, for a rate; None: none is shown.
        unit: of it.
    """
    rate = [] if per_round is None else [f"{unit}/s"]
    headers = ["schedule", "microbatches", "round", *rate, "idle", "device memory", "fits", "with"]
    cells = []
    for row in rows:
        if row.seconds_per_round is None or row.idle is None or row.peak_bytes is None:
            cells.append([row.name, str(row.microbatches), "-", *["-" for _ in rate], "-", "-", "no", row.remark])
            continue
        speed = [] if per_round is None else [f"{per_round / row.seconds_per_round:,.0f}"]
        cells.append(
            [
                row.name,
                str(row.microbatches),
                format_seconds(row.seconds_per_round),
                *speed,
                f"{row.idle:.1%}",
                format_bytes(row.peak_bytes),
                "yes" if row.fits else "no",
                row.remark,
            ]
        )
    return columns_table(headers, cells)


def comparison_json(rows: Sequence[ComparedSchedule], per_round: float | None = None) -> list[dict[str, Any]]:
    """The same as plain values."""
    found = []
    for row in rows:
        values = asdict(row)
        if per_round is not None:
            values["per_s"] = None if not row.seconds_per_round else per_round / row.seconds_per_round
        found.append(values)
    return found
