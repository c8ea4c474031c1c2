"""What a ``loss_fn`` returns, and how the losses of microbatches make up the loss of the batch.

A sum needs nothing: each microbatch has its backward, and gradients add up. For a mean, each loss counts by its weight
over the weights of all. Samples are known before the step, so losses are multiplied before their backward. Weights that
``loss_fn`` returns are known once the last microbatch has its loss, and the first backward runs before that: it starts
from the loss times its weight over a reference, the first weight times the number of microbatches, so that gradients
have their usual size. A job's gradients leave for the host when all its microbatches are through; by then all weights
are known, and the gradients are multiplied by the reference over the sum of weights. One pass, nothing kept.

Where a graph shows what each term of the loss is a mean of, targets are counted before the step, and the graph weighs
the terms (`CountedTerms`). Losses then add up as they are. Among ranks, each mean of several counts by the targets of
all ranks, which the first loss waits for (`JointShares`); terms then add up over ranks.

Invariant: after the last loss, gradients times `LossWeights.scale` are those of the loss of the batch.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node

from roundpipe.core import trees
from roundpipe.core.errors import LossError
from roundpipe.core.layers import OwnKind
from roundpipe.core.storages import is_plain
from roundpipe.core.term_shares import TermShares
from roundpipe.runtime.engine.loss_divisors import LossPart, terms_of
from roundpipe.runtime.ranks.turns import CallShare

GIVEN_SOMETIMES = (
    "loss_fn returned a weight beside the loss for some microbatches only; return one for all, or for none"
)


WEIGHTS_UNKNOWN = (
    "loss_fn returned a weight for each loss, and they must be known before the microbatches run. That takes weights "
    "made of label alone, such as (label != -100).sum() or label.shape[0], and a loss_fn and a model that can be "
    "traced. Else return one weight for all losses, or give loss_scope='batch'"
)


@dataclass(slots=True)
class Losses:
    """What ``loss_fn`` returned for one microbatch."""

    tensors: list[torch.Tensor]
    """One element each, in autograd's graph; none after `LossWeights.apply` if the microbatch counts for nothing."""
    is_list: bool
    """Whether they came as a sequence."""
    weight: float | list[float] | None = None
    """What came beside them: for all, or for each."""
    values: list[torch.Tensor] | None = None
    """The losses detached, as they count; None: as they are."""

    def detached(self) -> Any:
        """A tensor, or a list of them, as ``loss_fn`` gave it, for the sum over microbatches."""
        plain = [loss.detach() for loss in self.tensors] if self.values is None else self.values
        return plain if self.is_list else plain[0]


@dataclass(frozen=True, slots=True)
class Mean:
    """The loss of a step is a mean over its microbatches, by weights that ``loss_fn`` returns, else by samples."""

    shares: Sequence[float] | None
    """Per microbatch of the step, its share of the call's samples; None: not known."""
    total_microbatches: int
    is_whole: bool = True
    """Whether the step is the whole call. Else the caller divides gradients and losses once the last step is over."""
    reference: float | None = None
    """Of the steps before, if there were any."""
    share: CallShare | None = None
    """If other ranks have parts of the batch: what this one's counts for."""


@dataclass(frozen=True, slots=True)
class OwnMean:
    """A mean that the model computes itself, over what its arguments tell."""

    shares: Sequence[float]
    """Each microbatch's of the step, of all in the call."""
    total: float
    """How many elements the call has that the mean is over."""


@dataclass(frozen=True, slots=True)
class CountedTerms:
    """What the terms of a loss count for, known before the step."""

    shares: Sequence[TermShares]
    """Per microbatch of the step."""
    functions: Sequence[Callable[[Any, Any], Any]] = ()
    """Per microbatch, what computes as ``loss_fn`` does and weighs terms; none: the step ends with outputs."""
    total: float | None = None
    """If the loss is one mean, and other ranks have parts of the batch: how many elements the call has of it."""
    share: CallShare | None = None
    """If the loss has several means, and other ranks have parts of the batch: it knows how many elements all have."""

    @property
    def num_ranks(self) -> int:
        """Whose terms add up; their gradients will be averaged."""
        return 1 if self.share is None else self.share.num_ranks

    def all_count(self, microbatch: int) -> bool:
        """Whether no term of a microbatch counts for nothing; such terms have no gradient."""
        return all(self.shares[microbatch].values())


