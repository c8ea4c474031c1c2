"""Losses of which the graph shows that microbatches can't make up that of the batch: they mix samples.

Each value is followed through the operators behind a graph's calls, on fakes of the example's sizes: which of its
dimensions counts samples, and whether its elements are sums over several of them. A sum or mean over samples may be
added up, weighed and divided by what labels add up to. Anything else mixes samples for good: a function or a quotient
of sums, such as a root, and a comparison, where a sample's value depends on other samples. That is what products and
differences of samples with each other do, statistics over them and what is centred by these, sorting them, and taking
some of them by their places; a loop that takes them all one by one does not.

Invariant: an operator without a rule mixes nothing. What is told of is certain, as far as sizes tell samples apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from roundpipe.core.allocations import TorchDispatchMode
from roundpipe.core.layers import Mixing
from roundpipe.core.tiling import Rows
from roundpipe.fx.fakes import code_at_other_sizes, static_mode
from roundpipe.fx.graph.nodes import GraphInterpreter, has_effect, hint, mutated_by, producer_of, value_of
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.passes.attribute_copies import AttributeCopies, fakes_of
from roundpipe.fx.passes.row_losses import OF_MODULES
from roundpipe.fx.passes.row_rules import RULES, AlongRows, Found, NotRowwise, OperatorCall, pointwise
from roundpipe.fx.passes.sample_dimensions import size_at, symbols_of_samples
from roundpipe.fx.sizes import Symbolic, expression_of, flat_tensors

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
class _Samples:
    """What is known of a tensor."""

    dim: int | None = None
    """The one that counts samples."""
    is_sum: bool = False
    """Whether elements are linear in values of several samples each."""
    of_outputs: bool = False
    """Whether it depends on more than labels."""
    mixing: Mixing | None = None

    @property
    def is_divisor(self) -> bool:
        """Whether it is made of sums over labels alone, such as their number."""
        return self.is_sum and self.dim is None and not self.of_outputs


class _SampleWatch(TorchDispatchMode):
    """Follows samples through operators."""

    supports_higher_order_operators = True
    is_outermost = False

    def __init__(self, number: int, microbatches: Collection[int]) -> None:
        super().__init__()
        self.sizes: Sequence[int] = (number,)
        self.microbatches = microbatches
        self._found: dict[int, _Samples] = {}
        self._alive: list[torch.Tensor] = []
        self._left: dict[int, set[int]] = {}
        """By tensor of which samples were taken one by one, the places of the others."""

    @property
    def takes_some(self) -> bool:
        """Whether samples were taken by their places, but not all of them one after the other."""
        return any(self._left.values())

    def take(self, tensor: torch.Tensor, dim: int, place: int) -> None:
        number = tensor.shape[dim]
        self._left.setdefault(id(tensor), {*range(number)}).discard(place % number)

    def put(self, tensor: torch.Tensor, samples: _Samples) -> None:
        self._found[id(tensor)] = samples
        self._alive.append(tensor)

    def samples(self, tensor: Any) -> _Samples:
        return self._found.get(id(tensor), _NOTHING)

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
        inputs = [each for each in map(self.samples, flat_tensors(args, kwargs)) if each != _NOTHING]
        if inputs and outputs:
            found: Sequence[_Samples] = ()
            mixing = worst(each.mixing for each in inputs)
            with suppress(NotRowwise, LookupError):
                found = _SampleCall(self, func, args, kwargs, outputs).results()
            for index, tensor in enumerate(outputs):
                each = found[index] if index < len(found) else _NOTHING
                self.put(tensor, replace(each, mixing=worst((mixing, each.mixing))))
        return out


_NOTHING = _Samples()


class _SampleCall(OperatorCall):
    """A call of an operator, some of whose inputs are of samples."""

    def __init__(self, watch: _SampleWatch, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        super().__init__(watch, func, args, kwargs, outputs)
        self._watch = watch
        self.samples = watch.samples
        self.microbatches = watch.microbatches
        self.name = (func._opname if func.namespace == "aten" else str(func)).removesuffix("_")
        self.outputs = outputs
        self.each = [watch.samples(tensor) for tensor in self.inputs]
        self.of_outputs = any(each.of_outputs for each in self.each)
        self.sums = [each for each in self.each if each.is_sum]

    def results(self) -> Sequence[_Samples]:
        """What is known of its results; as far as nothing is, there are none."""
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
            return [_Samples(None, True, self.of_outputs, self._bent())] * len(rows)
        if any(isinstance(each, tuple) and sum(axes is not None for axes in each) > 1 for each in rows):
            return self._compared()  # every sample meets every other
        return self._all([_dim(each) for each in rows])

    def _all(self, dims: list[int | None]) -> list[_Samples]:
        """Where it works on each sample by itself, or on sums over them."""
        dims = dims or [None] * len(self.outputs)
        mixing = self._bent()
        if mixing is None and self.sums and self.name not in (*_MOVING, *_ADDING, *_COMPARING, "mul", "div"):
            is_known = self.name in RULES or torch.Tag.pointwise in self.func.tags
            if not is_known or not all(each.is_divisor for each in self.each if each != _NOTHING):
                return []
        scaled = [each for each in self.each if each != _NOTHING and not each.is_divisor]
        if self.name in ("mul", "div", "where") and scaled:  # divisors are factors here
            is_sum = any(each.is_sum for each in scaled)
        else:
            is_sum = bool(self.sums)
        return [_Samples(dim, is_sum, self.of_outputs, mixing) for dim in dims]

    def _bent(self) -> Mixing | None:
        """Whether it is no linear function of sums over samples."""
        sums = [each for each in self.sums if not each.is_divisor]
        is_by_sample = any(each.dim is not None for each in self.each)
        if self.name in _CHOOSING and any(self.samples(each) in sums for each in self.inputs if _is_bool(each)):
            return "not linear"
        if not self.sums or self.name in (*_MOVING, *_ADDING):
            return None
        if self.name in ("mul", "div"):
            others = [each for each in self.each if each != _NOTHING and not each.is_divisor]
            first = self.each[0] if self.inputs and self.inputs[0] is self.first else _NOTHING
            is_factor = len(others) == 1 and (self.name == "mul" or others[0] is first)
            if not sums or is_factor:
                return None
            return "compares samples" if is_by_sample else "not linear"
        if is_by_sample and (self.name in RULES or torch.Tag.pointwise in self.func.tags):
            return "compares samples"
        return "not linear" if sums and self.of_outputs and self.name in (*_BENT, *_LOSSES) else None

    def _along(self) -> Sequence[_Samples]:
        """Where it works along samples."""
        if self.name == "select":
            self._watch.take(self.first, self.samples(self.first).dim or 0, self.values["index"])
        step = self.values["step"] if self.name == "slice" else 1
        if self.name in _PUTTING or step > 1 and not any(size % step for size in self.microbatches):
            dim = next(each.dim for each in self.each if each.dim is not None)
            return [_Samples(dim, bool(self.sums), self.of_outputs)] * len(self.outputs)
        return self._compared() if self.name in _STATISTICS else ()

    def _reduced_loss(self) -> Sequence[_Samples]:
        """One of torch's losses, summed or averaged; those of classes also give what they are divided by."""
        loss = _Samples(None, True, self.of_outputs, self._bent())
        return [loss, *[_Samples(None, True)] * (len(self.outputs) - 1)]

    def _product(self) -> Sequence[_Samples]:
        """The result has the dimensions of both that are not summed over, each at its place."""
        left, right = self.inputs[-2:]
        (a, b), taken = map(self.samples, (left, right)), (left.dim() - 1, max(right.dim() - 2, 0))
        is_along = [each.dim is not None and each.dim == dim for each, dim in zip((a, b), taken, strict=True)]
        has_samples = [each.dim is not None for each in (a, b)]
        is_each_with_itself = all(is_along) or not any(is_along) and left.dim() == 3 and a.dim == b.dim == 0
        if all(has_samples) and not is_each_with_itself:
            return self._compared()
        mixing: Mixing | None = None
        if (a.is_sum or b.is_sum) and _NOTHING not in (a, b):
            if a.is_divisor or b.is_divisor:
                return ()
            mixing = "compares samples" if any(has_samples) else "not linear"
        dim = None if any(is_along) else a.dim if a.dim is not None else b.dim
        return [_Samples(dim, bool(self.sums) or any(is_along), self.of_outputs, mixing)]

    def _distances(self) -> Sequence[_Samples]:
        """Of each row with each; rows of one sample are no samples."""
        pairs = zip(self.each, self.inputs, strict=True)
        has_samples = [each.dim is not None and each.dim == tensor.dim() - 2 for each, tensor in pairs]
        return self._compared() if sum(has_samples) == (1 if "pdist" in self.name else 2) else ()

    def _compared(self) -> list[_Samples]:
        return [_Samples(None, False, self.of_outputs, "compares samples")] * len(self.outputs)


