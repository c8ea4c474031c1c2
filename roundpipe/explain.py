"""`explain`: what tracing makes of a model, without compiling it.

Everything is worked out from one trace on fakes: no weights are read, no threads are started, and a model on
``meta`` will do. A model that can't be traced is no error here, its cause is the explanation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from roundpipe.errors import ConfigError, TraceError
from roundpipe.fx.ambient import autocast_as_on_accelerator
from roundpipe.fx.codegen import generate
from roundpipe.fx.cost import measure
from roundpipe.fx.graph import TracedGraph, hint, module_of, value_bytes, value_of
from roundpipe.fx.partition import Partition, partition
from roundpipe.fx.tracer import trace
from roundpipe.layers import LayerChain
from roundpipe.report import explain_table, format_bytes
from roundpipe.runtime.pipe import RoundPipe

MAX_PERIOD = 96
"""Longest run of lines whose repetition is folded, such as the lines of one decoder layer."""
MAX_NAMES = 6
"""Values of one cut that are named."""
MAX_GUARDS = 40
"""Guards that are shown."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What was found; ``str()`` of it is the report."""

    model_name: str
    traced: TracedGraph | None
    """None if the model's own forward can't be traced."""
    chain: LayerChain | None
    """The layers it would be cut into."""
    cuts: tuple[tuple[tuple[str, int], ...], ...]
    """Per cut between two layers: name and bytes of each value carried over it, at the example's size."""
    error: TraceError | None = None
    """Why it can't be traced."""

    @property
    def opaque(self) -> dict[str, str]:
        """Modules whose inside was not traced, and why."""
        return {} if self.traced is None else dict(self.traced.opaque)

    @property
    def guards(self) -> list[str]:
        """What must hold for the trace to serve a call, in words."""
        describe = getattr(self.traced and self.traced.guards, "describe", list)
        return list(describe())

    def __str__(self) -> str:
        if self.traced is None or self.chain is None:
            return (
                f"{self.model_name} can't be cut into layers.\n\n{self.error}\n\n"
                "Without a change, compile runs its forward on the CPU and its modules on the devices (AutoRoundPipe)."
            )
        parts = [
            f"{self.model_name}, traced for {self.traced.example_elements:,} input elements",
            "\n".join(("Graph", *(f"  {line}" for line in graph_lines(self.traced)))),
            explain_table(self.chain, self.opaque),
            "\n".join(("Carried over the cuts", *(f"  {line}" for line in self._cut_lines()))),
            "\n".join(("A call traces again unless", *(f"  {line}" for line in self._guard_lines()))),
        ]
        return "\n\n".join(parts)

    def _cut_lines(self) -> Iterator[str]:
        assert self.chain is not None
        lines = []
        for index, values in enumerate(self.cuts):
            shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in values[:MAX_NAMES])
            more = f", and {len(values) - MAX_NAMES} more" if len(values) > MAX_NAMES else ""
            total = format_bytes(sum(size for _, size in values))
            lines.append(f"behind layer {index} ({self.chain.specs[index].name}): {total}: {shown}{more}")
        yield from _folded(lines) if lines else ["there is one layer, and no cut"]

    def _guard_lines(self) -> Iterator[str]:
        yield "structure, dtypes, numbers of dimensions and plain values of the arguments are those of the example"
        guards = list(dict.fromkeys(self.guards))
        yield from guards[:MAX_GUARDS]
        if len(guards) > MAX_GUARDS:
            yield f"and {len(guards) - MAX_GUARDS} more, in .guards"


def explain(
    model: nn.Module,
    example_args: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    graph: str | os.PathLike[str] | None = None,
) -> Explanation:
    """What would be traced and cut of a model, and what stands in the way.

    Args:
        model: any module, also on ``meta``; it is not changed.
        example_args: as for `roundpipe.compile`; without any example, the model's own ``dummy_inputs`` are used.
        example_kwargs: likewise.
        graph: a file to write the graph to, in the DOT language, with one cluster per layer.

    Returns:
        The explanation; ``print`` it. If the model can't be traced, it says why and what to change.

    Raises:
        ConfigError: there is no example, or an argument can't be used as given.
    """
    if isinstance(model, RoundPipe):
        model = model._target
    if not isinstance(model, nn.Module):
        raise ConfigError(f"explain takes an nn.Module, got {type(model).__name__}")
    if not isinstance(example_args, tuple):
        raise ConfigError(f"example_args is {type(example_args).__name__}; give a tuple, such as (x,)")
    if not example_args and example_kwargs is None:
        dummy = getattr(model, "dummy_inputs", None)
        if not isinstance(dummy, dict):
            raise ConfigError(
                f"{type(model).__name__} has no dummy_inputs; give example_args=(...) or example_kwargs={{...}}"
            )
        example_kwargs = dict(dummy)
    name = type(model).__name__
    try:
        with torch.inference_mode(False), torch.enable_grad(), autocast_as_on_accelerator():
            traced = trace(model, example_args, example_kwargs or {})
            costs = measure(traced)
            parts = partition(traced, costs)
            chain = generate(traced, parts, costs)
    except TraceError as error:
        return Explanation(name, None, None, (), error)
    if graph is not None:
        Path(graph).write_text("\n".join(dot_lines(traced, parts)) + "\n")
    return Explanation(name, traced, chain, _cuts(traced, chain))


