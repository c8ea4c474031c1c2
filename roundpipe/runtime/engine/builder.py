"""From one call's microbatches to the spec of a step that the engine can run.

Everything that a call decides is decided here, in the caller's thread: which plan (`PlanChooser`), which values flow
where, which gradients are wanted, the seed, the modes.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from roundpipe.core import trees
from roundpipe.core.compiled_modules import context_for
from roundpipe.core.execute_plan import ExecutePlan, ScheduleKind
from roundpipe.core.inventory import Inventory
from roundpipe.core.layers import LayerChain
from roundpipe.core.modes import caller_autocast
from roundpipe.core.schedule import Phase, Schedule, make_schedule
from roundpipe.core.tiling import UNTILED
from roundpipe.planning.residency import STREAMED
from roundpipe.runtime.config import microbatch_count
from roundpipe.runtime.device.backend import OUT_OF_MEMORY, synchronize_streams
from roundpipe.runtime.engine.cost_model import MemoryMeasure
from roundpipe.runtime.engine.engine import Engine
from roundpipe.runtime.engine.full_plans import FULL
from roundpipe.runtime.engine.host_values import HostValue, HostValues
from roundpipe.runtime.engine.input_tensors import inputs_of
from roundpipe.runtime.engine.plan_choice import PlanChooser
from roundpipe.runtime.engine.plans_beside import homes_of
from roundpipe.runtime.engine.recompute import base_seed
from roundpipe.runtime.engine.shared_values import Place, places_not_split
from roundpipe.runtime.engine.spec import (
    LABEL,
    Call,
    StepSpec,
    flow,
    names_with_gradient,
    reads_of_backward,
)
from roundpipe.runtime.engine.stays import KeptStays, stays_of
from roundpipe.runtime.optimizer.optimizer import OptimizerSide
from roundpipe.runtime.profiling.meter import link_speeds, visit_seconds
from roundpipe.runtime.weights.frozen_layers import FrozenLayers, LatestFrozenLayers
from roundpipe.runtime.weights.host_weights import HostWeights
from roundpipe.runtime.weights.layer_weights import LayerWeights
from roundpipe.runtime.weights.twin_group import Tenants

logger = logging.getLogger(__name__)

MOST_RETURNS = 3
"""From a device on which nobody has asked for them weights return so often because others are trained."""


class StepBuilder:
    """Makes the specs of one model's steps; the optimizer's side is told when weights are moved.

    ``measure``: see `CostModel`; ``add_tiles`` makes a call's layers run in tiles where they are asked to.
    """

    def __init__(
        self,
        engine: Engine,
        host: HostWeights,
        optimizer: OptimizerSide,
        measure: MemoryMeasure | None = None,
        add_tiles: Callable[[Call], None] = lambda call: None,
    ) -> None:
        self._engine = engine
        self._host = host
        self._optimizer = optimizer
        self._add_tiles = add_tiles
        self.plans = PlanChooser(
            engine.num_workers,
            (backend.memory_budget_bytes for backend in engine.backends),
            lambda: link_speeds(engine.read_meters()),
            accelerators=engine.has_accelerators,
            measure=measure,
            chain=lambda: optimizer.times.all_on_host() if optimizer.is_async else None,
            visit_s=lambda: visit_seconds(engine.read_meters()),
            has_peers=engine.has_peers,
        )
        self.plans.full.allow(self._may_live_there, optimizer)
        self.last_plan: ExecutePlan | None = None
        self.last_residency = STREAMED
        self.last_allocator_bytes = 0
        self._num_returns = 0
        """How often weights came home from the device because others are trained."""
        self._frozen: weakref.WeakKeyDictionary[LayerChain, LatestFrozenLayers] = weakref.WeakKeyDictionary()
        self._stays: weakref.WeakKeyDictionary[LayerChain, KeptStays] = weakref.WeakKeyDictionary()
        self._shared: weakref.WeakKeyDictionary[LayerChain, list[frozenset[int]]] = weakref.WeakKeyDictionary()
        """Per layer of a chain, other layers that have one of its parameters."""

    def train_step(self, call: Call, return_outputs: bool, *, may_overlap: bool) -> tuple[StepSpec, HostValues]:
        """The step of a ``forward_backward``, and its first carries.

        With ``may_overlap`` the call returns with the losses, if nothing else speaks against it.
        """
        spec, values = self._spec(call, "train", keeps_history=True)
        # without a step that has run by this plan, the call may have to be run again
        may_outlive_call = may_overlap and not spec.inputs and self.plans.is_proven(call)
        may_outlive_call &= not torch.is_anomaly_enabled()  # a mode of the process, which may end with the call
        spare_bytes = self.plans.room(call, spec.schedule.plan).spare_bytes
        spec = replace(
            self._with_loss(spec, call, return_outputs),
            spare_bytes=spare_bytes,
            is_tight=self.plans.is_tight(spare_bytes),
            tail=call.tail if call.tiles.tail > 1 else None,
            may_outlive_call=may_outlive_call,
            runs_again=may_outlive_call and self.plans.has_budget,
            times=self.plans.costs.times_of(call),
            peaks=None if call.has_twins else self.plans.costs.peaks_of(call, spec.schedule.plan),
            retries=self.plans.retries_of(call, self._engine.retries),
        )
        return spec, values

    def loss_step(self, call: Call, return_outputs: bool) -> tuple[StepSpec, HostValues]:
        """The step of a ``forward_loss``, and its first carries."""
        spec, values = self._spec(call, "forward", keeps_history=False, ends_in_loss=True)
        return self._with_loss(spec, call, return_outputs), values

    def _with_loss(self, spec: StepSpec, call: Call, return_outputs: bool) -> StepSpec:
        return replace(
            spec,
            loss_fn=call.loss_fn,
            mean=call.mean,
            own_means=call.own_means,
            labels=call.labels,
            return_outputs=return_outputs,
            output_device=call.config.output_device,
            microbatch_context=functools.partial(microbatch_count, call.total_microbatches),
        )

    def forward_step(self, call: Call, *, with_backward: bool) -> tuple[StepSpec, HostValues]:
        """The step of a ``forward``, and its first carries; what a later `backward_step` needs stays on the host."""
        return self._spec(call, "forward", keeps_history=with_backward)

    def backward_step(self, forward: StepSpec, call: Call, frozen: FrozenLayers) -> StepSpec:
        """The step of the backward of a ``forward``; ``frozen`` are the user's modules as the forward found them."""
        self._optimizer.come_home()
        schedule = self._schedule(forward.schedule.plan, call, "backward")
        chain = call.chain
        weights = self._prepare(chain, wants_gradients=forward.keeps_history, earlier=forward.weights)
        return replace(
            forward,
            weights=weights,
            stays=stays_of(chain, weights, {index for index, stay in enumerate(forward.stays) if stay.parts}),
            schedule=schedule,
            flows=flow(schedule, chain.specs, grain=call.config.recompute_grain, exit_reads=chain.exit.reads),
            runs_again=self.plans.has_budget,
            tied_jobs=self._tied(chain, schedule),
            frozen=frozen.with_hooks_now(),
        )

    def _spec(
        self, call: Call, kind: ScheduleKind, *, keeps_history: bool, ends_in_loss: bool = False
    ) -> tuple[StepSpec, HostValues]:
        chain, config = call.chain, call.config
        call.is_evaluation = kind == "forward" and not keeps_history
        self._prepare_to_plan(call)
        with self._engine.start.part("plan"):
            plan = self.plans.plan(call)
            if call.tiles != UNTILED:
                self._add_tiles(call)
        if plan.replicas:
            most = min(self._engine.num_workers, call.num_microbatches)
            plan = plan.with_fewer_replicas(most, set(self._in_order(call)))
        self.last_plan = plan
        schedule = self._schedule(plan, call, kind)
        synchronize_streams(trees.tensors([call.args, call.kwargs, call.labels]))
        values = [
            {name: HostValue(value) for name, value in chain.entry(args, kwargs).items()}
            for args, kwargs in zip(call.args, call.kwargs, strict=True)
        ]
        stay: frozenset[str] = frozenset()
        if kind == "forward" and keeps_history:
            later = make_schedule(plan, self._engine.num_workers, call.num_microbatches, kind="backward")
            stay = reads_of_backward(later, chain.specs, config.recompute_grain)
        drawing = frozenset(_drawing(call) if config.preserve_rng_state else ())
        trained = call.trained
        trainable = [index in trained for index in range(len(chain))]
        inputs = inputs_of(values)
        requiring = {tensor.name for tensor in inputs}
        inputs += inputs_of([{LABEL: HostValue(label)} for label in call.labels])
        held, room = call.inventory, self.plans.room(call, plan)
        weights = self._prepare(chain, wants_gradients=keeps_history, held=held)
        homes = homes_of(call, room.residency, plan, self._engine.num_workers)
        if not self._live(call, homes):
            return self._spec(call, kind, keeps_history=keeps_history, ends_in_loss=ends_in_loss)
        if not call.is_evaluation:
            self.last_residency = room.residency
            self.last_allocator_bytes = room.allocator_bytes
        spec = StepSpec(
            chain=chain,
            weights=weights,
            stays=self._stays.setdefault(chain, KeptStays()).of(
                chain,
                weights,
                held.modes(),
                room.residency.layers,
                with_trained=call.is_evaluation,
                staying=homes,
            ),
            others_bytes=room.others_bytes,
            spare_bytes=room.spare_bytes if call.is_evaluation else None,
            schedule=schedule,
            flows=flow(
                schedule,
                chain.specs,
                grain=config.recompute_grain,
                exit_reads=chain.exit.reads,
                stay=stay,
                ends_in_loss=ends_in_loss,
            ),
            base_seed=base_seed(drawing, chain.specs, weights),
            drawing=drawing,
            check_finite=config.check_finite,
            with_gradient=names_with_gradient(chain.specs, trainable, requiring),
            plain={
                (microbatch, name): frozenset(
                    i for i, tensor in enumerate(trees.tensors(value.value)) if not tensor.requires_grad
                )
                for microbatch, carry in enumerate(values)
                for name, value in carry.items()
                if name in requiring
            },
            keeps_history=keeps_history,
            autocast=caller_autocast(),
            context=context_for(schedule.num_workers),
            arguments=frozenset(name for carry in values for name in carry),
            not_split=_not_split(values, call),
            inputs=inputs if keeps_history else (),
            first_microbatch=call.first_microbatch,
            counted=call.counted,
            tiles=call.tiles,
            tied_jobs=self._tied(chain, schedule),
            latest_frozen=self._latest_frozen(chain),
            # a loss may switch adapters off for a while, or the mode, while other workers run layers
            frozen=self.freeze(chain) if call.loss_reads_weights and self._engine.num_workers > 1 else None,
        )
        return spec, values

    def freeze(self, chain: LayerChain) -> FrozenLayers:
        """The user's modules as they are now."""
        return self._latest_frozen(chain).of(chain)

    def _latest_frozen(self, chain: LayerChain) -> LatestFrozenLayers:
        return self._frozen.setdefault(chain, LatestFrozenLayers())

    def has_plan(self, call: Call) -> bool:
        """Whether a call has a plan, or one fits it, which it then has."""
        if not self.plans.has_budget:
            return True
        self._prepare_to_plan(call)
        with self._engine.start.part("plan"):
            return self.plans.has_plan(call)

    def _prepare_to_plan(self, call: Call) -> None:
        self.plans.set_budgets(self._engine.take_budgets())
        start = self._engine.start
        start.take_in(call.chain.made_in_s)
        call.chain.made_in_s = {}
        with start.part("measure memory"):
            self.plans.costs.measure_memory(call)
        if call.config.replicas == "auto":
            call.may_replicate = not any(self._in_order(call))

    def _may_live_there(self, call: Call) -> bool:
        """Whether a call's trained weights may live on the device: not if its backward comes later."""
        if call.loss_fn is None:
            return self._optimizer.has_twins and not call.config.requires_grad
        return self._optimizer.may_have_twins and not call.loss_reads_weights

    def _live(self, call: Call, homes: Mapping[int, int]) -> bool:
        """Let trained weights be on devices, those that have ``homes`` there, or on the host; False: no room."""
        optimizer, twins = self._optimizer, self._engine.twins
        if not (call.has_twins or twins):
            return True
        parameters = [each for held in call.parameters for each in held]
        if twins and not (call.has_twins and twins.are_of(parameters, homes)):
            comes_and_goes = optimizer.is_unasked and self._num_returns > MOST_RETURNS
            self._num_returns += call.has_twins
            optimizer.come_home()
            if call.loss_reads_weights and call.config.residency == FULL:
                logger.warning(
                    "residency='full': weights are streamed as with 'auto' (loss_fn can reach the model and may read "
                    "its weights on the host)"
                )
            if comes_and_goes or not (call.has_twins or call.is_evaluation):
                self.plans.full.is_over |= call.config.residency != "off"  # or they might come and go with each call
        if not call.has_twins or twins:
            return True
        trained = {id(each): each for each in parameters if id(each) in homes}
        is_asked = call.config.residency == FULL
        try:
            if twins.suit(trained.values()) and (is_asked or optimizer.suits()):
                tenants: dict[int, Tenants] = {}
                for worker in sorted({*homes.values()}):
                    own = [each for key, each in trained.items() if homes[key] == worker]
                    tenants[worker] = Tenants(own, optimizer.device_bytes(set(own)))
                self._engine.release_memory()  # of streamed weights
                begin = optimizer.begin_twins if is_asked else optimizer.begin_unasked
                begin(tenants)
                return True
            reason = "some trained weights are of a kind that stays on the host"
            self.plans.full.is_over = True
        except OUT_OF_MEMORY as error:
            reason = str(error).partition("\n")[0]
            self.plans.full.shrink(call)
            if not self.plans.full.is_over:
                logger.info("weights of fewer layers stay on the device (%s)", reason)
                return False
        if is_asked:
            logger.warning("residency='full': weights are streamed as with 'auto' (%s)", reason)
        elif not optimizer.is_over:  # it has said why
            logger.info("weights are streamed (%s)", reason)
        return False

    def _in_order(self, call: Call) -> Iterator[int]:
        """Layers whose microbatches must run one after the other: they leave something behind, for all that is known.

        That a forward leaves nothing behind is known once one has run.
        """
        hooked = {index for index, _, _ in call.hooks}
        for index, (layer, spec) in enumerate(zip(call.chain, call.chain.specs, strict=True)):
            if index in hooked or not self._host.is_prepared(layer):
                yield index
            elif self._host.layer(spec.name, layer).may_have_side_effects():
                yield index

    def _schedule(self, plan: ExecutePlan, call: Call, kind: ScheduleKind) -> Schedule:
        engine = self._engine
        return make_schedule(plan, engine.num_workers, call.num_microbatches, first_job=engine.next_job, kind=kind)

    def _prepare(
        self,
        chain: LayerChain,
        *,
        wants_gradients: bool,
        earlier: Sequence[LayerWeights] = (),
        held: Inventory | None = None,
    ) -> list[LayerWeights]:
        num_laid_out = self._host.num_laid_out
        try:
            with self._engine.start.part("pin weights"):
                return self._engine.prepare(
                    chain, self._host, wants_gradients=wants_gradients, earlier=earlier, held=held
                )
        finally:
            if self._host.num_laid_out != num_laid_out:
                self._optimizer.weights_moved()

    def _tied(self, chain: LayerChain, schedule: Schedule) -> dict[int, list[int]]:
        """Per job, the earlier jobs that bring gradients of the same parameters."""
        if (shared := self._shared.get(chain)) is None:
            ids = [{id(parameter) for parameter in layer.parameters()} for layer in chain]
            shared = self._shared[chain] = [
                frozenset(other for other, its_ids in enumerate(ids) if other != index and not own.isdisjoint(its_ids))
                for index, own in enumerate(ids)
            ]
        if not any(shared):
            return {}
        backward = [job for job in schedule.jobs if job.phase is not Phase.FORWARD]
        return {
            job.index: [
                earlier.index
                for earlier in backward
                if earlier.index < job.index - job.replica and any(shared[i] & set(earlier.layers) for i in job.layers)
            ]
            for job in backward
        }


def _drawing(call: Call) -> Iterator[int]:
    """Layers that may draw random numbers, by themselves or in hooks, which come and go."""
    yield from (index for index, spec in enumerate(call.chain.specs) if spec.draws_random)
    yield from (index for index, _, _ in call.hooks)


def _not_split(values: HostValues, call: Call) -> frozenset[Place]:
    """Tensors of arguments and labels that all microbatches may share, once they are on a device."""
    written = {name for spec in call.chain.specs if spec.may_write_reads for name in spec.reads}
    return places_not_split(
        [
            {
                LABEL: None if any(tensor.requires_grad for tensor in trees.tensors(label)) else label,
                **{name: value.value for name, value in carry.items() if name not in written},
            }
            for carry, label in zip(values, call.labels, strict=True)
        ]
    )
