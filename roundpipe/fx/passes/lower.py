"""From a traced graph to a chain of layers: measure -> partition -> generate.

Compiling, explaining and forecasting all lower here, so that equal options give equal cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.fx import Node

from roundpipe.core.layers import LayerChain, LayerCost
from roundpipe.core.module_tree import walked_once
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.passes.codegen import generate
from roundpipe.fx.passes.cost import DEFAULT_PROFILE, DeviceProfile, NodeCost, measure
from roundpipe.fx.passes.cuts import Balance
from roundpipe.fx.passes.own_losses import output_sums, own_losses, own_mixing
from roundpipe.fx.passes.partition import Partition, layer_costs, partition
from roundpipe.fx.passes.read_numbers import where_sums_are_read
from roundpipe.fx.passes.sample_dependence import ONE_SAMPLE_ALONE, dependence_of_samples
from roundpipe.fx.passes.sample_dimensions import (
    dims_of_samples,
    lacks_samples,
    outputs_without_rows,
    outputs_without_samples,
    takes_samples_as_time,
)

LIMITS_APART, NUM_LIMITS = 4, 7
"""Limits of other cuts are the whole model and so many times smaller each, down to less than a thousandth."""


@dataclass(frozen=True, slots=True)
class LowerOptions:
    """What decides the cuts."""

    balance: Balance = "time"
    """What weighs: ``"time"``, ``"size"`` (bytes of weights) or a function of a leaf module."""
    max_layer_bytes: int | None = None
    """Bytes of weights and gradients above which a layer is cut, inside blocks if need be; the trace needs it, too."""
    profile: DeviceProfile = DEFAULT_PROFILE
    """The device that estimated seconds are for."""

    def others(self, model_bytes: int) -> list[LowerOptions]:
        """Other limits for the layers of a model of so many bytes, the largest first.

        They are parts of the model, the same for every device. So where a plan fits layers within one of them, the
        device is large enough, and so is every larger one, whatever its own limit.
        """
        limits = (model_bytes // LIMITS_APART**power for power in range(NUM_LIMITS))
        return [replace(self, max_layer_bytes=limit) for limit in limits]

    def cuts_as(self, larger: LowerOptions, costs: Iterable[LayerCost]) -> bool:
        """Whether layers, cut within a larger limit, stay as they are: within this one, or as small as can be."""
        assert self.max_layer_bytes is not None and larger.max_layer_bytes is not None
        sizes = [cost.weight_bytes + cost.gradient_bytes for cost in costs if cost.weight_bytes]
        return max(sizes, default=0) <= self.max_layer_bytes or min(sizes) > larger.max_layer_bytes


@dataclass(frozen=True, slots=True)
class LoweredGraph:
    """A graph with its costs, its cuts and the layers between them."""

    traced: TracedGraph
    costs: Mapping[Node, NodeCost]
    partition: Partition
    chain: LayerChain

    def costs_on(self, profile: DeviceProfile) -> tuple[LayerCost, ...]:
        """The layers' costs on a device other than the one that they were cut for."""
        with torch.enable_grad():
            costs = measure(self.traced, profile)
        return layer_costs(self.traced, self.partition, self.chain, costs)


def lower(
    traced: TracedGraph, options: LowerOptions = LowerOptions(), earlier: Sequence[nn.Module] = ()
) -> LoweredGraph:
    """Cuts a graph into the finest chain of sensible layers, and generates them.

    Args:
        traced: a linted graph; values handed through unchanged are merged in it.
        options: what decides the cuts.
        earlier: layers of another graph of the model. If it can be cut between the same weights, it is, so that
            microbatches of both can run in one round.

    Raises:
        TraceError: an input is written in place and returned under its old name.
        PartitionError: ``balance`` is not usable, or there is nothing to cut.
    """
    with torch.enable_grad(), walked_once():
        of_samples = traced.of_two() or traced
        dependence = dependence_of_samples(of_samples)
        bent = dependence.bent
        if bent and of_samples is not traced:
            bent = dependence_of_samples(traced).bent
        mixing, sums = own_mixing(of_samples, dependence.bent), output_sums(of_samples)
        losses = own_losses(traced, bent)
        costs = measure(traced, options.profile)
        balance, max_layer_bytes = options.balance, options.max_layer_bytes
        parts = partition(traced, costs, balance=balance, max_layer_bytes=max_layer_bytes, earlier=earlier)
        chain = generate(traced, parts, costs)
        chain.own_losses, chain.mixing = losses, mixing
        chain.mixes_samples = dependence.where or lacks_samples(of_samples) or where_sums_are_read(traced)
        chain.changed_buffer = dependence.changed_buffer
        single = dict.fromkeys(dependence.single, ONE_SAMPLE_ALONE)
        chain.odd_outputs, chain.output_blocks = outputs_without_rows(of_samples) | single, dependence.blocks
        chain.output_dims, chain.output_sums = dims_of_samples(of_samples), sums
        chain.without_samples = outputs_without_samples(of_samples)
        chain.takes_samples_as_time = takes_samples_as_time(of_samples)
        return LoweredGraph(traced, costs, parts, chain)
