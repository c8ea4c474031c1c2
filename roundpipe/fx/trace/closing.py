"""Closes the graph of an attempt whose run has ended: its output, its guards, and what must not be in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.core.errors import TraceError
from roundpipe.fx.binding import CallForm
from roundpipe.fx.fakes import FakeWorld
from roundpipe.fx.flat import flat_values
from roundpipe.fx.graph.grammar import lint
from roundpipe.fx.graph.nodes import mutated_by, storage_key
from roundpipe.fx.graph.traced import OutputValue, TracedGraph
from roundpipe.fx.guards.guards import CallModes, Guards
from roundpipe.fx.guards.values import ValueProgram
from roundpipe.fx.trace.builder import GraphBuilder
from roundpipe.fx.trace.knowledge import Knowledge, Lesson, Retry
from roundpipe.fx.trace.recorder import CallRecorder
from roundpipe.fx.trace.verify import ShapeVerifier


def output_template(builder: GraphBuilder, out: Any) -> tuple[Any, list[Node]]:
    """What a forward returned with names of nodes in place of tensors and sizes, and these nodes, in order."""
    nodes: list[Node] = []

    def place(leaf: Any) -> Any:
        if not flat_values(leaf):
            return leaf
        if isinstance(leaf, torch.Size):
            return tuple(place(size) for size in leaf)
        argument = builder.argument(leaf)
        if not isinstance(argument, Node):
            return argument
        nodes.append(argument)
        return OutputValue(argument.name)

    if not flat_values(out):
        return out, nodes
    return trees.map_leaves(out, place), nodes


def closed_graph(
    world: FakeWorld,
    form: CallForm,
    knowledge: Knowledge,
    recorder: CallRecorder,
    template: Any,
    call_modes: CallModes,
    opaque: Mapping[str, str],
) -> TracedGraph:
    """The graph of an attempt, with its guards.

    Args:
        template: the output, see `output_template`.
        opaque: leaves whose inside was not traced, and why.
    """
    builder, findings, graph = recorder.builder, recorder.findings, recorder.builder.graph
    values = ValueProgram(graph, recorder.data.reader.reads, world.model, builder.constants, builder.input_paths)
    _refuse_moving_reads(world, builder, values)
    _remove_unused(builder)
    traced = TracedGraph(
        graph=graph,
        model=world.model,
        constants=builder.constants,
        input_paths=builder.input_paths,
        output=template,
        example_elements=sum(tensor.numel() for tensor in trees.tensors(world.real_arguments)),
        opaque=dict(opaque),
    )
    verifier = ShapeVerifier(traced, world.symbols(), findings.probed_nodes, knowledge.dynamic, findings.origins)
    weights = {str(node.target) for node in graph.nodes if node.op == "get_attr"} - set(traced.constants)
    written = {storage_key(target) for node in graph.nodes for target in mutated_by(node)} - {None}
    guards = traced.guards = Guards(
        form,
        world,
        call_modes,
        values,
        verifier,
        grad_matters=findings.grad_matters,
        weight_writes=findings.weight_writes,
        written=frozenset(index for index, node in enumerate(traced.placeholders) if storage_key(node) in written),
        weights=sorted(weights),
        replaced=frozenset(name for name in world.real if not world.has_in_place(name)),
    )
    shared = guards.shared_write(trees.tensors(world.real_arguments))
    if shared:
        raise Retry(Lesson(TraceError(shared)))
    lint(traced)
    return traced


def _refuse_moving_reads(world: FakeWorld, builder: GraphBuilder, values: ValueProgram) -> None:
    """Data of a buffer that the same forward changes is another in the next microbatch."""
    for name in values.buffers:
        if world.fake(name).untyped_storage()._cdata in builder.written_storages:
            raise Retry(Lesson(TraceError(f"the forward takes a decision on buffer {name}, which it also changes")))


def _remove_unused(builder: GraphBuilder) -> None:
    """Drops glue that nothing reads."""
    for node in reversed(list(builder.graph.nodes)):
        stays = node.op in ("placeholder", "output", "call_module")
        if not stays and not node.users and not node.meta.get("effect") and not node.meta.get("random"):
            builder.graph.erase_node(node)
