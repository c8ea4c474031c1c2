"""For each kind of operator, what becomes of a loss's samples; see `sample_mixing`.

Invariant: an operator without a rule mixes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from roundpipe.core.allocations import TorchDispatchMode
from roundpipe.core.layers import Mixing
from roundpipe.core.tiling import Rows
from roundpipe.fx.passes.row_rules import RULES, AlongRows, Found, NotRowwise, OperatorCall, pointwise
from roundpipe.fx.sizes import flat_tensors

ORDER: tuple[Mixing, ...] = ("has state", "compares samples", "not linear", "sum", "differs")
"""The worse first."""
_MOVING = frozenset(
    "view _unsafe_view reshape _reshape_alias expand permute transpose t unsqueeze squeeze slice select unbind split "
    "split_with_sizes diagonal index index_select gather cat stack flip repeat tril triu constant_pad_nd "
    "_to_copy clone detach alias lift_fresh".split()
)
"""What gives elements as they are."""
_ADDING = frozenset("add sub rsub neg sum mean where masked_fill".split())
_BENT = frozenset(
    "sqrt rsqrt pow exp expm1 log log1p log2 log10 reciprocal tanh sigmoid softplus log_sigmoid_forward "
    "var std var_mean linalg_vector_norm norm logsumexp _softmax _log_softmax prod dist "
    "abs relu leaky_relu elu clamp clamp_min clamp_max maximum minimum max min amax amin hardtanh threshold logaddexp "
    "sin cos erf round floor ceil sign".split()
)
"""Functions that no sum goes through."""
_CHOOSING, _COMPARING = frozenset("where masked_fill".split()), frozenset("gt ge lt le eq ne".split())
_STATISTICS = frozenset(
    "var std var_mean linalg_vector_norm norm logsumexp _softmax _log_softmax amax amin max min prod median argmax "
    "argmin cumsum cumprod logcumsumexp sort topk flip roll slice split split_with_sizes".split()
)
"""What mixes samples where it works along them, other than a sum."""
_PUTTING = frozenset("cat repeat".split())
"""What puts samples behind samples; as long as samples are taken in steps, they are those of whole groups."""
_PRODUCTS = frozenset("mm addmm bmm baddbmm mv dot vdot".split())
_DISTANCES = frozenset("_cdist_forward _euclidean_dist _pdist_forward".split())
_LOSSES = frozenset(
    "mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits nll_loss_forward "
    "nll_loss2d_forward".split()
)


@dataclass(frozen=True, slots=True)
class Samples:
    """What is known of a tensor."""

    dim: int | None = None
    """The one that counts samples."""
    is_sum: bool = False
    """Whether elements are linear in values of several samples each."""
    of_outputs: bool = False
    """Whether it depends on more than labels."""
    mixing: Mixing | None = None
    sample: int | None = None
    """The one that it is made of, where samples were taken one by one."""

    @property
    def is_divisor(self) -> bool:
        """Whether it is made of sums over labels alone, such as their number."""
        return self.is_sum and self.dim is None and not self.of_outputs

    @property
    def is_beside(self) -> bool:
        """Whether it is the same for each sample."""
        return self.dim is None and (self.is_divisor or not self.is_sum)


class MixingWatch(TorchDispatchMode):
    """Follows samples through operators."""

    supports_higher_order_operators = True
    is_outermost = False

    def __init__(self, number: int, microbatches: Collection[int]) -> None:
        super().__init__()
        self.sizes: Sequence[int] = (number,)
        self.microbatches = microbatches
        self._found: dict[int, Samples] = {}
        self._alive: list[torch.Tensor] = []
        self._left: dict[int, set[int]] = {}
        """By tensor of which samples were taken one by one, the places of the others."""

    @property
    def takes_some(self) -> bool:
        """Whether samples were taken by their places, but not all of them one after the other."""
        return any(self._left.values())

    def take(self, tensor: torch.Tensor, dim: int, places: Iterable[int]) -> int:
        """Take samples out of a tensor; returns how many it has."""
        number = tensor.shape[dim]
        left = self._left.setdefault(id(tensor), {*range(number)})
        left.difference_update(place % number for place in places)
        return number

    def put(self, tensor: torch.Tensor, samples: Samples) -> None:
        self._found[id(tensor)] = samples
        self._alive.append(tensor)

    def samples(self, tensor: Any) -> Samples:
        return self._found.get(id(tensor), NOTHING)

    # What rules of rows ask.

    def found(self, tensor: torch.Tensor) -> Found:
        return self.rows(tensor) if self.samples(tensor).dim is not None else None

    def rows(self, tensor: torch.Tensor) -> Rows:
        dim = self.samples(tensor).dim
        return tuple((0, 1) if each == dim else None for each in range(tensor.dim()))

    def take_in_rows(self, tensor: torch.Tensor, rows: Rows) -> None:
        """One that is the same for all microbatches may have another value for each place."""

    def check(self, rows: Rows) -> None:
        """There is but one axis."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        outputs = flat_tensors(out)
        inputs = [each for each in map(self.samples, flat_tensors(args, kwargs)) if each != NOTHING]
        if inputs and outputs:
            found: Sequence[Samples] = ()
            mixing = worst(each.mixing for each in inputs)
            with suppress(NotRowwise, LookupError):
                found = _MixingCall(self, func, args, kwargs, outputs).results()
            for index, tensor in enumerate(outputs):
                each = found[index] if index < len(found) else NOTHING
                self.put(tensor, replace(each, mixing=worst((mixing, each.mixing))))
        return out


