"""Captures a model as a graph of modules and glue by running its Python on fakes, in attempts.

An `Attempt` that fails leaves `Knowledge` for the next: look inside a module, keep it whole, or find its output sizes
by running a copy. Only the root can't be kept whole: what its own code does wrong is a `TraceError`.

Invariant: the user's model, and all random state, are after `trace` what they were before it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.caller import warn
from roundpipe.core.errors import TraceCause, TraceError, TraceFacts, enumerated
from roundpipe.core.interrupts import interrupts_held
from roundpipe.core.module_tree import modules_in
from roundpipe.core.random_state import preserved_random_state
from roundpipe.effects.completed import CompletedTexts
from roundpipe.effects.snapshot import ModuleSnapshot, PlaceValues, PythonSnapshot
from roundpipe.fx.arguments import Arguments, CallForm
from roundpipe.fx.fakes import symbols_kept_quiet
from roundpipe.fx.graph.traced import printed_graph
from roundpipe.fx.guards.guards import GuardedGraph
from roundpipe.fx.guards.model_guard import kind_and_value
from roundpipe.fx.trace.advice import where_set
from roundpipe.fx.trace.attempt import Attempt, OtherSizes
from roundpipe.fx.trace.decisions import Knowledge, Learned, Need, Retry
from roundpipe.fx.trace.intercept import TRACING
from roundpipe.fx.trace.kept import KeptHolders, are_alike
from roundpipe.fx.trace.own_errors import as_the_models_own
from roundpipe.fx.varying import FoundName, Varying, is_value, named_places
from roundpipe.fx.world import FakeWorld

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 60
MAX_SETTLING_RUNS = 2
"""Runs of a model that sets attributes in its forward; both must give the same graph, or its first call differs."""


def trace(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    max_leaf_bytes: int | None = None,
    dynamic: Collection[Varying] = (),
    is_pure: bool = False,
    batch: Arguments | None = None,
    needs: Collection[Need] = (),
    learned: Learned | None = None,
) -> GuardedGraph:
    """The graph that a model's forward records on example arguments.

    Args:
        model: any module; it may be on the ``meta`` device. Its train or eval mode, grad mode and
            autocast are those of the graph.
        args, kwargs: example arguments. Their data answer what the model's code asks of its inputs'
            data; dim 0 of floats and every dimension of integers become symbols.
        max_leaf_bytes: look into modules with more bytes of weights and gradients than this; None = no such limit.
        dynamic: further input dimensions, and numbers, that become symbols, as in `Failure.varying`.
        is_pure: a forward that changes anything in Python is refused, unless it only leaves values that it computes,
            which are `TracedGraph.kept`; it never runs on data.
        batch: the arguments of which the example is a piece, by whose data the model's code decides.
        needs: what is known to be needed before the first attempt.
        learned: from earlier traces of the model; this one adds to it.

    Returns:
        The graph, with its guards.

    Raises:
        TraceError: the root's own code can't be captured; says file, line, cause and what to change. Or the model's
            forward raises its cause without a trace, too.
    """
    knowledge = Knowledge(max_leaf_bytes, frozenset(dynamic), is_pure, frozenset(needs))
    request = _Request(model, args, kwargs or {}, batch, learned or Learned(), knowledge)
    try:
        return request.traced()
    except TraceError:
        sizes = frozenset(each for each in dynamic if not is_value(each))
        if len(sizes) == len(knowledge.dynamic):
            raise
    logger.debug("%s can't be traced with symbols in the place of its numbers", type(model).__name__)
    request.knowledge = replace(knowledge, dynamic=sizes)
    return request.traced()


@dataclass(slots=True)
class _Request:
    """What `trace` is asked for."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: Arguments | None
    learned: Learned
    knowledge: Knowledge

    def traced(self) -> GuardedGraph:
        """The graph, of arguments in normal form."""
        form = CallForm(self.model, named_places(self.knowledge.dynamic))
        arguments = form.normalise(self.args, self.kwargs)
        whole = None if self.batch is None else form.normalise(*self.batch)
        try:
            with interrupts_held(), TRACING, preserved_random_state(), symbols_kept_quiet():
                return self._trace_doubled(form, arguments, whole)
        except TraceError as error:
            own = None if self.knowledge.is_pure else as_the_models_own(self.model, self.args, self.kwargs, error)
            if own is not None:
                raise own from own.__cause__
            raise

    def _trace_doubled(self, form: CallForm, arguments: Arguments, batch: Arguments | None) -> GuardedGraph:
        """The graph for a batch of two in place of a batch of one, where it serves both."""
        trace_for = functools.partial(self._trace, form, batch)
        doubled = _batch_of_two(arguments, batch)
        if doubled is None:
            return trace_for(arguments)
        of_two: GuardedGraph | None = None
        try:
            of_two = trace_for(doubled, also=arguments)
        except OtherSizes as other:
            decisions = other.decisions
        except TraceError as error:
            try:
                traced = trace_for(arguments)
            except TraceError:
                raise error from error.__cause__
            traced.fails_for_two = error
            return traced
        else:
            if of_two.guards.check(*arguments, batch=batch) is None:
                return of_two
            decisions = of_two.guards.decisions
        traced = trace_for(arguments, has_one_sample=True)
        traced.guards.decisions = decisions
        traced.of_two = lambda: of_two or self._trace_of_two(form, doubled, batch)
        return traced

    def _trace_of_two(self, form: CallForm, doubled: Arguments, batch: Arguments | None) -> GuardedGraph | None:
        """The graph of a model that asks for the number of samples, for two of them."""
        with interrupts_held(), TRACING, preserved_random_state(), symbols_kept_quiet(), suppress(TraceError):
            return self._trace(form, batch, doubled)
        return None

    def _trace(
        self,
        form: CallForm,
        batch: Arguments | None,
        arguments: Arguments,
        also: Arguments | None = None,
        *,
        has_one_sample: bool = False,
    ) -> GuardedGraph:
        """Attempts until one succeeds; each knows what those before found out."""
        model, knowledge = self.model, self.learned.added_to(self.knowledge)
        for _ in range(MAX_ATTEMPTS):
            world = FakeWorld(model, arguments, knowledge.dynamic, also, batch, has_one_sample=has_one_sample)
            try:
                attempts = _pure_trace if knowledge.is_pure else _stable_trace
                with world.numbers_opened():
                    traced, traced_parts = attempts(world, form, knowledge)
            except Retry as retry:
                knowledge = knowledge.after(retry, model)
                continue
            traced.guards.watch(model, *traced_parts())  # now that the run's own traces are taken back
            self.learned.note(knowledge)
            return traced
        raise TraceError(
            f"can't trace {type(model).__name__}: no graph after {MAX_ATTEMPTS} attempts; looked into or kept "
            f"whole: {', '.join(str(name) for name in knowledge.decisions)}"
        )


