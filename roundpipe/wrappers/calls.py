"""Calls of a model that is a chain of layers: arguments in, losses, outputs and gradients out.

    forward_backward:  split -> chain_for each microbatch -> step -> engine -> sum of losses, merged outputs
    forward:           the same without loss; with grad, as one node of the caller's autograd graph (`deferred`)

Where the source has no chain for a call, the fallback runs it: another runner, made for the first such call.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from roundpipe.core.errors import DeviceMemoryError, GradientNote, OnlyWholeError, RaisedIn
from roundpipe.core.layers import ChainSource, LayerChain
from roundpipe.reports.partition_table import partition_table
from roundpipe.runtime.config import ResolvedConfig, RoundPipeRunConfig, resolve
from roundpipe.runtime.engine.builder import StepBuilder
from roundpipe.runtime.engine.losses import LossWeights, Mean, gradient_scale_of, scale_of, sum_losses, tell_weights
from roundpipe.runtime.engine.spec import Call, LossFunction, MakeTail
from roundpipe.runtime.engine.step import StepState
from roundpipe.runtime.microbatch.merge import merge
from roundpipe.runtime.microbatch.split import EarlierCalls, batch_size, split
from roundpipe.runtime.ranks.turns import CallShare
from roundpipe.wrappers.batch_loss import train_on_batch
from roundpipe.wrappers.batch_warnings import BatchWarnings
from roundpipe.wrappers.calls_in_tiles import add_tiles_for, memory_of
from roundpipe.wrappers.deferred import run_forward
from roundpipe.wrappers.features import plan_hooks_beside_loss
from roundpipe.wrappers.hook_warnings import HookWarnings
from roundpipe.wrappers.host_gradients import reaches, wait_for_weights
from roundpipe.wrappers.loss_warnings import LossWarnings
from roundpipe.wrappers.losses_by_pieces import LossesByPieces
from roundpipe.wrappers.other_cuts import cut_to_fit
from roundpipe.wrappers.recovery import run_step
from roundpipe.wrappers.run_log import LatestStep
from roundpipe.wrappers.session import Program, Runner, Session
from roundpipe.wrappers.tails import TailSource, kind_of_sum
from roundpipe.wrappers.term_counts import added_outputs, count_loss, count_outputs, layout_of
from roundpipe.wrappers.training_arguments import TrainingCall
from roundpipe.wrappers.variants import JointChains, chains_of


@dataclass(eq=False)
class ChainRunner(Runner):
    """Runs calls of a model, the session's or a module of it, by the chains that a source has for them.

    ``make_fallback`` makes what runs calls without a chain.
    """

    session: Session
    model: nn.Module
    source: ChainSource
    name: str
    config: RoundPipeRunConfig
    make_fallback: Callable[[Session], Runner] | None = None
    fallback: Runner | None = field(init=False, default=None)
    last_chain: LayerChain | None = field(init=False, default=None)
    """The latest call's; None if that ran in parts."""
    _known_chain: LayerChain | None = field(init=False, default=None)
    """That of the latest call that had one."""

    def __post_init__(self) -> None:
        session = self.session
        self._joints = JointChains(self.name)
        self._loss_warnings = LossWarnings(self.model)
        self._batch_warnings = BatchWarnings(type(self.model).__name__)
        self.hook_warnings = HookWarnings(self.model)
        self._losses, self._earlier = LossesByPieces(self.model), EarlierCalls()
        measure = functools.partial(memory_of, session.engine.backends[0].device)
        self.tails = TailSource(self.model)
        self.builder = StepBuilder(session.engine, session.host, session.optimizer, measure, add_tiles_for)

    @property
    def trace_count(self) -> int:
        return self.source.trace_count

    def forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], options: RoundPipeRunConfig, first_microbatch: int = 0
    ) -> Any:
        """As `Runner.forward`; for a part, the arguments may be of a microbatch of the whole model's call."""
        config = self._resolve(options)
        self.session.begin_call(adds_gradients=config.requires_grad, has_backward_later=True)
        calls, options = self._calls(
            args, kwargs, config, options, first_microbatch=first_microbatch, is_evaluation=not config.requires_grad
        )
        if calls is None:
            return self.in_parts().forward(args, kwargs, options)
        look_at_hooks = self.hook_warnings.begin_calls(calls, has_backward=config.requires_grad)
        scalars = count_outputs(calls, config)
        outputs = [output for call in calls for output in run_forward(self.session, self.builder, call)]
        look_at_hooks()
        self.session.optimizer.raise_pending()
        layout, mixing = layout_of(calls), calls[0].chain.mixing
        self._batch_warnings.look(outputs, config, scalars.keys() - mixing.keys(), layout.odd, mixing)
        merged = merge(outputs, config, scalars=scalars, layout=layout)
        look = self.hook_warnings.look_at_outputs(merged)
        for call in calls:
            call.before_backward = look
        return merged

    def forward_backward(self, training: TrainingCall) -> Any:
        session, config = self.session, self._resolve(training.options)
        if config.loss_scope == "batch":
            wait_for_weights(session, self.model, training.loss_fn)
            return train_on_batch(self.forward, session, training, is_mean=config.loss_reduction == "mean")
        session.begin_call(adds_gradients=training.has_backward)
        whole_if_needed = self._losses.config_for(config, training.args, training.kwargs, training.loss_fn)
        return self._train(training, whole_if_needed)

    def _train(self, training: TrainingCall, config: ResolvedConfig) -> Any:
        has_backward = training.has_backward
        calls, options = self._calls(
            training.args,
            training.kwargs,
            config,
            training.options,
            training.label,
            training.loss_fn,
            make_tail=self.tails.tail if has_backward and not training.return_outputs else None,
            share=training.share,
            is_evaluation=not has_backward,
            is_merged=training.return_outputs,
        )
        if calls is None:
            return self.in_parts().forward_backward(replace(training, options=options))
        train, again = self._train_on, functools.partial(self._train, training, config.in_one_piece())
        return self._losses.run(self.session, calls, training, config, train, again)

    def _train_on(self, calls: list[Call], training: TrainingCall, config: ResolvedConfig) -> Any:
        session, has_backward = self.session, training.has_backward
        look_at_hooks = self.hook_warnings.begin_calls(calls, has_backward=has_backward)
        may_matter = session.engine.num_workers > 1 or has_backward and session.optimizer.may_have_twins
        reads = may_matter and reaches(training.loss_fn, self.model)
        alone = wait_for_weights(session, self.model, training.loss_fn)
        count_loss(calls, config, self.tails, returns_outputs=training.return_outputs)
        losses: list[Any] = []
        outputs: list[Any] = []
        inputs: list[torch.Tensor] = []
        gradients: list[torch.Tensor | None] = []
        weights: list[LossWeights] = []
        is_apart = has_backward and len(calls) > 1 and calls[0].mean is not None
        apart: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if is_apart:
            apart = session.optimizer.gradients_scaled(lambda: gradient_scale_of(weights, training.share))
        with apart:
            for call in calls:
                if call.mean is not None and weights:
                    call.mean = replace(call.mean, reference=weights[-1].reference)
                call.loss_reads_weights = reads
                may_overlap = session.optimizer.is_async and not alone and not is_apart
                step = self._run_round(call, training, may_overlap=may_overlap)
                losses += [loss.synchronize() for loss in step.losses]
                outputs += [output.synchronize() for output in step.outputs]
                if has_backward:
                    inputs += [item.tensor for item in step.spec.inputs]
                    gradients += step.input_gradients()
                weights.append(step.weights)
            tell_weights(weights, training.share)
        scale = scale_of(weights)
        if is_apart:
            factor = gradient_scale_of(weights, training.share)
            gradients = [None if gradient is None else gradient * factor for gradient in gradients]
        if has_backward:
            session.optimizer.end_call()
        if training.return_outputs:
            layout, scalars = layout_of(calls), added_outputs(calls)
            self._batch_warnings.look(outputs, config, scalars.keys(), layout.odd, has_loss=True)
        with GradientNote(added=has_backward):
            # once, since all steps' arguments may be pieces of one graph
            flow_back(inputs, gradients)
            merged = None
            if training.return_outputs:
                merged = merge(outputs, config, scalars=scalars, layout=layout)
        session.engine.raise_pending()
        session.optimizer.raise_pending()
        look_at_hooks()
        self._loss_warnings.look(weights, len(losses), training.num_ranks, training.options, self.config)
        if config.loss_reduction == "mean":
            labels = [label for call in calls for label in call.labels]
            mixing, reason = functools.partial(self.tails.mixing, calls), functools.partial(self.tails.reason, calls)
            self._loss_warnings.look_at_mean(labels, weights, mixing, reason)
        elif not any(each and each.loss_reduction for each in (training.options, self.config)):
            find_kind = functools.partial(kind_of_sum, self.model, calls)
            self._loss_warnings.look_at_sum(training.loss_fn, weights, len(losses), find_kind)
        for each in weights:
            each.forget_terms()
        of_last = calls[0].kept.put(1 if calls[0].counted is None else calls[0].counted.num_ranks)
        self._loss_warnings.look_at_logs(of_last, len(losses), config.loss_reduction)
        total = sum_losses(losses, scale)
        return (total, merged) if training.return_outputs else total

    def _run_round(self, call: Call, training: TrainingCall, *, may_overlap: bool) -> StepState:
        """One round of a call, with its backward if there is one."""
        session, plans = self.session, self.builder.plans
        if not training.has_backward:
            build = functools.partial(self.builder.loss_step, call, training.return_outputs)
            return run_step(session, plans, call, build)[1]
        build = functools.partial(self.builder.train_step, call, training.return_outputs, may_overlap=may_overlap)
        spec, step = run_step(session, plans, call, build)
        session.log.latest = LatestStep(
            spec.schedule,
            weakref.ref(call.chain),
            call.elements(),
            call.config.recompute_grain,
            call.tiles,
            spec.may_outlive_call,
            self.builder.last_residency,
            self.builder.last_allocator_bytes,
            plans,
        )
        plans.costs.learn_from(spec.times, call)
        return step

    def num_microbatches_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Into how many a batch is to be cut."""
        return self._settled(self._resolve(None), args, kwargs).num_microbatch

    def _settled(
        self, config: ResolvedConfig, args: Any, kwargs: Any, label: Any = None, **loss: Any
    ) -> ResolvedConfig:
        """The options with what was left to choice chosen, once there is a chain."""
        if not config.auto or (chain := self.last_chain or self.source.latest) is None:
            return config
        whole = Call(chain, config, [args], [kwargs], [label], 1, **loss)
        return self.builder.plans.options.settle(whole, batch_size(args, kwargs, config))

    def update_begun(self) -> None:
        self.builder.plans.update_begun()

    def partition_table(self) -> str:
        if self.last_chain is None and self.fallback is not None:
            return self.fallback.partition_table()
        chain = self.last_chain or self.source.latest
        if chain is None:
            return f"{self.name}: not traced yet; the first call traces it, or give compile(example_kwargs=...)"
        plans, plan, residency = self.builder.plans, self.builder.last_plan, self.builder.last_residency
        if self.last_chain is None:
            with contextlib.suppress(DeviceMemoryError):  # the call will say so; the layers can be shown
                plan = plans.plan(call := Call.like_example(chain, self._resolve(None)))
                residency = plans.room(call, plan).residency
        costs, memory, latest = plans.costs.measured(chain), None, self.session.log.latest
        is_measured = costs is not None
        if latest is not None and latest.chain() is chain and (memory := latest.device_memory()):
            takes = plans.costs.of(chain, latest.elements, latest.tiles)
            costs = [cost.with_memory_of(other) for cost, other in zip(costs or chain.costs, takes, strict=True)]
            plan, residency = latest.schedule.plan, latest.residency
        return partition_table(
            chain,
            plan,
            title=self.name,
            costs=costs,
            measured=is_measured,
            memory=memory,
            optim_dtypes=self.session.optimizer.copy_dtypes(),
            resident_bytes=residency.bytes_of(chain.costs),
            stays_bytes=residency.weight_bytes(chain.costs),
        )

    def _resolve(self, options: RoundPipeRunConfig | None) -> ResolvedConfig:
        return resolve(options, self.config, num_devices=self.session.engine.num_workers)

    def in_parts(self) -> Runner:
        """What runs calls without a chain."""
        if self.fallback is None:
            assert self.make_fallback is not None, "a source that has no chain for a call"
            self.fallback = self.make_fallback(self.session)
        return self.fallback

    def _calls(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        config: ResolvedConfig,
        options: RoundPipeRunConfig,
        label: Any = None,
        loss_fn: LossFunction | None = None,
        first_microbatch: int = 0,
        make_tail: MakeTail | None = None,
        share: CallShare | None = None,
        *,
        is_evaluation: bool,
        is_merged: bool = True,
    ) -> tuple[list[Call] | None, RoundPipeRunConfig]:
        """The microbatches as one round, or as few as can be; None, and the fallback's options, if one has no chain.

        The fallback splits again, without a second run of the user's functions.
        """
        if self.fallback is not None and self.source.latest is None:
            return None, options  # there never was one
        config = self._batch_warnings.whole_if_unclear(config, args, kwargs, label)
        config = self._settled(config, args, kwargs, label, loss_fn=loss_fn, make_tail=make_tail)
        config = self._batch_warnings.in_one_piece(config, self._known_chain)
        config = self._batch_warnings.whole_if_small(config, args, kwargs)
        ways: dict[str, Any] = {"is_evaluation": is_evaluation, "is_merged": is_merged}
        rest = (options, label, loss_fn, first_microbatch, make_tail, share)
        again = functools.partial(self._calls, args, kwargs, config.in_one_piece(), *rest, **ways)
        pieces = split(args, kwargs, label, config, self._earlier, warns=False)
        if self._batch_warnings.whole_if_listed(config, pieces):
            return again()
        number, may_choose = pieces.num_microbatches, config.leaves_cut_open
        or_whole = may_choose or callable(config.split_input)  # an integration's, if it has whole batches
        or_parts = number == 1 or loss_fn is not None and config.loss_reduction == "sum"  # which needs no weights
        for events in pieces.events:
            for event in events:  # guards may read the arguments
                event.synchronize()

        def calls_by(source: ChainSource) -> list[Call] | None:
            if (chains := chains_of(source, pieces, or_whole=or_whole, or_parts=or_parts)) is None:
                return None
            calls: list[Call] = []
            joined = zip(*self._joints.join(*chains), pieces.args, pieces.labels, strict=True)
            for position, (chain, piece_kwargs, piece_args, piece_label) in enumerate(joined, first_microbatch):
                if not calls or calls[-1].chain is not chain:
                    calls.append(Call(chain, config, [], [], [], number, position, loss_fn, make_tail=make_tail))
                    calls[-1].kept = calls[0].kept
                calls[-1].args.append(piece_args)
                calls[-1].kwargs.append(piece_kwargs)
                calls[-1].labels.append(piece_label)
            for call in calls:
                call.is_evaluation = is_evaluation
                if config.loss_reduction == "mean":
                    first = call.first_microbatch - first_microbatch
                    own = None if (shares := pieces.shares) is None else shares[first : first + call.num_microbatches]
                    call.mean = Mean(own, number, len(calls) == 1, share=share)
                if loss_fn is not None:
                    plan_hooks_beside_loss(call)
            return calls

        try:
            calls = calls_by(self.source)
        except OnlyWholeError as error:
            if not may_choose:
                raise
            self._batch_warnings.run_whole(error, pieces.sizes)
            return again()
        if calls is None:
            self.last_chain = None
            return None, pieces.replay_options(options, config)
        for call in calls if number > 1 else ():
            if self._batch_warnings.in_one_piece(config, call.chain) is not config:
                self.last_chain = self._known_chain = call.chain
                return again()
        if self._batch_warnings.whole_if_odd(config, pieces, [call.chain for call in calls], is_merged=is_merged):
            return again()
        pieces.warn()
        if number > 1:
            self._batch_warnings.look_at_norms(self.model, config, number)
            self._batch_warnings.note_cut(pieces.sizes)
        self.source, calls = cut_to_fit(self.source, calls, self.builder.plans, self.builder.has_plan, calls_by)
        self.last_chain = self._known_chain = calls[-1].chain
        return calls, options


@dataclass(slots=True)
class ChainProgram(Program):
    """A model cut into layers."""

    source: ChainSource
    """Has the layers of each call."""
    make_fallback: Callable[[Session], Runner] | None = None
    """Makes what runs the calls for which the source has no layers."""

    def start(self, session: Session) -> ChainRunner:
        return ChainRunner(session, self.model, self.source, session.name, session.config, self.make_fallback)


def flow_back(inputs: Sequence[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
    """Carry on a backward into whatever produced the arguments."""
    pairs = [(tensor, gradient) for tensor, gradient in zip(inputs, gradients, strict=True) if gradient is not None]
    with RaisedIn("code in front of the model, phase backward"):
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
