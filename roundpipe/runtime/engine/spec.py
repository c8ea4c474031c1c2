"""What a step will run: the microbatches of a call, the values that each job takes and gives, the complete `StepSpec`.

A name is given once, so a job brings to the device what its layers read and don't make, and to the host what it makes
and a later job reads. With layer recomputation each layer of a backward job takes its inputs by itself.

Invariants: a name is dropped from the host right after its last reader, and never before; a spec is complete before
anything runs, and nobody changes it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe.core import inventory, trees
from roundpipe.core.inventory import Inventory
from roundpipe.core.layers import LayerChain, LayerSpec, Tail
from roundpipe.core.schedule import Job, Phase, Schedule
from roundpipe.core.storages import bytes_of
from roundpipe.core.tiling import UNTILED, Tiles
from roundpipe.core.trees import Path
from roundpipe.effects.uses import forward_hooks, hooked_modules
from roundpipe.runtime.config import RecomputeGrain, ResolvedConfig
from roundpipe.runtime.engine.allocator_room import StepRetries
from roundpipe.runtime.engine.input_tensors import InputTensor
from roundpipe.runtime.engine.losses import CountedTerms, Mean, OwnMean
from roundpipe.runtime.engine.shared_values import Place
from roundpipe.runtime.engine.visit_peaks import VisitPeaks
from roundpipe.runtime.microbatch.kept import KeptOfCall
from roundpipe.runtime.profiling.layer_times import StepTimes
from roundpipe.runtime.weights.frozen_layers import FrozenLayers, LatestFrozenLayers
from roundpipe.runtime.weights.layer_weights import LayerWeights
from roundpipe.runtime.weights.residents import Stay

LABEL = "the label"
"""What stands for the label among names of carried values, which are identifiers."""

LossFunction = Callable[[Any, Any], Any]
MakeTail = Callable[["Call"], Tail | None]
Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(slots=True)
class Call:
    """The microbatches of one call that share a chain and run as one step."""

    chain: LayerChain
    config: ResolvedConfig
    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    labels: list[Any]
    total_microbatches: int
    """Of the whole call, for `num_microbatches`."""
    first_microbatch: int = 0
    """Position of the first one in the whole call, for notes."""
    loss_fn: LossFunction | None = None
    mean: Mean | None = None
    """How the losses of its microbatches make up one; None: a sum."""
    own_means: Mapping[Path, OwnMean] = field(default_factory=dict)
    """By place in the outputs of a mean that the model computes itself, what is known of it, for a `mean`."""
    counted: CountedTerms | None = None
    """What the terms of its loss count for, or of losses among its outputs; takes the place of `mean`."""
    tiles: Tiles = UNTILED
    """What the planner has chosen."""
    may_replicate: bool = False
    """Whether the planner may have several workers share a stage's microbatches."""
    has_arguments: bool = True
    """Whether layers could run with its arguments."""
    is_evaluation: bool = False
    """Whether no backward follows, so that nothing is trained."""
    has_own_plan: bool = False
    """Of an evaluation: whether it is planned without a backward, as no plan that could train fits."""
    loss_reads_weights: bool = False
    """Whether ``loss_fn`` may read the model's weights on the host, or change how it runs; asked only if it matters."""
    has_twins: bool = False
    """Whether trained weights live on the device, all or those of some layers."""
    make_tail: MakeTail | None = None
    """Makes the loss a part of the last layer, if it can be."""
    kept: KeptOfCall = field(default_factory=KeptOfCall)
    """What ``loss_fn`` leaves in Python where its graph runs in its place; of the whole call."""
    before_backward: Callable[[], None] | None = None
    """Called when the backward of a forward that has run begins."""
    _tail: tuple[Tail | None] | None = None
    _hooks: list[tuple[int, nn.Module, Any]] | None = None
    _inventory: Inventory | None = None
    _trained: dict[int, list[torch.Tensor]] | None = None
    _sizes: list[int] | None = field(default=None, init=False)
    """Of the microbatches, once it was asked: a copy with others has to look itself."""

    @property
    def inventory(self) -> Inventory:
        """What the layers hold when it is first asked."""
        if self._inventory is None:
            self._inventory = inventory.of_children(self.chain)
        return self._inventory

    def look_again(self) -> None:
        """The layers may hold something else by now, since they have run."""
        self._inventory = self._hooks = self._trained = None

    @property
    def parameters(self) -> Sequence[Sequence[torch.Tensor]]:
        """Those of each layer."""
        return self.inventory.parameters

    @property
    def trained(self) -> dict[int, list[torch.Tensor]]:
        """Per layer that has some, the parameters that are trained when it is first asked."""
        if self._trained is None:
            trained = (
                (index, [each for each in own if each.requires_grad]) for index, own in enumerate(self.parameters)
            )
            self._trained = {index: parameters for index, parameters in trained if parameters}
        return self._trained

    @property
    def hooks(self) -> list[tuple[int, nn.Module, Any]]:
        """Every forward hook, with the index of its layer and its module; looked for when first asked for."""
        if self._hooks is None:
            self._hooks = [
                (index, module, hook)
                for index, layer in enumerate(self.chain if self.inventory.has_hooks() else ())
                for module in hooked_modules(layer)
                for hook in forward_hooks(module)
            ]
        return self._hooks

    @property
    def tail(self) -> Tail | None:
        """The last layer with the loss as a part of it; made when it is first asked for."""
        if self._tail is None:
            self._tail = (self.make_tail and self.make_tail(self),)
        return self._tail[0]

    @property
    def weighs_terms(self) -> bool:
        """Whether graphs of its loss are made to weigh terms, that may then be `counted`."""
        return self.mean is not None and (self.mean.share is not None or self.total_microbatches > 1)

    @classmethod
    def like_example(cls, chain: LayerChain, config: ResolvedConfig) -> Call:
        """A call that is only planned: the example's elements, split evenly."""
        number = config.num_microbatch
        piece = torch.empty(-(-chain.example_elements // number), device="meta")
        return cls(chain, config, [(piece,)] * number, [{}] * number, [None] * number, number, has_arguments=False)

    @property
    def num_microbatches(self) -> int:
        return len(self.args)

    def elements(self) -> int:
        """Tensor elements of the largest microbatch's arguments."""
        return max(self._elements())

    def largest(self) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Arguments and label of the largest microbatch."""
        elements = self._elements()
        position = elements.index(max(elements))
        return self.args[position], self.kwargs[position], self.labels[position]

    def _elements(self) -> list[int]:
        if self._sizes is None:
            each = zip(self.args, self.kwargs, strict=True)
            self._sizes = [sum(map(torch.Tensor.numel, trees.tensors(arguments))) for arguments in each]
        return self._sizes

    def argument_bytes(self) -> int:
        """Bytes of the tensors in the largest microbatch's arguments."""
        return max(sum(map(bytes_of, trees.tensors(each))) for each in zip(self.args, self.kwargs, strict=True))


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive layers of a job that autograd sees as one."""

    layers: tuple[int, ...]
    takes: tuple[str, ...]
    """Names it reads and does not make."""
    makes: tuple[str, ...]
    last_reader: Mapping[str, int] = field(compare=False, default_factory=dict)
    """By name, the last of its layers that reads it; a layer beyond for what the model's outputs need."""


@dataclass(frozen=True, slots=True)
class JobFlow:
    """The values of one job, the same for every microbatch; its segments in the order in which they run."""

    segments: tuple[Segment, ...]
    gives: frozenset[str]
    """Names that it makes and others read: brought to the host."""
    drops: tuple[str, ...]
    """Names that nobody reads after it."""
    read_again: frozenset[str]
    """Names that several of its segments take, none of which may write them."""
    last_source: int | None
    """The job of the last stage that makes a value it takes, or that ran one of its layers forward and so left the
    buffers for its recomputation, or one that shares that stage; None: all were there before."""

    @property
    def takes(self) -> set[str]:
        """Names that its segments take, which stay until it is through."""
        return {name for segment in self.segments for name in segment.takes}


@dataclass(frozen=True, slots=True, eq=False)
class StepSpec:
    """Everything about one step that is known before it runs."""

    chain: LayerChain
    weights: Sequence[LayerWeights]
    """Per layer; a backward has its forward's."""
    stays: Sequence[Stay]
    """Per layer, which of its weights stay on devices."""
    schedule: Schedule
    flows: Sequence[JobFlow]
    """Per job of the schedule."""
    base_seed: int
    """Random numbers of layer L and microbatch m derive from it, L and m."""
    drawing: frozenset[int]
    """Layers that may draw random numbers, whose draws recomputation repeats."""
    with_gradient: frozenset[str]
    """Names of carried values whose tensors take part in autograd."""
    plain: Mapping[tuple[int, str], frozenset[int]]
    """By microbatch and name of arguments that gradients flow to, the tensors that take no part."""
    keeps_history: bool
    """Whether a backward will recompute this forward, so that what it saw and saved must be kept."""
    autocast: Context
    context: contextvars.Context
    """The caller's context variables; a backward has its forward's."""
    arguments: frozenset[str]
    """Names of the carried values that the caller's arguments are in."""
    not_split: frozenset[Place] = frozenset()
    """Tensors of arguments and labels that are the same for all microbatches."""
    inputs: Sequence[InputTensor] = ()
    """Those that the step is to leave gradients for."""
    labels: Sequence[Any] = ()
    """Per microbatch, as ``loss_fn`` gets them."""
    first_microbatch: int = 0
    """See `Call`."""
    loss_fn: LossFunction | None = None
    """None: the step ends with the model's outputs, or is a backward."""
    mean: Mean | None = None
    """See `Call`."""
    own_means: Mapping[Path, OwnMean] = field(default_factory=dict)
    """See `Call`."""
    counted: CountedTerms | None = None
    """See `Call`."""
    tail: Tail | None = None
    """Runs in place of the last layer, the exit and ``loss_fn``."""
    return_outputs: bool = False
    output_device: torch.device | None = None
    microbatch_context: Context = contextlib.nullcontext
    """Entered around the fused stage of each microbatch."""
    tied_jobs: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Per job: jobs of earlier stages that bring gradients of the same parameters; they are added first."""
    may_outlive_call: bool = False
    """Whether the call returns with the losses, or once all is drawn."""
    runs_again: bool = False
    """Whether a worker that runs out of memory in a backward stage runs it again: see `KeptRuns`."""
    spare_bytes: int | None = None
    """Device memory that the plan leaves over; None: there is no limit."""
    is_tight: bool = False
    """Whether that is little, so that the step may run out of memory."""
    others_bytes: int | None = None
    """The most that weights may take on a device which have stayed there and which the step does not use; None: no
    limit."""
    frozen: FrozenLayers | None = None
    """The user's modules as the forward found them, for a backward of its own; None: as they are."""
    latest_frozen: LatestFrozenLayers = field(default_factory=LatestFrozenLayers)
    """Freezes the chain once the call may return."""
    check_finite: bool = False
    """See `RoundPipeRunConfig`."""
    times: StepTimes | None = None
    """Where workers note what calls take; None: the step is not measured."""
    peaks: VisitPeaks | None = None
    """Where workers note what visits take on devices; None: that is not measured."""
    retries: StepRetries | None = None
    """Where it is noted how often allocators were at their limit; None: nobody asks."""
    tiles: Tiles = UNTILED

    def tiles_of(self, layer_index: int) -> int:
        """In how many tiles a layer runs; the last one is of the tail."""
        return self.tiles.of(layer_index, len(self.chain))

    def is_inner(self, name: str) -> bool:
        """Whether a carried value, and so its gradient, is nobody's but the engine's."""
        return name not in self.arguments and name != LABEL and name not in self.chain.exit.reads

    def flow_of(self, job: Job) -> JobFlow:
        return self.flows[job.index - self.schedule.first_job]

    def layers_of(self, worker: int) -> Iterable[int]:
        """Those that a worker runs in steps like this one, ascending."""
        if self.schedule.plan.rotates:
            return range(len(self.chain))
        return sorted({index for job in self.schedule.jobs if job.worker == worker for index in job.layers})

    def streamed_sizes(self, worker: int) -> list[int]:
        """Bytes that a worker's visits bring up, in their order."""
        return self.schedule.visit_sizes(worker, [stay.streamed_bytes for stay in self.stays])


def _segment(specs: Sequence[LayerSpec], layers: Sequence[int], exit_reads: Sequence[str] = ()) -> Segment:
    takes: dict[str, None] = {}
    makes: dict[str, None] = {}
    last_reader: dict[str, int] = {}
    visits = [(index, specs[index].reads, specs[index].makes) for index in layers]
    for index, reads, made in (*visits, (layers[-1] + 1, exit_reads, ())):
        takes.update(dict.fromkeys(name for name in reads if name not in makes))
        makes.update(dict.fromkeys(made))
        last_reader.update(dict.fromkeys(reads, index))
    return Segment(tuple(layers), tuple(takes), tuple(makes), last_reader)


def segments_of(
    job: Job, specs: Sequence[LayerSpec], grain: RecomputeGrain, exit_reads: Sequence[str] = ()
) -> tuple[Segment, ...]:
    """The segments of a job, in the order in which they run; ``exit_reads`` if it makes the model's outputs itself."""
    if job.phase is Phase.BACKWARD and grain == "layer":
        return tuple(by_layer(job, specs))
    return (_segment(specs, job.layers, exit_reads),)


def by_layer(job: Job, specs: Sequence[LayerSpec]) -> list[Segment]:
    """The layers of a job as segments, in the order of its backward."""
    return [_segment(specs, (index,)) for index in reversed(job.layers)]


def flow(
    schedule: Schedule,
    specs: Sequence[LayerSpec],
    *,
    grain: RecomputeGrain,
    exit_reads: Sequence[str],
    stay: Iterable[str] = (),
    ends_in_loss: bool = False,
) -> tuple[JobFlow, ...]:
    """The flow of each job of a schedule, the same for those that share a stage.

    The model's outputs need the names in ``exit_reads``, on the device where a job goes on to the loss; those in
    ``stay`` stay on the host after the step.
    """
    stages = [job for job in schedule.jobs if job.replica == 0]
    loss_stage = stages[-1] if ends_in_loss else None
    segments = [
        segments_of(job, specs, grain, exit_reads if job.phase is Phase.FUSED or job is loss_stage else ())
        for job in stages
    ]
    last_reader = {name: position for position, parts in enumerate(segments) for part in parts for name in part.takes}
    stays = {*stay, *(exit_reads if schedule.kind == "forward" and not ends_in_loss else ())}
    flows: list[JobFlow] = []
    maker: dict[str, int] = {}
    forward_job: dict[int, int] = {}
    for position, (job, parts) in enumerate(zip(stages, segments, strict=True)):
        gives: frozenset[str] = frozenset()
        drops = tuple(name for name, last in last_reader.items() if last == position and name not in stays)
        earlier = [maker[name] for part in parts for name in part.takes if name in maker]
        if job.phase is Phase.FORWARD:
            names = (name for part in parts for name in part.makes)
            gives = frozenset(name for name in names if name in stays or last_reader.get(name, -1) > position)
            forward_job.update(dict.fromkeys(job.layers, job.index))
        else:
            earlier += [forward_job[index] for index in job.layers if index in forward_job]
        again = _read_again(parts, specs)
        flows += [JobFlow(parts, gives, drops, again, max(earlier, default=None))] * job.num_replicas
        maker.update(dict.fromkeys(gives, job.index))
    return tuple(flows)


def _read_again(segments: Sequence[Segment], specs: Sequence[LayerSpec]) -> frozenset[str]:
    counts = Counter(name for segment in segments for name in segment.takes)
    layers = (index for segment in segments for index in segment.layers)
    written = {name for index in layers if specs[index].may_write_reads for name in specs[index].reads}
    return frozenset(name for name, count in counts.items() if count > 1) - written


def reads_of_backward(schedule: Schedule, specs: Sequence[LayerSpec], grain: RecomputeGrain) -> frozenset[str]:
    """Names that the jobs of a backward schedule take: what a forward before it must keep."""
    return frozenset(name for job in schedule.jobs for part in segments_of(job, specs, grain) for name in part.takes)


def names_with_gradient(specs: Sequence[LayerSpec], trainable: Sequence[bool], inputs: Iterable[str]) -> frozenset[str]:
    """Names through which a gradient flows: from ``inputs`` that require grad, and from ``trainable`` layers."""
    flowing = set(inputs)
    for spec, has_trainable in zip(specs, trainable, strict=True):
        if has_trainable or any(name in flowing for name in spec.reads):
            flowing.update(spec.makes if spec.differentiable is None else spec.differentiable)
    return frozenset(flowing)
