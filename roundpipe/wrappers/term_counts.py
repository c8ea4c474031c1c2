"""What the microbatches of a call count for in losses, as the graphs of the model and of ``loss_fn`` tell.

Targets are counted from arguments and labels, before anything runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from roundpipe.core.layers import OwnLoss
from roundpipe.core.term_shares import TermShares
from roundpipe.core.trees import Path
from roundpipe.fx.passes.argument_values import Divisor
from roundpipe.runtime.config import ResolvedConfig
from roundpipe.runtime.engine.losses import CountedTerms, JointShares, OwnMean, share_of
from roundpipe.runtime.engine.spec import Call
from roundpipe.runtime.microbatch.merge import OutputLayout, ScalarWeights
from roundpipe.runtime.ranks.turns import CallShare
from roundpipe.wrappers.tails import CountedLoss, TailSource, samples_of
from roundpipe.wrappers.variants import JointChain

Counts = Mapping[str, float]
"""Of a microbatch, by name of a term."""
_T = TypeVar("_T")


def count_outputs(calls: Sequence[Call], config: ResolvedConfig) -> ScalarWeights:
    """How scalars among the outputs of microbatches are made one; terms that need it are weighed in the graph."""
    if calls[0].total_microbatches == 1 or config.merge_output not in (True, None):
        return {}
    scalars: dict[Path, list[float] | float] = {**_sums_of(calls)}
    of_terms: list[Counts] = [{}] * calls[0].total_microbatches
    for own, counts in _own_counts(calls):
        is_added = own.has_terms or not own.weights
        scalars[own.path] = 1.0 if is_added else [number for each in counts for number in each.values()]
        if own.has_terms:
            of_terms = [{**before, **each} for before, each in zip(of_terms, counts, strict=True)]
    if any(of_terms):
        for call, shares in _by_call(calls, _shares(of_terms)):
            call.counted = CountedTerms(shares)
    return scalars


def count_loss(calls: Sequence[Call], config: ResolvedConfig, tails: TailSource, *, returns_outputs: bool) -> None:
    """Tell the rounds of a call, whose loss is a mean, what its terms count for, or means of the model's own."""
    mean = calls[0].mean
    if mean is None or calls[0].total_microbatches == 1 and mean.share is None:
        return
    counted = _counted(calls, tails) if calls[0].weighs_terms else []
    # losses among the outputs are weighed as well, which is seen where these are not merged
    is_seen = returns_outputs and config.merge_output not in (True, None)
    if counted and not (is_seen and _weighed_in(calls, counted[0].counts)):
        _weigh_terms(calls, counted, mean.share)
        return
    for loss, counts in _own_counts(calls):
        if loss.weights and not loss.has_terms:
            numbers = [number for each in counts for number in each.values()]
            # where none has targets each is a mean over nothing, and so is the whole, unless other ranks have some
            total, otherwise = sum(numbers), float(mean.share is None)
            for call, shares in _by_call(calls, [number / total if total else otherwise for number in numbers]):
                call.own_means = {**call.own_means, loss.path: OwnMean(shares, total)}


def _weigh_terms(calls: Sequence[Call], counted: Sequence[CountedLoss], share: CallShare | None) -> None:
    """Tell the rounds of a call what each term of the loss counts for, among the ranks if there are others."""
    counts, total, joint = [each.counts for each in counted], None, None
    divisors = [each.divisors for each in counted]
    shares: Sequence[TermShares] = _shares(counts, divisors)
    if share is not None and all(each.is_one_mean for each in counted):
        total = sum(number for own in counts for number in own.values())  # a factor for the whole makes it that of all
        shares = shares if total else [dict.fromkeys(own, 0.0) for own in counts]
    elif share is not None:
        joint = share
        share.tell_terms({name: sum(own[name] for own in counts) for name in counts[0]})
        shares = [JointShares(own, share, divisors=each) for own, each in zip(counts, divisors, strict=True)]
    for call, of_call in _by_call(calls, list(zip(shares, counted, strict=True))):
        functions = [partial(each.function, microbatch) for microbatch, (_, each) in enumerate(of_call)]
        call.counted = CountedTerms([own for own, _ in of_call], functions, total, joint)


def _sums_of(calls: Sequence[Call]) -> dict[Path, float]:
    """Numbers among the outputs that add up, where samples are in dimension 0."""
    sums = calls[0].chain.output_sums
    return dict.fromkeys(sums, 1.0) if sums and all(map(samples_of, calls)) else {}


def added_outputs(calls: Sequence[Call]) -> ScalarWeights:
    """Numbers among the outputs of a step with a loss that add up, as losses of the model's own that were weighed."""
    counted = calls[0].counted
    weighed = [] if counted is None else _weighed_in(calls, counted.shares[0])
    return _sums_of(calls) | dict.fromkeys(weighed, 1.0 if counted is None else float(counted.num_ranks))


def _weighed_in(calls: Sequence[Call], terms: Collection[str]) -> list[Path]:
    """Places of losses of the model's own whose terms are among some, in the chains of all microbatches."""
    chains = [
        each.chain
        for call in calls
        for each in (call.chain.calls(call).values() if isinstance(call.chain, JointChain) else (call,))
    ]
    weighed = [
        {own.path for own in chain.own_losses if own.has_terms and own.weights.keys() <= set(terms)} for chain in chains
    ]
    return [own.path for own in chains[0].own_losses if all(own.path in paths for paths in weighed)]


def _counted(calls: Sequence[Call], tails: TailSource) -> list[CountedLoss]:
    """Of each microbatch; none if the graphs don't tell, or differ in terms."""
    found: list[CountedLoss] = []
    for call in calls:
        own = tails.counted(call)
        if own is None or any(each.counts.keys() != (found or own)[0].counts.keys() for each in own):
            return []
        found += own
    return found


def _own_counts(calls: Sequence[Call]) -> Iterator[tuple[OwnLoss, list[Counts]]]:
    """Losses of the model's own, with what each microbatch counts for in their terms, as far as graphs tell."""
    for first in calls[0].chain.own_losses:
        own = [loss for call in calls for loss in call.chain.own_losses if loss.path == first.path]
        if len(own) == len(calls) and all(map(first.is_like, own)):
            pairs = [(loss, zip(call.args, call.kwargs, strict=True)) for loss, call in zip(own, calls, strict=True)]
            yield first, [loss.counts(*each) for loss, microbatches in pairs for each in microbatches]


def _shares(counts: Sequence[Counts], divisors: Sequence[Mapping[str, Divisor]] = ()) -> list[dict[str, float]]:
    """What microbatches count for over what all of them do, or what both are divided by."""
    totals = {name: sum(each[name] for each in counts) for name in counts[0]}
    pairs = zip(counts, divisors or [{}] * len(counts), strict=True)
    return [{name: share_of(own[name], totals[name], by.get(name)) for name in own} for own, by in pairs]


def _by_call(calls: Sequence[Call], values: Iterable[_T]) -> Iterator[tuple[Call, list[_T]]]:
    """Each round with the values of its microbatches."""
    rest = iter(values)
    return ((call, list(itertools.islice(rest, call.num_microbatches))) for call in calls)


def layout_of(calls: Sequence[Call]) -> OutputLayout:
    """How outputs are put together whose samples are not in dimension 0, or not side by side."""
    samples, chain = [number for call in calls for number in samples_of(call)], calls[0].chain
    odd = {path: why for path, why in chain.odd_outputs.items() if not samples or path not in chain.output_dims}
    return OutputLayout(chain.output_blocks, samples, chain.output_dims, odd) if samples else OutputLayout(odd=odd)