NOTHING = Samples()


class _MixingCall(OperatorCall):
    """A call of an operator, some of whose inputs are of samples."""

    def __init__(self, watch: MixingWatch, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        super().__init__(watch, func, args, kwargs, outputs)
        self._watch = watch
        self.microbatches = watch.microbatches
        self.name = (func._opname if func.namespace == "aten" else str(func)).removesuffix("_")
        self.outputs = outputs
        self.each = [watch.samples(tensor) for tensor in self.inputs]
        self.of_outputs = any(each.of_outputs for each in self.each)
        self.sums = [each for each in self.each if each.is_sum]

    def samples(self, tensor: Any) -> Samples:
        """What is known of an input, once samples that were taken meet others: each is a sum of itself."""
        found = self._watch.samples(tensor)
        return found if found.sample is None else replace(found, is_sum=True, sample=None)

    def results(self) -> Sequence[Samples]:
        """What is known of its results; as far as nothing is, there are none."""
        taken = [each.sample for each in self.each if each.sample is not None]
        if not taken:
            return self._results()
        if len({*taken}) == 1 and all(each.sample is not None or each.is_beside for each in self.each):
            return [Samples(of_outputs=self.of_outputs, sample=taken[0])] * len(self.outputs)
        if self.name in ("stack", "cat"):
            dim = self.values["dim"] % self.output.dim()
            is_whole = taken == [*range(self.output.shape[dim])] == [*range(self._watch.sizes[0])]
            return [Samples(dim, of_outputs=self.of_outputs)] if is_whole else ()
        self.each = list(map(self.samples, self.inputs))
        self.sums = [each for each in self.each if each.is_sum]
        found = self._results()
        return self._compared() if any(each.mixing == "not linear" for each in found) else found

    def _results(self) -> Sequence[Samples]:
        if self.name in _DISTANCES:
            return self._distances()
        if self.name in _PRODUCTS:
            return self._product()
        if all(each.dim is None for each in self.each):
            return self._all([])
        if self.name in _LOSSES and self.values.get("reduction") != 0:
            return self._reduced_loss()
        rule = RULES.get(self.name) or (pointwise if torch.Tag.pointwise in self.func.tags else None)
        if rule is None:
            return ()
        try:
            found = rule(self)
        except AlongRows:
            return self._along()
        rows = list(found) if isinstance(found, list) else [found] * len(self.outputs)
        if rows and isinstance(rows[0], str):
            return [Samples(None, True, self.of_outputs, self._bent())] * len(rows)
        if any(isinstance(each, tuple) and sum(axes is not None for axes in each) > 1 for each in rows):
            return self._compared()  # every sample meets every other
        return self._all([_dim(each) for each in rows])

    def _all(self, dims: list[int | None]) -> list[Samples]:
        """Where it works on each sample by itself, or on sums over them."""
        dims = dims or [None] * len(self.outputs)
        mixing = self._bent()
        if mixing is None and self.sums and self.name not in (*_MOVING, *_ADDING, *_COMPARING, "mul", "div"):
            is_known = self.name in RULES or torch.Tag.pointwise in self.func.tags
            if not is_known or not all(each.is_divisor for each in self.each if each != NOTHING):
                return []
        scaled = [each for each in self.each if each != NOTHING and not each.is_divisor]
        if self.name in ("mul", "div", "where") and scaled:  # divisors are factors here
            is_sum = any(each.is_sum for each in scaled)
        else:
            is_sum = bool(self.sums)
        return [Samples(dim, is_sum, self.of_outputs, mixing) for dim in dims]

    def _bent(self) -> Mixing | None:
        """Whether it is no linear function of sums over samples."""
        sums = [each for each in self.sums if not each.is_divisor]
        is_by_sample = any(each.dim is not None for each in self.each)
        if self.name in _CHOOSING and any(self.samples(each) in sums for each in self.inputs if _is_bool(each)):
            return "not linear"
        if not self.sums or self.name in (*_MOVING, *_ADDING):
            return None
        if self.name in ("mul", "div"):
            others = [each for each in self.each if each != NOTHING and not each.is_divisor]
            first = self.each[0] if self.inputs and self.inputs[0] is self.first else NOTHING
            is_factor = len(others) == 1 and (self.name == "mul" or others[0] is first)
            if not sums or is_factor:
                return None
            return "compares samples" if is_by_sample else "not linear"
        if is_by_sample and (self.name in RULES or torch.Tag.pointwise in self.func.tags):
            return "compares samples"
        return "not linear" if sums and self.of_outputs and self.name in (*_BENT, *_LOSSES) else None

    def _along(self) -> Sequence[Samples]:
        """Where it works along samples."""
        if taken := self._taken():
            number = self._watch.take(self.first, self.samples(self.first).dim or 0, taken)
            return [Samples(of_outputs=self.of_outputs, sample=place % number) for place in taken]
        step = self.values["step"] if self.name == "slice" else 1
        if self.name in _PUTTING or step > 1 and not any(size % step for size in self.microbatches):
            dim = next(each.dim for each in self.each if each.dim is not None)
            return [Samples(dim, bool(self.sums), self.of_outputs)] * len(self.outputs)
        return self._compared() if self.name in _STATISTICS else ()

    def _taken(self) -> Sequence[int]:
        """The places of samples that it takes by themselves, one for each result."""
        if self.name == "select":
            return [self.values["index"]]
        is_each = self.name == "unbind" or all(tensor.shape[self.dims()[0]] == 1 for tensor in self.outputs)
        if self.name == "slice" and is_each:
            return [self.values["start"] or 0]
        return range(len(self.outputs)) if self.name in ("unbind", "split", "split_with_sizes") and is_each else ()

    def _reduced_loss(self) -> Sequence[Samples]:
        """One of torch's losses, summed or averaged; those of classes also give what they are divided by."""
        loss = Samples(None, True, self.of_outputs, self._bent())
        return [loss, *[Samples(None, True)] * (len(self.outputs) - 1)]

    def _product(self) -> Sequence[Samples]:
        """The result has the dimensions of both that are not summed over, each at its place."""
        left, right = self.inputs[-2:]
        (a, b), taken = map(self.samples, (left, right)), (left.dim() - 1, max(right.dim() - 2, 0))
        is_along = [each.dim is not None and each.dim == dim for each, dim in zip((a, b), taken, strict=True)]
        has_samples = [each.dim is not None for each in (a, b)]
        is_each_with_itself = all(is_along) or not any(is_along) and left.dim() == 3 and a.dim == b.dim == 0
        if all(has_samples) and not is_each_with_itself:
            return self._compared()
        mixing: Mixing | None = None
        if (a.is_sum or b.is_sum) and NOTHING not in (a, b):
            if a.is_divisor or b.is_divisor:
                return ()
            mixing = "compares samples" if any(has_samples) else "not linear"
        dim = None if any(is_along) else a.dim if a.dim is not None else b.dim
        return [Samples(dim, bool(self.sums) or any(is_along), self.of_outputs, mixing)]

    def _distances(self) -> Sequence[Samples]:
        """Of each row with each; rows of one sample are no samples."""
        pairs = zip(self.each, self.inputs, strict=True)
        has_samples = [each.dim is not None and each.dim == tensor.dim() - 2 for each, tensor in pairs]
        return self._compared() if sum(has_samples) == (1 if "pdist" in self.name else 2) else ()

    def _compared(self) -> list[Samples]:
        return [Samples(None, False, self.of_outputs, "compares samples")] * len(self.outputs)


def _is_bool(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.bool


def _dim(found: Found) -> int | None:
    rows = found if isinstance(found, tuple) else ()
    return next((dim for dim, axes in enumerate(rows) if axes is not None), None)


def worst(kinds: Iterable[Mixing | None]) -> Mixing | None:
    """That of a whole, by those of its parts."""
    found = set(kinds)
    return next((kind for kind in ORDER if kind in found), None)
