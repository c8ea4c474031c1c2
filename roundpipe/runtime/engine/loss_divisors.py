"""What a loss of one microbatch is divided by, as autograd's graph of it shows.

Losses that are averaged by samples make up the loss of the batch if each term's divisor is in proportion to these. The
graph is read from the loss down to the reduction of each term; nothing runs, and nothing large is kept.

Private to torch, and asked for here alone: names of autograd's nodes, what they save, and the shapes of what they made.
`tests/runtime/test_loss_divisors.py` says what is expected of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.autograd.graph import Node, get_gradient_edge

from roundpipe.core import trees

Verdict = Literal["right", "compares samples", "not by samples", "not linear", "sum", "unknown"]
"""Of losses that were averaged by samples, or by weights: whether that is the loss of the batch, and if not, why."""

_PASSING = frozenset("ToCopy Clone Alias Squeeze Unsqueeze View UnsafeView ReshapeAlias Neg".split())
_BENT = frozenset(
    "Sqrt Rsqrt Pow Exp Expm1 Log Log1p Log2 Log10 Reciprocal Tanh Sigmoid Softplus LogSigmoid Abs Relu Clamp ClampMin "
    "ClampMax Maximum Minimum".split()
)
"""Functions of a scalar that no mean goes through."""
_COMPARING = frozenset("Mm Addmm Mv Dot Cdist EuclideanDist Pdist".split())
"""Products and distances that have rows of one operand meet all rows of the other."""
_APART = frozenset("Select Unbind".split())
"""What may take one sample of all."""
_PARTS = frozenset("Slice Split".split())
"""What may take one, with its dimension."""
_MEAN, _SUM = 1, 2
"""Reductions as torch's losses save them."""
_EXACT, _HALF, _GIVEN = 1e-6, 1e-2, 1e-3
"""How far divisors may be from the proportion, by their precision, and to weights, to which code may add a little."""


