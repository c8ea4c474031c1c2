"""Says, once per wrapper, that a loss may not be that of the whole batch: one that the model computes itself, or a mean
whose label has other numbers of ignored targets in each microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.caller import warn
from roundpipe.core.layers import Mixing
from roundpipe.runtime.config import RoundPipeRunConfig
from roundpipe.runtime.engine.chain_record import code_of
from roundpipe.runtime.engine.loss_divisors import Verdict, verdict
from roundpipe.runtime.engine.losses import LossWeights
from roundpipe.runtime.microbatch.leaves import has_samples_first

_COMPARISON = (
    "compares samples with each other, or with a statistic over them, and each of the {number} microbatches has only "
    "its own: loss and gradients differ from those of the whole batch. Give num_microbatch=1, or compute the loss in "
    "loss_fn, from outputs, with loss_scope='batch'"
)
_PRODUCT = (
    "has products or other functions of means over the batch, as the load balancing of experts has, and each of the "
    "{number} microbatches has its own means: loss and gradients differ from those of the whole batch, as they do "
    "where plain PyTorch accumulates gradients. With num_microbatch=1 they don't"
)
_TEXTS = {
    ("sum", "not linear"): _PRODUCT,
    ("mean", "not linear"): _PRODUCT,
    ("sum", "compares samples"): _COMPARISON,
    ("mean", "compares samples"): _COMPARISON,
    ("sum", "mean"): (
        "is a mean, and the {number} microbatches' means were added up: loss and gradients are larger than those of "
        "the whole batch. loss_reduction='mean' makes one mean of them; where the sum is meant, divide in loss_fn"
    ),
    ("sum", "unknown"): (
        "was added up over {number} microbatches. If it is a mean, as in most models, loss and gradients are larger "
        "than those of the whole batch: give loss_reduction='mean', or let loss_fn return (loss, number of targets) "
        "with it. If it is a sum, say so by loss_reduction='sum'"
    ),
    ("mean", "sum"): (
        "is a sum, and loss_reduction='mean' made a mean of the {number} microbatches' sums: loss and gradients are "
        "smaller than those of the whole batch. Give loss_reduction='sum'"
    ),
    ("mean", "unknown"): (
        "is put together by the samples of the {number} microbatches, since nothing tells what it is a mean of. If it "
        "is one over tokens, padding makes that differ from the whole batch: let loss_fn return (loss, number of "
        "targets), or of several means ([first, second], [number of targets, number of targets])"
    ),
}
"""By the reduction and by what is known of the loss."""


_OF_LOSS_FN: dict[Verdict | Mixing, str] = {
    "has state": (
        "but loss_fn changes what it computes with, as a queue, a memory bank or a centre, and does so for each "
        "microbatch, which reads what the one before has left: loss and gradients differ from those of the whole "
        "batch. Give loss_scope='batch', or num_microbatch=1"
    ),
    "compares samples": (
        "but they compare samples with each other, or with a statistic over them, and a microbatch has only its own: "
        "loss and gradients differ from those of the whole batch. Give loss_scope='batch'; or num_microbatch=1, if the "
        "model itself compares them"
    ),
    "not by samples": (
        "but they are divided by numbers that are not in proportion to these, such as the number of targets, the sum "
        "of a mask or the weights of classes: loss and gradients differ from those of the whole batch. Let loss_fn "
        "return (loss, weight), the weight being what the loss is divided by, such as mask.sum() or "
        "(label != {ignored}).sum(), or for several losses ([first, second], [weight, weight])"
    ),
    "not linear": (
        "but a function of means, such as a root or a quotient of two, is not a mean: loss and gradients differ from "
        "those of the whole batch. Give loss_scope='batch', or compute that function from the loss that is returned; "
        "or num_microbatch=1, if the model itself computes it"
    ),
    "sum": (
        "but loss_fn gives sums, which nothing divides: loss and gradients are smaller than those of the whole batch. "
        "Give loss_reduction='sum', or let loss_fn return means"
    ),
}
"""By what autograd's graph shows of a loss that ``loss_fn`` computes."""
_OF_WEIGHTS: dict[Verdict | Mixing, str] = {
    **_OF_LOSS_FN,
    "not by samples": (
        "but no weight is what its loss is divided by, up to a factor: loss and gradients differ from those of the "
        "whole batch. The second of the two that loss_fn returns is a weight, such as mask.sum() or "
        "(label != {ignored}).sum(). An accuracy, or another number to log, is none: append it to a list, and return "
        "the loss alone"
    ),
    "sum": (
        "but loss_fn gives sums, which nothing divides, and a mean multiplies each by its weight. Divide the loss by "
        "the weight in loss_fn; or return the loss alone, with loss_reduction='sum'"
    ),
}
"""The same, where weights came beside the losses."""
_ADDED = (
    "but each is a mean, or made of means: these and their gradients are {number} times those of the whole batch. "
    "loss_reduction='mean' makes one mean of them, loss_reduction='sum' says that the sum is meant"
)
_OF_NUMBERS = (
    "but with random outputs the losses of microbatches do not make up that of all together: loss and gradients differ "
    "from those of the whole batch. Give loss_scope='batch'; or give what loss_fn knows of the batch, such as sample "
    "weights, as label, so that it is cut"
)
_OF_LABELS = (
    "and label has other numbers of {ignored} in each, which losses such as cross_entropy ignore. If the loss is a "
    "mean over the others, it differs from that of the whole batch: let loss_fn return (loss, (label != {ignored})"
    ".sum()), or of several means ([first, second], [weight, weight])"
)


