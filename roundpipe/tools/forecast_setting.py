"""A forecast for one setting: devices, batch, microbatches, optimizer.

    Layers        a model as layers, traced and lowered once for all settings
    forecast_at   -> PlanChooser.plan     the plan that a run would choose
                  -> Setting.simulate     links, host memory and the optimizer included

Nothing is allocated or run: compute times rest on FLOPs and bytes, and on what a device sustains of its datasheet.

Invariant: layers and plan are those that the runtime chooses for the same budget, so what is predicted is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from roundpipe.core.errors import ConfigError, DeviceMemoryError, TraceError
from roundpipe.core.layers import LayerChain, LayerCost
from roundpipe.core.schedule import ExecutePlan
from roundpipe.fx.passes.cost import DeviceProfile
from roundpipe.fx.passes.lower import LowerOptions, lower
from roundpipe.fx.trace.tracer import trace
from roundpipe.planning.machine import HardwareProfile
from roundpipe.planning.simulator import Simulation
from roundpipe.planning.stage_costs import StageCosts, device_memory, largest_layer_bytes, training_stages
from roundpipe.reports.memory import DeviceMemory, HostMemory
from roundpipe.runtime.config import RecomputeGrain, RoundPipeRunConfig, resolve
from roundpipe.runtime.device.accelerator import PLANNED_SHARE
from roundpipe.runtime.engine.plan_choice import PlanChooser, times_the_example, with_temporaries
from roundpipe.runtime.engine.spec import Call
from roundpipe.tools.comparison import Setting
from roundpipe.tools.device_data import DeviceSpec, Efficiency
from roundpipe.tools.target import Target

OptimizerName = Literal["adamw", "sgd"]

_STATES = {"adamw": 2, "sgd": 0}
"""Optimizer states per trained parameter, as large as its copy."""
_COPY_ACCESSES = {"adamw": 8, "sgd": 3}
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


@dataclass(slots=True)
class Forecast:
    """What a setting takes; without a plan, if none fits on the devices, there is no simulation."""

    target: Target
    chain: LayerChain
    """The layers, with the costs that they and the plan were chosen by."""
    costs: tuple[LayerCost, ...]
    """Of one microbatch, in the device's seconds."""
    machine: Machine
    training: Training
    setting: Setting
    """The same for the simulator."""
    plan: ExecutePlan | None
    stages: dict[str, DeviceMemory]
    """Device memory while the stages F0, .., U, B1, .. of the plan run; none without a plan."""
    host: HostMemory
    simulation: Simulation | None
    notes: list[str]
    """What the figures leave out."""
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


@dataclass(frozen=True, slots=True)
class Layers:
    """A model as layers."""

    chain: LayerChain
    """With the costs that a run would choose its plan by."""
    device_costs: tuple[LayerCost, ...]
    notes: tuple[str, ...]

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
        return cls(lowered.chain, tuple(lowered.costs_on(machine.profile)), tuple(notes))


def forecast_at(
    target: Target, layers: Layers, machine: Machine, training: Training, *, simulated: bool = True
) -> Forecast:
    """The forecast for one setting, from layers of any microbatch; how fast it is only where it is ``simulated``."""
    chain, kwargs = layers.chain, target.kwargs_for(training.microbatch)
    number, grain = training.num_microbatches, training.recompute_grain
    options = RoundPipeRunConfig(num_microbatch=number, recompute_grain=grain)
    config = resolve(options, None, num_devices=machine.num_devices)
    call = Call(chain, config, [()] * number, [kwargs] * number, [None] * number, number)
    factor = times_the_example(chain, call.elements())
    costs = tuple(with_temporaries([cost.scaled(factor) for cost in layers.device_costs]))
    setting = _setting(costs, machine, training)
    chooser = PlanChooser(machine.num_devices, [machine.budget_bytes], accelerators=True)
    reasons, plan, simulation = [], None, None
    stages: dict[str, DeviceMemory] = {}
    try:
        plan = chooser.plan(call)
    except DeviceMemoryError as error:
        reasons.append(str(error))
    else:
        memory = device_memory(training_stages(plan, StageCosts(costs, grain)), machine.num_devices)
        stages = {name: need for (name, _), need in zip(plan.named_stages(), memory, strict=True)}
        simulation = setting.simulate(plan) if simulated else None
        needed_bytes = max(need.total for need in memory)
        if needed_bytes > machine.budget_bytes:
            reasons.append(
                f"a device needs {needed_bytes:,} bytes with what comes and goes within layers, and its budget is "
                f"{machine.budget_bytes:,} bytes"
            )
    carried_bytes = simulation.peak_carried_bytes if simulation else _saved_bytes(plan, costs, training)
    host = _host_memory(target, training, carried_bytes)
    if machine.host_memory_bytes is not None and host.total > machine.host_memory_bytes:
        reasons.append(f"the host needs {host.total:,} bytes of memory and has {machine.host_memory_bytes:,}")
    notes = list(layers.notes)
    return Forecast(target, chain, costs, machine, training, setting, plan, stages, host, simulation, notes, reasons)


def _setting(costs: Sequence[LayerCost], machine: Machine, training: Training) -> Setting:
    """Costs of a mean microbatch, links, host memory and the optimizer's traffic, for the simulator."""
    share = training.batch / (training.microbatch * training.num_microbatches)
    mean_costs = (replace(cost, forward_s=cost.forward_s * share, backward_s=cost.backward_s * share) for cost in costs)
    num_parameters = sum(cost.num_parameters for cost in costs)
    item_bytes = sum(cost.weight_bytes for cost in costs) / num_parameters if num_parameters else 0.0
    copies_bytes = _COPY_ACCESSES[training.optimizer] * training.optim_dtype.itemsize
    profile = HardwareProfile(
        upload_bytes_per_s=machine.link_bytes_per_s,
        download_bytes_per_s=machine.link_bytes_per_s,
        host_bytes_per_s=machine.host_bytes_per_s,
        optimizer_bytes_per_s=machine.host_bytes_per_s,
        optimizer_bytes_per_parameter=round(copies_bytes + _MODEL_ACCESSES * item_bytes),
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


def _saved_bytes(plan: ExecutePlan | None, costs: Sequence[LayerCost], training: Training) -> int:
    """The stage inputs of all microbatches, which are about what the host carries at most."""
    if plan is None or plan.fused is None:
        return 0
    starts = {start for start, _ in plan.backward} if training.recompute_grain == "stage" else range(plan.fused[0])
    saved_bytes = sum(costs[start - 1].carry_bytes for start in {*starts, plan.fused[0]} if start)
    return saved_bytes * training.num_microbatches


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
