"""For each kind of operator, whether it mixes the samples of a batch; see `sample_dependence`.

Dimensions that count samples, or samples and something else, are known by their sizes.

Invariant: an operator without a rule mixes nothing.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from roundpipe.fx.locations import is_within
from roundpipe.fx.passes.row_rules import OperatorArguments
from roundpipe.fx.passes.sample_follower import SampleFollower
from roundpipe.fx.sizes import flat_tensors

_REDUCTIONS = frozenset(
    "sum nansum mean amax amin max min prod any all argmax argmin logsumexp var std var_mean std_mean norm "
    "linalg_vector_norm median nanmedian mode kthvalue aminmax count_nonzero histc bincount".split()
)
_ALONG = frozenset(
    "_softmax _log_softmax cumsum cumprod logcumsumexp cummax cummin sort topk argsort flip roll diff "
    "_fft_r2c _fft_c2c _fft_c2r".split()
)
_PRODUCTS = frozenset("mm bmm addmm baddbmm addbmm linear mv addmv dot vdot".split())
_PARTS = frozenset("slice split split_with_sizes".split())
_NORMS = frozenset("native_layer_norm _fused_rms_norm native_group_norm".split())
_BATCH_NORMS = frozenset(
    "native_batch_norm _native_batch_norm_legit _batch_norm_with_update cudnn_batch_norm batch_norm".split()
)
_BATCH_NORM_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_MAKING = frozenset(
    "new_ones new_zeros new_full new_empty zeros_like ones_like full_like empty_like rand_like randn_like".split()
)
"""Operators that look at the form of a tensor only."""
_TAKING = frozenset("index index_select take gather".split())
_PUTTING = frozenset("index_put _index_put_impl masked_scatter".split())
_VIEWING = frozenset("view _unsafe_view reshape".split())
_BY_PLACE = frozenset("index_add scatter_add scatter_reduce index_reduce index_copy index_fill scatter put".split())
"""Operators that put samples at places: at one where there is something before, it is summed up, or lost."""
_SCALING = frozenset("add sub rsub mul div where".split())
_ALIKE = frozenset("full zeros ones empty empty_strided scalar_tensor".split())
"""Operators that make rows which are all alike, of nothing but numbers."""
_FILLING = frozenset("full scalar_tensor new_full full_like fill".split())
_POOLS = frozenset(
    f"{kind}_pool{n}d{rest}" for kind in ("avg", "max") for n in (1, 2, 3) for rest in ("", "_with_indices")
)
_RESIZING = frozenset(
    f"{prefix}upsample_{kind}"
    for prefix in ("", "_")
    for kind in "nearest1d nearest2d nearest3d nearest_exact1d nearest_exact2d nearest_exact3d linear1d bilinear2d "
    "bilinear2d_aa bicubic2d bicubic2d_aa trilinear3d".split()
)
_DECOMPOSITIONS = frozenset(
    "_linalg_svd linalg_svd linalg_qr _linalg_det _linalg_slogdet linalg_inv_ex linalg_cholesky_ex _linalg_eigh "
    "linalg_lu_factor_ex linalg_pinv".split()
)
_CARRYING = _REDUCTIONS | _ALONG | frozenset("_to_copy embedding one_hot".split())
"""Operators beside pointwise ones whose floats are made of integers' values."""
_BENT = frozenset(
    "mul div pow sqrt rsqrt exp expm1 log log1p reciprocal tanh sigmoid softplus dot linalg_vector_norm norm prod "
    "abs relu clamp clamp_min clamp_max maximum minimum amax amin".split()
)
"""Functions that no sum goes through; of two factors, one may be none."""


