"""Loss functions whose graph, behind a model's, shows what each of their terms is a mean of.

The targets of a mean are counted from the label alone. A loss that the model computes itself is a term as well, by what
its own graph shows. And where a function returns a weight beside each loss, these are what the losses count for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.core.layers import Mixing, OwnLoss
from roundpipe.fx.graph.nodes import value_of
from roundpipe.fx.graph.traced import OutputNumber, OutputValue, TracedGraph, output_names
from roundpipe.fx.passes.argument_values import ArgumentValues, Count, Divisor, is_in_proportion
from roundpipe.fx.passes.loss_numbers import LABEL, OUTPUTS, Arguments, Made, made_by_graph
from roundpipe.fx.passes.loss_state import has_state
from roundpipe.fx.passes.loss_terms import Combination, Term, combination, factors_of, weigh
from roundpipe.fx.passes.mixing_rules import worst
from roundpipe.fx.passes.sample_dependence import mixing_of_samples
from roundpipe.fx.passes.sample_mixing import mixing_of
from roundpipe.fx.passes.sample_sums import SampleSum, nodes_in_rows, sample_sums

Rowless = Mapping[trees.Path, bool]
"""Places of outputs without a dimension for samples, and whether they are made of these."""
_NONE: Rowless = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CountedLosses:
    """What each microbatch counts for in the terms of the losses of a function."""

    own: tuple[OwnLoss, ...]
    """Losses of the model's own that are among the terms, and whose terms its graph weighs."""
    terms: Mapping[str, Term]
    """By name, those that the function's graph weighs; they count from the model's arguments and the label."""
    is_one_mean: bool
    """Whether there is one loss, and it is a mean of one kind of targets, up to a factor."""
    factors: tuple[float | None, ...] = ()
    """What means are multiplied by; None: no number of the code's."""

    def counts(self, args: tuple[Any, ...], kwargs: dict[str, Any], label: Any) -> dict[str, float]:
        """Of one microbatch, by name of a term."""
        found = {name: count for own in self.own for name, count in own.counts(args, kwargs).items()}
        counts = {name: term.count for name, term in self.terms.items() if term.count is not None}
        return {**found, **{name: count(((args, kwargs), {LABEL: label})) for name, count in counts.items()}}

    @property
    def divisors(self) -> dict[str, Divisor]:
        """By name of a term, what it is divided by, if that is not what it counts for."""
        return {name: term.divisor for name, term in self.terms.items() if term.divisor is not None}


def count_losses(
    loss: TracedGraph,
    own: Collection[OwnLoss],
    whole: Collection[trees.Path] = (),
    rowless: Rowless = _NONE,
) -> CountedLosses | None:
    """What the graph of a `LossCall` tells, which is changed so that it weighs its terms; None: not enough.

    A function that returns weights beside its losses returns the losses alone, then. At the places ``whole`` the label
    is not split; ``rowless``: see `Rowless`.
    """
    of_label = _of_label(loss, rowless)
    result = loss.output
    if not isinstance(result, tuple) or len(result) != 2:
        return _by_terms(loss, result, of_label, own, whole, rowless)
    losses, weights = result
    is_each = type(losses) in (list, tuple) and type(weights) in (list, tuple) and len(losses) == len(weights)
    return _by_weights(loss, losses, weights, of_label) if is_each else None


def _of_label(loss: TracedGraph, rowless: Rowless) -> ArgumentValues:
    """What is made from the label; outputs that are made of no samples are of weights."""

    def is_of_weights(name: str) -> bool:
        _, argument, *path = loss.input_paths[name]
        return argument.key == OUTPUTS and rowless.get(tuple(path)) is False

    return ArgumentValues(loss, lambda name: loss.input_paths[name][1].key == LABEL, is_of_weights)


def mixing_of_losses(
    loss: TracedGraph,
    samples: Collection[trees.Path],
    of_model: Mapping[trees.Path, Mixing] = MappingProxyType({}),
    sizes: Collection[int] = (),
    rowless: Rowless = _NONE,
) -> Mixing | None:
    """How the losses of a `LossCall`, as it was traced, mix samples.

    Args:
        loss: its graph.
        samples: places in ``(outputs, label)`` where the first dimension counts samples.
        of_model: how losses of the model's own do, by their places in the outputs.
        sizes: of the microbatches.
        rowless: see `Rowless`.
    """
    places = {node: tuple(loss.input_paths[node.name][1:]) for node in loss.placeholders}
    with_samples = [node for node, path in places.items() if path in samples]
    outputs = [node for node, (argument, *_) in places.items() if argument.key == OUTPUTS]
    own = {node: of_model[places[node][1:]] for node in outputs if places[node][1:] in of_model}
    nodes = _scalars(loss, _without_weights(loss.output)) or ()
    if has_state(nodes):
        return "has state"
    over_samples = [node for node in outputs if rowless.get(places[node][1:])]
    followed = worst(mixing_of(loss, node, with_samples, outputs, own, sizes, over_samples) for node in nodes)
    return followed or mixing_of_samples(loss, nodes, with_samples, outputs)


