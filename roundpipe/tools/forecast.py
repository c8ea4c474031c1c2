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

import torch

from roundpipe.core.errors import DeviceMemoryError
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.layers import LayerCost
from roundpipe.core.tiling import Tiles
from roundpipe.planning.machine import HardwareProfile
from roundpipe.planning.planner import LeastNeed
from roundpipe.planning.residency import STREAMED, Residency
from roundpipe.planning.simulator import Simulation, simulate_timeline, steady
from roundpipe.planning.stage_costs import num_trained
from roundpipe.reports.memory import DeviceMemory, HostMemory
from roundpipe.reports.tables import format_bytes
from roundpipe.reports.timeline import Timeline
from roundpipe.runtime.config import RecomputeGrain
from roundpipe.runtime.engine.chain_record import times_the_example
from roundpipe.runtime.engine.cost_model import with_tiles
from roundpipe.runtime.engine.plan_choice import PlanChooser
from roundpipe.runtime.engine.plans_beside import homes_of
from roundpipe.runtime.engine.spec import Call
from roundpipe.tools.comparison import Setting
from roundpipe.tools.optimizer_side import COPY_ACCESSES, STATES, ExpectedOptimizer, conversion_bytes
from roundpipe.tools.problem import Layers, Machine, Training
from roundpipe.tools.target import Target

WORTH_NAMING = 1.05
"""How much faster a change must be to be suggested."""
MUCH_IDLE = 0.05
"""Share of idle time above which other settings are tried."""


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
    streamed_host: HostMemory | None
    """In the first steps, while everything is at home; None: so it stays."""
    simulation: Simulation | None
    reasons: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def host_bytes(self) -> int:
        """The most that the host must have."""
        return max(memory.total for memory in (self.host, self.streamed_host) if memory is not None)

    @property
    def residency(self) -> Residency:
        """What stays on the devices; nothing without a plan."""
        return STREAMED if self.plan is None else self.setting.residency(self.plan)

    @property
    def device(self) -> DeviceMemory | None:
        """Device memory of the stage that needs the most."""
        return max(self.stages.values(), key=lambda memory: memory.total, default=None)

    @property
    def fits_devices(self) -> bool:
        """Whether there is a plan that leaves room for all that is counted."""
        return self.device is not None and self.device.total <= self.machine.budget_bytes

    @property
    def trains_little(self) -> bool:
        """Whether most weights are frozen."""
        return 2 * _num_trained(self.costs) < sum(cost.num_parameters for cost in self.costs)

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


def forecast_at(
    layers: Layers, machine: Machine, training: Training, *, simulated: bool = True, is_alone: bool = True
) -> Forecast:
    """The forecast for one setting, from layers of any microbatch; from others where no plan fits these, as in a run.

    How fast it is, how much the host carries and which trained weights live on the device, only where it is
    ``simulated``; those stay at home unless the process ``is_alone``, without ranks beside it.
    """
    plan, simulation = None, None
    stages: dict[str, DeviceMemory] = {}
    for tried in _to_try(layers, machine, training):
        layers = tried
        call, plans = layers.call(training, machine.num_devices), plans_for(layers, machine, training)
        plans.costs.measure_memory(call)
        reasons: list[str] = []
        try:
            plan = plans.streaming(call)
            break
        except DeviceMemoryError as error:
            reasons.append(str(error))
    costs = _costs(layers, call)
    setting, optimizer = _setting(layers, costs, machine, training), training.expected_optimizer
    streamed_host = None
    there: set[torch.Tensor] = set()
    if plan is not None:
        if simulated:
            run = _Run(plans, layers, call, optimizer)
            may_live_there = is_alone and training.residency != "off"
            if may_live_there and training.residency == "full":  # which the first call decides
                run.let_live_there(plan)
            plan = run.measured_plan()
            simulation = setting.simulate(plan)
            if may_live_there:
                plan = run.plan_beside(plan, setting.profile.optimizer_s(_num_trained(costs)), simulation)
            if call.has_twins:
                residency, there = plans.room(call, plan).residency, run.there()
                streamed_host = optimizer.host_memory(layers.target, simulation.peak_carried_bytes)
                setting = replace(setting, stays=residency)
                simulation = setting.simulate(plan)
        stages = setting.device_memory(plan)
        needed_bytes = max(need.total for need in stages.values())
        if needed_bytes > machine.budget_bytes:
            reasons.append(
                f"a device needs {format_bytes(needed_bytes)} with what comes and goes within layers, and its budget "
                f"is {format_bytes(machine.budget_bytes)}"
            )
    host = optimizer.host_memory(layers.target, simulation.peak_carried_bytes if simulation else 0, there)
    result = Forecast(
        layers, costs, machine, training, setting, plan, call.tiles, stages, host, streamed_host, simulation, reasons
    )
    if machine.host_memory_bytes is not None and result.host_bytes > machine.host_memory_bytes:
        reasons.append(
            f"the host needs {format_bytes(result.host_bytes)} of memory and has "
            f"{format_bytes(machine.host_memory_bytes)}"
        )
    return result


