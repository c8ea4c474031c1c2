"""Cuts a model's chain of layers into stages: which layers, which values at each cut, which weights are shared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import nn
from torch.fx import Node

from roundpipe.core.balance import cut_into
from roundpipe.core.checks import check_count, check_example
from roundpipe.core.errors import ConfigError, PartitionError, TraceError
from roundpipe.core.layers import LayerChain
from roundpipe.distributed.boundary import Boundary, can_travel
from roundpipe.distributed.module import PartitionedModel, StageModule, StageProgram, Tie
from roundpipe.fx.graph.nodes import mutated_by, writes_buffers
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.guards.guards import GuardedGraph
from roundpipe.fx.operations import assign_buffer
from roundpipe.fx.passes.cuts import Balance, check_balance
from roundpipe.fx.passes.lower import LowerOptions
from roundpipe.fx.source import TracedSource, own_example
from roundpipe.wrappers.auto import AutoRoundPipe
from roundpipe.wrappers.calls import ChainProgram
from roundpipe.wrappers.model_view import check_wrappable
from roundpipe.wrappers.pipe import RoundPipe


def partition_stages(
    model: nn.Module,
    num_stages: int,
    *,
    example_args: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    balance: Balance = "time",
) -> list[StageModule]:
    """A model as modules that run one after the other, each some of its layers.

    The first takes the model's arguments, each other one the tensors that the one before gave, the last gives the
    tensors of the model's outputs. They share modules and weights with the model. Equal arguments give equal stages
    in every process.

    Args:
        model: any module that can be traced, in train or eval mode as it is to run, also on ``meta``; or a model
            from `roundpipe.compile`.
        num_stages: how many; for schedules with several stages per rank, of all ranks together.
        example_args: arguments like those of a call with one microbatch; only shapes and dtypes matter, for most
            models. A compiled model and one with ``dummy_inputs`` need none.
        example_kwargs: likewise.
        balance: what is equal for all stages; see `roundpipe.compile`. A compiled model has its own.

    Raises:
        ConfigError: an argument can't be used, or there is no example.
        TraceError: the model can't be traced.
        PartitionError: the model can't be cut into so many stages.
    """
    check_count("num_stages", num_stages, "a number of at least 1")
    check_example(example_args, example_kwargs)
    check_balance(balance)
    traced, chain = _trace(model, example_args, example_kwargs, balance)
    live = _live_values(traced, chain)
    outputs = Boundary.of(live[-1])
    if outputs.sizes or not all(map(can_travel, live[-1])):
        raise ConfigError("the model's outputs are not tensors and constants alone; return tensors from its forward")
    positions = _possible_cuts(traced, chain, live)
    if len(positions) + 1 < num_stages:
        raise PartitionError(
            f"num_stages={num_stages}, but the model can be cut into {len(positions) + 1} stages at most; use fewer"
        )
    weights = [cost.forward_s + cost.backward_s for cost in chain.costs]
    parts = cut_into(weights, num_stages, positions)
    boundaries = [Boundary(), *(Boundary.of(live[start]) for start, _ in parts[1:]), outputs]
    whole = PartitionedModel(
        traced=traced,
        entry=chain.entry,
        exit=chain.exit,
        outputs=outputs,
        num_stages=num_stages,
        training=traced.model.training,
        ties=_ties(traced.model, chain, parts),
        spare=_spare_tensors(traced.model, chain),
    )
    layers = list(chain)
    return [
        StageModule(
            StageProgram(
                whole,
                index,
                tuple(layers[start:stop]),
                tuple(dict.fromkeys(name for spec in chain.specs[start:stop] for name in spec.module_names)),
                before,
                after,
            )
        )
        for index, ((start, stop), (before, after)) in enumerate(zip(parts, pairwise(boundaries), strict=True))
    ]


def _trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None, balance: Balance
) -> tuple[GuardedGraph, LayerChain]:
    """The graph and the chain of layers for an example, or those that a compiled model has."""
    if isinstance(model, AutoRoundPipe):
        raise ConfigError("the model's forward can't be traced, so it has no layers to make stages of; see its warning")
    source = None
    if isinstance(model, RoundPipe):
        model.synchronize()
        if isinstance(model._program, ChainProgram) and isinstance(model._program.source, TracedSource):
            source = model._program.source
        model = model.model
    check_wrappable(model, "partition_stages")
    if source is None:
        source = TracedSource(model, LowerOptions(balance), _refuse)
    example = (args, kwargs or {}) if args or kwargs is not None else None
    if example is None and source.latest_trace is None:
        example = own_example(model)
        if example is None:
            raise ConfigError("there is no example to trace; give example_args or example_kwargs")
    if example is not None and source.chain_for(*example) is None:
        raise TraceError(f"{type(model).__name__} can't be traced, so it has no layers to make stages of")
    trace = source.latest_trace
    assert trace is not None
    return trace


def _refuse(error: TraceError) -> NoReturn:
    raise error


def _live_values(traced: TracedGraph, chain: LayerChain) -> list[list[Node]]:
    """Item ``i``: the values that layer ``i`` or one behind it reads, and that exist in front of it; last the outputs.

    In the order of the graph, which is the same in every process.
    """
    nodes = {node.name: node for node in traced.graph.nodes}
    order = {name: position for position, name in enumerate(nodes)}
    read = set(chain.exit.reads)
    live = [read]
    for spec in reversed(chain.specs):
        read = (read - set(spec.makes)) | set(spec.reads)
        live.append(read)
    return [[nodes[name] for name in sorted(names, key=order.__getitem__)] for names in reversed(live)]


def _possible_cuts(traced: TracedGraph, chain: LayerChain, live: Sequence[Sequence[Node]]) -> list[int]:
    """Layers in front of which a stage may begin: all values can be sent, and no buffer is written on both sides."""
    written = {id(buffer) for buffer in _written_buffers(traced)}
    users: dict[int, list[int]] = defaultdict(list)
    for index, layer in enumerate(chain):
        for buffer in layer.buffers():
            if id(buffer) in written:
                users[id(buffer)].append(index)
    inside = {cut for layers in users.values() for cut in range(layers[0] + 1, layers[-1] + 1)}
    return [cut for cut in range(1, len(chain)) if cut not in inside and all(map(can_travel, live[cut]))]


def _written_buffers(traced: TracedGraph) -> list[torch.Tensor]:
    """Buffers of the model that its forward changes."""
    targets = []
    for node in traced.body:
        sources = [*mutated_by(node), *(node.args[:1] if node.target is assign_buffer else ())]
        targets += [source for source in sources if isinstance(source, Node) and source.op == "get_attr"]
    buffers = [traced.attribute(str(node.target)) for node in targets]
    leaves = [traced.attribute(str(node.target)) for node in traced.body if writes_buffers(node)]
    return [*buffers, *(buffer for leaf in leaves if isinstance(leaf, nn.Module) for buffer in leaf.buffers())]


def _ties(model: nn.Module, chain: LayerChain, parts: Sequence[tuple[int, int]]) -> tuple[Tie, ...]:
    """The trained parameters that several stages use, in the model's order."""
    layers = list(chain)
    used = [{id(weight) for layer in layers[start:stop] for weight in layer.parameters()} for start, stop in parts]
    ties = []
    for name, weight in model.named_parameters():
        stages = tuple(index for index, weights in enumerate(used) if id(weight) in weights)
        if weight.requires_grad and len(stages) > 1:
            ties.append(Tie(name, stages))
    return tuple(ties)


def _spare_tensors(model: nn.Module, chain: LayerChain) -> frozenset[int]:
    tensors = (*model.parameters(), *model.buffers())
    return frozenset(map(id, tensors)) - {id(tensor) for tensor in (*chain.parameters(), *chain.buffers())}
