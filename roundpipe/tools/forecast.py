"""What training a model on given devices will take, and what to change: forecasts for one setting and its neighbours.

Nothing is allocated or run: compute times rest on FLOPs and bytes, and on what a device sustains of its datasheet.

Invariant: layers and plan are those that the runtime chooses for the same budget, and such times once it has measured
them, so what is predicted is what runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import Any, Literal

import torch

from roundpipe.core.errors import ConfigError, DeviceMemoryError, TraceError
from roundpipe.core.layers import LayerChain, LayerCost
from roundpipe.core.schedule import ExecutePlan
from roundpipe.core.tiling import Tiles
from roundpipe.fx.guards.guards import GuardedGraph
from roundpipe.fx.passes.cost import DeviceProfile
from roundpipe.fx.passes.lower import LowerOptions, lower
from roundpipe.fx.trace.tracer import trace
from roundpipe.planning.machine import HardwareProfile
from roundpipe.planning.simulator import Simulation, simulate_timeline, steady
from roundpipe.planning.stage_costs import largest_layer_bytes
from roundpipe.reports.memory import DeviceMemory, HostMemory
from roundpipe.reports.tables import format_bytes
from roundpipe.reports.timeline import Timeline
from roundpipe.runtime.config import RecomputeGrain, RoundPipeRunConfig, resolve
from roundpipe.runtime.device.accelerator import PLANNED_SHARE
from roundpipe.runtime.engine.chain_record import times_the_example
from roundpipe.runtime.engine.cost_model import with_repetition
from roundpipe.runtime.engine.plan_choice import PlanChooser
from roundpipe.runtime.engine.spec import Call
from roundpipe.tools.comparison import Setting
from roundpipe.tools.device_data import DeviceSpec, Efficiency
from roundpipe.tools.target import Target
from roundpipe.wrappers.calls import memory_of
from roundpipe.wrappers.tails import TailSource

WORTH_NAMING = 1.05
"""How much faster a change must be to be suggested."""
MUCH_IDLE = 0.05
"""Share of idle time above which other settings are tried."""

OptimizerName = Literal["adamw", "sgd"]

_CPU = torch.device("cpu")
_STATES = {"adamw": 2, "sgd": 0}
"""Optimizer states per trained parameter, as large as its copy."""
COPY_ACCESSES = {"adamw": 8, "sgd": 3}
"""Reads and writes of values of the optimizer's dtype in one update of one parameter: copy, gradient, states."""
_MODEL_ACCESSES = 2
"""Those of the model's dtype: the gradient read, the weight written."""


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
    update_bytes_per_s: float = inf
    """Host memory traffic that updates alone reach, sustained; inf: all that the host's memory has."""

    @property
    def budget_bytes(self) -> int:
        """What the runtime uses of a device that nobody else uses."""
        return int(self.device.memory_bytes * PLANNED_SHARE)

    @property
    def link_bytes_per_s(self) -> float:
        """Of each device's link to the host, one direction, sustained."""
        return self.device.link_bytes_per_s * self.efficiency.link

    @property
    def profile(self) -> DeviceProfile:
        return DeviceProfile(
            flops_per_s=self.device.flops_per_s * self.efficiency.compute,
            bytes_per_s=self.device.bytes_per_s * self.efficiency.bandwidth,
        )


