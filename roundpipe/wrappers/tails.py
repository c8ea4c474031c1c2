"""The tails of a model's calls: the loss functions that can be a part of the last layer, traced and kept.

A loss function is traced on the outputs of a microbatch, which are known by their sizes, and its label. Every call
asks the trace's guards; a function made anew for each call has the trace of the one before if it does and holds the
same. Where there is no tail, `loss_fn` runs as it is, and the reason is logged once.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.attributes import stored_attribute
from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import ConfigError, TraceCause, TraceError
from roundpipe.core.layers import Carry, LayerChain, Mixing, Tail
from roundpipe.core.modes import autocast_as_on_accelerator
from roundpipe.core.trees import Access
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.guards.failure import Failure, Retraces, nearest
from roundpipe.fx.guards.guards import GuardedGraph
from roundpipe.fx.passes.argument_values import Divisor
from roundpipe.fx.passes.codegen import Layer, OutputExit
from roundpipe.fx.passes.counted_losses import (
    CountedLosses,
    are_sums,
    count_losses,
    made_by_numbers,
    mixing_of_losses,
    note_kept_rows,
    places_of_numbers,
)
from roundpipe.fx.passes.loss_numbers import LABEL, OUTPUTS, Made, made_by_calls, tried_on_numbers
from roundpipe.fx.passes.mixing_rules import worst
from roundpipe.fx.passes.tail import JoinedTail
from roundpipe.fx.sizes import forget_worlds
from roundpipe.fx.trace.loss import (
    call_loss,
    change_of,
    is_other_when_repeated,
    is_same,
    loss_tracer,
    trace_loss,
    values_kept,
)
from roundpipe.fx.varying import Varied
from roundpipe.runtime.config import microbatch_count
from roundpipe.runtime.engine.chain_record import code_of
from roundpipe.runtime.engine.losses import Mean, checked_weight
from roundpipe.runtime.engine.spec import Call
from roundpipe.runtime.microbatch.leaves import batched_leaf, has_samples_first
from roundpipe.wrappers.features import hooked_for_loss
from roundpipe.wrappers.variants import JointChain, JointTail

logger = logging.getLogger(__name__)

MAX_TAILS = 8
"""Kept at once; the one unused for longest goes first."""
MAX_CONSTANT_BYTES = 1 << 20
"""Of a loss that was given another tensor in the place of one, which a lambda in a loop may have at every call."""
_MAY_CALL = (TraceCause.ACTIVATION_DATA, TraceCause.FORWARD_RAISES, TraceCause.STATE)
"""Why a loss can't be traced, though it can be called with drawn outputs before a round."""
MAX_TRACES = 3
"""Of one loss for one call, whose microbatches may differ in size."""


class Example(NamedTuple):
    """One microbatch behind the last layer but one; what the model computes is without data."""

    carry: Carry
    """Without what has other sizes for other data."""
    outputs: Any
    label: Any


@dataclass(frozen=True, slots=True)
class _KnownTail:
    chain: weakref.ref[LayerChain]
    function: Any
    num_microbatches: int
    weighs_terms: bool
    traced: GuardedGraph
    tail: JoinedTail
    counted: CountedLosses | None
    """What its graph tells of its terms."""
    mixing: Mixing | None
    """How its graph mixes samples."""

    @property
    def is_light(self) -> bool:
        """Whether it may be kept beside others of the same code: what it holds, such as a mask, is not large."""
        return sum(tensor.nbytes for tensor in trees.tensors(self.traced.constants)) <= MAX_CONSTANT_BYTES


class CountedLoss(NamedTuple):
    """The loss of one microbatch, whose graph weighs its terms."""

    counts: dict[str, float]
    """By name of a term, what it counts for."""
    function: Callable[[int, Any, Any], Any]
    """What computes it as ``loss_fn`` does, given the microbatch's position in its step."""
    is_one_mean: bool
    """See `CountedLosses`."""
    divisors: dict[str, Divisor]
    """See `CountedLosses`."""
    factors: tuple[float | None, ...]
    """See `CountedLosses`."""

    def may_be_divided(self, number: int) -> bool:
        """Whether the code may divide means by a number of microbatches."""
        return any(factor is None or math.isclose(factor * number, 1.0, rel_tol=1e-6) for factor in self.factors)


class _OtherGraphs(TraceError):
    """Microbatches of a call need other graphs of a loss than the one that is ``traced``."""

    def __init__(self, message: str, traced: GuardedGraph) -> None:
        super().__init__(message)
        self.traced = traced


