"""What a model's own scalar outputs are, as its graph shows: a sum over the batch, or a mean and of how many.

A loss that the forward returns is `cross_entropy` or the like of the outputs and of something made from the arguments,
divided by a number at most. Then the graph tells whether it adds up over microbatches or is their mean, and what each
microbatch counts for can be computed from its arguments alone, before it runs. Of any other scalar nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.core.layers import OwnLoss
from roundpipe.fx.arguments import CallForm
from roundpipe.fx.graph.nodes import GraphInterpreter, draws_random, has_effect, value_of
from roundpipe.fx.graph.traced import OutputValue, TracedGraph
from roundpipe.fx.passes.row_losses import BY_WEIGHT, OF_MODULES

_FUNCTIONS: dict[Any, Any] = {kind: function for kind, (function, _) in OF_MODULES.items()}
_FUNCTIONS.update({function: function for function in _FUNCTIONS.values()})
"""The losses that are known, modules and functions: what each computes."""
_SAME = ("to", "float", "double", "half", "bfloat16", "clone", "contiguous", "squeeze")
_TIMES = ("div", "mul", "truediv", "true_divide")


@dataclass(frozen=True, slots=True)
class _Reduction:
    """How a scalar node comes from the samples."""

    is_sum: bool
    target: Node | None = None
    ignored: int | None = None
    """Value in the target that is not counted."""


def own_losses(traced: TracedGraph) -> tuple[OwnLoss, ...]:
    """The scalar outputs of which the graph tells what they are."""
    nodes = {node.name: node for node in traced.graph.nodes}
    found = []
    for path, leaf in trees.walk(traced.output):
        node = nodes.get(leaf.name) if isinstance(leaf, OutputValue) else None
        value = None if node is None else value_of(node)
        if node is None or not isinstance(value, torch.Tensor) or value.ndim or not value.is_floating_point():
            continue
        reduction = _reduction(traced, node)
        if reduction is not None and reduction.is_sum:
            found.append(OwnLoss(path, None))
        elif reduction is not None and reduction.target is not None:
            found.append(OwnLoss(path, _counter(traced, reduction.target, reduction.ignored)))
    return tuple(found)


def _reduction(traced: TracedGraph, node: Node) -> _Reduction | None:
    name = getattr(node.target, "__name__", node.target)
    first = node.args[0] if node.args else None
    if node.op == "call_module":
        return _of_loss(traced, node, traced.attribute(str(node.target)))
    if node.op == "call_function" and node.target in _FUNCTIONS:
        return _of_loss(traced, node, None)
    if not isinstance(first, Node):
        return None
    *_, source = sources(node)
    if source is not node:
        return _reduction(traced, source)
    if name in _TIMES and len(node.args) == 2 and _is_replicated(node.args[1]):
        return _reduction(traced, first)
    return None


def sources(node: Node) -> Iterator[Node]:
    """A scalar, and what it was before it was cast or copied."""
    yield node
    while getattr(node.target, "__name__", node.target) in _SAME and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
        yield node


def _is_replicated(value: Any) -> bool:
    """Whether a factor is the same for every microbatch: a number, or a scalar argument."""
    if isinstance(value, Node):
        found = value_of(value)
        return value.op == "placeholder" and isinstance(found, torch.Tensor) and not found.ndim
    return isinstance(value, int | float)


def _of_loss(traced: TracedGraph, node: Node, module: Any) -> _Reduction | None:
    kind = type(module) if module is not None else node.target
    options: dict[str, Any] = {"reduction": "mean", "weight": None, "ignore_index": -100, "pos_weight": None}
    options.update({name: getattr(module, name) for name in options if hasattr(module, name)})
    options.update({name: value for name, value in node.kwargs.items() if name in options})
    target = node.args[1] if len(node.args) > 1 else node.kwargs.get("target")
    is_plain = len(node.args) <= 2 and node.kwargs.get("size_average") is None and node.kwargs.get("reduce") is None
    if not is_plain or not isinstance(target, Node) or options["reduction"] not in ("sum", "mean"):
        return None
    if options["reduction"] == "sum":
        return _Reduction(is_sum=True)
    value = value_of(target)
    if options["weight"] is not None or not isinstance(value, torch.Tensor) or not _is_of_arguments(traced, target):
        return None
    function = _FUNCTIONS.get(kind)
    if function in BY_WEIGHT:
        ignored = int(options["ignore_index"])
        return None if value.is_floating_point() else _Reduction(is_sum=False, target=target, ignored=ignored)
    return None if function is None else _Reduction(is_sum=False, target=target)


def _is_of_arguments(traced: TracedGraph, node: Node) -> bool:
    """Whether a value is made from arguments alone, by plain calls."""
    pending, seen = [node], set()
    while pending:
        one = pending.pop()
        if one in seen:
            continue
        seen.add(one)
        if one.op in ("call_module", "get_attr") or draws_random(one) or has_effect(one):
            return False
        pending += one.all_input_nodes
    return True


def _counter(traced: TracedGraph, target: Node, ignored: int | None) -> Callable[[Any, Any], float]:
    """What a microbatch counts for in a mean over a target: how many of its elements are not ignored."""
    form, needed = CallForm(traced.model), {target}
    for node in reversed(traced.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    order = [node for node in traced.graph.nodes if node in needed]

    def count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        run = _TargetRun(traced, form.normalise(args, kwargs))
        with torch.no_grad():
            for node in order:
                run.values[node] = run.run_node(node)
        value = run.values[target]
        return float(value.numel() if ignored is None else (value != ignored).sum())

    return count


class _TargetRun(GraphInterpreter):
    def __init__(self, traced: TracedGraph, arguments: Any) -> None:
        super().__init__()
        self._traced, self._arguments = traced, arguments

    def placeholder(self, node: Node) -> Any:
        value = trees.get(self._arguments, self._traced.input_paths[node.name])
        return value.detach().cpu() if isinstance(value, torch.Tensor) else value