def _cuts(traced: TracedGraph, chain: LayerChain) -> tuple[tuple[tuple[str, int], ...], ...]:
    """The values that are made in front of each cut, or are inputs, and read behind it."""
    nodes = {node.name: node for node in traced.graph.nodes}
    cuts = []
    for index in range(1, len(chain.specs)):
        made = {name for spec in chain.specs[:index] for name in spec.makes} | set(traced.input_paths)
        read = dict.fromkeys(name for spec in chain.specs[index:] for name in spec.reads)
        read.update(dict.fromkeys(chain.exit.reads))
        cuts.append(tuple((name, value_bytes(nodes[name])) for name in read if name in made))
    return tuple(cuts)


# ---------------------------------------------------------------------------------- the graph as text


def graph_lines(traced: TracedGraph) -> list[str]:
    """The graph, a line per leaf module and one per run of glue between them; repetitions are folded."""
    inputs = [f"{node.name}: {_shape(node)}" for node in traced.placeholders]
    lines: list[str] = []
    glue: list[Node] = []

    def end_glue() -> None:
        if glue:
            where = module_of(glue[0]) or "the model"
            functions = list(dict.fromkeys(_function_name(node) for node in glue))
            shown = ", ".join(functions[:MAX_NAMES]) + (", ..." if len(functions) > MAX_NAMES else "")
            lines.append(f"code of {where}: {shown} -> {_shape(glue[-1])}")
            glue.clear()

    for node in traced.body:
        if node.op == "call_module":
            end_glue()
            kind = type(traced.attribute(str(node.target))).__name__
            lines.append(f"{node.target} ({kind}) -> {_shape(node)}")
        else:
            if glue and module_of(glue[0]) != module_of(node):
                end_glue()
            glue.append(node)
    end_glue()
    outputs = [f"{node.name}: {_shape(node)}" for node in traced.outputs]
    return [f"inputs {', '.join(inputs)}", *_folded(lines), f"outputs {', '.join(outputs)}"]


def _function_name(node: Node) -> str:
    if isinstance(node.target, str):
        return node.target
    return str(getattr(node.target, "__name__", type(node.target).__name__))


_DTYPES = {"bfloat": "bf", "float": "f", "complex": "c", "uint": "u", "int": "i", "bool": "bool"}


def _shape(node: Node) -> str:
    """Such as ``f32[2, 16, 64]``, at the example's sizes."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return "a structure" if value is None else type(value).__name__.lower()
    dtype = str(value.dtype).removeprefix("torch.")
    for long, short in _DTYPES.items():
        if dtype.startswith(long):
            dtype = short + dtype.removeprefix(long)
            break
    return f"{dtype}[{', '.join(str(hint(size)) for size in value.shape)}]"


def _folded(lines: Sequence[str]) -> Iterator[str]:
    """The lines, with runs that repeat but for their numbers given once."""
    keys = [re.sub(r"\d+", "#", line) for line in lines]
    position = 0
    while position < len(lines):
        period, repeats = 1, 1
        for length in range(1, min(MAX_PERIOD, (len(lines) - position) // 2) + 1):
            stop = position + length
            while stop < len(keys) and keys[stop] == keys[stop - length]:
                stop += 1
            times = (stop - position) // length
            if times > 1 and times * length > period * repeats:
                period, repeats = length, times
        if repeats > 1:
            yield f"{repeats} times, the first of them:"
        yield from (("  " if repeats > 1 else "") + line for line in lines[position : position + period])
        position += period * repeats


# ---------------------------------------------------------------------------------- the graph as DOT


def dot_lines(traced: TracedGraph, parts: Partition) -> Iterator[str]:
    """The graph in the DOT language: a box per node, a cluster per layer, an edge per value with its bytes."""
    yield "digraph model {"
    yield "  node [shape=box, fontname=monospace]"
    shown = set(traced.placeholders)
    for node in traced.placeholders:
        yield f"  {_quoted(node.name)} [shape=ellipse, label={_quoted(f'{node.name}: {_shape(node)}')}]"
    for index, chunk in enumerate(parts.chunks):
        yield f"  subgraph cluster_{index} {{"
        yield f"    label={_quoted(f'layer {index}: {chunk.name}')}"
        for node in chunk.nodes:
            if node.op.startswith("call_") and node not in shown:
                shown.add(node)
                what = str(node.target) if node.op == "call_module" else _function_name(node)
                yield f"    {_quoted(node.name)} [label={_quoted(f'{what}: {_shape(node)}')}]"
        yield "  }"
    for node in traced.body:
        for source in node.all_input_nodes:
            if source in shown and node in shown:
                label = _quoted(format_bytes(value_bytes(source)))
                yield f"  {_quoted(source.name)} -> {_quoted(node.name)} [label={label}]"
    yield '  "outputs" [shape=ellipse]'
    for node in traced.outputs:
        if node in shown:
            yield f'  {_quoted(node.name)} -> "outputs"'
    yield "}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