class TailSource:
    """Tails of one model's calls.

    Args:
        logs: whether it says why a loss has none.
    """

    def __init__(self, model: nn.Module, *, logs: bool = True) -> None:
        self._model = model
        self._logs = logs
        self._known: list[_KnownTail] = []
        """The one used last first."""
        self._varying: dict[Any, Varied] = {}
        """By code of a loss."""
        self._refused: dict[Any, Mixing | None] = {}
        """By code of a loss that has no tail, how it mixes samples, as far as one microbatch's graph tells."""
        self._reasons: dict[Any, str] = {}
        """Why it has none."""
        self._retraces: dict[Any, Retraces] = {}
        """By code of a loss."""
        self.trace_count = 0

    def tail(self, call: Call) -> Tail | None:
        """The tail for all microbatches of a call; None if its loss can't be a part of the last layer."""
        if isinstance(call.chain, JointChain):
            calls = call.chain.calls(call)
            tails = {number: own for number, each in calls.items() if (own := each.tail) is not None}
            is_alike = len({tuple(own.first_loss) for own in tails.values()}) == 1
            return JointTail(tails) if len(tails) == len(calls) and is_alike else None
        if (found := self._find(call)) is None:
            return None
        known, examples = found
        for example in examples:
            known.tail.add_tiles(call.chain[-1], example.carry, example.label)
        return known.tail.for_call(call.kept.note, call.first_microbatch)

    def counted(self, call: Call) -> list[CountedLoss] | None:
        """The losses of the microbatches; None if their graph, and that of the model's own losses, don't tell."""
        if isinstance(call.chain, JointChain):
            by_chain = {number: self.counted(each) for number, each in call.chain.calls(call).items()}
            in_turn = {number: iter(own) for number, own in by_chain.items() if own is not None}
            if len(in_turn) < len(by_chain):
                return None
            return [next(in_turn[call.chain.number_of(kwargs)]) for kwargs in call.kwargs]
        found = self._find(call)
        if found is None or (counted := found[0].counted) is None:
            return None
        microbatches = zip(call.args, call.kwargs, call.labels, strict=True)
        counts = [{name: checked_weight(n) for name, n in counted.counts(*each).items()} for each in microbatches]
        divisors = counted.divisors
        function = found[0].tail.for_call(call.kept.note, call.first_microbatch).loss
        return [CountedLoss(own, function, counted.is_one_mean, divisors, counted.factors) for own in counts]

    def mixing(self, calls: Iterable[Call]) -> Mixing | None:
        """How the loss mixes samples, as far as its graph tells, in calls that were asked for what is `counted`."""
        each = [own for call in calls for own in _by_chain(call)]
        pairs = ((known, call) for call in each for known in self._known if self._is_for(known, call))
        known = [known.mixing for known, call in pairs if is_same(known.function, call.loss_fn, call.kept.moved)]
        return worst([*known, *(self._refused.get(code_of(call.loss_fn)) for call in each)])

    def reason(self, calls: Iterable[Call]) -> str:
        """Why a loss has no graph that serves a call, in words; empty if it has one."""
        return next((why for call in calls if (why := self._reasons.get(code_of(call.loss_fn)))), "")

    def logged(self, calls: Iterable[Call]) -> list[str]:
        """In words, where the loss leaves a number of each microbatch, as `mixing` is told of it."""
        each = [own for call in calls for own in _by_chain(call)]
        traces = [known.traced for known in self._known if any(self._is_for(known, call) for call in each)]
        return list(dict.fromkeys(words for traced in traces for words in places_of_numbers(traced)))

    def _find(self, call: Call) -> tuple[_KnownTail, list[Example]] | None:
        function, code = call.loss_fn, code_of(call.loss_fn)
        if function is None or code in self._refused:
            return None
        if any(hooked_for_loss(call)):
            self._refuse(code, "it reads what forward hooks collect")
            return None
        examples = _examples(call)
        if examples is None:
            self._refuse(code, "the outputs' sizes are not known before the model runs")
            return None
        with _tracing_modes(), microbatch_count(call.total_microbatches):
            retraces = self._retraces.setdefault(code, Retraces(f"the loss function {_name_of(function)}"))
            failure: Failure | None = None
            for position, known in enumerate(self._known):
                if not self._is_for(known, call):
                    continue
                if (why := _failure(known, function, examples)) is None:
                    self._known.insert(0, self._known.pop(position))
                    call.kept.moved.update(known.traced.guards.moved)
                    retraces.note_served(len(examples))
                    return known, examples
                if code_of(known.function) == code:
                    failure = nearest(failure, why)
            if failure is not None:
                self._varying.setdefault(code, Varied(takes_tensors=False)).note(failure.varying)
                logger.info("tracing a loss function again: %s", failure)
                retraces.note(failure)
            try:
                traced = self._trace(function, examples, self._varying.setdefault(code, Varied(takes_tensors=False)))
            except _OtherGraphs as error:
                mixing = _mixing(error.traced, call, examples) if call.weighs_terms else None
                self._refuse(code, str(error), mixing or self._numbers(call, examples))
                return None
            except TraceError as error:
                reason = str(error).partition(". ")[0].removeprefix("can't trace LossCall: ")
                self._refuse(code, reason, self._called(call, examples, error.cause))
                return None
        last, exit = call.chain[-1], call.chain.exit
        assert isinstance(last, Layer) and isinstance(exit, OutputExit)
        counted, mixing, whole, rowless = None, None, _whole(call.labels), call.chain.without_samples
        if call.weighs_terms:
            is_sum = are_sums(traced, call.chain.own_losses, whole, rowless)
            mixing = _mixing(traced, call, examples) or ("sum" if is_sum else None)
            counted = count_losses(traced, call.chain.own_losses, whole, rowless)
            if counted is None and mixing is None:
                mixing = self._numbers(call, examples)
        if call.total_microbatches > 1:
            note_kept_rows(traced, whole, rowless)
        tail = JoinedTail(last, exit, traced)
        known = _KnownTail(
            weakref.ref(call.chain), function, call.total_microbatches, call.weighs_terms, traced, tail, counted, mixing
        )
        others = [other for other in self._known if other.is_light or code_of(other.function) != code]
        self._known = [known, *others][:MAX_TAILS]
        return known, examples

    def _is_for(self, known: _KnownTail, call: Call) -> bool:
        counts = call.total_microbatches, call.weighs_terms
        return known.chain() is call.chain and (known.num_microbatches, known.weighs_terms) == counts

    def _trace(self, function: Any, examples: list[Example], varying: Varied) -> GuardedGraph:
        """A trace that serves all examples."""
        example = examples[0]
        for _ in range(MAX_TRACES):
            self.trace_count += 1
            traced = trace_loss(function, example.outputs, example.label, model=self._model, dynamic=tuple(varying))
            if (misfit := _misfit(traced, examples)) is None:
                return traced
            example, failure = misfit
            varying.note(failure.varying)
        raise _OtherGraphs(f"microbatches of a call need different graphs of it: {failure}", traced)

    def _numbers(self, call: Call, examples: Sequence[Example]) -> Mixing | None:
        """What numbers tell of a loss that is a mean."""
        if not call.weighs_terms:
            return None
        arguments, sizes = [(each.outputs, each.label) for each in examples], samples_of(call)
        function: Any = call.loss_fn
        with _tracing_modes(), microbatch_count(call.total_microbatches), values_kept(function, self._model):
            return _unless_mean(made_by_numbers(loss_tracer(function, self._model), arguments, sizes))

    def _called(self, call: Call, examples: Sequence[Example], cause: TraceCause | None) -> Mixing | None:
        """What numbers tell of such a loss that can't be traced, since it decides by them, say, or has state."""
        if not call.weighs_terms or (function := call.loss_fn) is None or cause not in _MAY_CALL:
            return None
        test = functools.partial(is_other_when_repeated, function, model=self._model)
        with microbatch_count(call.total_microbatches):
            if tried_on_numbers(test, (examples[0].outputs, examples[0].label)):
                return "has state"
        if cause is TraceCause.STATE:
            return None
        arguments = [(each.outputs, each.label) for each in examples]
        program: Any = lambda numbers: [call_loss(function, *numbers, model=self._model)]  # noqa: E731
        with microbatch_count(call.total_microbatches):
            return _unless_mean(made_by_calls(program, arguments, samples_of(call)))

    def _refuse(self, code: Any, reason: str, mixing: Mixing | None = None) -> None:
        self._refused[code], self._reasons[code] = mixing, reason
        if not self._logs:
            return
        logger.info("a loss runs as it is, not as a part of the last layer, whose outputs exist as a whole: %s", reason)


