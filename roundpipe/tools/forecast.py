"""What training a model on given devices will take, and what to change: forecasts for one setting and its neighbours.

Settings are tried with the same layers: for memory if nothing fits the devices, otherwise for speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf

from roundpipe.planning.simulator import simulate_timeline, steady
from roundpipe.reports.timeline import Timeline
from roundpipe.runtime.config import RecomputeGrain
from roundpipe.tools.forecast_setting import Forecast, Layers, Machine, Training, forecast_at
from roundpipe.tools.target import Target

WORTH_NAMING = 1.05
"""How much faster a change must be to be suggested."""
MUCH_IDLE = 0.05
"""Share of idle time above which other settings are tried."""


def forecast(target: Target, machine: Machine, training: Training) -> Forecast:
    """What a training run will take.

    Raises:
        ConfigError: the options don't go together.
        TraceError: the model's own forward can't be traced, so it would not be cut.
    """
    layers = Layers.of(target, training.microbatch, machine)
    result = forecast_at(target, layers, machine, training)
    for changed in _alternatives(training, result):
        other = forecast_at(target, layers, machine, changed, simulated=result.fits_devices)
        is_slower = result.fits_devices and other.samples_per_s() < result.samples_per_s() * WORTH_NAMING
        if not other.fits_devices or is_slower:
            continue
        result.changes.append(_describe(training, changed, other, result))
        if not result.fits_devices:
            break  # the first that fits is the cheapest
    result.changes += _with_fewer_devices(target, layers, result)
    if not result.fits_devices and not result.changes:
        result.changes.append("shorter sequences, a device with more memory, or --lora (no gradients of the weights)")
    host_bytes = machine.host_memory_bytes
    if host_bytes is not None and result.host.total > host_bytes:
        result.changes.append("host memory: --lora, --optimizer sgd or --optim-dtype bfloat16 need less of it")
    return result


def simulated_timeline(result: Forecast) -> Timeline:
    """The latest steps of the run that a forecast rests on; for one that has a plan."""
    assert result.plan is not None, "a model that no plan fits has no run"
    setting = result.setting
    schedule = setting.schedule(result.plan)
    _, timeline = simulate_timeline(schedule, setting.costs, setting.profile, recompute_grain=setting.recompute_grain)
    return steady(timeline, schedule)


def _alternatives(training: Training, result: Forecast) -> Iterator[Training]:
    """Settings to try: for memory if nothing fits the devices, the cheapest first; otherwise for speed."""
    other_grain: RecomputeGrain = "layer" if training.recompute_grain == "stage" else "stage"
    number, batch = training.num_microbatches, training.batch
    if result.simulation is not None and result.fits_devices:
        idle = result.simulation.mean_idle
        if idle.total > MUCH_IDLE:
            yield replace(training, batch=2 * batch, num_microbatches=2 * number)
            yield replace(training, recompute_grain=other_grain)
        if number < batch and idle.no_work > MUCH_IDLE:
            yield replace(training, num_microbatches=min(2 * number, batch))
        return
    grains: tuple[RecomputeGrain, ...] = ("layer",) if training.recompute_grain == "layer" else ("stage", "layer")
    for num_microbatches, grain in product(sorted({number, min(2 * number, batch), batch}), grains):
        changed = replace(training, num_microbatches=num_microbatches, recompute_grain=grain)
        if changed != training:
            yield changed


def _with_fewer_devices(target: Target, layers: Layers, result: Forecast) -> list[str]:
    """The number of devices that would be faster than all of them, if there is one: one, or half of them.

    Where links bind, the one stage of a single device moves each weight once; stages spread over devices move most of
    them twice.
    """
    step, training, machine = result.simulation, result.training, result.machine
    if step is None or not result.fits_devices or step.mean_idle.total <= MUCH_IDLE:
        return []
    within_s = step.seconds_per_step / WORTH_NAMING
    work_s = sum(cost.forward_s + cost.backward_s for cost in result.setting.costs)
    weight_bytes = sum(cost.weight_bytes for cost in result.costs)
    moved_bytes = weight_bytes + max(weight_bytes - machine.budget_bytes, 0)  # what can't stay comes up twice
    gradient_bytes = sum(cost.gradient_bytes for cost in result.costs)
    if (step.optimizer_bytes + moved_bytes + gradient_bytes) / machine.host_bytes_per_s > within_s:
        return []  # the host is the limit, for any number
    best: tuple[float, int] | None = None
    for number in sorted({1, -(-machine.num_devices // 2)}):
        at_least_s = max(work_s * training.num_microbatches, moved_bytes / machine.link_bytes_per_s) / number
        if not 0 < number < machine.num_devices or at_least_s > within_s:
            continue
        other = forecast_at(target, layers, replace(machine, num_devices=number), training)
        if other.fits_devices and other.simulation is not None and other.simulation.seconds_per_step <= within_s:
            best = min(best or (inf, 0), (other.simulation.seconds_per_step, number))
    if best is None:
        return []
    same = f"--batch {training.batch} --microbatches {training.num_microbatches}"
    return [f"--devices {best[1]} {same}: {step.seconds_per_step / best[0] - 1:+.0%} throughput"]


def _describe(training: Training, changed: Training, other: Forecast, result: Forecast) -> str:
    names = {"batch": "--batch", "num_microbatches": "--microbatches", "recompute_grain": "--recompute"}
    values = {name: getattr(changed, name) for name in names if getattr(changed, name) != getattr(training, name)}
    options = " ".join(f"{names[name]} {value}" for name, value in values.items())
    if not result.fits_devices:
        return f"{options}: fits the devices"
    return f"{options}: {other.samples_per_s() / result.samples_per_s() - 1:+.0%} throughput"
