"""The chain that is valid for some arguments: traces kept with their guards, a new one when all fail.

Invariant: a chain is handed out only for arguments that pass every guard of its trace. Traces are kept, so
a model that alternates between two of them (train and eval, padded and full batches) traces twice in all. A model
that can't be traced in train or eval mode is not tried again in that mode. One whose code does something else for each
batch's data is not traced for each batch.
"""

from __future__ import annotations

import copy
import logging
import operator
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.attributes import given_attribute
from roundpipe.core.caller import warn
from roundpipe.core.contexts import contextmanager, garbage_kept
from roundpipe.core.errors import OnlyWholeError, TraceCause, TraceError, add_note, enumerated, said, shortened
from roundpipe.core.interrupts import interrupts_held
from roundpipe.core.layers import LayerChain
from roundpipe.core.modes import autocast_as_on_accelerator, saved_tensor_hooks_aside
from roundpipe.core.module_tree import modules_in, training_bytes_of
from roundpipe.effects.reads import Reads
from roundpipe.fx.arguments import Arguments
from roundpipe.fx.guards.failure import OF_MODEL, Failure, Retraces, nearest
from roundpipe.fx.guards.guards import GuardedGraph
from roundpipe.fx.guards.other_data import DataTraces
from roundpipe.fx.passes.carried_outputs import cache_advice, warn_of_carried_outputs
from roundpipe.fx.passes.lower import LowerOptions, lower
from roundpipe.fx.passes.own_losses import has_unknown_scalars
from roundpipe.fx.sizes import forget_worlds
from roundpipe.fx.trace.decisions import Learned, Need
from roundpipe.fx.trace.intercept import TRACING
from roundpipe.fx.trace.progress import progress
from roundpipe.fx.trace.tracer import trace
from roundpipe.fx.varying import Varied, is_value

logger = logging.getLogger(__name__)

MAX_TRACES = 32
"""Traces kept at once; the one unused for longest goes first."""