def _to_try(layers: Layers, machine: Machine, training: Training) -> Iterator[Layers]:
    """Some layers; then the model cut otherwise: the first that fits the devices, else what needs the least."""
    yield layers
    if layers.indivisible_bytes <= machine.budget_bytes:
        yield cut_otherwise(layers, machine, training)[0]


def cut_otherwise(layers: Layers, machine: Machine, training: Training) -> tuple[Layers, LeastNeed]:
    """The first of other cuts that fits the devices, else the one that needs the least, and what it needs."""
    found: tuple[Layers, LeastNeed] | None = None
    for other in layers.others(machine.profile):
        need = plans_for(other, machine, training).least_need(other.call(training, machine.num_devices))
        if found is None or need.memory.total < found[1].memory.total:
            found = other, need
        if need.memory.total <= machine.budget_bytes:
            break
    assert found is not None, "there is always a limit of the whole model"
    return found


def _num_trained(costs: Sequence[LayerCost]) -> int:
    return sum(num_trained(cost) for cost in costs)


def plans_for(layers: Layers, machine: Machine, training: Training) -> PlanChooser:
    """What chooses plans as on a machine's accelerators."""
    links, profile = (machine.link_bytes_per_s, machine.link_bytes_per_s), _profile(layers, machine, training)
    return PlanChooser(
        machine.num_devices,
        [machine.budget_bytes],
        lambda: links,
        accelerators=True,
        measure=layers.memory,
        machine=profile,
    )


class _Run:
    """How a run comes to its plan, once it knows what its layers, updates and visits take."""

    def __init__(self, plans: PlanChooser, layers: Layers, call: Call, optimizer: ExpectedOptimizer) -> None:
        self._plans, self._layers, self._call = plans, layers, call
        self._optimizer = optimizer

    def let_live_there(self, streamed: ExecutePlan) -> None:
        """Choose what of trained weights lives on the device, in place of a plan that streams, by what is known."""
        full = self._plans.full
        full.allow(lambda call: True, self._optimizer)
        self._plans.in_place_of(self._call, streamed)
        if self._call.has_twins:
            self._plans.prove(self._call)
            self._optimizer = replace(self._optimizer, homes=self._homes())
            full.allow(lambda call: True, self._optimizer)

    def measured_plan(self) -> ExecutePlan:
        """The plan that streams, behind steps and updates that were measured."""
        plans, call = self._plans, self._call
        plans.costs.expect(call.chain, self._layers.device_costs, call.chain.example_elements, call.tiles)
        plans.update_begun()
        return plans.streaming(call)

    def plan_beside(self, streamed: ExecutePlan, update_s: float, step: Simulation) -> ExecutePlan:
        """The plan beside what lives on the device, if anything does; else the one that streams."""
        self._optimizer = replace(self._optimizer, seconds=(update_s, step.seconds_per_step))
        self._plans.full.allow(lambda call: True, self._optimizer)
        self._plans.full.may_look_again = True
        return self._plans.in_place_of(self._call, streamed)

    def _homes(self) -> dict[int, int]:
        """The parameters that live on a device, by their identities, and the worker whose it is."""
        room, plan = self._plans.full.room(self._call), self._plans.full.plan_of(self._call)
        return homes_of(self._call, room.residency, plan, self._plans.costs.num_workers)

    def there(self) -> set[torch.Tensor]:
        """The parameters that live on devices."""
        trained = self._call.trained
        layers = self._plans.full.room(self._call).residency.trained
        return {parameter for index in layers for parameter in trained.get(index, ())}