def share_of(count: float, total: float, divisor: Callable[[float], float] | None = None) -> float:
    """What a term counts for by what one microbatch has of what all have, or by what both are divided by.

    A mean over nothing at all stays one.
    """
    if divisor is not None:
        count, total = divisor(count), divisor(total)
    return count / total if total else 1.0


class JointShares(Mapping[str, float]):
    """What the terms of a microbatch count for over what those of all ranks do; a look waits for the other ranks.

    ``divisors`` are as those of `share_of`, by name of a term.
    """

    def __init__(
        self, counts: Mapping[str, float], share: CallShare, divisors: Mapping[str, Callable[[float], float]]
    ) -> None:
        self._counts = counts
        self._share = share
        self._divisors = divisors

    def __getitem__(self, name: str) -> float:
        return share_of(self._counts[name], self._share.totals()[name], self._divisors.get(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)


class LossWeights:
    """What each microbatch's loss counts for in a step; whichever thread has a loss tells it."""

    def __init__(self, mean: Mean | None, counted: CountedTerms | None = None) -> None:
        self._mean = mean
        self._counted = counted
        self._lock = threading.Lock()
        self._has_given: bool | None = None
        self.total = 0.0
        """Sum of the weights that ``loss_fn`` has given."""
        self.own: OwnKind | None = None
        """What is known of the model's own loss, if that counts as the call says and not by its own weights."""
        self.own_total: float | None = None
        """Of the call, how many elements the loss is a mean over; None: it is no such mean of the model's own."""
        self.reference = None if mean is None else mean.reference
        self._terms: dict[int, tuple[float, list[list[LossPart]]]] = {}
        """By microbatch, what its losses count for, a share of the samples or a weight, and the terms of each loss."""
        self.added_terms: list[LossPart] = []
        """Of a microbatch whose losses are added up as they are, the terms of these."""

    def apply(
        self,
        losses: Losses,
        microbatch: int,
        own: OwnKind | None = None,
        own_mean: OwnMean | None = None,
        ends: frozenset[Node] = frozenset(),
    ) -> None:
        """Multiply the losses of one microbatch by what they count for, before their backward.

        ``own`` is not None if the loss is one that the model has computed itself, ``own_mean`` if it is a mean by
        shares that are known; ``ends`` are what it was computed from, in autograd's graph.
        """
        mean, weight = self._mean, losses.weight
        if own in ("compares samples", "not linear"):
            self.own = own
        if self._counted is not None:
            number, self.own_total = self._counted.num_ranks, self._counted.total
            weighed = [loss * number for loss in losses.tensors] if number > 1 else losses.tensors
            losses.values = [loss.detach() for loss in weighed]
            losses.tensors = [loss for loss in weighed if loss.requires_grad]
            return
        if isinstance(weight, list):
            if mean is None or mean.total_microbatches > 1 or mean.share is not None:
                raise LossError(WEIGHTS_UNKNOWN)
            if not all(weight):
                losses.values = [
                    loss.detach() if each else torch.zeros_like(loss)
                    for loss, each in zip(losses.tensors, weight, strict=True)
                ]
                losses.tensors = [loss for loss, each in zip(losses.tensors, weight, strict=True) if each]
            return
        if own is not None and weight is None and own_mean is None:
            self.own = "unknown" if own == "mean" and mean is not None else own
        if own_mean is not None:
            self.own_total = own_mean.total
        if mean is None:
            if own is None and not self.added_terms:
                self.added_terms = [term for loss in losses.tensors for term in terms_of(loss, ends)]
            return
        with self._lock:
            if self._has_given is None:
                self._has_given = weight is not None
            if self._has_given is (weight is None):
                raise LossError(GIVEN_SOMETIMES)
            if weight is None:
                factor = counts_for = own_mean.shares[microbatch] if own_mean is not None else _share(mean, microbatch)
            else:
                self.total += weight
                if self.reference is None and weight:
                    self.reference = weight * mean.total_microbatches
                factor, counts_for = weight / self.reference if self.reference else 0.0, weight
            if own_mean is None and mean.total_microbatches > 1:
                self._terms[microbatch] = counts_for, [terms_of(loss, ends) for loss in losses.tensors]
        if factor == 0:  # such a loss may be no number: a mean over no tokens
            losses.values = [torch.zeros_like(loss) for loss in losses.tensors]
            losses.tensors = []
        elif factor != 1:
            losses.tensors = [loss * factor for loss in losses.tensors]

    @property
    def is_counted(self) -> bool:
        """Whether the loss is a mean by its targets, as far as they are known before the step."""
        return self._counted is not None or self.own_total is not None

    @property
    def averaged_terms(self) -> list[tuple[float, list[list[LossPart]]]]:
        """Of each microbatch, what its losses count for, a share of the samples or a weight, and their terms."""
        return [self._terms[microbatch] for microbatch in sorted(self._terms)]

    def forget_terms(self) -> None:
        """Let go of the terms, whose divisors are on the device, once they were looked at."""
        self._terms, self.added_terms = {}, []

    @property
    def has_given(self) -> bool:
        """Whether ``loss_fn`` gives weights."""
        return bool(self._has_given)

    @property
    def scale(self) -> float:
        """What losses are still to be multiplied by, once all are known."""
        if self._mean is None or not self._mean.is_whole:
            return 1.0
        return scale_of([self])

    @property
    def gradient_scale(self) -> float:
        """What gradients are still to be multiplied by, once all losses are known; may wait for other ranks."""
        if self._mean is None or not self._mean.is_whole:
            return 1.0
        return gradient_scale_of([self], self._mean.share)


def scale_of(weights: Sequence[LossWeights]) -> float:
    """What gradients and losses of steps with one reference are to be multiplied by; NaN for a mean over nothing."""
    given = [each for each in weights if each.has_given]
    if not given:
        return math.nan if any(each.own_total == 0 for each in weights) else 1.0
    if len(given) < len(weights):
        raise LossError(GIVEN_SOMETIMES)
    total, reference = sum(each.total for each in given), given[-1].reference
    return reference / total if reference is not None and total else math.nan


def tell_weights(weights: Sequence[LossWeights], share: CallShare | None) -> None:
    """Tell the other ranks what the losses of a call weigh, once all are known."""
    if share is not None:
        own = next((each.own_total for each in weights if each.own_total is not None), None)
        has_given = any(each.has_given for each in weights)
        share.tell(sum(each.total for each in weights) if has_given else own)


def gradient_scale_of(weights: Sequence[LossWeights], share: CallShare | None) -> float:
    """What gradients are to be multiplied by; with other ranks, so that their average is that of the whole batch."""
    if share is None:
        return scale_of(weights)
    tell_weights(weights, share)
    factor = share.factor()
    return scale_of(weights) * factor if factor else 0.0


def _share(mean: Mean, microbatch: int) -> float:
    if mean.shares is None:
        raise LossError(
            "loss_reduction='mean': how many samples each microbatch has is not known, since no tensor that is split "
            "tells; let loss_fn return (loss, weight)"
        )
    return mean.shares[microbatch]


def read_losses(result: Any, *, is_mean: bool, has_gradient: bool = True) -> Losses:
    """What a ``loss_fn`` returned; raises `LossError` if it is no loss.

    For a mean, a tuple of two is a loss (or a list of losses) and its weight, or a list of weights; anything else is
    without a weight. Losses that may count for nothing need no gradient.
    """
    weight: float | list[float] | None = None
    if is_mean and isinstance(result, tuple) and len(result) == 2:
        result, given = result
        weight = [_as_weight(each) for each in given] if type(given) in (list, tuple) else _as_weight(given)
        if isinstance(weight, list) and (isinstance(result, torch.Tensor) or len(weight) != len(result)):
            number = 1 if isinstance(result, torch.Tensor) else len(result)
            raise LossError(f"loss_fn returned {len(weight)} weights for {number} losses; give one for each, or one")
    losses = [result] if isinstance(result, torch.Tensor) else result
    if not isinstance(losses, Sequence) or not losses or not all(isinstance(each, torch.Tensor) for each in losses):
        advice = "A weight beside the loss is for loss_reduction='mean'"
        if not (isinstance(losses, tuple) and len(losses) == 2):
            advice = (
                "A model that computes its own loss needs its labels in input_kwargs and "
                "loss_fn=lambda outputs, label: outputs.loss; that is a mean in most models, which "
                "loss_reduction='mean' puts together"
            )
        raise LossError(
            f"loss_fn returned {type(result).__name__}; it must return a tensor or a non-empty sequence of tensors. "
            + advice
        )
    for tensor in losses:
        if tensor.numel() != 1:
            raise LossError(
                f"loss_fn returned a tensor of shape {list(tensor.shape)}; a loss has one element. Reduce it, for "
                "example with .mean() or .sum(). Without loss_fn=, the model's outputs are taken for losses"
            )
        if has_gradient and torch.is_grad_enabled() and not tensor.requires_grad:
            raise LossError(
                "loss_fn returned a loss that does not depend on anything that requires grad: it was detached, or made "
                "of numbers (.item()), or every parameter is frozen and no input requires grad. Without training, call "
                "forward_loss, or model(...) under torch.no_grad(). A weight beside the loss is for "
                "loss_reduction='mean'"
            )
    return Losses(list(losses), is_list=not isinstance(result, torch.Tensor), weight=weight)


def in_small_memory(loss: torch.Tensor) -> torch.Tensor:
    """A loss that keeps no more memory than its own: some kernels give a scalar in memory as large as the outputs."""
    is_large = is_plain(loss) and loss.untyped_storage().nbytes() > loss.nbytes
    return loss.clone() if is_large else loss


def place_of(loss: torch.Tensor, outputs: Any) -> trees.Path | None:
    """Where a model's outputs have a loss, cast or copied at most; None: ``loss_fn`` has computed it."""
    scalars = ((path, value) for path, value in trees.walk(outputs) if isinstance(value, torch.Tensor))
    return next((path for path, value in scalars if not value.ndim and is_copy(loss, value)), None)


_COPIES = frozenset("ToCopyBackward0 CloneBackward0 AliasBackward0 SqueezeBackward0".split())


def is_copy(loss: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a loss is another scalar, cast or copied at most, as far as autograd knows; without it, by its value."""
    if loss is other:
        return True
    if not loss.requires_grad and not other.requires_grad:
        is_cast = loss.dtype != other.dtype  # a loss that is no number may be anything else
        return bool(torch.isclose(loss.reshape(()), other.to(loss), rtol=0, atol=0, equal_nan=is_cast))
    node, position = loss.grad_fn, loss.output_nr
    while node is not None and (node is not other.grad_fn or position != other.output_nr):
        if node.name() not in _COPIES:
            return getattr(node, "variable", None) is other
        node, position = node.next_functions[0]
    return node is not None


def _as_weight(weight: Any) -> float:
    if isinstance(weight, torch.Tensor) and weight.requires_grad:
        raise LossError(
            "loss_fn returned a pair of losses; with loss_reduction='mean' a tuple of two is (loss, weight). Return "
            "several losses as a list, or as ([first, second], weight)"
        )
    if not isinstance(weight, torch.Tensor | int | float) or isinstance(weight, torch.Tensor) and weight.numel() != 1:
        what = list(weight.shape) if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise LossError(
            f"loss_fn returned (loss, weight) with a weight of {what}; it must be one number, or a tensor with one "
            "element, for all losses of a microbatch, or a list with one for each"
        )
    return checked_weight(float(weight))


def checked_weight(number: float) -> float:
    """A weight that ``loss_fn`` gives; raises `LossError` if it can't be one."""
    if not (math.isfinite(number) and number >= 0):
        raise LossError(f"loss_fn returned (loss, weight) with the weight {number}; it must be finite and at least 0")
    return number


def sum_losses(losses: Sequence[Any], scale: float = 1.0) -> Any:
    """The sum over microbatches, in their order, times ``scale``; of a list of losses, the sums by position."""
    if isinstance(losses[0], torch.Tensor):
        total = functools.reduce(operator.add, losses)
        return total if scale == 1 else total * scale
    return [sum_losses(position, scale) for position in zip(*losses, strict=True)]
