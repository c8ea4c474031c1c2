"""Cuts batches into microbatches so that the losses of the pieces make up the batch's.

Whether a loss is a sum, or a mean over samples or tokens, is not assumed. The model's graph tells it of a loss of the
model's own, as a rule. Any other is measured: on a few samples, without gradients, together and apart. Those of the
`WEIGHINGS` stay that explain what came out, by a clear margin if one does; where they disagree about a later batch, it
is measured too. So is a batch with classes that were not measured beside others, since a loss may have weights of
classes. A loss that no weighing explains is not cut.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.caller import warn
from roundpipe.core.errors import RoundPipeError
from roundpipe.integrations.stand_in import CalledAgain
from roundpipe.runtime.engine.loss_divisors import ends_of, terms_of

IGNORED = -100
"""The label of what is not counted."""
NUM_SAMPLES = 2
"""That a loss is measured on: together, and each by itself."""
MAX_MEASURED = 3
"""Times that a loss is measured, before the weighing that fits best is taken."""
MEASURED_EACH = 8
"""By how many times as many batches as at one measurement there is another, of a loss whose kind seems known."""
MAX_CLASSES = 16
"""That a loss is measured on, before it is taken to weigh the others alike; and times that this may tell nothing."""
MIN_SPREAD = 100
"""How many times as far apart two samples' losses must be as a weighing is off, to tell that it weighs them right."""
TOLERANCE, HALF_TOLERANCE = 1e-4, 0.02
"""By how much a weighing may be off, relatively, by rounding; the latter if the model computes in half precision."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """What the model and its loss are given, of a batch or of a piece of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: dict[str, Any] = field(default_factory=dict)
    """For loss code; empty where the loss is the model's own."""
    whole: Batch | None = None
    """What it is a piece of."""

    @property
    def num_samples(self) -> int:
        """As its tensors have in their first dimension; 1 if they differ in it, so that the batch can't be cut."""
        sizes = {tensor.shape[0] for tensor in trees.tensors((self.args, self.kwargs, self.inputs)) if tensor.ndim}
        return sizes.pop() if len(sizes) == 1 else 1

    @property
    def decides(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments by whose data the model's code decides: those of the whole, as in eager mode."""
        whole = self.whole or self
        return whole.args, whole.kwargs


def _targets(piece: Batch, label_names: Sequence[str]) -> torch.Tensor | None:
    given = {**piece.kwargs, **piece.inputs}
    labels = next((given[name] for name in label_names if given.get(name) is not None), None)
    return labels if isinstance(labels, torch.Tensor) and not labels.is_floating_point() else None


def _tokens(piece: Batch, label_names: Sequence[str], *, shifted: bool = False) -> int | None:
    labels = _targets(piece, label_names)
    if labels is None or labels.ndim < 2:
        return None
    return int(labels[..., 1:].ne(IGNORED).sum() if shifted else labels.ne(IGNORED).sum())


def _classes(piece: Batch, label_names: Sequence[str]) -> list[set[int]]:
    """By sample, the values of its targets that count."""
    number, labels = piece.num_samples, _targets(piece, label_names)
    if labels is None or not labels.ndim or labels.shape[0] != number:
        return [set()] * number
    return [set(row.unique().tolist()) - {IGNORED} for row in labels]


Measure = Callable[[Sequence[Batch]], list[float]]
"""Gives the losses of batches, each by itself."""
Weighing = Callable[[Batch], float | None]
"""What a piece counts for: a weight, -1 for a sum, None where it can't be told."""

WEIGHINGS: dict[str, Callable[[Batch, Sequence[str]], float | None]] = {
    "a sum": lambda piece, label_names: -1,
    "a mean over tokens, shifted": lambda piece, label_names: _tokens(piece, label_names, shifted=True),
    "a mean over tokens": _tokens,
    "a mean over samples": lambda piece, label_names: piece.num_samples,
}
"""What a loss may be, each with its `Weighing`, which is given the names of labels, too."""


def factors(weights: Sequence[float | None]) -> list[float] | None:
    """What the pieces' losses are multiplied by before they are added; None if the weights don't tell."""
    known = [weight for weight in weights if weight]
    if len(known) < len(weights):  # a mean over nothing is no number
        return None
    return [1.0] * len(known) if known[0] < 0 else [weight / sum(known) for weight in known]


def cut(piece: Batch, number: int) -> list[Batch]:
    """A batch in so many pieces, as even as can be; fewer if it has fewer samples."""
    total = piece.num_samples
    number = min(number, total)
    starts = [total * index // number for index in range(number + 1)]
    return [_rows(piece, slice(*each)) for each in pairwise(starts)]


def _rows(piece: Batch, which: slice | list[int]) -> Batch:
    given = piece.args, piece.kwargs, piece.inputs
    args, kwargs, inputs = trees.map_tensors(given, lambda tensor: tensor[which] if tensor.ndim else tensor)
    return Batch(args, kwargs, inputs, piece)


@dataclass(slots=True)
class LossKind:
    """What is known of one loss, of batches whose labels are in the arguments ``label_names``."""

    label_names: Sequence[str]
    known: Weighing | None = None
    """Its weighing, where it needs no measurement."""
    tolerance: float = TOLERANCE
    errors: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WEIGHINGS, 0.0))
    """Of each weighing that may be the loss's, by how much it was off at most so far."""
    _num_batches: int = 0
    """That might have been cut."""
    _measured_at: int = 0
    """How many there were at the last measurement."""
    _looked_at: int = 0
    """How many there were when autograd's graph was last looked at."""
    _num_measured: int = 0
    _num_unclear: int = 0
    """Measurements on samples of several classes whose losses were too much alike to tell."""
    _alike: set[int] = field(default_factory=set)
    """Classes that were measured beside each other."""

    def cut(self, batch: Batch, number: int, measure: Measure) -> list[tuple[Batch, float]]:
        """A batch in ``number`` pieces, and what their losses count for; in one if the loss can't be cut."""
        if min(number, batch.num_samples) <= 1:
            return [(batch, 1.0)]
        pieces = cut(batch, number)
        if self.known is not None:
            shares = factors(list(map(self.known, pieces)))
            return [(batch, 1.0)] if shares is None else list(zip(pieces, shares, strict=True))
        self._num_batches += 1
        if self.errors:
            classes = _classes(batch, self.label_names)
            if self._num_measured == 0 or self._num_measured < MAX_MEASURED and not self._agree(pieces):
                few = (self._num_measured > 0 and self._telling(batch)) or self._few(classes)
                self._measure(batch, classes, few, measure)
            elif self._is_due and not self._has_new(classes):
                self._measure(batch, classes, self._few(classes), measure)
            while self._has_new(classes) and self._measure(batch, classes, self._few(classes), measure):
                pass
            if self._num_measured >= MAX_MEASURED and self.errors:
                self.errors = dict([min(self.errors.items(), key=lambda item: item[1])])
            found = self._factors(pieces)
            if found and found[0] and self._agree(pieces) and not self._has_new(classes):
                return list(zip(pieces, found[0], strict=True))
        return [(batch, 1.0)]

    @property
    def _is_due(self) -> bool:
        """Whether to measure again: code may change its loss in the course of a training."""
        return self._measured_at > 0 and self._num_batches >= MEASURED_EACH * self._measured_at

    def _has_new(self, classes: Sequence[set[int]]) -> bool:
        """Whether there are several classes, of which some may count for more than others, for all that is known."""
        together = set().union(*classes)
        is_open = self.errors and len(self._alike) < MAX_CLASSES
        return bool(is_open and len(together) > 1 and not together <= self._alike)

    def _weights(self, kind: str, pieces: Sequence[Batch]) -> list[float | None]:
        return [WEIGHINGS[kind](piece, self.label_names) for piece in pieces]

    def _factors(self, pieces: Sequence[Batch]) -> list[list[float] | None]:
        return [factors(self._weights(kind, pieces)) for kind in self.errors]

    def _agree(self, pieces: Sequence[Batch]) -> bool:
        first, *others = self._factors(pieces) or [None]
        return all(other == first or first and other and _are_close(first, other) for other in others)

    def _telling(self, batch: Batch) -> list[int]:
        """Two samples that the weighings that are left weigh in other ways, such as a long and a short one, if any."""
        parts = [_rows(batch, [index]) for index in range(batch.num_samples)]
        known = [[each for each in own if each] for own in (self._weights(kind, parts) for kind in self.errors)]
        told = [own for own in known if len(own) == len(parts)]
        widest = max(told, key=lambda own: max(own) / min(own), default=[1.0])
        if len(told) < 2 or max(widest) <= min(widest):
            return []
        return [widest.index(min(widest)), widest.index(max(widest))]

    def _few(self, classes: Sequence[set[int]]) -> list[int]:
        """Samples to measure on: those with the most classes that are new, beside one with classes that are not."""
        few = [index for index, each in enumerate(classes) if each & self._alike][:1]
        while len(few) < min(NUM_SAMPLES, len(classes)):
            seen = self._alike.union(*(classes[index] for index in few))
            others = (index for index in range(len(classes)) if index not in few)
            few.append(max(others, key=lambda index: len(classes[index] - seen)))
        return few

    def _measure(self, batch: Batch, classes: Sequence[set[int]], few: Sequence[int], measure: Measure) -> bool:
        """Measure on a few samples; returns whether something new is known of the classes."""
        parts = [_rows(batch, [index]) for index in few]
        weights = {kind: self._weights(kind, parts) for kind in self.errors}
        told = {kind: found for kind, each in weights.items() if (found := factors(each))}
        seen = set().union(*(classes[index] for index in few))
        self._num_measured += 1
        self._measured_at = self._num_batches
        if not told:
            return False
        try:
            whole, *losses = measure([_rows(batch, [*few]), *parts])
        except (RoundPipeError, CalledAgain, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of code that halves a batch, say; what is wrong anyway fails for the whole, too
            self._give_up(f"the loss can't be computed for single samples ({type(error).__name__}: {error})")
            return False
        size, off = max(abs(whole), 1e-6), {}
        for kind, found in told.items():
            together = sum(factor * loss for factor, loss in zip(found, losses, strict=True))
            off[kind] = abs(together - whole) / size
            self.errors[kind] = max(self.errors[kind], off[kind])
        limit = min(self.tolerance, 10 * max(min(self.errors[kind] for kind in told), 1e-6))
        untold = {kind for kind, each in weights.items() if kind not in told and None not in each}
        self.errors = {
            kind: error for kind, error in self.errors.items() if kind in untold or kind in told and error <= limit
        }
        spread = (max(losses) - min(losses)) / size
        is_clear = "a sum" in self.errors or spread > MIN_SPREAD * max(min(off.values()), 1e-6)
        if is_clear or not 1 < len(seen) <= MAX_CLASSES:
            self._alike |= seen
        else:
            self._num_unclear += 1
            self.errors = self.errors if self._num_unclear < MAX_CLASSES else {}
        if self.errors and all(map(math.isfinite, (whole, *losses))):
            logger.info("the loss is %s", " or ".join(self.errors))
        else:
            self._give_up(
                f"the loss is neither a sum nor a mean over samples or tokens: {whole:.6g} for {len(few)} "
                f"samples together, {' and '.join(f'{loss:.6g}' for loss in losses)} apart"
            )
        return seen <= self._alike

    def look_at(self, loss: Any, outputs: Any) -> None:
        """Take in what autograd's graph shows of a microbatch's loss, once for each batch."""
        is_new = self.errors and self._looked_at != self._num_batches
        if not is_new or not isinstance(loss, torch.Tensor) or not loss.requires_grad:  # as while it is measured
            return
        self._looked_at = self._num_batches
        if any(term.kind == "not linear" for term in terms_of(loss, ends_of(outputs))):
            self._give_up("the loss is a function of means, such as a root or the larger of two")

    def _give_up(self, why: str) -> None:
        self.errors = {}
        warn(
            f"{why}. Batches are not cut into microbatches, so that devices wait for each other; "
            "gradient_accumulation_steps gives them more at once"
        )


def _are_close(first: Sequence[float], second: Sequence[float]) -> bool:
    return all(abs(one - other) <= 1e-9 for one, other in zip(first, second, strict=True))