def _stable_trace(world: FakeWorld, form: CallForm, knowledge: Knowledge) -> tuple[GuardedGraph, Callable[[], Any]]:
    """The graph that the model gives again and again, should its forward set attributes of its own.

    Texts that it completes once and for good stay with the model.

    Beside it what gives `Attempt.traced_parts`, for when all is taken back.

    Raises:
        Retry: an attempt failed, or the graph is another one the second time.
    """
    previous: str | None = None
    inside = modules_in(world.twin)
    state, python = ModuleSnapshot(inside), PythonSnapshot([*inside, *modules_in(world.model)])
    outside = state.copied()
    refuse_changes = _Refusals(world, inside, python)
    changed: dict[tuple[nn.Module, str], str] = {}
    values: dict[tuple[nn.Module, str], Any] = {}
    places: PlaceValues = {}
    completed, is_stable = CompletedTexts([]), False
    try:
        for _ in range(MAX_SETTLING_RUNS):
            attempt = Attempt(world, form, knowledge, outside, python)
            traced = attempt.run()
            now = python.narrowed()
            refuse_changes(attempt, now)
            changed.update(attempt.changed_attributes())
            seen = {(type(module), attribute) for module, attribute in changed}
            knowledge = replace(knowledge, seen_to_set=knowledge.seen_to_set | seen)
            changes = list(dict.fromkeys([*changed.values(), *now.side_effects()]))
            printed = printed_graph(traced, in_order=not world.recipes)
            if not changes or printed == previous:
                completed.keep_read()
                handed_on = {words for (module, _), words in changed.items() if attempt.glue.hands_on(module)}
                handed_on |= {place.words for place in now.changed() if completed.are_all_of(place)}
                handed_on |= {words for (module, name), words in changed.items() if _is_private_flag(module, name)}
                if lost := [words for words in changes if words not in handed_on]:
                    words = "%s: its forward sets %s; the compiled model runs as if it had not"
                    logger.warning(words, type(world.model).__name__, ", ".join(lost))
                _warn_of_tensors(world.model, attempt.recorder.findings.not_kept)
                counts = _counting(world, state, values, now.side_effects(places))
                own = state.diff(), now.changed_values(), counts
                is_stable = True
                return traced, functools.partial(attempt.traced_parts, *own)
            previous = printed
            values = {(change.module, change.name): change.now for change in state.diff()}
            places = now.changed_values()
            completed = CompletedTexts(now.changed())
            state.restore_tensors(keep=changed)
            now.restore_tensors()
    except Retry as retry:
        retry.seen_to_set = knowledge.seen_to_set
        raise
    finally:
        python.restore()
        if is_stable:
            completed.put()
    stateful = tuple(dict.fromkeys(world.name_of_module[module] for module, _ in changed))
    words = f"it sets {', '.join(changes)}, and what it computes depends on that"
    facts = TraceFacts(changes=tuple(changes), stateful=stateful)
    raise _refusal(world, changes[0], TraceError(words, TraceCause.STATE, facts))