def _costs(layers: Layers, call: Call) -> tuple[LayerCost, ...]:
    """Of a call's largest microbatch, in its tiles."""
    factor = times_the_example(call.chain, call.elements())
    costs = [cost.scaled(factor) for cost in layers.device_costs]
    memory = layers.memory(call, call.tiles)
    if memory is None:
        return tuple(costs)
    costs = with_tiles(costs, memory)
    return tuple(cost.with_memory_of(other) for cost, other in zip(costs, memory, strict=True))


def _setting(layers: Layers, costs: Sequence[LayerCost], machine: Machine, training: Training) -> Setting:
    """Costs of a mean microbatch, and the machine, for the simulator."""
    share = training.batch / (training.microbatch * training.num_microbatches)
    mean_costs = (replace(cost, forward_s=cost.forward_s * share, backward_s=cost.backward_s * share) for cost in costs)
    return Setting(
        costs=tuple(mean_costs),
        num_workers=machine.num_devices,
        num_microbatches=training.num_microbatches,
        budget_bytes=machine.budget_bytes,
        profile=_profile(layers, machine, training),
        recompute_grain=training.recompute_grain,
        stays=STREAMED if training.residency == "off" else None,
        state_bytes_per_parameter=(1 + STATES[training.optimizer]) * training.optim_dtype.itemsize,
    )


def _profile(layers: Layers, machine: Machine, training: Training) -> HardwareProfile:
    """Links, host memory and the optimizer's traffic."""
    trained = [parameter for parameter in layers.target.model.parameters() if parameter.requires_grad]
    item_bytes = sum(each.nbytes for each in trained) / max(sum(each.numel() for each in trained), 1)
    update_bytes = COPY_ACCESSES[training.optimizer] * training.optim_dtype.itemsize
    weight_bytes, gradient_bytes = conversion_bytes(training.optim_dtype.itemsize, item_bytes)
    return HardwareProfile(
        upload_bytes_per_s=machine.link_bytes_per_s,
        download_bytes_per_s=machine.link_bytes_per_s,
        host_bytes_per_s=machine.host_bytes_per_s,
        optimizer_bytes_per_s=min(machine.host_bytes_per_s, machine.update_bytes_per_s),
        conversion_bytes_per_s=min(machine.host_bytes_per_s, machine.conversion_bytes_per_s),
        optimizer_bytes_per_parameter=round(update_bytes + weight_bytes + gradient_bytes),
        hand_over_bytes_per_parameter=round(weight_bytes),
        gradients_bytes_per_parameter=round(gradient_bytes),
        device_bytes_per_s=machine.profile.bytes_per_s,
        visit_s=machine.visit_s,
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
        lora = "" if result.trains_little else ", or --lora (no gradients of the weights)"
        result.changes.append(f"shorter sequences, a device with more memory{lora}")
    if machine.host_memory_bytes is not None and result.host_bytes > machine.host_memory_bytes:
        lora = "" if result.trains_little else "--lora, "
        result.changes.append(f"host memory: {lora}--optimizer sgd or --optim-dtype bfloat16 need less of it")
    return result


def simulated_timeline(result: Forecast) -> Timeline:
    """The latest steps of the run that a forecast rests on; for one that has a plan."""
    assert result.plan is not None, "a model that no plan fits has no run"
    setting, residency = result.setting, result.residency
    schedule, grain = setting.schedule(result.plan), setting.recompute_grain
    _, timeline = simulate_timeline(
        schedule, setting.costs, setting.profile, recompute_grain=grain, residency=residency
    )
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
        if result.machine.num_devices > 1 and training.replicas == "off":
            yield replace(training, replicas="auto")
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
    names = {
        "batch": "--batch",
        "num_microbatches": "--microbatches",
        "recompute_grain": "--recompute",
        "replicas": "--replicas",
    }
    values = {option: (getattr(result.training, name), getattr(other.training, name)) for name, option in names.items()}
    options = " ".join(f"{option} {now}" for option, (before, now) in values.items() if now != before)
    if not result.fits_devices:
        return f"{options}: fits the devices"
    return f"{options}: {other.samples_per_s() / result.samples_per_s() - 1:+.0%} throughput"
