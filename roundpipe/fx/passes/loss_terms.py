"""The terms that a scalar of a graph adds up, and the graph with each of them weighed by itself.

A loss may be a linear combination: of sums over the batch, of means whose targets are made from arguments, and of what
is the same for every microbatch, such as a penalty on weights. Its coefficients are numbers, scalar arguments, or made
from weights. Then the graph tells what each microbatch counts for in each term, from its arguments alone. Of any other
scalar nothing is known: a product of two means is no mean.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.core.term_shares import weighed
from roundpipe.fx.graph.nodes import called_name, has_effect, hint, mutated_by, picks_samples, value_of
from roundpipe.fx.graph.traced import KeptValue, OutputValue, TracedGraph
from roundpipe.fx.passes.argument_values import ArgumentValues, Count, Divisor, symbols_of
from roundpipe.fx.passes.read_numbers import is_made_of_numbers, is_read
from roundpipe.fx.passes.row_losses import RowLoss, reduction_of_ctc
from roundpipe.fx.passes.sample_sums import SampleSum
from roundpipe.fx.sizes import Symbolic

_COPIES = ("to", "float", "double", "half", "bfloat16", "clone", "contiguous", "squeeze")
_UNARY = (*_COPIES, "neg", "negative", "detach", "cpu")
_SUMS = ("add", "radd", "sub", "rsub", "subtract")
_PRODUCTS = ("mul", "rmul", "multiply")
_QUOTIENTS = ("div", "truediv", "true_divide", "divide")
_OF_LISTS = ("stack", "sum", "mean")
_IN_PLACE = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div"}


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a loss of which it is known how those of microbatches make up that of the batch."""

    count: Count | None
    """What a microbatch counts for; None: it is a sum, which adds up."""
    is_mean: bool
    """Whether it is a mean over targets; else it is a sum, or the same for every microbatch."""
    divisor: Divisor | None = None
    """What it is divided by, given what it counts for; None: by that."""


@dataclass(slots=True)
class Combination:
    """A scalar as a linear combination."""

    terms: dict[Node, Term] = field(default_factory=dict)
    between: dict[Node, None] = field(default_factory=dict)
    """The nodes from the terms to the scalar, each behind those that it reads."""
    has_offset: bool = False
    """Whether a number is added to terms, as in ``1 - mean``; microbatches make up one if they do for a mean."""

    @property
    def counts(self) -> dict[Node, Count]:
        """By term that must be weighed, what a microbatch counts for."""
        return {node: term.count for node, term in self.terms.items() if term.count is not None}

    @property
    def has_mean(self) -> bool:
        return any(term.is_mean for term in self.terms.values())

    @property
    def weighed_mean(self) -> Node | None:
        """A mean that must be weighed; None: there is none."""
        return next((node for node in self.counts if self.terms[node].is_mean), None)


def factors_of(node: Node) -> Iterator[float | None]:
    """What a node between a term and the scalar multiplies it by, if it does; None: no number of the code's."""
    name = _name(node)
    if name in (*_PRODUCTS, *_QUOTIENTS):
        numbers = (_plain(each) for each in node.args)
        number = next((each for each in numbers if isinstance(each, int | float)), None)
        yield 1 / number if number and name in _QUOTIENTS else number


def _plain(factor: Any) -> Any:
    """A number; of one that is an input, the example's."""
    value = value_of(factor) if isinstance(factor, Node) else factor
    return value.node.hint if isinstance(value, Symbolic) else value


def combination(
    traced: TracedGraph,
    scalar: Node,
    arguments: ArgumentValues,
    given: Mapping[Node, Term] = MappingProxyType({}),
    sums: Mapping[Node, SampleSum] = MappingProxyType({}),
    bent: Collection[Node] = (),
) -> Combination | None:
    """A scalar as a linear combination of terms; None if it isn't known to be one.

    Args:
        arguments: those that targets and factors may be made of.
        given: terms that are known otherwise.
        sums: over samples or tokens, that are known as such.
        bent: scalars that are known not to be linear; as terms they count by samples.
    """
    found = Combination()
    is_linear = _TermSearch(traced, arguments, given, sums, bent, found).visit(scalar)
    if not is_linear or (found.has_offset and found.weighed_mean is None):
        return None
    parts = (*found.terms, *found.between)
    writers = {user for node in parts for user in node.users if node in mutated_by(user)}
    return found if writers <= found.between.keys() else None  # what is written may be read through a view