def _warn_of_tensors(model: nn.Module, attributes: Iterable[str]) -> None:
    """Tensors that a forward leaves in attributes, as hooks do that compute a weight of others."""
    if names := list(attributes):
        warn(
            f"{type(model).__name__}: its forward sets {enumerated(names, most=3)} to tensors, as the hooks of "
            "torch.nn.utils.prune and the older spectral_norm do. The compiled model does not: what is there stays as "
            "it was, and code that reads it, such as another pruning or a penalty in the loss, gets old values. "
            "Compute it from the parameters, or call the module itself once before it is read"
        )


def _is_private_flag(module: nn.Module, name: str) -> bool:
    """Whether an attribute is none of the user's: private, and a plain value."""
    return name.startswith("_") and isinstance(module.__dict__.get(name), trees.PLAIN)


class _Refusals:
    """What ends an attempt whatever comes of it; closed state does at once."""

    def __init__(self, world: FakeWorld, modules: Collection[nn.Module], python: PythonSnapshot) -> None:
        self._world = world
        self._hashes = [(module, hash(module)) for module in modules if type(module).__hash__ is not object.__hash__]
        for place, kind in python.reach.closed.items():
            words = f"it uses {place}, of type {kind}, and nothing tells how a call changes that"
            raise _refusal(world, place, TraceError(words, TraceCause.OPAQUE_STATE))

    def __call__(self, attempt: Attempt, now: PythonSnapshot) -> None:
        if other := next((module for module, own in self._hashes if hash(module) != own), None):
            words = f"it changes a {type(other).__name__}, whose own hash tells of what it holds"
            raise _refusal(self._world, type(other).__name__, TraceError(words, TraceCause.STATE))
        for drawn in (place.words for place in now.diff() if place.kind == "random"):
            words = f"it draws random numbers from {drawn}, which a graph would specialize"
            raise _refusal(self._world, drawn, TraceError(words, TraceCause.RANDOM))
        attempt.refuse_activations(now)