_LOGS_OF_MEAN = (
    "Means over samples or targets, sums, and arithmetic with numbers on them are put together for the batch; compute "
    "anything else from them after the call, or append to a list, which gets the values of all"
)
_LOGS_OF_SUM = (
    "With loss_reduction='mean', means and sums over samples are put together for the batch; or append to a list, "
    "which gets the values of all"
)


def _nothing() -> None:
    """Of a loss without a graph."""


class LossWarnings:
    """Looks at the calls of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._name = type(model).__name__
        self._has_warned = self._has_warned_of_logs = False
        self._looked_at: set[Any] = set()

    def look(
        self, weights: Sequence[LossWeights], number: int, num_ranks: int, *options: RoundPipeRunConfig | None
    ) -> None:
        """After a call.

        Args:
            number: of its microbatches; each rank has about as many.
            num_ranks: that make up one mean. Each compares its own samples only, as is usual.
            options: those given, those of the call first.
        """
        kind = next((each.own for each in weights if each.own is not None), None)
        given = next((each.loss_reduction for each in options if each and each.loss_reduction), None)
        is_certain = kind != "unknown" or given != "sum"
        is_mixed = kind in ("compares samples", "not linear")
        if is_mixed and not all(map(has_samples_first, filter(None, options))):
            kind = "unknown"
        number = number if is_mixed else number * num_ranks
        text = None if kind is None else _TEXTS.get((given or "sum", kind))
        if text is None or number == 1 or not is_certain or self._has_warned:
            return
        if (given, kind) != ("mean", "unknown") or verdicts_of(weights) != ["right"]:
            self._has_warned = True
            warn(f"the loss that {self._name} computes itself {text.format(number=number)}")

    def look_at_sum(
        self,
        loss_fn: object,
        weights: Sequence[LossWeights],
        number: int,
        find_kind: Callable[[], tuple[Mixing | Literal["mean"] | None, list[str]]],
    ) -> None:
        """After a call whose losses, which ``loss_fn`` computes, were added up since nothing else was asked for.

        Args:
            number: of its microbatches.
            find_kind: what the loss is, as far as its graph tells, which each function is asked for once, and where it
                leaves numbers. Where the graph doesn't, autograd's may.
        """
        is_own, code = any(each.own is not None for each in weights), code_of(loss_fn)
        if loss_fn is None or self._has_warned or is_own or number == 1 or code in self._looked_at:
            return
        self._looked_at.add(code)
        kind, logged = find_kind()
        self.look_at_logs(logged, number, "sum")
        if kind is None and any(term.is_mean() for each in weights for term in each.added_terms):
            kind = "mean"
        text = _ADDED if kind == "mean" else None if kind is None else _OF_LOSS_FN.get(kind)
        if text is not None:
            self._has_warned = True
            warn(f"the losses of the {number} microbatches were added up, {text.format(number=number)}")

    def look_at_mean(
        self,
        labels: Sequence[Any],
        weights: Sequence[LossWeights],
        find_mixing: Callable[[], Mixing | None] = _nothing,
        find_reason: Callable[[], str] = str,
    ) -> None:
        """After a call whose loss is a mean that ``loss_fn`` computes.

        Args:
            labels: those of the microbatches.
            find_mixing: tells how the loss mixes samples, as far as its graph does.
            find_reason: tells why it has no graph, if it has none.
        """
        if self._has_warned or any(each.own is not None for each in weights) or len(labels) == 1:
            return
        mixing, is_counted = find_mixing(), any(each.is_counted for each in weights)
        has_given = any(each.has_given for each in weights)
        if has_given and mixing in ("not linear", "differs"):  # as a quotient by the weight may be
            mixing = None
        if is_counted and mixing is None:
            return
        if is_counted and mixing == "not linear":  # loss_fn is, so that it is a term of the model's own
            self._has_warned = True
            warn(f"the loss that {self._name} computes itself {_PRODUCT.format(number=len(labels))}")
            return
        verdicts = verdicts_of(weights) if mixing in (None, "differs") else [mixing]
        has_weights = has_given or is_counted and mixing == "sum"
        texts = _OF_WEIGHTS if has_weights else _OF_LOSS_FN
        text = next((text for verdict, text in texts.items() if verdict in verdicts), None)
        if text is None and "unknown" in verdicts and not has_weights and _have_other_targets(labels):
            text = _OF_LABELS
        if text is None and mixing == "differs":
            text = _OF_NUMBERS
        if text is not None:
            self._has_warned = True
            reason = find_reason() if text in (_OF_LABELS, _OF_LOSS_FN["not by samples"]) else ""
            more = f". Its graph would tell that by itself, but there is none: {reason}" if reason else ""
            by = "the weights beside them" if has_weights else "their samples"
            warn(
                f"loss_reduction='mean' averaged the losses of the {len(labels)} microbatches by {by}, "
                f"{text.format(ignored=IGNORED)}{more}"
            )

    def look_at_logs(self, of_last: Sequence[str], number: int, reduction: str) -> None:
        """After a call that has left some numbers of its last microbatch alone, at places in words."""
        if of_last and not self._has_warned_of_logs:
            self._has_warned_of_logs = True
            way = _LOGS_OF_MEAN if reduction == "mean" else _LOGS_OF_SUM
            where = ", ".join(of_last)
            warn(f"{where}: loss_fn left the value of the last of {number} microbatches, not that of the batch. {way}")


IGNORED = -100
"""What losses of torch ignore in a target, unless they are told otherwise."""


def verdicts_of(weights: Sequence[LossWeights]) -> list[Verdict]:
    """Whether losses that were averaged by samples, or weights, are those of the batch, each kind of answer once."""
    are_weights = any(each.has_given for each in weights)
    microbatches = [each for weight in weights for each in weight.averaged_terms]
    shares = [share for share, _ in microbatches]
    losses = zip(*(terms for _, terms in microbatches), strict=False)
    return list(dict.fromkeys(verdict(each, shares, are_weights=are_weights) for each in losses)) or ["unknown"]


def _have_other_targets(labels: Sequence[Any]) -> bool:
    """Whether labels of microbatches have other shares of targets that count."""
    return len({_share_of_targets(label) for label in labels} - {None}) > 1


def _share_of_targets(label: Any) -> float | None:
    """The share of targets that count; None: there are none on the host, where looking at them is cheap."""
    kinds = torch.int64, torch.int32
    tensors = [each for each in trees.tensors(label) if each.dtype in kinds and each.device.type == "cpu" and each.ndim]
    number = sum(each.numel() for each in tensors)
    return sum(int((each != IGNORED).sum()) for each in tensors) / number if number else None