@dataclass(frozen=True, slots=True)
class Training:
    """How it is trained."""

    batch: int
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
        return -(-self.batch // self.num_microbatches)


@dataclass(frozen=True, slots=True)
class Layers:
    """A model as layers, traced and lowered once for all settings."""

    target: Target
    traced: GuardedGraph
    chain: LayerChain
    """With the costs that a run would choose its plan by."""
    device_costs: tuple[LayerCost, ...]
    notes: tuple[str, ...]
    """What the figures leave out."""
    tails: TailSource
    """Make the loss a part of the last layer, as in a run."""
    known_memory: dict[tuple[int, Tiles], list[LayerCost] | None] = field(default_factory=dict)

    def memory(self, call: Call, tiles: Tiles) -> list[LayerCost] | None:
        """Costs with the memory for a call's largest microbatch; None if the layers can't run on fakes."""
        key = call.elements(), tiles
        if key not in self.known_memory:
            self.known_memory[key] = memory_of(_CPU, call, tiles)
        return self.known_memory[key]

    def call(self, training: Training, num_devices: int) -> Call:
        """A training call, all microbatches of one size."""
        number = training.num_microbatches
        options = RoundPipeRunConfig(num_microbatch=number, recompute_grain=training.recompute_grain)
        config, kwargs = resolve(options, None, num_devices=num_devices), self.target.kwargs_for(training.microbatch)
        call = Call(self.chain, config, [()] * number, [kwargs] * number, [None] * number, number)
        return replace(call, loss_fn=_own_loss, make_tail=self.tails.tail) if self.target.has_loss else call

    @classmethod
    def of(cls, target: Target, num_samples: int, machine: Machine) -> Layers:
        """The layers of a target, with costs for a microbatch; a `TraceError` for a model that would not be cut."""
        options = LowerOptions(max_layer_bytes=largest_layer_bytes(machine.budget_bytes))
        kwargs, notes = target.kwargs_for(num_samples), list(target.notes)
        try:
            with torch.enable_grad():
                traced = trace(target.model, (), kwargs, max_leaf_bytes=options.max_layer_bytes)
        except TraceError as error:
            message = f"there is no forecast for a model that runs whole, which this one would: {error}"
            raise TraceError(message) from error
        lowered = lower(traced, options)
        if traced.opaque:
            notes.append(f"{len(traced.opaque)} modules stayed whole: {', '.join(list(traced.opaque)[:3])}")
        estimated = sum(cost.estimated for cost in lowered.costs.values())
        if estimated:
            notes.append(f"the costs of {estimated} of {len(lowered.costs)} nodes are guessed from sizes")
        if not target.has_loss:
            notes.append("the loss is not part of the model's call: its time and memory are left out")
        costs = tuple(lowered.costs_on(machine.profile))
        return cls(target, traced, lowered.chain, costs, tuple(notes), TailSource(target.model))


def _own_loss(outputs: Any, label: Any) -> Any:
    """The loss that the model has computed."""
    return outputs.loss


@dataclass(slots=True)
class Forecast:
    """What a setting takes; without a plan, if none fits on the devices, there is no simulation."""

    layers: Layers
    costs: tuple[LayerCost, ...]
    """Of one microbatch, in the device's seconds."""
    machine: Machine
    training: Training
    setting: Setting
    """The same for the simulator."""
    plan: ExecutePlan | None
    tiles: Tiles
    stages: dict[str, DeviceMemory]
    """Device memory while the stages F0, .., U, B1, .. of the plan run; none without a plan."""
    host: HostMemory
    simulation: Simulation | None
    reasons: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def device(self) -> DeviceMemory | None:
        """Device memory of the stage that needs the most."""
        return max(self.stages.values(), key=lambda memory: memory.total, default=None)

    @property
    def fits_devices(self) -> bool:
        """Whether there is a plan that leaves room for all that is counted."""
        return self.device is not None and self.device.total <= self.machine.budget_bytes

    def samples_per_s(self) -> float:
        """Samples in a second; 0 if it doesn't run."""
        return self.training.batch / self.simulation.seconds_per_step if self.simulation else 0.0

    def least_s(self) -> dict[str, float]:
        """Least time of a step if only compute counted, only the busier direction of the links, or only host memory."""
        if self.simulation is None:
            return {}
        step, machine = self.simulation, self.machine
        up, down = step.uploaded_bytes, step.downloaded_bytes
        return {
            "compute": step.seconds_per_step * (1.0 - step.mean_idle.total),
            "link": max(up, down) / machine.num_devices / machine.link_bytes_per_s,
            "host": (up + down + step.optimizer_bytes) / machine.host_bytes_per_s,
        }


def forecast_at(layers: Layers, machine: Machine, training: Training, *, simulated: bool = True) -> Forecast:
    """The forecast for one setting, from layers of any microbatch.

    How fast it is, and how much the host carries, only where it is ``simulated``.
    """
    call, plans = layers.call(training, machine.num_devices), plans_for(layers, machine)
    plans.costs.measure_memory(call)
    reasons, plan, simulation = [], None, None
    stages: dict[str, DeviceMemory] = {}
    try:
        plan = plans.plan(call)
    except DeviceMemoryError as error:
        reasons.append(str(error))
    costs = _costs(layers, call)
    setting = _setting(costs, machine, training)
    if plan is not None:
        if simulated:
            plan = setting.steady_plan(plan)
            simulation = setting.simulate(plan)
        stages = setting.device_memory(plan)
        needed_bytes = max(need.total for need in stages.values())
        if needed_bytes > machine.budget_bytes:
            reasons.append(
                f"a device needs {format_bytes(needed_bytes)} with what comes and goes within layers, and its budget "
                f"is {format_bytes(machine.budget_bytes)}"
            )
    host = _host_memory(layers.target, training, simulation.peak_carried_bytes if simulation else 0)
    if machine.host_memory_bytes is not None and host.total > machine.host_memory_bytes:
        reasons.append(
            f"the host needs {format_bytes(host.total)} of memory and has {format_bytes(machine.host_memory_bytes)}"
        )
    return Forecast(layers, costs, machine, training, setting, plan, call.tiles, stages, host, simulation, reasons)


def plans_for(layers: Layers, machine: Machine) -> PlanChooser:
    """What chooses plans as on a machine's accelerators."""
    return PlanChooser(machine.num_devices, [machine.budget_bytes], accelerators=True, measure=layers.memory)


def _costs(layers: Layers, call: Call) -> tuple[LayerCost, ...]:
    """Of a call's largest microbatch, in its tiles."""
    factor = times_the_example(call.chain, call.elements())
    costs = [cost.scaled(factor) for cost in layers.device_costs]
    memory = layers.memory(call, call.tiles)
    if memory is None:
        return tuple(costs)
    costs = with_repetition(costs, memory)
    return tuple(cost.with_memory_of(other) for cost, other in zip(costs, memory, strict=True))


def _setting(costs: Sequence[LayerCost], machine: Machine, training: Training) -> Setting:
    """Costs of a mean microbatch, links, host memory and the optimizer's traffic, for the simulator."""
    share = training.batch / (training.microbatch * training.num_microbatches)
    mean_costs = (replace(cost, forward_s=cost.forward_s * share, backward_s=cost.backward_s * share) for cost in costs)
    num_parameters = sum(cost.num_parameters for cost in costs)
    item_bytes = sum(cost.weight_bytes for cost in costs) / num_parameters if num_parameters else 0.0
    copies_bytes = COPY_ACCESSES[training.optimizer] * training.optim_dtype.itemsize
    profile = HardwareProfile(
        upload_bytes_per_s=machine.link_bytes_per_s,
        download_bytes_per_s=machine.link_bytes_per_s,
        host_bytes_per_s=machine.host_bytes_per_s,
        optimizer_bytes_per_s=min(machine.host_bytes_per_s, machine.update_bytes_per_s),
        optimizer_bytes_per_parameter=round(copies_bytes + _MODEL_ACCESSES * item_bytes),
        hand_over_bytes_per_parameter=round(training.optim_dtype.itemsize + item_bytes),
    )
    return Setting(
        costs=tuple(mean_costs),
        num_workers=machine.num_devices,
        num_microbatches=training.num_microbatches,
        budget_bytes=machine.budget_bytes,
        profile=profile,
        recompute_grain=training.recompute_grain,
        state_bytes_per_parameter=(1 + _STATES[training.optimizer]) * training.optim_dtype.itemsize,
    )


def _host_memory(target: Target, training: Training, carried_bytes: int) -> HostMemory:
    parameters = {id(parameter): parameter for parameter in target.model.parameters()}.values()
    buffers = {id(buffer): buffer for buffer in target.model.buffers()}.values()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer_bytes = sum(parameter.numel() for parameter in trained) * training.optim_dtype.itemsize
    return HostMemory(
        weights=sum(tensor.nbytes for tensor in (*parameters, *buffers)),
        gradients=sum(parameter.nbytes for parameter in trained),
        optimizer_copies=optimizer_bytes,
        optimizer_gradients=optimizer_bytes,
        optimizer_states=optimizer_bytes * _STATES[training.optimizer],
        carried=carried_bytes,
    )


def forecast(target: Target, machine: Machine, training: Training) -> Forecast:
    """What a training run will take; a `TraceError` if the model's own forward can't be traced, so would not be cut."""
    layers = Layers.of(target, training.microbatch, machine)
    result = forecast_at(layers, machine, training)
    for changed in _alternatives(result):
        other = forecast_at(layers, machine, changed, simulated=result.fits_devices)
        is_slower = result.fits_devices and other.samples_per_s() < result.samples_per_s() * WORTH_NAMING
        if not other.fits_devices or is_slower:
            continue
        result.changes.append(_describe(other, result))
        if not result.fits_devices:
            break  # the first that fits is the cheapest
    result.changes += _with_fewer_devices(result)
    if not result.fits_devices and not result.changes:
        result.changes.append("shorter sequences, a device with more memory, or --lora (no gradients of the weights)")
    if not result.host.fits(machine.host_memory_bytes):
        result.changes.append("host memory: --lora, --optimizer sgd or --optim-dtype bfloat16 need less of it")
    return result


def simulated_timeline(result: Forecast) -> Timeline:
    """The latest steps of the run that a forecast rests on; for one that has a plan."""
    assert result.plan is not None, "a model that no plan fits has no run"
    setting = result.setting
    schedule = setting.schedule(result.plan)
    _, timeline = simulate_timeline(schedule, setting.costs, setting.profile, recompute_grain=setting.recompute_grain)
    return steady(timeline, schedule)


def _alternatives(result: Forecast) -> Iterator[Training]:
    """Settings to try: for memory if nothing fits the devices, the cheapest first; otherwise for speed."""
    training = result.training
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


def _with_fewer_devices(result: Forecast) -> list[str]:
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
    best_s, best_number = inf, 0
    for number in sorted({1, -(-machine.num_devices // 2)}):
        at_least_s = max(work_s * training.num_microbatches, moved_bytes / machine.link_bytes_per_s) / number
        if not 0 < number < machine.num_devices or at_least_s > within_s:
            continue
        other = forecast_at(result.layers, replace(machine, num_devices=number), training)
        if other.fits_devices and other.simulation is not None and other.simulation.seconds_per_step <= within_s:
            best_s, best_number = min((best_s, best_number), (other.simulation.seconds_per_step, number))
    if not best_number:
        return []
    same = f"--batch {training.batch} --microbatches {training.num_microbatches}"
    return [f"--devices {best_number} {same}: {step.seconds_per_step / best_s - 1:+.0%} throughput"]


def _describe(other: Forecast, result: Forecast) -> str:
    names = {"batch": "--batch", "num_microbatches": "--microbatches", "recompute_grain": "--recompute"}
    values = {option: (getattr(result.training, name), getattr(other.training, name)) for name, option in names.items()}
    options = " ".join(f"{option} {now}" for option, (before, now) in values.items() if now != before)
    if not result.fits_devices:
        return f"{options}: fits the devices"
    return f"{options}: {other.samples_per_s() / result.samples_per_s() - 1:+.0%} throughput"
