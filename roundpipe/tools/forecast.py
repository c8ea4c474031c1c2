"""What training a model on given devices will take: the plan, seconds per step, bytes on devices and on the host.

    target -> trace -> measure -> partition -> generate      the compiler's own steps, on fake tensors
           -> PlanChooser.plan                               the plan that a run would choose
           -> measure for the device -> simulate             links, host memory and the optimizer included

Nothing is allocated or run: compute times rest on FLOPs and bytes, and on what a device sustains of its datasheet.

Invariant: layers and plan are those that the runtime chooses for the same budget, so what is predicted is what runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal

import torch

from roundpipe.core.errors import ConfigError, DeviceMemoryError, TraceError
from roundpipe.core.layers import LayerChain, LayerCost
from roundpipe.core.schedule import ExecutePlan, make_schedule
from roundpipe.fx.passes.cost import DeviceProfile
from roundpipe.fx.passes.lower import LowerOptions, lower
from roundpipe.fx.trace.tracer import trace
from roundpipe.planning.evaluation import plan_memory
from roundpipe.planning.hardware import HardwareProfile
from roundpipe.planning.simulated_timeline import simulate_timeline, steady
from roundpipe.planning.simulator import Idle, simulate
from roundpipe.planning.stage_costs import largest_layer_bytes
from roundpipe.reports.memory import DeviceMemory
from roundpipe.reports.timeline import Timeline
from roundpipe.runtime.config import RecomputeGrain, RoundPipeRunConfig, resolve
from roundpipe.runtime.device.accelerator import PLANNED_SHARE
from roundpipe.runtime.engine.call import Call
from roundpipe.runtime.engine.plan_choice import PlanChooser, times_the_example, with_temporaries
from roundpipe.tools.comparison import ComparedSchedule, Setting, compare_schedules
from roundpipe.tools.device_data import DeviceSpec, Efficiency
from roundpipe.tools.target import Target

OptimizerName = Literal["adamw", "sgd"]

_STATES = {"adamw": 2, "sgd": 0}
"""Optimizer states per trained parameter, as large as its copy."""
_COPY_ACCESSES = {"adamw": 8, "sgd": 3}
"""Reads and writes of values of the optimizer's dtype in one step of one parameter: copy, gradient, states."""
_MODEL_ACCESSES = 2
"""Those of the model's dtype: the gradient read, the weight written."""
WORTH_NAMING = 1.05
"""How much faster a change must be to be suggested."""
MUCH_IDLE = 0.05
"""Share of idle time above which other settings are tried."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices and their host."""

    device: DeviceSpec
    num_devices: int
    efficiency: Efficiency
    host_bytes_per_s: float
    """Host memory bandwidth that transfers and the optimizer share, sustained."""
    host_memory_bytes: int | None = None
    """None = not asked."""

    @property
    def budget_bytes(self) -> int:
        """What the runtime uses of a device that nobody else uses."""
        return int(self.device.memory_bytes * PLANNED_SHARE)

    @property
    def profile(self) -> DeviceProfile:
        """The compiler's view of a device."""
        return DeviceProfile(
            flops_per_s=self.device.flops_per_s * self.efficiency.compute,
            bytes_per_s=self.device.bytes_per_s * self.efficiency.bandwidth,
        )


