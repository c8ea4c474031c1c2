"""What a model's own scalar outputs are, as its graph shows: a sum over the batch, or means, and of how many targets.

A loss that the forward returns is a linear combination of `cross_entropy` or the like as a rule, or of sums over
samples. Then the graph tells what each microbatch counts for in each of its terms, before it runs. A sum adds up, and a
loss with one mean is weighed as a whole; in the graph of any other the terms are weighed before they are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import sympy
import torch
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.core.layers import Mixing, OwnLoss
from roundpipe.fx.arguments import CallForm
from roundpipe.fx.graph.nodes import called_name, past_calls, value_of
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.passes.argument_values import ArgumentValues, Count, Divisor
from roundpipe.fx.passes.loss_terms import Combination, combination, weigh
from roundpipe.fx.passes.sample_dimensions import arguments_of_samples, symbols_in, symbols_of_samples
from roundpipe.fx.passes.sample_mixing import mixing_of
from roundpipe.fx.passes.sample_sums import SampleSum, sample_sums
from roundpipe.fx.sizes import expression_of

_LEAST_DIVISOR = 1e-4
"""Of what code adds to a number of targets, in case there are none."""
_CASTS = frozenset("to long int cpu detach clone".split())


def own_losses(traced: TracedGraph, bent: Collection[Node] = ()) -> tuple[OwnLoss, ...]:
    """The scalar outputs of which the graph tells what they are; it is changed where terms have to be weighed.

    Terms that are ``bent``, no linear functions of sums over samples, count by samples.
    """
    form, outputs = traced.form or CallForm(traced.model), list(_scalar_outputs(traced))
    combinations = _combinations(traced, [node for _, node in outputs], bent)
    found: list[OwnLoss] = []
    names: dict[Node, dict[Node, str]] = {}
    """By node of a loss and of a term of it."""
    with_terms: dict[Node, Combination] = {}
    for path, node in outputs:
        if (parts := combinations[node]) is None:
            continue
        if node not in names:
            names[node] = {term: f"output{trees.path_string(path)} {i}" for i, term in enumerate(parts.counts)}
        weights = {names[node][term]: _of_call(form, count) for term, count in parts.counts.items()}
        if weights and len(parts.terms) > 1:
            with_terms[node] = parts
        found.append(OwnLoss(path, weights, has_terms=node in with_terms))
    for node, parts in with_terms.items():
        weigh(traced, node, parts, names[node])
    return tuple(found)


def _combinations(
    traced: TracedGraph, nodes: Collection[Node], bent: Collection[Node]
) -> dict[Node, Combination | None]:
    """Scalars as linear combinations; None: they are not known to be one.

    The graph runs once more, on fakes, if what its losses are called doesn't tell.
    """
    arguments, sums = ArgumentValues(traced), dict[Node, SampleSum]()
    found = {node: combination(traced, node, arguments, bent=bent) for node in nodes}
    unknown = [node for node, parts in found.items() if parts is None and node not in bent]
    if unknown and (samples := arguments_of_samples(traced)):
        sums = sample_sums(traced, samples, [node for node in traced.placeholders if node.name in traced.uncut])
    for node in unknown if sums else ():
        parts = combination(traced, node, arguments, bent=bent, sums=sums)
        # what a sum is divided by, other than its number, only the whole batch tells
        is_told = parts is not None and all(_is_by_number(term.divisor) for term in parts.terms.values())
        found[node] = parts if is_told else None
    return found


def _is_by_number(divisor: Divisor | None) -> bool:
    """Whether a sum is divided by the number itself, but for what keeps code from dividing by 0."""
    return divisor is None or all(abs(divisor(number) - number) <= _LEAST_DIVISOR for number in (1.0, 2.0, 1000.0))


def output_sums(traced: TracedGraph) -> frozenset[trees.Path]:
    """Places of numbers among the outputs that add up: how many samples or tokens there are, or are of some kind."""
    batch, found = symbols_of_samples(arguments_of_samples(traced)), set[trees.Path]()
    counts: dict[trees.Path, Node] = {}
    for path, node in traced.output_places.items():
        value = value_of(node)
        if isinstance(value, torch.SymInt):
            own = batch & getattr(expression := expression_of(value), "free_symbols", set())
            if len(own) == 1 and own.isdisjoint(sympy.expand(expression / next(iter(own))).free_symbols):
                found.add(path)
        elif isinstance(value, torch.Tensor) and not value.ndim and value.dtype in (torch.int64, torch.int32):
            counts[path] = node
    found |= {path for path, node in counts.items() if _counts_all(node, batch)}
    counts = {path: node for path, node in counts.items() if path not in found}
    combinations = _combinations(traced, [*counts.values()], ()) if counts else {}
    for path, node in counts.items():
        if (parts := combinations[node]) and parts.terms and all(each.count is None for each in parts.terms.values()):
            found.add(path)
    return frozenset(found)


def _counts_all(node: Node, batch: Collection[Any]) -> bool:
    """Whether it counts, or sums up whole numbers, over all elements of something that has the samples in it."""
    node = past_calls(node, _CASTS)
    if called_name(node) not in ("sum", "count_nonzero") or not node.all_input_nodes:
        return False
    source = value_of(node.all_input_nodes[0])
    is_whole = isinstance(source, torch.Tensor) and not (source.is_floating_point() and called_name(node) == "sum")
    return is_whole and not symbols_in([source]).isdisjoint(batch)


def has_unknown_scalars(traced: TracedGraph, known: Collection[OwnLoss]) -> bool:
    """Whether there are scalar outputs beside those of which the graph tells what they are."""
    return not {path for path, _ in _scalar_outputs(traced)} <= {loss.path for loss in known}


def own_mixing(traced: TracedGraph, bent: Collection[Node] = ()) -> dict[trees.Path, Mixing]:
    """How scalar outputs mix samples, where they do; ``bent`` are those that are known to be no linear function.

    Samples are along the first dimension, as many as that of the first argument that has one.
    """
    samples = arguments_of_samples(traced)
    outputs = list(_scalar_outputs(traced))
    found: dict[trees.Path, Mixing] = {path: "not linear" for path, node in outputs if node in bent}
    compared = [path for path, node in outputs if mixing_of(traced, node, samples) == "compares samples"]
    return found | dict.fromkeys(compared, "compares samples")


def _scalar_outputs(traced: TracedGraph) -> Iterator[tuple[trees.Path, Node]]:
    for path, node in traced.output_places.items():
        value = value_of(node)
        if isinstance(value, torch.Tensor) and not value.ndim and value.is_floating_point():
            yield path, node


def _of_call(form: CallForm, count: Count) -> Callable[[tuple[Any, ...], dict[str, Any]], float]:
    return lambda args, kwargs: count(form.normalise(args, kwargs))