def _is_bool(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.bool


def _dim(found: Found) -> int | None:
    rows = found if isinstance(found, tuple) else ()
    return next((dim for dim, axes in enumerate(rows) if axes is not None), None)


def worst(kinds: Iterable[Mixing | None]) -> Mixing | None:
    """That of a whole, by those of its parts."""
    found = set(kinds)
    return next((kind for kind in ORDER if kind in found), None)


# ---------------------------------------------------------------------------------- the graph


def mixing_of(
    traced: TracedGraph,
    scalar: Node,
    samples: Collection[Node],
    outputs: Collection[Node] = (),
    own: Mapping[Node, Mixing] = MappingProxyType({}),
    sizes: Collection[int] = (),
    statistics: Collection[Node] = (),
) -> Mixing | None:
    """How a scalar mixes samples behind the last nodes with weights, as far as the graph tells.

    Args:
        traced: the graph of a model, or of a `LossCall`.
        samples: arguments whose first dimension counts samples.
        outputs: those arguments that a model has made.
        own: what is known of some arguments, which are losses of the model's own.
        sizes: of the microbatches, as far as they are known.
        statistics: arguments that were made of all samples, such as a mean over them.
    """
    counts = {hint(value.shape[0]) for node in samples if isinstance(value := value_of(node), torch.Tensor)}
    if len(counts) > 1:
        return None
    number = max([2, *counts])  # one sample has no other to be mixed with
    mode = static_mode()
    attributes = AttributeCopies(traced, fakes_of(mode))
    run = _SampleRun(traced, samples, outputs, own, statistics, _SampleWatch(number, sizes), attributes)
    with code_at_other_sizes(), mode, torch.no_grad(), suppress(Exception):  # code may ask for what fakes lack
        return run.found(scalar)
    return None


class _SampleRun(GraphInterpreter):
    """Runs what is behind the last nodes with weights."""

    def __init__(
        self,
        traced: TracedGraph,
        samples: Collection[Node],
        outputs: Collection[Node],
        own: Mapping[Node, Mixing],
        statistics: Collection[Node],
        watch: _SampleWatch,
        attributes: AttributeCopies,
    ) -> None:
        super().__init__()
        self._attributes = attributes
        self._traced, self._samples, self._outputs, self._own, self._watch = traced, samples, outputs, own, watch
        self._statistics, self._symbols = statistics, symbols_of_samples(samples)

    def found(self, scalar: Node) -> Mixing | None:
        needed: set[Node] = set()
        pending = [scalar]
        while pending:
            if (node := pending.pop()) not in needed:
                needed.add(node)
                pending += () if self._is_given(node) else node.all_input_nodes
        for node in self._traced.graph.nodes:
            if node in needed and self._is_given(node):
                self.values[node] = self._given(node)
            elif node in needed:
                with self._watch:
                    self.values[node] = self.run_node(node)
        mixing = self._watch.samples(self.values[scalar]).mixing
        return worst((mixing, "compares samples")) if self._watch.takes_some else mixing

    def _is_given(self, node: Node) -> bool:
        """Whether a value counts as an argument, or as one of outputs: what weights make do, up to a scalar."""
        if node.op in ("placeholder", "get_attr") or isinstance(value_of(node), Symbolic):
            return True
        maker = producer_of(node)
        if maker.op == "call_module":
            return not self._computes(self._traced.attribute(str(maker.target)))
        attributes = (each for each in maker.all_input_nodes if each.op == "get_attr")
        weights = (weight for each in attributes for weight in self._traced.parameters_of(each))
        return has_effect(maker) and not mutated_by(maker) or any(weight.numel() > 1 for weight in weights)

    @staticmethod
    def _computes(module: nn.Module) -> bool:
        """Whether a module of torch's is a function, such as a loss."""
        is_torchs = type(module).__module__.startswith("torch.nn.")
        has_tensors = any(True for _ in (*module.parameters(), *module.buffers()))
        return type(module) in OF_MODULES or is_torchs and not has_tensors

    def _given(self, node: Node) -> Any:
        value = value_of(node)
        if node.op == "get_attr":
            return self._attributes.at(node.target)
        if not isinstance(value, torch.Tensor):
            if isinstance(value, torch.SymInt):
                return self._size(value)
            return value.node.hint if isinstance(value, torch.SymFloat) else value
        dims = [dim for dim, size in enumerate(value.shape) if expression_of(size) in self._symbols]
        dims = [0] if node in self._samples else dims
        fake = torch.empty([*map(self._size, value.shape)], dtype=value.dtype)
        is_output = node.op != "placeholder" or node in self._outputs
        mixing: Mixing | None = "compares samples" if len(dims) > 1 else self._own.get(node)
        is_statistic = node in self._statistics and not dims
        if dims or mixing is not None or is_statistic:
            self._watch.put(fake, _Samples(dims[0] if len(dims) == 1 else None, is_statistic, is_output, mixing))
        return fake

    def _size(self, size: int | torch.SymInt) -> int:
        """That of the example, with as many samples as are watched."""
        return size_at(size, self._symbols, self._watch.sizes[0])

    def get_attr(self, node: Node) -> Any:
        raise AssertionError("it is given")

    def call_module(self, node: Node, args: Any, kwargs: Any) -> Any:
        return self._attributes.at(node.target).forward(*args, **kwargs)