@dataclass(frozen=True, slots=True)
class Training:
    """How it is trained."""

    batch: int
    """Samples per step."""
    num_microbatches: int
    optimizer: OptimizerName = "adamw"
    optim_dtype: torch.dtype = torch.float32
    recompute_grain: RecomputeGrain = "stage"

    def __post_init__(self) -> None:
        if self.batch < self.num_microbatches:
            raise ConfigError(
                f"a batch of {self.batch} can't be split into {self.num_microbatches} microbatches; raise --batch or "
                "give --microbatches"
            )

    @property
    def microbatch(self) -> int:
        """Samples of the largest microbatch."""
        return -(-self.batch // self.num_microbatches)


@dataclass(frozen=True, slots=True)
class HostNeed:
    """Bytes in host memory."""

    weights: int
    gradients: int
    optimizer_copies: int
    optimizer_gradients: int
    """Of the step that is being applied, while the next one's come down."""
    optimizer_states: int
    carried: int
    """Values and gradients between stages, most at once: stage inputs are kept for recomputation."""

    @property
    def total(self) -> int:
        parts = (self.weights, self.gradients, self.optimizer_copies, self.optimizer_gradients, self.optimizer_states)
        return sum(parts) + self.carried

    @property
    def pinned(self) -> int:
        """The part of it that is pinned where devices copy from and to pinned memory."""
        return self.weights + self.gradients + self.carried


@dataclass(frozen=True, slots=True)
class Speed:
    """A step in steady state."""

    seconds_per_step: float
    idle: Idle
    """Mean over the devices."""
    uploaded_bytes: float
    """Per step, all devices."""
    downloaded_bytes: float
    """Per step, all devices."""
    optimizer_bytes: float
    """Host memory traffic of the optimizer's step."""
    carried_bytes: int
    """Host memory for values between stages, most at once."""
    link_s: float
    """Least time of a step if only the busier direction of the links counted."""
    host_s: float
    """Least time of a step if only host memory counted: transfers and the optimizer."""

    @property
    def compute_s(self) -> float:
        """What each device computes in a step."""
        return self.seconds_per_step * (1.0 - self.idle.total)


@dataclass(slots=True)
class Forecast:
    """All that was found; ``plan``, ``device`` and ``speed`` are None if no plan fits on the devices."""

    target: Target
    chain: LayerChain
    """The layers, with the costs that they and the plan were chosen by."""
    costs: tuple[LayerCost, ...]
    """Of one microbatch, in the device's seconds."""
    machine: Machine
    training: Training
    plan: ExecutePlan | None
    stages: tuple[DeviceMemory, ...]
    """Device memory while each stage of the plan runs, in the order of the round; none without a plan."""
    host: HostNeed
    speed: Speed | None
    notes: list[str]
    """What the figures leave out."""
    reasons: list[str] = field(default_factory=list)
    """Why it doesn't fit; none if it does."""
    changes: list[str] = field(default_factory=list)
    """What to change, with what that would bring."""

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def device(self) -> DeviceMemory | None:
        """Device memory of the stage that needs the most."""
        return max(self.stages, key=lambda need: need.total, default=None)

    @property
    def fits_devices(self) -> bool:
        """Whether there is a plan that leaves room for all that is counted."""
        return self.device is not None and self.device.total <= self.machine.budget_bytes

    def samples_per_s(self) -> float:
        """Samples in a second; 0 if it doesn't run."""
        return self.training.batch / self.speed.seconds_per_step if self.speed else 0.0


def forecast(target: Target, machine: Machine, training: Training) -> Forecast:
    """What a training run will take.

    Args:
        target: the model.
        machine: the devices.
        training: batch, microbatches, optimizer.

    Raises:
        ConfigError: the options don't go together.
        TraceError: the model's own forward can't be traced, so it would not be cut.
    """
    kwargs = target.kwargs_for(training.microbatch)
    notes = list(target.notes)
    measured = _measured(target, kwargs, machine, notes)
    if not target.has_loss:
        notes.append("the loss is not part of the model's call: its time and memory are left out")
    result = _at(target, measured, machine, training, notes)
    for changed in _alternatives(training, result):
        other = _at(target, measured, machine, changed, notes, replay=result.fits_devices)
        if not other.fits_devices:
            continue
        if result.fits_devices and other.samples_per_s() < result.samples_per_s() * WORTH_NAMING:
            continue
        result.changes.append(_describe(training, changed, other, result))
        if not result.fits_devices:
            break  # the first that fits is the cheapest
    result.changes += _with_fewer_devices(target, measured, result)
    if not result.fits_devices and not result.changes:
        result.changes.append("shorter sequences, a device with more memory, or --lora (no gradients of the weights)")
    host_bytes = machine.host_memory_bytes
    if host_bytes is not None and result.host.total > host_bytes:
        result.changes.append("host memory: --lora, --optimizer sgd or --optim-dtype bfloat16 need less of it")
    return result


@dataclass(frozen=True, slots=True)
class _Measured:
    """A model as layers."""

    chain: LayerChain
    """With the costs that a run would choose its plan by."""
    device_costs: tuple[LayerCost, ...]


def _measured(target: Target, kwargs: dict[str, Any], machine: Machine, notes: list[str]) -> _Measured:
    """The layers, with costs for a microbatch like the keyword arguments."""
    options = LowerOptions(max_layer_bytes=largest_layer_bytes(machine.budget_bytes))
    try:
        with torch.enable_grad():
            traced = trace(target.model, (), kwargs, max_leaf_bytes=options.max_layer_bytes)
    except TraceError as error:
        raise TraceError(f"there is no forecast for a model that runs whole, which this one would: {error}") from error
    lowered = lower(traced, options)
    if traced.opaque:
        notes.append(f"{len(traced.opaque)} modules stayed whole: {', '.join(list(traced.opaque)[:3])}")
    estimated = sum(cost.estimated for cost in lowered.costs.values())
    if estimated:
        notes.append(f"the costs of {estimated} of {len(lowered.costs)} nodes are guessed from sizes")
    return _Measured(lowered.chain, lowered.costs_on(machine.profile))


# One setting


def _at(
    target: Target,
    measured: _Measured,
    machine: Machine,
    training: Training,
    notes: list[str],
    *,
    replay: bool = True,
) -> Forecast:
    """The forecast for one setting, from layers measured at any size; without a replay it has no speed."""
    chain, kwargs = measured.chain, target.kwargs_for(training.microbatch)
    number = training.num_microbatches
    config = resolve(
        RoundPipeRunConfig(num_microbatch=number, recompute_grain=training.recompute_grain),
        None,
        num_devices=machine.num_devices,
    )
    call = Call(chain, config, [()] * number, [kwargs] * number, [None] * number, number)
    factor = times_the_example(chain, call.elements())
    costs = tuple(with_temporaries([cost.scaled(factor) for cost in measured.device_costs]))
    plans = PlanChooser(machine.num_devices, [machine.budget_bytes], accelerators=True)
    reasons, plan, speed = [], None, None
    stages: tuple[DeviceMemory, ...] = ()
    try:
        plan = plans.plan(call)
    except DeviceMemoryError as error:
        reasons.append(str(error))
    else:
        grain = training.recompute_grain
        stages = tuple(plan_memory(plan, costs, num_workers=machine.num_devices, recompute_grain=grain))
        speed = _speed(plan, costs, machine, training) if replay else None
        needed_bytes = max(need.total for need in stages)
        if needed_bytes > machine.budget_bytes:
            reasons.append(
                f"a device needs {needed_bytes:,} bytes with what comes and goes within layers, and its budget is "
                f"{machine.budget_bytes:,} bytes"
            )
    host = _host_need(target, training, plan, costs, speed)
    if machine.host_memory_bytes is not None and host.total > machine.host_memory_bytes:
        reasons.append(f"the host needs {host.total:,} bytes of memory and has {machine.host_memory_bytes:,}")
    return Forecast(target, chain, costs, machine, training, plan, stages, host, speed, notes, reasons)


def _host_need(
    target: Target, training: Training, plan: ExecutePlan | None, costs: Sequence[LayerCost], speed: Speed | None
) -> HostNeed:
    """What the host holds; without a replay, carried values are the stage inputs of all microbatches."""
    parameters = {id(one): one for one in target.model.parameters()}.values()
    buffers = {id(one): one for one in target.model.buffers()}.values()
    trained = [one for one in parameters if one.requires_grad]
    optimizer_bytes = sum(one.numel() for one in trained) * training.optim_dtype.itemsize
    carried = 0
    if speed is not None:
        carried = speed.carried_bytes
    elif plan is not None and plan.fused is not None:
        starts = {start for start, _ in plan.backward} if training.recompute_grain == "stage" else range(plan.fused[0])
        carried = sum(costs[start - 1].carry_bytes for start in {*starts, plan.fused[0]} if start)
        carried *= training.num_microbatches
    return HostNeed(
        weights=sum(one.nbytes for one in (*parameters, *buffers)),
        gradients=sum(one.nbytes for one in trained),
        optimizer_copies=optimizer_bytes,
        optimizer_gradients=optimizer_bytes,
        optimizer_states=optimizer_bytes * _STATES[training.optimizer],
        carried=carried,
    )


def replayed_costs(costs: Sequence[LayerCost], training: Training) -> tuple[LayerCost, ...]:
    """Costs of a mean microbatch: those that are smaller than the largest count so."""
    share = training.batch / (training.microbatch * training.num_microbatches)
    return tuple(replace(cost, forward_s=cost.forward_s * share, backward_s=cost.backward_s * share) for cost in costs)


def hardware_profile(costs: Sequence[LayerCost], machine: Machine, training: Training) -> HardwareProfile:
    """Links, host memory and the optimizer's traffic, for the simulator."""
    num_parameters = sum(cost.num_parameters for cost in costs)
    item_bytes = sum(cost.weight_bytes for cost in costs) / num_parameters if num_parameters else 0.0
    copies_bytes = _COPY_ACCESSES[training.optimizer] * training.optim_dtype.itemsize
    link = machine.device.link_bytes_per_s * machine.efficiency.link
    return HardwareProfile(
        upload_bytes_per_s=link,
        download_bytes_per_s=link,
        host_bytes_per_s=machine.host_bytes_per_s,
        optimizer_bytes_per_s=machine.host_bytes_per_s,
        optimizer_bytes_per_parameter=round(copies_bytes + _MODEL_ACCESSES * item_bytes),
    )


def simulated_timeline(found: Forecast) -> Timeline:
    """The latest rounds of the run that a forecast rests on; for one that has a plan."""
    assert found.plan is not None, "a model that no plan fits has no run"
    training, machine = found.training, found.machine
    profile = hardware_profile(found.costs, machine, training)
    schedule = make_schedule(found.plan, machine.num_devices, training.num_microbatches)
    costs = replayed_costs(found.costs, training)
    _, timeline = simulate_timeline(schedule, costs, profile, recompute_grain=training.recompute_grain)
    return steady(timeline, schedule)


def _speed(plan: ExecutePlan, costs: Sequence[LayerCost], machine: Machine, training: Training) -> Speed:
    """A replay with links, host memory and the optimizer."""
    profile = hardware_profile(costs, machine, training)
    schedule = make_schedule(plan, machine.num_devices, training.num_microbatches)
    found = simulate(schedule, replayed_costs(costs, training), profile, recompute_grain=training.recompute_grain)
    up, down = found.uploaded_bytes, found.downloaded_bytes
    return Speed(
        seconds_per_step=found.seconds_per_step,
        idle=found.mean_idle,
        uploaded_bytes=up,
        downloaded_bytes=down,
        optimizer_bytes=found.optimizer_bytes,
        carried_bytes=found.peak_carried_bytes,
        link_s=max(up, down) / machine.num_devices / profile.upload_bytes_per_s,
        host_s=(up + down + found.optimizer_bytes) / machine.host_bytes_per_s,
    )


def compared(result: Forecast) -> list[ComparedSchedule]:
    """Other schedules on the same model, devices and batch."""
    machine, training = result.machine, result.training
    setting = Setting(
        costs=replayed_costs(result.costs, training),
        num_workers=machine.num_devices,
        num_microbatches=training.num_microbatches,
        budget_bytes=machine.budget_bytes,
        profile=hardware_profile(result.costs, machine, training),
        recompute_grain=training.recompute_grain,
        state_bytes_per_parameter=(1 + _STATES[training.optimizer]) * training.optim_dtype.itemsize,
    )
    return compare_schedules(setting, result.plan)


# What to change


def _alternatives(training: Training, result: Forecast) -> Iterator[Training]:
    """Settings to try: for memory if nothing fits the devices, the cheapest first; otherwise for speed."""
    other_grain: RecomputeGrain = "layer" if training.recompute_grain == "stage" else "stage"
    number, batch = training.num_microbatches, training.batch
    if result.speed is not None and result.fits_devices:
        if result.speed.idle.total > MUCH_IDLE:
            yield replace(training, batch=2 * batch, num_microbatches=2 * number)
            yield replace(training, recompute_grain=other_grain)
        if number < batch and result.speed.idle.no_work > MUCH_IDLE:
            yield replace(training, num_microbatches=min(2 * number, batch))
        return
    grains: tuple[RecomputeGrain, ...] = ("layer",) if training.recompute_grain == "layer" else ("stage", "layer")
    for num_microbatches in sorted({number, min(2 * number, batch), batch}):
        for grain in grains:
            changed = replace(training, num_microbatches=num_microbatches, recompute_grain=grain)
            if changed != training:
                yield changed


def _with_fewer_devices(target: Target, measured: _Measured, result: Forecast) -> list[str]:
    """The number of devices that would be faster than all of them, if there is one: one, or half of them.

    Where links bind, the one stage of a single device moves each weight once; stages spread over devices move most of
    them twice.
    """
    speed, training, all_devices = result.speed, result.training, result.machine.num_devices
    if speed is None or not result.fits_devices or speed.idle.total <= MUCH_IDLE:
        return []
    within_s = speed.seconds_per_step / WORTH_NAMING
    work_s = sum(cost.forward_s + cost.backward_s for cost in replayed_costs(result.costs, training))
    link_bytes_per_s = hardware_profile(result.costs, result.machine, training).upload_bytes_per_s
    weight_bytes = sum(cost.weight_bytes for cost in result.costs)
    moved_bytes = weight_bytes + max(weight_bytes - result.machine.budget_bytes, 0)  # what can't stay comes up twice
    gradient_bytes = sum(cost.gradient_bytes for cost in result.costs)
    if (speed.optimizer_bytes + moved_bytes + gradient_bytes) / result.machine.host_bytes_per_s > within_s:
        return []  # the host is the limit, for any number
    best: tuple[float, int] | None = None
    for number in sorted({1, -(-all_devices // 2)}):
        at_least_s = max(work_s * training.num_microbatches, moved_bytes / link_bytes_per_s) / number
        if not 0 < number < all_devices or at_least_s > within_s:
            continue
        other = _at(target, measured, replace(result.machine, num_devices=number), training, [])
        if other.fits_devices and other.speed is not None and other.speed.seconds_per_step <= within_s:
            best = min(best or (inf, 0), (other.speed.seconds_per_step, number))
    if best is None:
        return []
    same = f"--batch {training.batch} --microbatches {training.num_microbatches}"
    return [f"--devices {best[1]} {same}: {speed.seconds_per_step / best[0] - 1:+.0%} throughput"]


def _describe(training: Training, changed: Training, other: Forecast, result: Forecast) -> str:
    """A change as options, and what it brings."""
    options = []
    if changed.batch != training.batch:
        options.append(f"--batch {changed.batch}")
    if changed.num_microbatches != training.num_microbatches:
        options.append(f"--microbatches {changed.num_microbatches}")
    if changed.recompute_grain != training.recompute_grain:
        options.append(f"--recompute {changed.recompute_grain}")
    if not result.fits_devices:
        return f"{' '.join(options)}: fits the devices"
    gain = other.samples_per_s() / result.samples_per_s() - 1
    return f"{' '.join(options)}: {gain:+.0%} throughput"
