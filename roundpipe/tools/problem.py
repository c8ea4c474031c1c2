"""What is forecast: a model as layers, the machine, and how it is trained on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import torch

from roundpipe.core.errors import ConfigError, TraceError
from roundpipe.core.layers import LayerChain, LayerCost
from roundpipe.core.module_tree import training_bytes_of
from roundpipe.core.storages import bytes_of
from roundpipe.core.tiling import Tiles
from roundpipe.fx.guards.guards import GuardedGraph
from roundpipe.fx.passes.cost import DeviceProfile
from roundpipe.fx.passes.lower import LowerOptions, lower
from roundpipe.fx.trace.tracer import trace
from roundpipe.planning.stage_costs import largest_layer_bytes
from roundpipe.runtime.config import RecomputeGrain, Replicas, Residency, RoundPipeRunConfig, resolve
from roundpipe.runtime.device.device_memory import PLANNED_SHARE
from roundpipe.runtime.engine.spec import Call
from roundpipe.tools.device_data import DeviceSpec, Efficiency
from roundpipe.tools.optimizer_side import ExpectedOptimizer, OptimizerName
from roundpipe.tools.target import Target
from roundpipe.wrappers.calls_in_tiles import memory_of
from roundpipe.wrappers.tails import TailSource

_CPU = torch.device("cpu")


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
    conversion_bytes_per_s: float = inf
    """The same of weights and gradients on their way between dtypes; inf: as much as updates."""
    visit_s: float = 0.0
    """What a worker takes to begin a visit of a stage; 0: not measured."""

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
    residency: Residency = "auto"
    replicas: Replicas = "off"
    """Both as in `RoundPipeRunConfig`."""

    def __post_init__(self) -> None:
        if self.batch < self.num_microbatches:
            raise ConfigError(
                f"a batch of {self.batch} can't be split into {self.num_microbatches} microbatches; raise --batch or "
                "give fewer --microbatches"
            )

    @property
    def expected_optimizer(self) -> ExpectedOptimizer:
        return ExpectedOptimizer(self.optimizer, self.optim_dtype)

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
    options: LowerOptions
    num_samples: int
    """Of the microbatch of the trace."""
    known_memory: dict[tuple[int, Tiles], list[LayerCost] | None] = field(default_factory=dict)
    known_others: dict[LowerOptions, Layers] = field(default_factory=dict)

    @property
    def indivisible_bytes(self) -> int:
        """What some layer takes of a device however the model is cut: a parameter's weights, and its gradient."""
        return max((bytes_of(each) * (1 + each.requires_grad) for each in self.target.model.parameters()), default=0)

    def memory(self, call: Call, tiles: Tiles) -> list[LayerCost] | None:
        """Costs with the memory for a call's largest microbatch; None if the layers can't run on fakes."""
        key = call.elements(), tiles
        if key not in self.known_memory:
            self.known_memory[key] = memory_of(_CPU, call, tiles)
        return self.known_memory[key]

    def call(self, training: Training, num_devices: int) -> Call:
        """A training call, all microbatches of one size."""
        number = training.num_microbatches
        options = RoundPipeRunConfig(
            num_microbatch=number,
            recompute_grain=training.recompute_grain,
            residency=training.residency,
            replicas=training.replicas,
        )
        config, kwargs = resolve(options, None, num_devices=num_devices), self.target.kwargs_for(training.microbatch)
        call = Call(self.chain, config, [()] * number, [kwargs] * number, [None] * number, number)
        call.may_replicate = training.replicas == "auto"
        return replace(call, loss_fn=_own_loss, make_tail=self.tails.tail) if self.target.has_loss else call

    def others(self, profile: DeviceProfile) -> Iterator[Layers]:
        """The model cut into layers within other limits, as `TracedSource.others` has it."""
        before: Layers | None = None
        for options in self.options.others(training_bytes_of(self.target.model)):
            if before is not None and options.cuts_as(before.options, before.chain.costs):
                continue
            if options not in self.known_others:
                self.known_others[options] = Layers.within(options, self.target, self.num_samples, profile)
            before = replace(self.known_others[options], target=self.target)
            yield before

    @classmethod
    def of(cls, target: Target, num_samples: int, machine: Machine) -> Layers:
        """The layers of a target, with costs for a microbatch; a `TraceError` for a model that would not be cut."""
        options = LowerOptions(max_layer_bytes=largest_layer_bytes(machine.budget_bytes))
        return cls.within(options, target, num_samples, machine.profile)

    @classmethod
    def within(cls, options: LowerOptions, target: Target, num_samples: int, profile: DeviceProfile) -> Layers:
        """The same, cut by some options."""
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
        costs, tails = tuple(lowered.costs_on(profile)), TailSource(target.model)
        return cls(target, traced, lowered.chain, costs, tuple(notes), tails, options, num_samples)


def _own_loss(outputs: Any, label: Any) -> Any:
    """The loss that the model has computed."""
    return outputs.loss