def made_by_numbers(
    trace: Callable[[Arguments], TracedGraph], examples: Sequence[Arguments], sizes: Sequence[int]
) -> Made | None:
    """What the losses of a batch are seen to be, given those of its microbatches; None: they can't be tried.

    Args:
        trace: gives the graph of a `LossCall` for some arguments.
        examples: what it is called with for each microbatch; outputs have no data.
        sizes: of these, in samples.
    """
    return made_by_graph(trace, lambda loss: _scalars(loss, loss.output) or (), examples, sizes)


def are_sums(
    loss: TracedGraph,
    own: Collection[OwnLoss],
    whole: Collection[trees.Path] = (),
    rowless: Rowless = _NONE,
) -> bool:
    """Whether the losses of a `LossCall` are sums over samples, up to factors, which nothing divides by their number.

    ``own``, ``whole``, ``rowless``: see `count_losses`.
    """
    of_label, given = _of_label(loss, rowless), {node: _term_of(each) for node, each in _own_by_node(loss, own).items()}
    nodes, sums = _scalars(loss, _without_weights(loss.output)) or (), _sums(loss, whole, rowless)
    found = [combination(loss, node, of_label, given, sums) for node in nodes]
    return bool(found) and all(
        each is not None and not each.has_mean and any(term.count is None for term in each.terms.values())
        for each in found
    )


def _by_terms(
    loss: TracedGraph,
    losses: Any,
    of_label: ArgumentValues,
    own: Collection[OwnLoss],
    whole: Collection[trees.Path],
    rowless: Rowless,
) -> CountedLosses | None:
    """By the means that the graph shows."""
    by_node = _own_by_node(loss, own)
    given = {node: _term_of(each) for node, each in by_node.items()}
    nodes = _scalars(loss, losses) or ()
    found = {node: combination(loss, node, of_label, given) for node in nodes}
    sums = _sums(loss, whole, rowless) if None in found.values() or loss.kept else {}
    if None in found.values():
        found = {node: combination(loss, node, of_label, given, sums) for node in nodes}
    parts = {node: each for node, each in found.items() if each is not None}
    if not parts or len(parts) < len(found) or not any(each.has_mean for each in parts.values()):
        return None
    kept = {node: combination(loss, node, of_label, given, sums) for node in _kept_scalars(loss)}
    # what is a number of targets, or of hits, is no mean
    kept_parts = {node: each for node, each in kept.items() if each and (_is_float(node) or not each.counts)}
    terms = {term for each in (*parts.values(), *kept_parts.values()) for term in each.terms}
    weighed_before = {each.path: each for node, each in by_node.items() if node in terms and each.has_terms}
    weighed = _weigh(loss, parts, kept_parts)
    loss.added |= {node.name for node in _kept_sizes(loss, whole)}
    is_one_mean = len(parts) == len(terms) == 1 and not weighed_before
    is_one_mean = is_one_mean and all(term.divisor is None for term in weighed.values())
    factors = tuple(factor for each in parts.values() for node in each.between for factor in factors_of(node))
    return CountedLosses(tuple(weighed_before.values()), weighed, is_one_mean, factors)


def _kept_nodes(loss: TracedGraph) -> Iterator[tuple[Node, Any]]:
    """What a function leaves in Python, with the values of the trace."""
    nodes = {node.name: node for node in loss.graph.nodes}
    names = dict.fromkeys(output_names([value for _, value in loss.kept]))
    return ((node, value_of(node)) for node in map(nodes.__getitem__, names))


def places_of_numbers(loss: TracedGraph) -> Iterator[str]:
    """In words, where a function leaves a number that it computes, be it in a tensor, in the place of another."""
    scalars = {node.name for node in _kept_scalars(loss)}
    kept = ((place, output_names(value)) for place, value in loss.kept if not place.is_appended)
    return (place.words for place, names in kept if not scalars.isdisjoint(names))


def _kept_scalars(loss: TracedGraph) -> Iterator[Node]:
    return (node for node, value in _kept_nodes(loss) if isinstance(value, torch.Tensor) and value.numel() == 1)


def _kept_sizes(loss: TracedGraph, whole: Collection[trees.Path]) -> Iterator[Node]:
    """Those sizes that are in proportion to the number of samples."""
    paths = {node: loss.input_paths[node.name] for node in loss.placeholders}
    of_batch = [value_of(node) for node, (_, _, *path) in paths.items() if tuple(path) not in whole]
    first: list[Any] = [tensor.shape[0] for tensor in of_batch if isinstance(tensor, torch.Tensor) and tensor.ndim]
    numbers = [size.node.expr for size in first if isinstance(size, torch.SymInt)]
    sizes = ((node, value) for node, value in _kept_nodes(loss) if isinstance(value, torch.SymInt))
    return (node for node, size in sizes if is_in_proportion(size, numbers))