def weigh(
    traced: TracedGraph, scalar: Node, found: Combination, names: Mapping[Node, str], *, is_kept: bool = False
) -> None:
    """Give as output, in place of a scalar, the same combination with its terms weighed, by their ``names``.

    Or as what ``is_kept``, which adds up then.
    """
    copies: dict[Node, Node] = {}
    for node in found.counts:
        with traced.graph.inserting_after(traced.placeholders[-1] if node.op == "placeholder" else node):
            copies[node] = traced.graph.call_function(weighed, (node, names[node]))
        _describe(copies[node], node)
    for node in found.between:
        with traced.graph.inserting_after(node):
            copies[node] = traced.graph.node_copy(node, lambda source: copies.get(source, source))
        if found.weighed_mean is not None and _name(node) in _SUMS:
            _weigh_number(traced, copies[node], names[found.weighed_mean])
        if has_effect(node):  # what was made in place is made anew
            copies[node].op, copies[node].target = "call_method", _name(node)
        _describe(copies[node], node)
    name = copies.get(scalar, scalar).name

    def replaced(leaf: Any) -> Any:
        return type(leaf)(name) if isinstance(leaf, OutputValue) and leaf.name == scalar.name else leaf

    if is_kept:
        traced.kept = [KeptValue(place, trees.map_leaves(value, replaced)) for place, value in traced.kept]
        traced.added |= {name}
    else:
        traced.output = trees.map_leaves(traced.output, replaced)
    *_, output = traced.graph.nodes
    by_name = {node.name: node for node in traced.graph.nodes}
    output.args = (tuple(by_name[name] for name in traced.returned_names),)


def _weigh_number(traced: TracedGraph, added: Node, name: str) -> None:
    """Have a number that is added to something count for as much as the term of a ``name``."""
    value, number = value_of(added), next((each for each in added.args if not isinstance(each, Node)), None)
    if number is None or not isinstance(value, torch.Tensor):
        return
    (other,) = (each for each in added.args if isinstance(each, Node))
    with traced.graph.inserting_before(added):
        whole = traced.graph.call_function(torch.full_like, (other, number), {"dtype": value.dtype})
        copy = traced.graph.call_function(weighed, (whole, name))
    _describe(whole, added)
    _describe(copy, added)
    added.args = tuple(each if each is other else copy for each in added.args)


def _describe(node: Node, original: Node) -> None:
    """What the compiler knows of a node that computes what another does, in memory of its own."""
    value = value_of(original)
    assert isinstance(value, torch.Tensor)
    node.meta = {**original.meta, "value": value.clone(), "mutates": (), "effect": False, "random": False}
    if node.target is weighed:
        node.meta.pop("buffers_written", None)


def sources(node: Node) -> Iterator[Node]:
    """A scalar, and what it was before it was weighed, cast or copied."""
    yield node
    while _name(node) in (*_COPIES, "weighed") and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
        yield node


# ---------------------------------------------------------------------------------- the search