class DependenceCall(OperatorArguments):
    """A call of an operator, and whether it mixes samples."""

    def __init__(self, watch: SampleFollower, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        super().__init__(func, args, kwargs, outputs)
        self._watch = watch
        self.name = str(func._opname if func.namespace == "aten" else func).removesuffix("_")
        self.outputs = outputs
        self._is_pointwise = torch.Tag.pointwise in func.tags
        self.takes_integers = self._is_pointwise or self.name in _CARRYING

    @property
    def sources(self) -> list[torch.Tensor]:
        """What its result is made of; other inputs are places."""
        if self.name in _MAKING:
            return []
        if self.name in _TAKING:
            return self.inputs[:1]
        if self.name == "copy" and len(self.inputs) > 1:
            return self.inputs[1:]
        if self.name in _PUTTING:
            return [self.inputs[0], self.inputs[-1]]
        if self.name in _BATCH_NORMS and self._takes_statistics():  # those that it keeps are for evaluation
            return flat_tensors([self.values["input"], self.values["weight"], self.values["bias"]])
        if self._watch.is_of_loss and self.name in _SCALING:
            return [each for each in self.inputs if each.ndim or not self._watch.is_sum(each)] or self.inputs
        return self.inputs

    @property
    def mixed(self) -> list[torch.Tensor]:
        """Those of its results that it mixes samples in, if it does."""
        return self.outputs[2:] if self.name == "_unique2" else self.outputs  # values and their places mix nothing

    @property
    def written(self) -> list[torch.Tensor]:
        """What it writes in place."""
        schema = self.func._schema.arguments
        names = [each.name for each in schema if each.alias_info is not None and each.alias_info.is_write]
        return flat_tensors([self.values[name] for name in names])

    @property
    def samples_taken(self) -> list[int | None]:
        """Which one sample each of its results is of; what was expanded over samples is of none."""
        number = len(self.outputs)
        if self.name in ("select", "slice", "unbind", "split", "split_with_sizes"):
            (dim,) = self.dims()
            if dim in self._samples() and self.first.stride(dim):
                if self.name == "select":
                    return [self.values["index"] % self.first.shape[dim]]
                if self.name == "unbind":
                    return list(range(number))
                if all(tensor.shape[dim] == 1 for tensor in self.outputs):
                    if self.name != "slice":
                        return list(range(number))
                    return [(self.values["start"] or 0) % self.first.shape[dim]]
        return [None] * number

    @property
    def checks(self) -> bool:
        """Whether it asks for what should not be there: numbers that are none, or infinite."""
        other = self.values.get("other")
        is_itself, is_infinite = other is self.first, isinstance(other, float) and math.isinf(other)
        return self.name in ("isnan", "isinf") or self.name in ("eq", "ne") and (is_itself or is_infinite)

    @property
    def of_floats(self) -> bool:
        """Whether it takes more than integers from samples; putting one thing at places takes these alone."""
        if self.name in _PUTTING or self.name in _BY_PLACE:
            return is_float(self.inputs[-1]) and bool(self._watch.dims(self.inputs[-1]))
        return any(map(is_float, self.inputs[:1])) and not self.checks

    def finds(self) -> bool:
        """Whether it has, one after the other, places of those samples that a mask tells, or integers at these."""
        if self.name == "nonzero":
            return bool(self._samples())
        is_by_mask = self.name in ("index", "masked_select") and self.inputs[1].dtype is torch.bool
        return is_by_mask and bool(self._watch.dims(self.inputs[1])) and is_place(self.output)

    def picks(self) -> bool:
        """Whether it takes some of what was found among samples, by where it is among the others."""
        if not self._watch.is_found(self.first):
            return False
        if self.name in _TAKING:
            return self._takes_shuffled() and self.output.shape[:1] != self.first.shape[:1]
        if self.name not in ("slice", "topk"):
            return False
        (dim,) = self.dims()
        size, end = self.first.shape[dim], self.values.get("end")
        is_bounded = end is not None and size < end < sys.maxsize  # there may be more samples than are tried
        return dim in self._samples() and (self.output.shape[dim] < size or is_bounded)

    def mixes(self) -> bool:
        if self.name.startswith("_scaled_dot_product_"):
            return self._attention()
        if not self.inputs:
            return self._makes_places() or self._fills()
        rule = next((rule for names, rule in _RULES if self.name in names), None)
        if rule is not None and not (self.name in _REDUCTIONS and "other" in self.values):
            return rule(self)
        return self._is_pointwise and (self._meet() or self._take_their_number())

    def bends(self) -> bool:
        """Whether its result is no linear function of sums over samples that weights have made."""
        if self.name not in _BENT or not is_float(self.output) or self._watch.dims(self.output):
            return False
        sums = [tensor for tensor in self.inputs if self._watch.is_learned_sum(tensor)]
        if self.name == "div" and len(self.inputs) > 1 and self._watch.is_learned_sum(self.inputs[1]):
            return True
        return len(sums) > (1 if self.name in ("mul", "div", "dot") else 0)

    def _along(self) -> bool:
        """Whether it works along samples; what is sorted by integers goes with its group, as a router's tokens do."""
        if self.name in ("sort", "argsort") and not is_float(self.first):
            return False
        name = "dim" if "dim" in self.values else "dims"
        return not set(self.dims(name) if name in self.values else range(self.first.dim())).isdisjoint(self._samples())

    def _samples(self) -> list[int]:
        return self._watch.dims(self.first)

    def _product(self) -> bool:
        """Whether it sums over samples, or multiplies each with each."""
        left, right = self.inputs[:2] if self.name == "linear" else self.inputs[-2:]
        if self._watch.is_of_loss and left.dim() == right.dim() == 3 and left.shape[0] % self._watch.prime**2 == 0:
            return True  # of each sample with each
        a, b = (list(map(self._watch.counts_samples, tensor.shape)) for tensor in (left, right))
        if a[-1] or self.name == "addbmm" and a[0]:
            return True
        return self.name != "linear" and left.dim() > 1 and right.dim() > 1 and a[-2] and b[-1]

    def _part(self) -> bool:
        """Whether it takes some samples, more than one, of those that there are."""
        if self._watch.is_of_loss and self.values.get("step", 1) > 1:
            return False  # groups, which microbatches may have as a whole
        (dim,) = self.dims()
        parts = {tensor.shape[dim] for tensor in self.outputs}
        if dim not in self._samples() and self._watch.is_stored(self.first):
            return any(map(self._watch.counts_samples, parts))  # so each sample has what is stored at its place
        return dim in self._samples() and any(1 < part < self._watch.number for part in parts)

    def _halves(self) -> bool:
        """Whether it lays one half of the samples, or a quarter, beside another."""
        number, pairs = self._watch.number, itertools.pairwise(self.output.shape)
        if not self._watch.is_of_loss:
            return self._scrambles()
        is_cut = any(1 < a < 2 * number // self._watch.prime and a * b == number for a, b in pairs)
        return is_cut and number in self.first.shape

    def _scrambles(self) -> bool:
        """Whether it cuts the samples into groups, or lays their elements into other rows."""
        number = self._watch.number
        ends = [*itertools.accumulate(self.output.shape, operator.mul)]
        whole = [(end // size, end) for end, size in zip(ends, self.output.shape, strict=True) if size]
        for dim, size in enumerate(self.first.shape):
            start = math.prod(self.first.shape[:dim])
            if size == number and not any(start % a == 0 and b % (start * size) == 0 for a, b in whole):
                return True
        is_part = any(self._watch.counts_samples(size) and size < number for size in self.first.shape)
        return is_part and number in self.output.shape and number not in self.first.shape

    def _repeats(self) -> bool:
        """Whether it repeats several rows until there are as many as samples, so that each has one by its place."""
        before = (1,) * (self.output.dim() - self.first.dim()) + self.first.shape
        pairs = zip(before, self.output.shape, strict=True)
        return any(size == self._watch.number and row not in (1, size) for row, size in pairs)

    def _puts_by_place(self) -> bool:
        """Whether it puts samples at places that are not theirs, where several may meet, or at picked ones."""
        meet = any(map(self._watch.dims, self.inputs[1:])) and not self._watch.dims(self.output)
        return meet or any(map(self._watch.is_picked, self.inputs[1:]))

    def _norm(self) -> bool:
        samples = self._samples()
        number = self.first.dim() - (1 if "group" in self.name else len(self.values["normalized_shape"]))
        return any(dim >= (1 if "group" in self.name else number) for dim in samples)

    def _batch_norm(self) -> bool:
        """Whether it takes statistics over samples; those of a model's BatchNorm are known to be of microbatches."""
        if not self._takes_statistics():
            return False
        along = {dim for dim in self._samples() if self._watch.is_of_loss or dim != 1}
        return along == {0} and not self._is_of_a_layer() or not along <= {0}

    def _is_of_a_layer(self) -> bool:
        """Whether a BatchNorm of torch's, or one made of it, calls it."""
        return self._watch.is_torchs(self.values.get("running_mean")) or is_within(_BATCH_NORM_LAYERS)

    def _takes_statistics(self) -> bool:
        return bool(self.values.get("training", self.values.get("train")))

    def _is_scaled_by_counts(self) -> bool:
        """Whether the gradient of each row is divided by how often a batch has it."""
        return bool(self.values.get("scale_grad_by_freq"))

    def _pads(self) -> bool:
        """Whether it puts something before or behind the samples, and so moves them to other places."""
        pad = self.values["pad"]
        return any(any(pad[2 * (self.first.dim() - 1 - dim) :][:2]) for dim in self._samples())

    def _pools(self) -> bool:
        """Whether it slides over samples."""
        return any(dim > 1 for dim in self._samples())

    def _decomposes(self) -> bool:
        """Whether samples are rows or columns of a matrix that is taken apart."""
        return any(dim >= self.first.dim() - 2 for dim in self._samples())

    def _convolution(self) -> bool:
        """Whether it slides over samples."""
        return any(dim > 1 for dim in self._samples()) and any(size > 1 for size in self.values["weight"].shape[2:])

    def _attention(self) -> bool:
        return any(self._watch.counts_samples(tensor.shape[-2]) for tensor in self.inputs[:2])

    def _distances(self) -> bool:
        """Whether it has those of each sample to each."""
        number = 1 if "pdist" in self.name else 2
        return all(self._watch.counts_samples(tensor.shape[-2]) for tensor in self.inputs[:number])

    def _takes_shuffled(self) -> bool:
        """Whether it takes samples in another order, or those that a comparison with others has picked."""
        places = self.inputs[1:]
        is_picked = any(map(self._watch.compares, places)) or any(map(self._watch.is_picked, places))
        return is_picked or any(map(self._watch.is_shuffle, self.inputs))

    def _puts(self) -> bool:
        """Whether places are filled one after the other, over all samples, with something that is not theirs."""
        places, values = self.inputs[1], self.inputs[-1]
        if self._takes_shuffled() or self._puts_by_place():
            return True
        is_filled = self._watch.has_others and places.dtype is torch.bool and values.dim() > 0 and values.shape[0] > 1
        return is_filled and bool(self._watch.dims(places)) and not self._watch.dims(values)

    def _takes_as_time(self) -> bool:
        """Whether samples are the steps of a sequence."""
        return 0 in self._samples()

    def _makes_places(self) -> bool:
        """Whether it makes something for the samples' places, of nothing else, and draws it not."""
        is_drawn = torch.Tag.nondeterministic_seeded in self.func.tags
        return self.name not in _ALIKE and not is_drawn and bool(self._watch.dims(self.output))

    def _fills(self) -> bool:
        """Whether it fills something with the number of samples."""
        is_given = self.name in _FILLING and not self._watch.is_of_loss
        return is_given and any(map(self._watch.is_their_number, self.values.values()))

    def _meet(self) -> bool:
        """Whether samples meet each other by broadcasting, also of what was expanded before."""
        met = len(self._watch.dims(self.output))
        if self._watch.is_of_loss:
            return met > 1 and len(self.inputs) > 1
        return met > 1 and all(len(self._watch.dims(tensor)) < met for tensor in self.inputs)

    def _take_their_number(self) -> bool:
        """Whether an operand is the number of samples, or that to some power."""
        plain = [*self.values.values()]
        return any(map(self._watch.is_their_number, plain)) and any(map(is_float, self.outputs))


def is_place(tensor: torch.Tensor) -> bool:
    """Whether its numbers may be places."""
    return not is_float(tensor) and tensor.dtype is not torch.bool


def is_float(tensor: torch.Tensor) -> bool:
    """Whether it has real or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


_RULES: tuple[tuple[Iterable[str], Callable[[DependenceCall], bool]], ...] = (
    (_REDUCTIONS | _ALONG, DependenceCall._along),
    (_PRODUCTS, DependenceCall._product),
    (_PARTS, DependenceCall._part),
    (_NORMS, DependenceCall._norm),
    (("convolution",), DependenceCall._convolution),
    (_BATCH_NORMS, DependenceCall._batch_norm),
    (("embedding", "_embedding_bag"), DependenceCall._is_scaled_by_counts),
    (("constant_pad_nd",), DependenceCall._pads),
    (_POOLS | _RESIZING, DependenceCall._pools),
    (_DECOMPOSITIONS, DependenceCall._decomposes),
    (("_cdist_forward", "_euclidean_dist", "_pdist_forward"), DependenceCall._distances),
    (_TAKING, DependenceCall._takes_shuffled),
    (_PUTTING, DependenceCall._puts),
    (_VIEWING, DependenceCall._halves),
    (_BY_PLACE, DependenceCall._puts_by_place),
    (("_unique2",), DependenceCall._along),
    (("repeat",), DependenceCall._repeats),
    (("mkldnn_rnn_layer",), DependenceCall._takes_as_time),
    (_FILLING, DependenceCall._fills),
)