def note_kept_rows(loss: TracedGraph, whole: Collection[trees.Path], rowless: Rowless) -> None:
    """Note in a graph which of the values that are kept have a row for each sample.

    ``whole``, ``rowless``: see `count_losses`.
    """
    kept = {node for node, value in _kept_nodes(loss) if isinstance(value, torch.Tensor) and value.ndim}
    if kept:
        loss.in_rows = frozenset(node.name for node in kept & nodes_in_rows(loss, *_by_rows(loss, whole, rowless)))


def _sums(loss: TracedGraph, whole: Collection[trees.Path], rowless: Rowless) -> dict[Node, SampleSum]:
    """The sums and means over samples."""
    return sample_sums(loss, *_by_rows(loss, whole, rowless))


def _by_rows(
    loss: TracedGraph, whole: Collection[trees.Path], rowless: Rowless
) -> tuple[Collection[Node], Collection[Node]]:
    """Arguments of the samples, and those that each microbatch has as a whole."""
    places = {node: loss.input_paths[node.name] for node in loss.placeholders}
    of_model = [(node, tuple(path)) for node, (_, (_, argument), *path) in places.items() if argument == OUTPUTS]
    outputs = [node for node, path in of_model if path not in rowless]
    in_one = [node for node, path in of_model if path in rowless]
    of_label = ((node, tuple(path)) for node, (_, (_, argument), *path) in places.items() if argument == LABEL)
    in_one += [node for node, path in of_label if path in whole]
    return outputs, in_one


def _by_weights(loss: TracedGraph, losses: Any, weights: Any, of_label: ArgumentValues) -> CountedLosses | None:
    """By the weights that the function returns."""
    nodes, counts = _scalars(loss, losses), [_weight(loss, weight, of_label) for weight in weights]
    if nodes is None or len(set(nodes)) < len(nodes):
        return None
    terms = {node: Term(count, is_mean=True) for node, count in zip(nodes, counts, strict=True) if count is not None}
    if len(terms) < len(nodes):
        return None
    loss.output = list(losses)
    parts = {node: Combination({node: term}) for node, term in terms.items()}
    return CountedLosses((), _weigh(loss, parts), is_one_mean=len(parts) == 1)


def _weigh(
    loss: TracedGraph, parts: Mapping[Node, Combination], kept: Mapping[Node, Combination] = MappingProxyType({})
) -> dict[str, Term]:
    """Weighs the terms of losses, and of what is kept beside them; gives all terms."""
    terms = {node: each.terms[node] for each in (*parts.values(), *kept.values()) for node in each.counts}
    names = {node: f"loss_fn {position}" for position, node in enumerate(terms)}
    for node, each in parts.items():
        weigh(loss, node, each, names)
    for node, each in kept.items():
        weigh(loss, node, each, names, is_kept=True)
    return {names[node]: term for node, term in terms.items()}


def _without_weights(result: Any) -> Any:
    """The losses of what a function has returned, which may have weights beside them."""
    return result[0] if isinstance(result, tuple) and len(result) == 2 else result


def _scalars(loss: TracedGraph, losses: Any) -> list[Node] | None:
    """The nodes of one loss or of several; None if some are no scalars of the graph, or numbers of Python's."""
    leaves = list(losses) if type(losses) in (list, tuple) else [losses]
    if any(isinstance(leaf, OutputNumber) for leaf in leaves):
        return None
    nodes = [node for leaf in leaves if (node := _node_of(loss, leaf)) is not None and _is_scalar(node)]
    return nodes if len(nodes) == len(leaves) else None


def _is_scalar(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.numel() == 1 and _is_float(node)


def _is_float(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _weight(loss: TracedGraph, weight: Any, of_label: ArgumentValues) -> Count | None:
    """What a weight that the function returns is made of, if that is the label."""
    if isinstance(weight, int | float):
        return lambda arguments: float(weight)
    node = _node_of(loss, weight)
    if node is None or not of_label.has(node):
        return None
    value = value_of(node)
    return None if isinstance(value, torch.Tensor) and value.numel() != 1 else of_label.number(node)


def _node_of(loss: TracedGraph, leaf: Any) -> Node | None:
    if not isinstance(leaf, OutputValue):  # whatever else a function returns may do anything when it is compared
        return None
    return next((node for node in loss.graph.nodes if node.name == leaf.name), None)


def _own_by_node(loss: TracedGraph, own: Collection[OwnLoss]) -> dict[Node, OwnLoss]:
    """Losses of the model's own among the arguments."""
    by_path = {each.path: each for each in own}
    found: dict[Node, OwnLoss] = {}
    for node in loss.placeholders:
        _, (_, argument), *path = loss.input_paths[node.name]
        if argument == OUTPUTS and (each := by_path.get(tuple(path))) is not None:
            found[node] = each
    return found


def _term_of(own: OwnLoss) -> Term:
    if own.has_terms or not own.weights:  # the model's graph weighs its terms, or it is a sum
        return Term(None, is_mean=bool(own.weights))
    (weight,) = own.weights.values()
    return Term(lambda arguments: weight(*arguments[0]), is_mean=True)
