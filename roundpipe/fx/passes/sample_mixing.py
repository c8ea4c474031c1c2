"""Losses of which the graph shows that microbatches can't make up that of the batch: they mix samples.

Each value is followed through the operators behind a graph's calls, on fakes of the example's sizes: which of its
dimensions counts samples, and whether its elements are sums over several of them. A sum or mean over samples may be
added up, weighed and divided by what labels add up to. Anything else mixes samples for good: a function or a quotient
of sums, such as a root, and a comparison, where a sample's value depends on other samples. That is what products and
differences of samples with each other do, statistics over them and what is centred by these, sorting them, and taking
some of them by their places; a loop that takes them all one by one does not, if each is by itself up to a sum.

What is told of is certain, as far as sizes tell samples apart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from roundpipe.core.layers import Mixing
from roundpipe.fx.fakes import code_at_other_sizes, static_mode
from roundpipe.fx.graph.nodes import GraphInterpreter, has_effect, hint, mutated_by, producer_of, value_of
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.passes.attribute_copies import AttributeCopies, fakes_of
from roundpipe.fx.passes.mixing_rules import MixingWatch, Samples, worst
from roundpipe.fx.passes.row_losses import OF_MODULES
from roundpipe.fx.passes.sample_dimensions import size_at, symbols_of_samples
from roundpipe.fx.sizes import Symbolic, expression_of


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
    lengths = [value.shape[0] for node in samples if isinstance(value := value_of(node), torch.Tensor)]
    if len(counts := {hint(length) for length in lengths}) > 1:
        return None
    has_asked = any(expression_of(length) in counts for length in lengths)  # else one sample has others, to be seen
    number = max(counts | (set() if has_asked else {2}))
    mode = static_mode()
    attributes = AttributeCopies(traced, fakes_of(mode))
    run = _SampleRun(traced, samples, outputs, own, statistics, MixingWatch(number, sizes), attributes)
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
        watch: MixingWatch,
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
            self._watch.put(fake, Samples(dims[0] if len(dims) == 1 else None, is_statistic, is_output, mixing))
        return fake

    def _size(self, size: int | torch.SymInt) -> int:
        """That of the example, with as many samples as are watched."""
        return size_at(size, self._symbols, self._watch.sizes[0])

    def get_attr(self, node: Node) -> Any:
        raise AssertionError("it is given")

    def call_module(self, node: Node, args: Any, kwargs: Any) -> Any:
        return self._attributes.at(node.target).forward(*args, **kwargs)