def kind_of_sum(model: nn.Module, calls: Sequence[Call]) -> tuple[Mixing | Literal["mean"] | None, list[str]]:
    """What a loss is that is added up over microbatches, as far as its graph tells: a mean, or how it mixes samples.

    And in words, where it leaves numbers of each microbatch.
    """
    tails, as_means = TailSource(model, logs=False), [copy.copy(call) for call in calls]
    for call in as_means:
        call.mean = Mean(None, call.total_microbatches)
    counted = [tails.counted(call) for call in as_means]
    forget_worlds()  # of graphs that nobody runs
    logged = tails.logged(as_means)
    if (mixing := tails.mixing(as_means)) is not None:
        return None if mixing in ("sum", "differs") else mixing, logged
    number = calls[0].total_microbatches
    is_mean = all(own is not None and not any(each.may_be_divided(number) for each in own) for own in counted)
    return "mean" if is_mean else None, logged


def _misfit(traced: GuardedGraph, examples: Collection[Example]) -> tuple[Example, Failure] | None:
    """The first example that a trace does not serve, and why."""
    for position, example in enumerate(examples):
        try:
            failure = traced.guards.check((example.outputs, example.label), {}, knows_model=position > 0)
        except ConfigError as error:  # it has other modules now
            failure = Failure(str(error))
        if failure is not None:
            return example, failure
    return None