class TracedSource:
    """Chains of one model, traced from the arguments that calls bring.

    Args:
        model: the user's model.
        options: what decides the cuts.
        on_failure: called with the error, once, when the model's own forward can't be traced; returns to go on
            without a chain, or raises.
        preview: arguments to trace if somebody asks for the chain before the first call.
    """

    def __init__(
        self,
        model: nn.Module,
        options: LowerOptions,
        on_failure: Callable[[TraceError], None],
        preview: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> None:
        self._model = model
        self._options = options
        self._on_failure = on_failure
        self._preview = preview
        self._traces: list[tuple[GuardedGraph, LayerChain]] = []
        """The one used last first."""
        self._compared: LayerChain | None = None
        """The one whose guards have held for the latest microbatch."""
        self._failed_modes: set[bool] = set()
        """Values of ``model.training`` in which it could not be traced."""
        self._retraces = Retraces(type(model).__name__)
        self._learned = Learned()
        self._data_traces = DataTraces(self._retraces, on_failure)
        self.varying = Varied()
        self._lost: dict[str, None] = {}
        """What the forward changes in Python, but calls of a chain did not."""
        self._noted_written = self._noted_compiled = False
        self._others: dict[LowerOptions, TracedSource] = {options: self}
        """All that cut the model know each other."""
        self.trace_count = 0

    @property
    def latest(self) -> LayerChain | None:
        """The chain last handed out; before the first call, that of the preview's arguments."""
        if not self._traces and not self._failed_modes and self._preview is not None:
            preview, self._preview = self._preview, None
            try:
                with _tracing_modes():
                    return self._trace(*preview, why="the model's own example")
            except (TraceError, TypeError) as error:  # real arguments may be others; the first call decides
                logger.info("%s's own example can't be traced: %s", type(self._model).__name__, error)
        return self._traces[0][1] if self._traces else None

    @property
    def latest_trace(self) -> tuple[GuardedGraph, LayerChain] | None:
        """The graph and the chain last handed out; None before the first."""
        return self._traces[0] if self._traces else None

    @property
    def opaque(self) -> dict[str, str]:
        """Modules of the latest trace whose inside was not traced, and why."""
        return dict(self._traces[0][0].opaque) if self._traces else {}

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedSource:
        """A source for the copy of the model; it traces anew."""
        model = copy.deepcopy(self._model, memo)
        on_failure = copy.deepcopy(self._on_failure, memo)  # it may know modules of the model
        return TracedSource(model, self._options, on_failure, self._preview)

    def chain_for(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: LayerChain | None = None,
        batch: Arguments | None = None,
        *,
        or_whole: bool = False,
        or_parts: bool = False,
    ) -> LayerChain | None:
        """The chain for these arguments of one microbatch; None if the model can't be traced.

        ``before`` is that of the microbatch before in the same call: the model still is what it was compared with then.
        ``batch``: the arguments are a piece of these, by whose data the model's code decides (see `fx.guards.values`).
        ``or_whole``: whether the batch may run in place of its pieces, if they can't be traced. ``or_parts``: see
        `ChainSource.chain_for`.

        Raises:
            OnlyWholeError: the batch can run in their place, and may, or the forward raises for the piece alone.
            TraceError: the model can't be traced and ``on_failure`` raised it.
            Exception: what the model's forward raises, traced or not, with a note that says so.
        """
        failure: Failure | None = None
        compared, self._compared = self._compared, None
        with _tracing_modes():
            for position, (traced, chain) in enumerate(self._traces):
                knows_model = before is not None and chain is before and chain is compared
                mismatch = traced.guards.check(args, kwargs, knows_model=knows_model, batch=batch)
                if mismatch is None:
                    self._look_at_piece(traced, chain, (args, kwargs), batch, or_whole=or_whole)
                    self._compared = chain
                    self._retraces.note_served()
                    if position:
                        self._traces.insert(0, self._traces.pop(position))
                    return chain
                failure = nearest(failure, mismatch)
            if self._model.training in self._failed_modes:
                self._refuse_lost_state()
                return None
            if failure is not None:
                may_end = or_parts and not self._lost and not (batch and _is_piece((args, kwargs), batch))
                if may_end and self._data_traces.end_for(failure, self._traces[0][0].guards, args, kwargs):
                    return None
                self._note_retrace(failure, args, kwargs)
            try:
                chain = self._trace(args, kwargs, failure or "for the first time", batch)
            except TraceError as error:
                own = error.__cause__ if error.cause is TraceCause.MODEL_ERROR else None
                if (or_whole or own) and batch is not None and _is_piece((args, kwargs), batch):
                    of_whole = self._error_of(*batch)
                    if of_whole is None:
                        raise OnlyWholeError("its forward can't be traced" if own is None else said(own)) from error
                    if own is not None and of_whole.cause is not TraceCause.MODEL_ERROR:
                        error, own = of_whole, None  # the whole runs, in parts
                if isinstance(own, Exception):
                    add_note(own, f"roundpipe: {error}")
                    raise own from None
                self._refuse_lost_state(error)
                if not self._failed_modes:
                    self._on_failure(error)
                self._failed_modes.add(self._model.training)
                return None
            self._look_at_piece(self._traces[0][0], chain, (args, kwargs), batch, or_whole=or_whole)
            return chain

    def _look_at_piece(
        self, traced: GuardedGraph, chain: LayerChain, arguments: Arguments, batch: Arguments | None, *, or_whole: bool
    ) -> None:
        """What is known of a graph for a piece of a batch once the whole batch is there, too."""
        is_to_look_at = traced.fails_for_two is not None or bool(traced.guards.decisions.guards)
        if batch is None or not is_to_look_at or not _is_piece(arguments, batch):
            return
        chain.mixes_samples = chain.mixes_samples or traced.guards.decided_by_number(arguments, batch)
        if traced.fails_for_two is not None:
            error, traced.fails_for_two = traced.fails_for_two, None
            self._refuse_broadcast(error, batch, or_whole=or_whole)

    def _refuse_broadcast(self, error: TraceError, batch: Arguments, *, or_whole: bool) -> None:
        """A piece of one sample may run only since what was cut, and has no samples, is repeated for them."""
        if self._error_of(*batch) is not None:
            return
        words = shortened(said(error.__cause__ or error).partition("\n")[0], 200)
        if or_whole:
            raise OnlyWholeError(f"one sample runs, and two don't, since they share what was cut: {words}")
        warn(
            f"{type(self._model).__name__}: microbatches of one sample run, and of two they don't ({words}). So some "
            "of what was cut, such as a mask or a table, is not the samples' and is repeated for each: outputs and "
            "losses differ from those of the batch. Say by split_input what is cut, or use num_microbatch=1"
        )

    def _error_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TraceError | None:
        """Why a call with these arguments can't be traced; None if a trace serves it, or a new one does."""
        if all(traced.guards.check(args, kwargs) is not None for traced, _ in self._traces):
            try:
                self._trace(args, kwargs, "since a piece of the batch can't be traced")
            except TraceError as error:
                return error
        return None

    def others(self) -> Iterator[TracedSource]:
        """Sources that cut the model into layers within other limits (`LowerOptions.others`).

        Whoever takes one asks it for chains before the next: limits that would change nothing are left out.
        """
        before: TracedSource | None = None
        for options in self._options.others(training_bytes_of(self._model)):
            costs = (cost for _, chain in (before or self)._traces for cost in chain.costs)
            if before is not None and options.cuts_as(before._options, costs):
                continue
            if options not in self._others:
                other = copy.copy(self)  # what is known of the model is that of all
                other._options, other._traces, other._compared, other._preview = options, [], None, None
                other.trace_count = (before or self).trace_count
                self._others[options] = other
            before = self._others[options]
            yield before

    def _refuse_lost_state(self, cause: TraceError | None = None) -> None:
        """The model's own Python must not go on from state that calls of a graph have not kept."""
        if cause is not None and self._traces:
            self._lost.update(dict.fromkeys(cause.facts.changes))
        if self._lost:
            raise TraceError(
                f"{type(self._model).__name__}: its forward changes {', '.join(self._lost)}, which the compiled calls "
                "so far have not done. Now its Python has to run, and may find another state there than after as many "
                "calls in eager mode. Keep what changes from call to call in a buffer"
            ) from cause

    def _note_retrace(self, failure: Failure, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        logger.info("tracing %s again: %s", type(self._model).__name__, failure)
        if failure.to_fix == OF_MODEL:
            self._learned.forget()
        self.varying.note(self._traces[0][0].guards.varying(failure, args, kwargs), bool(failure.fixed_read))
        self._retraces.note(failure)

    def _trace(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        why: object = "for the first time",
        batch: Arguments | None = None,
    ) -> LayerChain:
        records_gradients = torch.is_grad_enabled()
        try:
            with interrupts_held(), garbage_kept():
                traced, chain = self._lowered(args, kwargs, why, batch)
                if batch is not None and _is_piece((args, kwargs), batch) and _mixes_numbers(traced, chain):
                    need = Need.OWN_NUMBERS
                    traced, chain = self._lowered(args, kwargs, need.value, batch, [need])
                    chain.mixes_samples = (
                        chain.mixes_samples or "its code computes with numbers that it reads from data"
                    )
        finally:
            forget_worlds()
        guards = traced.guards
        if guards.not_kept and self._failed_modes:
            changes = ", ".join(guards.not_kept)
            raise TraceError(f"it changes {changes}, which its own Python may read in the other mode")
        self._lost.update(dict.fromkeys(guards.not_kept))
        self._note_written(guards.written)
        self._note_compiled(traced.compiled_by_torch)
        if records_gradients:
            warn_of_carried_outputs(self._model, traced, chain)
        self._traces.insert(0, (traced, chain))
        del self._traces[MAX_TRACES:]
        return chain

    def _lowered(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        why: object,
        batch: Arguments | None,
        needs: Collection[Need] = (),
    ) -> tuple[GuardedGraph, LayerChain]:
        """A graph and its layers, with seconds in the log."""
        began_s, kind = time.perf_counter(), type(self._model).__name__
        self.trace_count += 1
        records_gradients = torch.is_grad_enabled()
        with torch.enable_grad():
            traced = self._graph_for(args, kwargs, batch, needs)
        if not records_gradients and traced.guards.grad_matters:
            traced = self._graph_for(args, kwargs, batch, needs)  # its code asked
        traced_s = time.perf_counter() - began_s
        logger.info("traced %s in %.2f s (%s)", kind, traced_s, why)
        chain = lower(traced, self._options, [layer for _, first in self._traces[-1:] for layer in first]).chain
        traced.of_two = lambda: None  # it holds the example
        chain.made_in_s = {"trace": traced_s, "cut": time.perf_counter() - began_s - traced_s}
        self._data_traces.seconds += sum(chain.made_in_s.values())
        logger.info("measured %s on fakes and cut it in %.2f s", kind, chain.made_in_s["cut"])
        return traced, chain

    def _note_written(self, arguments: list[str]) -> None:
        """Warns, once, of what would be seen outside of a forward in eager mode."""
        if arguments and not self._noted_written:
            self._noted_written = True
            warn(
                f"the forward of {type(self._model).__name__} writes into its argument {', '.join(arguments)}, of "
                "which each microbatch has a copy: the caller's own stays as it was"
            )

    def _note_compiled(self, reasons: dict[str, str]) -> None:
        """Warns, once, of modules that run as written although torch has compiled them."""
        if not reasons or self._noted_compiled:
            return
        self._noted_compiled = True
        which = enumerated([name or "the model itself" for name in reasons])
        why = next(filter(None, reasons.values()), "")
        advice = "Compile what can stay whole, such as each block: for block in model.blocks: block.compile()"
        if why:
            advice = f"What can't stay whole has to be recorded: {why}."
            advice += cache_advice(self._model)
        warn(
            f"{type(self._model).__name__}: torch has compiled {which}, whose inside is recorded, so that it runs as "
            f"written. {advice}"
        )

    def _graph_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Arguments | None, needs: Collection[Need]
    ) -> GuardedGraph:
        dynamic, max_bytes = tuple(self.varying), self._options.max_layer_bytes
        reads = Reads(modules_in(self._model))
        with TRACING, reads.recorded(), progress(type(self._model).__name__):  # classes are changed for all threads
            traced = trace(
                self._model,
                args,
                kwargs,
                max_leaf_bytes=max_bytes,
                dynamic=dynamic,
                batch=batch,
                needs=needs,
                learned=self._learned,
            )
        traced.guards.restrict(reads)
        if any(map(is_value, dynamic)) and not traced.opens_values:
            self.varying.close_values()
        if batch is not None and traced.guards.check(args, kwargs, batch=batch) is not None:
            own = {*needs, Need.OWN_NUMBERS}  # it does not serve the whole, so a piece decides by itself
            return self._graph_for(args, kwargs, None, own)
        return traced


def _mixes_numbers(traced: GuardedGraph, chain: LayerChain) -> bool:
    """Whether numbers of a whole batch meet what a piece of it sums up or averages, which is as much smaller."""
    mixes = chain.mixes_samples or has_unknown_scalars(traced, chain.own_losses)
    return bool(mixes) and traced.guards.values.computes_with_batch


def _is_piece(arguments: Arguments, batch: Arguments) -> bool:
    """Whether arguments are not all of a batch."""
    own, whole = trees.tensors(arguments), trees.tensors(batch)
    return len(own) != len(whole) or not all(map(operator.is_, own, whole))


def misfit(
    traced: GuardedGraph, args: tuple[Any, ...], kwargs: dict[str, Any], *, knows_model: bool = False
) -> Failure | None:
    """Why a trace does not serve a call with these arguments; None if it does. ``knows_model``: see `Guards.check`."""
    with _tracing_modes():
        return traced.guards.check(args, kwargs, knows_model=knows_model)


def own_example(model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The model's ``dummy_inputs``, which may be inherited and not fit: they show a partition, calls decide."""
    dummy = given_attribute(model, "dummy_inputs")
    return ((), dict(dummy)) if isinstance(dummy, dict) else None


@contextmanager
def _tracing_modes() -> Iterator[None]:
    """The modes of a trace and of its guards; stages set their own grad mode.

    A checkpoint around the call would run the call again where a trace looks at what autograd saved.
    """
    records_gradients = torch.is_grad_enabled()
    with (
        saved_tensor_hooks_aside(),
        torch.inference_mode(False),
        torch.set_grad_enabled(records_gradients),
        autocast_as_on_accelerator(),
    ):
        yield