def _pure_trace(world: FakeWorld, form: CallForm, knowledge: Knowledge) -> tuple[GuardedGraph, Callable[[], Any]]:
    """The graph of a forward that does nothing but compute, and leave values that it does not read.

    The second is as that of `_stable_trace`.

    Raises:
        Retry: an attempt failed, or it does more.
    """
    inside = modules_in(world.twin)
    modules = [*inside, *modules_in(world.model)]
    state, python = ModuleSnapshot(modules), PythonSnapshot(modules)  # code that names a module has no twin of it
    refuse_changes, outside = _Refusals(world, modules, python), ModuleSnapshot(inside)

    def run(present: PythonSnapshot, before: ModuleSnapshot, left: KeptHolders) -> tuple[GuardedGraph, Attempt]:
        attempt = Attempt(world, form, knowledge, outside, present, keeping=(before, left))
        traced = attempt.run()
        refuse_changes(attempt, present.narrowed())
        own = [change for change in before.diff() if not attempt.has_kept(change)]  # leaves', too, which a copy runs in
        lost = [*attempt.lost, *attempt.recorder.findings.not_kept]
        lost += [f"{type(change.module).__name__}.{change.name}" for change in own]
        lost += [f"{type(module).__name__}.{name}" for module, name in filter(None, [before.rebuilt(modules)])]
        if lost:
            words = f"it changes {', '.join(dict.fromkeys(lost))}, which calls of a graph would not"
            raise _refusal(world, lost[0], TraceError(words, TraceCause.STATE))
        return traced, attempt

    try:
        traced, attempt = run(python, state, {})
        if attempt.kept:
            kept, printed = attempt.kept, printed_graph(traced)
            python.restore()
            state.restore()
            names = ", ".join(dict.fromkeys(each.place.words for each in kept))
            words = f"it sets {names}, and what it does next depends on that"
            is_read = _refusal(world, kept[0].place.words, TraceError(words, TraceCause.STATE))

            def refuse() -> NoReturn:
                raise is_read

            left = {key: holder for each in kept for key, holder in each.put_unread(refuse).items()}
            traced, attempt = run(PythonSnapshot(modules), ModuleSnapshot(modules), left)
            if printed_graph(traced) != printed or not are_alike(kept, attempt.kept):
                refuse()
        return traced, functools.partial(attempt.traced_parts, [], {}, [])
    finally:
        python.restore()
        state.restore()


def _refusal(world: FakeWorld, place: str, error: TraceError) -> Retry:
    """A model that can't be traced because of something at a place in its Python state."""
    return Retry(error, location=where_set(world.model, place))


def _counting(
    world: FakeWorld, state: ModuleSnapshot, values: dict[tuple[nn.Module, str], Any], places: list[str]
) -> list[str]:
    """What a second run changed once more, in words: places, and attributes that the first left at ``values``."""
    again = [
        f"{world.name_of_module[module]}.{name}".lstrip(".")
        for module, name, _, value, _ in state.diff()
        if (module, name) in values and kind_and_value(value) != kind_and_value(values[module, name])
    ]
    return list(dict.fromkeys([*again, *places]))


def _batch_of_two(arguments: Arguments, whole: Arguments | None) -> Arguments | None:
    """The example with every sample twice if it has one; a size of 1 could mean too many things.

    Of a piece of a ``whole``, what that has no more of than one is none of the samples'.
    """
    batch = next((t.shape[0] for t in trees.tensors(arguments) if t.dim()), None)
    if batch != 1:
        return None
    args, kwargs = arguments
    own, others = trees.tensors(arguments), trees.tensors(whole)
    pairs = zip(own, others, strict=True) if len(own) == len(others) else ()
    shared = {tensor for tensor, other in pairs if tensor.shape == other.shape}

    def twice(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != 1 or tensor in shared and len(shared) < len(own):
            return tensor
        with torch.no_grad():
            doubled = torch.cat([tensor, tensor])
        return doubled.requires_grad_(tensor.requires_grad)

    return (
        tuple(trees.map_tensors(value, twice) for value in args),
        {
            name: value if isinstance(name, FoundName) else trees.map_tensors(value, twice)
            for name, value in kwargs.items()
        },
    )