@dataclass(frozen=True, slots=True)
class _TermSearch:
    traced: TracedGraph
    arguments: ArgumentValues
    given: Mapping[Node, Term]
    sums: Mapping[Node, SampleSum]
    bent: Collection[Node]
    found: Combination

    def visit(self, scalar: Node) -> bool:
        """Whether a scalar is linear in terms, which are added to those found."""
        open_nodes, is_linear = [self._visit(scalar)], None
        while open_nodes:  # no recursion: a sum over steps in time has thousands of terms
            try:
                open_nodes.append(self._visit(open_nodes[-1].send(is_linear)))
                is_linear = None
            except StopIteration as end:
                open_nodes.pop()
                is_linear = end.value
        return bool(is_linear)

    def _visit(self, node: Any) -> Generator[Any, bool | None, bool]:
        """The same of any operand; it asks about its own operands."""
        if not isinstance(node, Node):
            is_number = type(node) in (int, float)
            self.found.has_offset |= is_number and node != 0  # with which `sum` begins
            return is_number
        if node in self.found.terms or node in self.found.between:
            return True
        term = self.given.get(node) or self._term(node) or self._sum(node) or self._quotient(node)
        if term is not None:
            self.found.terms[node] = term
            return True
        operands, found = self._operands(node), self.found
        before = found.terms.copy(), found.between.copy(), found.has_offset
        for operand in operands or ():
            if not (yield operand):
                break
        else:
            if operands is not None:
                found.between[node] = None
                return True
        if node in self.bent and (count := self.arguments.samples()) is not None:
            found.terms, found.between, found.has_offset = before
            found.terms[node] = Term(count, is_mean=True)
            return True
        return False

    def _operands(self, node: Node) -> Sequence[Any] | None:
        """What a node is linear in; None if it isn't, as far as is known."""
        name, args = _name(node), node.args
        if node.op not in ("call_function", "call_method") or not args or not isinstance(value_of(node), torch.Tensor):
            return None
        if name in _UNARY:
            return args[:1]
        if name in _OF_LISTS and len(args) == 1 and not node.kwargs:
            return args[0] if isinstance(args[0], list | tuple) else args
        if len(args) != 2 or set(node.kwargs) - {"alpha"} or isinstance(node.kwargs.get("alpha"), Node):
            return None
        first, second = map(self._is_factor, args)
        if name in _SUMS:
            return args
        if name in _PRODUCTS and (first or second):
            return args[:1] if second else args[1:]
        return args[:1] if name in _QUOTIENTS and second else None

    def _is_factor(self, value: Any) -> bool:
        """Whether a factor is the same for every microbatch: a number, a scalar argument, or made from weights."""
        if not isinstance(value, Node):
            return isinstance(value, int | float) and not is_read(self.traced, value)
        if is_read(self.traced, value):
            return False
        if is_made_of_numbers(self.traced, value):
            return True
        *_, source = sources(value)  # losses of transformers move a scalar argument to their device
        if not isinstance(found := value_of(source), torch.Tensor):
            return False
        is_argument = source.op == "placeholder" and not found.ndim and self.arguments.has(source)
        return is_argument or self.arguments.is_alike(value)

    def _term(self, node: Node) -> Term | None:
        module = self.traced.attribute(str(node.target)) if node.op == "call_module" else None
        loss = RowLoss.of(node, module, may_hold=True)
        if loss is not None:
            return self._of_loss(loss, module)
        if (reduction := reduction_of_ctc(node, module)) is not None:
            count = self.arguments.samples() if reduction == "mean" else None
            is_known = reduction == "sum" or count is not None
            return Term(count, is_mean=reduction == "mean") if is_known else None
        is_alike = isinstance(value_of(node), torch.Tensor) and self.arguments.is_alike(node)
        return Term(lambda arguments: 1.0, is_mean=False) if is_alike else None

    def _sum(self, node: Node) -> Term | None:
        if (rows := self.sums.get(node)) is None:
            return None
        count = self.arguments.rows(rows) if rows.is_mean else None
        return None if rows.is_mean and count is None else Term(count, rows.is_mean)

    def _quotient(self, node: Node) -> Term | None:
        """A combination of sums over a number that arguments tell."""
        if _name(node) not in _QUOTIENTS or len(node.args) != 2 or node.kwargs:
            return None
        above, below = node.args
        if not isinstance(above, Node) or (divisor := self._divisor(below)) is None:
            return None
        parts = combination(self.traced, above, self.arguments, self.given, self.sums)
        is_sum = parts is not None and all(term.count is None and not term.is_mean for term in parts.terms.values())
        return Term(divisor[0], True, divisor[1]) if is_sum else None

    def _divisor(self, value: Any) -> tuple[Count, Divisor | None] | None:
        if isinstance(value, Node):
            return None if self._is_factor(value) else self.arguments.divisor(value, self.sums)
        count = self.arguments.fixed(value) if isinstance(value, float) else None  # an int may be anything
        return None if count is None else (count, None)

    def _of_loss(self, loss: RowLoss, module: nn.Module | None) -> Term | None:
        if loss.reduction == "sum":
            return Term(None, is_mean=False)
        target, ignored = loss.target, loss.arguments.get("ignore_index", -100)
        if isinstance(target, Node) and _is_of_some(target):
            return None
        values = [value_of(each) if isinstance(each, Node) else None for each in (loss.arguments["input"], target)]
        scores, value = values
        if not isinstance(scores, torch.Tensor) or not isinstance(value, torch.Tensor) or _compares_samples(scores):
            return None
        is_like = list(map(hint, value.shape)) == list(map(hint, scores.shape))  # or one is repeated for the other
        if loss.reduction == "batchmean":
            count = self.arguments.first_size(scores) if is_like else None
            return Term(count, is_mean=True) if count is not None else None
        weight = loss.arguments.get("weight")
        if not self.arguments.has_data_of(target):
            return None
        if isinstance(weight, Node) and not self.arguments.is_constant(weight):
            return None
        if not loss.is_by_weight(value):
            if weight is not None:
                return None
            return Term(self.arguments.counter(target), is_mean=True) if is_like else None
        is_known = not isinstance(ignored, Node) or self.arguments.has(ignored)
        if isinstance(weight, torch.Tensor):  # the module may have another one by then
            weight = partial(getattr, module, "weight")
        return Term(self.arguments.counter(target, ignored, weight), is_mean=True) if is_known else None


def _name(node: Node) -> str:
    """What a node calls, such as ``add`` for ``+`` and ``+=``."""
    name = called_name(node)
    return _IN_PLACE.get(name, name)


def _is_of_some(target: Node) -> bool:
    """Whether targets are of one of several samples, as in a loop over them, or of some; a piece has others there."""
    seen, open_nodes = {target}, [target]
    while open_nodes:
        node = open_nodes.pop()
        if picks_samples(node):
            return True
        new = set(node.all_input_nodes) - seen
        seen |= new
        open_nodes += new
    return False


def _compares_samples(scores: torch.Tensor) -> bool:
    """Whether scores are of each sample with each, as in a contrastive loss, which is one of all samples together."""
    first, *others = scores.shape or (1,)
    return any(symbols_of(first) & symbols_of(size) for size in others)
