"""Captures a model as a graph of modules and glue by running its Python once on fakes.

    trace ---- attempts, until one ends without a Restart
      |- Attempt    one run
      `- Learned    what it found out, for the next: look inside a module, keep it whole, or find its output sizes
                    by running a copy

Only the root can't be kept whole: what its own code does wrong is a `TraceError`.

Invariant: the user's model, and all random state, are after `trace` what they were before it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.errors import TraceError
from roundpipe.core.random_state import preserved_random_state
from roundpipe.effects.snapshot import ModuleSnapshot, PlaceValues, PythonSnapshot
from roundpipe.fx.binding import Arguments, CallForm
from roundpipe.fx.fakes import Dimension, FakeWorld
from roundpipe.fx.graph.text import printed_graph
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.guards.guards import Guards
from roundpipe.fx.guards.model_state import kind_and_value
from roundpipe.fx.trace.advice import advice, where_set
from roundpipe.fx.trace.attempt import Attempt, Learned, PlainLengths
from roundpipe.fx.trace.eager import as_the_models_own
from roundpipe.fx.trace.intercept import exclusive
from roundpipe.fx.trace.policy import Decision, is_of_torch
from roundpipe.fx.trace.recorder import BurnSizes, LogLayouts, Restart, StatefulError

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
    dynamic: Collection[Dimension] = (),
) -> TracedGraph:
    """The graph that a model's forward records on example arguments.

    Args:
        model: any module; it may be on the ``meta`` device. Its train or eval mode, grad mode and
            autocast are those of the graph.
        args, kwargs: example arguments. Their data answer what the model's code asks of its inputs'
            data; dim 0 of floats and every dimension of integers become symbols.
        max_leaf_bytes: look into modules with more bytes of weights and gradients than this; None = no such limit.
        dynamic: further input dimensions that become symbols, as in `Failure.dimensions`.

    Returns:
        The graph, with its guards.

    Raises:
        TraceError: the root's own code can't be captured; says file, line, cause and what to change. Or the model's
            forward raises its cause without a trace, too.
    """
    form = CallForm(model)
    arguments = form.normalise(args, kwargs or {})
    learned = Learned(max_leaf_bytes=max_leaf_bytes, dynamic=frozenset(dynamic))
    try:
        return _trace_doubled(model, form, arguments, learned, args, kwargs or {})
    except TraceError as error:
        own = as_the_models_own(model, args, kwargs or {}, error)
        if own is not None:
            raise own from own.__cause__
        raise


def _trace_doubled(
    model: nn.Module,
    form: CallForm,
    arguments: Arguments,
    learned: Learned,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> TracedGraph:
    """The graph for a batch of two in place of a batch of one, where it serves both."""
    with exclusive(), preserved_random_state():
        doubled = _doubled(arguments)
        if doubled is None:
            return _trace(model, form, arguments, learned)
        try:
            traced = _trace(model, form, doubled, learned)
        except TraceError as error:
            try:
                return _trace(model, form, arguments, learned)
            except TraceError:
                raise error from error.__cause__
        assert traced.guards is not None
        if traced.guards.check(args, kwargs) is not None:
            return _trace(model, form, arguments, learned)
        return traced


def _trace(model: nn.Module, form: CallForm, arguments: Arguments, learned: Learned) -> TracedGraph:
    """Attempts until one succeeds."""
    for _ in range(MAX_ATTEMPTS):
        world = FakeWorld(model, arguments, learned.dynamic)
        try:
            traced, model_state, changed = _settled(world, form, learned)
            assert isinstance(traced.guards, Guards)
            traced.guards.remember(model_state(*changed))  # now that the run's own traces are taken back
            return traced
        except BurnSizes:
            learned.burn_sizes = True
        except LogLayouts:
            learned.log_layouts = True
        except PlainLengths:
            learned.plain_lengths = True
        except Restart as restart:
            _learn(model, learned, restart)
    raise TraceError(
        f"can't trace {type(model).__name__}: no graph after {MAX_ATTEMPTS} attempts; looked into or kept "
        f"whole: {', '.join(str(name) for name in learned.decisions)}"
    )


def _settled(world: FakeWorld, form: CallForm, learned: Learned) -> tuple[TracedGraph, Any, Any]:
    """The graph that the model gives again and again, should its forward set attributes of its own.

    Beside it `Attempt.model_state` and its arguments, for when all is taken back.
    """
    previous: str | None = None
    state, outside = ModuleSnapshot(world.twin.modules()), ModuleSnapshot(world.twin.modules())
    python = PythonSnapshot([*world.twin.modules(), *world.model.modules()])
    changed: dict[tuple[nn.Module, str], str] = {}
    values: dict[tuple[nn.Module, str], Any] = {}
    places: PlaceValues = {}
    for place, kind in python.reach.closed.items():
        cause = TraceError(f"it uses {place}, of type {kind}, and nothing tells how a call changes that")
        raise _root_error(world.model, cause, where_set(world.model, place), learned)
    try:
        for _ in range(MAX_SETTLING_RUNS):
            attempt = Attempt(world, form, learned, outside, python.reach.codes, python.reach.cells)
            traced = attempt.run()
            for place in python.draws():
                cause = TraceError(f"it draws random numbers from {place}, which a graph would burn in")
                raise _root_error(world.model, cause, where_set(world.model, place), learned)
            attempt.refuse_activations(python)
            changed.update(attempt.changed_attributes())
            learned.seen_to_set |= {(type(module), attribute) for module, attribute in changed}
            words = list(dict.fromkeys([*changed.values(), *python.side_effects()]))
            printed = printed_graph(traced)
            if not words or printed == previous:
                words = [one for one in words if one not in attempt.handed_on(changed)] + attempt.not_kept()
                if words:
                    logger.warning(
                        "%s: its forward sets %s; the compiled model runs as if it had not",
                        type(world.model).__name__,
                        ", ".join(words),
                    )
                counts = _counting(world, state, values, python.side_effects(places))
                return traced, attempt.model_state, (state.diff(), python.changed_values(), counts)
            previous = printed
            values = {(change.module, change.name): change.now for change in state.diff()}
            places = python.changed_values()
            state.restore_tensors(keep=changed)
            python.restore_tensors()
    finally:
        python.restore()
    learned.stateful.update(dict.fromkeys(world.name_of_module[module] for module, _ in changed))
    cause = TraceError(f"it sets {', '.join(words)}, and what it computes depends on that")
    error = _root_error(world.model, cause, where_set(world.model, words[0]), learned)
    error.changes = tuple(words)
    raise error


def _counting(
    world: FakeWorld, state: ModuleSnapshot, values: dict[tuple[nn.Module, str], Any], places: list[str]
) -> list[str]:
    """What a second run changed once more, in words.

    Args:
        state: the attributes before the first run.
        values: those that it changed, with what they held then.
        places: what of containers, closures and globals changed once more.
    """
    again = [
        f"{world.name_of_module[module]}.{name}".lstrip(".")
        for module, name, _, value, _ in state.diff()
        if (module, name) in values and kind_and_value(value) != kind_and_value(values[module, name])
    ]
    return list(dict.fromkeys([*again, *places]))


def _learn(model: nn.Module, learned: Learned, restart: Restart) -> None:
    """Notes what a failed attempt found; raises if it was the root that failed."""
    name, decision = restart.name, restart.decision
    location = restart.where()
    if not name or decision is None:
        raise _root_error(model, restart.cause, location, learned) from restart.cause
    if isinstance(restart.cause, StatefulError):
        learned.stateful.update({name: None, type(model.get_submodule(name)): None})
    if restart.hands_on:
        learned.handing_on.update({name, type(model.get_submodule(name))})
    if (name, decision) in learned.history:
        parent = name.rpartition(".")[0]
        while parent and isinstance(model.get_submodule(parent), (nn.ModuleList, nn.ModuleDict)):
            parent = parent.rpartition(".")[0]
        if not parent or (parent, Decision.LEAF) in learned.history:
            raise _root_error(model, restart.cause, location, learned) from restart.cause
        name, decision = parent, Decision.LEAF
    learned.history.add((name, decision))
    keys: list[str | type] = [name]
    module = model.get_submodule(name)
    if not is_of_torch(type(module)):
        keys.append(type(module))
    for key in keys:
        learned.decisions[key] = decision
        learned.reasons[key] = f"{location}: {_first_line(restart.cause)}"
    logger.debug("tracing again: %s is to be %s: %s", name, decision.value, restart.cause)


def _doubled(arguments: Arguments) -> Arguments | None:
    """The example with every sample twice if it has one; a size of 1 could mean too many things."""
    batch = next((t.shape[0] for t in trees.tensors(arguments) if t.dim()), None)
    if batch != 1:
        return None
    args, kwargs = arguments

    def twice(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != 1:
            return tensor
        with torch.no_grad():
            doubled = torch.cat([tensor, tensor])
        return doubled.requires_grad_(tensor.requires_grad)

    return (
        tuple(trees.map_tensors(value, twice) for value in args),
        {name: trees.map_tensors(value, twice) for name, value in kwargs.items()},
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0][:300]
    return text if isinstance(error, TraceError) else f"{type(error).__name__}: {text}"


def _root_error(model: nn.Module, cause: BaseException, location: str, learned: Learned) -> TraceError:
    what, line = _first_line(cause).rstrip("."), location.partition(" (")[2].removesuffix(")")
    error = TraceError(f"can't trace {type(model).__name__}: at {location}: {what}. {advice(what, line)}")
    error.stateful = tuple(
        name for name, module in model.named_modules() if {name, type(module)} & learned.stateful.keys()
    )
    return error