def _failure(known: _KnownTail, function: Any, examples: Collection[Example]) -> Failure | None:
    """Why a trace does not serve a call with this function."""
    if failure := change_of(known.traced.guards, known.function, function):
        return failure
    misfit = _misfit(known.traced, examples)
    return None if misfit is None else misfit[1]


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(stored_attribute(function, "__qualname__", type(function).__name__))


def _examples(call: Call) -> list[Example] | None:
    """Outputs without data and the label of each microbatch; None where the sizes of outputs can't be told."""
    exit = call.chain.exit
    if not isinstance(exit, OutputExit) or exit.forms is None or not isinstance(call.chain[-1], Layer):
        return None
    carries = [exit.forms.examples(args, kwargs) for args, kwargs in zip(call.args, call.kwargs, strict=True)]
    pairs = zip(carries, call.labels, strict=True)
    examples = [Example(carry, exit(carry), label) for carry, label in pairs if carry.keys() >= set(exit.reads)]
    return examples if len(examples) == len(carries) else None


def _unless_mean(made: Made | None) -> Mixing | None:
    """What numbers tell of a mean; of another batch, with other labels, they may tell something else."""
    return None if made == "mean" else made


def _by_chain(call: Call) -> Iterable[Call]:
    return call.chain.calls(call).values() if isinstance(call.chain, JointChain) else (call,)


def _mixing(traced: TracedGraph, call: Call, examples: Sequence[Example]) -> Mixing | None:
    """How a loss mixes samples, which are along the first dimension of what has as many as the first argument."""
    if not (sizes := samples_of(call)):
        return None
    places = trees.walk({OUTPUTS: examples[0].outputs, LABEL: examples[0].label})
    tensors = {path: leaf for path, leaf in places if isinstance(leaf, torch.Tensor) and leaf.ndim}
    whole = {(Access("item", LABEL), *path) for path in _whole(call.labels)}
    whole |= {(Access("item", OUTPUTS), *path) for path in call.chain.without_samples}
    samples = {path for path, tensor in tensors.items() if tensor.shape[0] == sizes[0]} - whole
    return mixing_of_losses(traced, samples, call.chain.mixing, sizes, call.chain.without_samples)


def samples_of(call: Call) -> list[int]:
    """Samples of each microbatch; none if they aren't along the first dimension."""
    firsts = [batched_leaf((args, kwargs)) for args, kwargs in zip(call.args, call.kwargs, strict=True)]
    sizes = [first.shape[0] for first in firsts if isinstance(first, torch.Tensor)]
    return sizes if len(sizes) == len(firsts) and has_samples_first(call.config) else []


def _whole(labels: Sequence[Any]) -> set[trees.Path]:
    """Where labels of several microbatches have one tensor in common."""
    first, *others = labels
    places = ((path, leaf) for path, leaf in trees.walk(first) if isinstance(leaf, torch.Tensor))
    return {path for path, leaf in places if others and all(trees.get(other, path) is leaf for other in others)}


@contextmanager
def _tracing_modes() -> Iterator[None]:
    """The modes of a fused stage, in which losses run."""
    with torch.inference_mode(False), torch.enable_grad(), autocast_as_on_accelerator():
        yield