Divisors = tuple[float | torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class LossPart:
    """A reduction among those that a loss adds up."""

    kind: Literal["divided", "sum", "compares samples", "not linear", "unknown"]
    """``"sum"`` is one of torch's losses by ``reduction="sum"``, divided by nothing."""
    divisors: Divisors = ()
    others: Divisors | None = None
    """Those of them that are no mean's own; None: it is no mean over all elements."""

    def divisor(self) -> float:
        """Waits for the device."""
        return math.prod(map(float, self.divisors), start=1.0)

    def is_mean(self) -> bool:
        """Whether it is a mean, which nothing else divides; waits for the device."""
        return self.others is not None and math.prod(map(float, self.others), start=1.0) < 1 + _HALF


def ends_of(value: Any) -> frozenset[Node]:
    """The nodes of autograd's graph that made the tensors in a value, such as a model's outputs."""
    return frozenset(get_gradient_edge(each).node for each in trees.tensors(value) if each.requires_grad)


def terms_of(loss: torch.Tensor, ends: frozenset[Node] = frozenset()) -> list[LossPart]:
    """The terms of a loss that depend on the ends, or on anything that requires grad if there are none."""
    if not loss.requires_grad:
        return [LossPart("unknown")]
    walk, edge = _GradientWalk(ends), (loss.grad_fn, loss.output_nr)
    walk.is_alone = walk.is_of_one(edge)
    walk.visit(edge, (), ())
    return walk.found


def verdict(
    microbatches: Sequence[Sequence[LossPart]], shares: Sequence[float], *, are_weights: bool = False
) -> Verdict:
    """Whether losses with these terms, averaged by shares of samples, or by weights, are that of the batch."""
    if len({len(terms) for terms in microbatches}) > 1:
        return "unknown"
    tolerance = _GIVEN if are_weights else _EXACT
    each = [_of_term(terms, shares, tolerance) for terms in zip(*microbatches, strict=True)]
    if len(each) > 1 and "sum" in each and "compares samples" not in each:
        return "sum" if set(each) == {"sum"} else "not by samples"
    order: tuple[Verdict, ...] = ("compares samples", "not by samples", "not linear", "sum", "unknown")
    return next((kind for kind in order if kind in each), "right")


def _of_term(terms: Sequence[LossPart], shares: Sequence[float], tolerance: float) -> Verdict:
    kinds = {term.kind for term in terms}
    if "compares samples" in kinds:
        return "compares samples"
    if len(kinds) > 1:
        return "unknown"
    if kinds == {"not linear"}:
        return "not linear"
    if kinds == {"sum"}:
        return "sum"
    half = (torch.float16, torch.bfloat16)
    is_half = any(isinstance(each, torch.Tensor) and each.dtype in half for term in terms for each in term.divisors)
    divisors, tolerance = [term.divisor() for term in terms], _HALF if is_half else tolerance

    def are_equal(numbers: Sequence[float]) -> bool:
        return all(math.isclose(each, numbers[0], rel_tol=tolerance) for each in numbers)

    counting = [(divisor, share) for divisor, share in zip(divisors, shares, strict=True) if share]
    is_even = are_equal([divisor / share for divisor, share in counting]) if counting else not any(divisors)
    if kinds == {"unknown"}:  # a loss of the model's own may be a sum, or a mean with a factor
        return "unknown" if is_even or are_equal(divisors) else "not by samples"
    return "right" if is_even else "not by samples"


Edge = tuple[Any, int]
"""A node of autograd's graph, and which of its results."""


@dataclass(slots=True)
class _GradientWalk:
    ends: frozenset[Node]
    found: list[LossPart] = field(default_factory=list)
    is_alone: bool = False
    """Whether there is one sample in all, as far as code takes them one by one."""
    _pending: list[tuple[Edge, Divisors, Divisors]] = field(default_factory=list)
    _reaching: dict[Node, bool] = field(default_factory=dict)
    _lengths: set[Sequence[int]] = field(default_factory=set)
    """Of the ends' first dimensions."""

    def __post_init__(self) -> None:
        self._lengths.update(_shape((end, 0))[:1] for end in self.ends)

    def visit(self, edge: Edge, divisors: Divisors, others: Divisors) -> None:
        """Find the terms of a scalar that the loss has, divided by numbers, of which ``others`` are no mean's own."""
        self._pending.append((edge, divisors, others))
        num_before = len(self._pending) - 1
        while len(self._pending) > num_before:  # sums over steps in time have thousands of terms
            self._look_at(*self._pending.pop())

    def _look_at(self, edge: Edge, divisors: Divisors, others: Divisors) -> None:
        node = edge[0]
        if node is None or not self._reaches(node):  # the same for every microbatch
            return
        name, edges = _name(node), node.next_functions
        if node in self.ends or _shape(edge) and name not in _PASSING:
            self.found.append(LossPart("unknown", divisors))
        elif name in _PASSING:
            self._pending.append((edges[0], divisors, others))
        elif name in ("Add", "Sub", "Rsub"):
            self._pending += [(each, divisors, others) for each in reversed(edges)]
        elif not self.is_alone and self.is_of_one(edge):  # what it is divided and multiplied by may be its own
            is_sum = not divisors and getattr(node, "_saved_reduction", None) == _SUM
            self.found.append(LossPart("sum") if is_sum else LossPart("unknown", divisors))
        elif name in ("Mul", "Div"):
            self._visit_scaled(node, name, divisors, others)
        elif name in ("Sum", "Mean") and not _shape(edges[0]):
            self.visit(edges[0], divisors, others)
        elif name in ("Sum", "Mean") and _name(edges[0][0]) in ("Stack", "Cat"):
            number, first = (float(math.prod(_shape(edges[0]))),) if name == "Mean" else (), len(self.found)
            for each in edges[0][0].next_functions:
                self.visit(each, (*divisors, *number), others)
            if not number:  # one of each sample, maybe
                self.found[first:] = [replace(part, others=None) for part in self.found[first:]]
        elif name in ("Sum", "Mean"):
            self._reduced(edge, divisors, others)
        elif getattr(node, "_saved_reduction", None) in (_MEAN, _SUM):
            self._torchs_loss(node, divisors, others)
        else:
            is_bent = name in _BENT and not _shape(edges[0])
            self.found.append(LossPart("not linear" if is_bent and self._is_certain else "unknown"))

    @property
    def _is_certain(self) -> bool:
        """Whether a term that is found is known to be made of outputs, not of weights or of one sample alone."""
        return bool(self.ends) and not self.is_alone

    def is_of_one(self, edge: Edge) -> bool:
        """Whether it is made of one sample, which code has taken out of all by its place."""
        pending, seen, places = [edge], set[Edge](), set[int]()
        while pending and len(places) < 2:
            node, index = edge = pending.pop()
            if node is None or edge in seen:
                continue
            seen.add(edge)
            if node in self.ends:
                return False
            if (place := _place_taken(edge)) is not None and _shape(node.next_functions[0])[:1] in self._lengths:
                places.add(place)
            else:
                pending += node.next_functions
        return len(places) == 1

    def _visit_scaled(self, node: Any, name: str, divisors: Divisors, others: Divisors) -> None:
        """A product or quotient of scalars."""
        first, second, *_ = *(each is not None and self._reaches(each) for each, _ in node.next_functions), False
        if name == "Div" and first and not second:
            number = _small(node._saved_other)
            self.visit(node.next_functions[0], (*divisors, number), (*others, number))
        elif name == "Mul" and first != second:
            factor = node._saved_other if first else node._saved_self
            number = 1 / _small(factor)
            self.visit(node.next_functions[second], (*divisors, number), (*others, number))
        else:
            self.found.append(LossPart("not linear" if self._is_certain else "unknown"))

    def _torchs_loss(self, node: Any, divisors: Divisors, others: Divisors) -> None:
        if node._saved_reduction == _SUM:
            self._add(node, LossPart("divided", divisors) if divisors else LossPart("sum"))
            return
        weight = getattr(node, "_saved_total_weight", None)
        number = float(math.prod(_shape(node.next_functions[0]))) if weight is None else _small(weight)
        self._add(node, LossPart("divided", (*divisors, number), others))

    def _reduced(self, edge: Edge, divisors: Divisors, others: Divisors) -> None:
        """A sum or mean over elements, or one of another over some of their dimensions."""
        own: tuple[float, ...] = ()
        while (name := _name(edge[0])) in ("Sum", "Mean", *_PASSING) and edge[0] not in self.ends:
            (source,) = edge[0].next_functions
            if name == "Mean":
                own = (*own, math.prod(_shape(source)) / max(math.prod(_shape(edge)), 1))
            edge = source
        is_mean = bool(own) and math.prod(own) == math.prod(_shape(edge))
        is_known = bool(divisors or own) and not self._has_scalars(edge[0])
        part = LossPart("divided", (*divisors, *own), others if is_mean else None)
        self._add(edge[0], part if is_known else LossPart("unknown"))

    def _add(self, node: Any, part: LossPart) -> None:
        """A term that a node has reduced elements to, or whose elements it has made."""
        is_compared = self._is_certain and any(self._compares(each) for each in self._behind(node))
        self.found.append(LossPart("compares samples") if is_compared else part)

    def _compares(self, node: Any) -> bool:
        """Whether outputs meet outputs in a product or a distance, as samples do in a contrastive loss."""
        if node in self.ends or _name(node) not in _COMPARING:
            return False
        sources = [each for each, _ in node.next_functions if each is not None]
        has_outputs = [not self.ends.isdisjoint(self._behind(each, of_all=True)) for each in sources]
        return sum(has_outputs) > 1 or any(has_outputs) and _name(node) == "Pdist"

    def _has_scalars(self, node: Any) -> bool:
        """Whether elements are made of scalars that outputs were reduced to before, such as losses in a row."""
        return any(not _shape((each, 0)) and self._reaches(each) for each in self._behind(node))

    def _reaches(self, node: Any) -> bool:
        """Whether what a node makes depends on outputs."""
        if not self.ends:
            return True
        if node not in self._reaching:
            self._reaching[node] = any(each in self.ends for each in self._behind(node))
        return self._reaching[node]

    def _behind(self, node: Any, *, of_all: bool = False) -> Iterator[Any]:
        """The nodes from one to the model's outputs, or to leaves; ``of_all``: or to where one of all is taken."""
        pending, seen = [node], {None}
        while pending:
            if (one := pending.pop()) not in seen:
                seen.add(one)
                yield one
                if one not in self.ends and not (of_all and _name(one) in _APART and not one._saved_dim):
                    pending += [each for each, _ in one.next_functions]


def _name(node: Any) -> str:
    """``"Div"`` for torch's ``DivBackward0``; none for functions that torch does not have."""
    found = None if node is None else re.fullmatch(r"(\w+?)Backward\d+", node.name())
    return "" if found is None else found[1]


def _place_taken(edge: Edge) -> int | None:
    """Of which entry alone, along the first dimension, something is."""
    node, index = edge
    name = _name(node)
    if name not in _APART | _PARTS or node._saved_dim:
        return None
    if name == "Select":
        return int(node._saved_index)
    if name == "Unbind":
        return index
    return (index if name == "Split" else int(node._saved_start)) if _shape(edge)[0] == 1 else None


def _shape(edge: Edge) -> Sequence[int]:
    """Of what a node made."""
    node, index = edge
    variable = getattr(node, "variable", None)
    return tuple(node._input_metadata[index].shape if variable is None else variable.shape)


def _small(scalar: torch.Tensor | float) -> torch.Tensor | float:
    """A scalar in memory of its own, without autograd."""
    if not isinstance(scalar, torch.Tensor):
        return scalar
    with torch.no_grad():  # where a mode counts memory, operators take a number of the code's for no tensor
        return torch.empty(scalar.shape, dtype=scalar.dtype, device=scalar.device).copy_(scalar)
