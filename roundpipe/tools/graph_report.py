"""A traced graph as people see it: lines of text, DOT, a picture.

Text and picture are at module granularity: a box is one leaf module, or a run of glue between two of them. DOT has a
box per node. Matplotlib is imported when a picture is asked for.

Invariant: nothing here changes the graph.
"""

from __future__ import annotations

import importlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.fx import Node

from roundpipe.core.checks import path_of
from roundpipe.core.errors import ConfigError
from roundpipe.fx.graph.nodes import hint, module_of, value_bytes, value_of
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.passes.partition import Partition
from roundpipe.reports.plotting import matplotlib_modules
from roundpipe.reports.tables import format_bytes, repetitions

FORMATS = (".dot", ".png")
MAX_PERIOD = 96
"""Longest run of lines whose repetition is folded, such as the lines of one decoder layer."""
MAX_NAMES = 6
"""Functions of one run of glue that are named."""
MAX_BOXES = 1500
"""Boxes of a picture; a larger one can't be looked at."""

_BOX_INCHES, _DOTS_PER_INCH = (4.6, 0.34), 100


def check_format(graph: str | os.PathLike[str]) -> Path:
    """Raise `ConfigError` if a graph can't be written to a file of this name, before any work is done for it."""
    path = path_of("graph", graph)
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"graph={str(path)!r}: the name must end in {' or '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"graph={str(path)!r}: there is no folder {path.absolute().parent}")
    if path.suffix.lower() == ".png":
        _matplotlib()
    return path


def write_graph(path: Path, traced: TracedGraph, parts: Partition) -> None:
    """Write the graph to a file, in the format that its name ends in; a `ConfigError` says why it can't be."""
    check_format(path)
    try:
        if path.suffix.lower() == ".dot":
            path.write_text("\n".join(dot_lines(traced, parts)) + "\n", encoding="utf-8")
        else:
            _draw(path, traced, parts)
    except OSError as error:
        raise ConfigError(f"graph={str(path)!r} can't be written: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class Box:
    """A leaf module, or neighbouring calls of one module's own code."""

    nodes: tuple[Node, ...]
    label: str


def boxes_of(traced: TracedGraph, nodes: Sequence[Node]) -> list[Box]:
    """Nodes, in order, as boxes."""

    def owner(node: Node) -> object:
        return node if node.op == "call_module" else module_of(node)

    groups = (tuple(group) for _, group in groupby(nodes, owner))
    return [Box(group, _label(traced, group)) for group in groups]


def _label(traced: TracedGraph, group: Sequence[Node]) -> str:
    if group[0].op == "call_module":
        kind = type(traced.attribute(str(group[0].target))).__name__
        return f"{group[0].target} ({kind}) -> {shape_text(group[0])}"
    where = module_of(group[0]) or "the model"
    functions = list(dict.fromkeys(function_name(node) for node in group))
    shown = ", ".join(functions[:MAX_NAMES]) + (", ..." if len(functions) > MAX_NAMES else "")
    return f"code of {where}: {shown} -> {shape_text(group[-1])}"


def function_name(node: Node) -> str:
    """The name of what a node that is no module calls."""
    if isinstance(node.target, str):
        return node.target
    return str(getattr(node.target, "__name__", type(node.target).__name__))


_DTYPES = {"bfloat": "bf", "float": "f", "complex": "c", "uint": "u", "int": "i", "bool": "bool"}


def shape_text(node: Node) -> str:
    """A node's value, such as ``f32[2, 16, 64]``, at the example's sizes."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return "a structure" if value is None else type(value).__name__.lower()
    dtype = str(value.dtype).removeprefix("torch.")
    long = next((long for long in _DTYPES if dtype.startswith(long)), "")
    dtype = _DTYPES.get(long, "") + dtype.removeprefix(long)
    return f"{dtype}[{', '.join(str(hint(size)) for size in value.shape)}]"


def _named(node: Node) -> str:
    return f"{node.name}: {shape_text(node)}"


def graph_lines(traced: TracedGraph) -> list[str]:
    """The graph, a line per box; repetitions are folded."""
    inputs, outputs = ", ".join(map(_named, traced.placeholders)), ", ".join(map(_named, traced.outputs))
    lines = [box.label for box in boxes_of(traced, traced.body)]
    return [f"inputs {inputs}", *folded(lines), f"outputs {outputs}"]


def folded(lines: Sequence[str]) -> Iterator[str]:
    """The lines, with runs that repeat but for their numbers given once."""
    keys = [re.sub(r"\d+", "#", line) for line in lines]
    for start, period, repeats in repetitions(keys, max_period=MAX_PERIOD, min_repeats=2):
        if repeats > 1:
            yield f"{repeats} times, the first of them:"
        yield from (("  " if repeats > 1 else "") + line for line in lines[start : start + period])


def nodes_by_layer(parts: Partition) -> list[list[Node]]:
    """The calls of each layer in order; glue that several layers repeat is in the first of them."""
    shown: set[Node] = set()
    layers = []
    for chunk in parts.chunks:
        layers.append([node for node in chunk.nodes if node.op.startswith("call_") and node not in shown])
        shown.update(layers[-1])
    return layers


def dot_lines(traced: TracedGraph, parts: Partition) -> Iterator[str]:
    """The graph in the DOT language: a box per node, a cluster per layer, an edge per value with its bytes."""
    yield "digraph model {"
    yield "  node [shape=box, fontname=monospace]"
    shown = set(traced.placeholders)
    for node in traced.placeholders:
        yield f"  {_quoted(node.name)} [shape=ellipse, label={_quoted(_named(node))}]"
    for index, (chunk, nodes) in enumerate(zip(parts.chunks, nodes_by_layer(parts), strict=True)):
        yield f"  subgraph cluster_{index} {{"
        yield f"    label={_quoted(f'layer {index}: {chunk.name}')}"
        for node in nodes:
            shown.add(node)
            what = str(node.target) if node.op == "call_module" else function_name(node)
            yield f"    {_quoted(node.name)} [label={_quoted(f'{what}: {shape_text(node)}')}]"
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


def _matplotlib() -> list[ModuleType]:
    return matplotlib_modules("a graph", ".dot", "figure", "patches", "backends.backend_agg")


def _draw(path: Path, traced: TracedGraph, parts: Partition) -> None:
    """One box under the other, a coloured band per layer, arcs for values that pass over boxes.

    Glue that each layer makes for itself stands in the first of them, without arcs to the others.
    """
    figure, patches, agg = _matplotlib()
    layers = [boxes_of(traced, nodes) for nodes in nodes_by_layer(parts)]
    inputs = [Box((node,), _named(node)) for node in traced.placeholders]
    outputs = Box((), "outputs " + ", ".join(node.name for node in traced.outputs))
    runs = _runs(layers)
    rows = [*inputs, *chain.from_iterable(layers[run[0]] for run in runs), outputs]
    first, last = len(inputs), len(rows) - 1
    if last - first > MAX_BOXES:
        raise ConfigError(
            f"the graph has {last - first:,} boxes, and a picture takes {MAX_BOXES:,}; write it as .dot, or explain a "
            "model of fewer blocks"
        )
    row_of = {node: number for number, box in enumerate(rows) for node in box.nodes}
    run_of = {node: run[0] for run in runs for index in run for box in layers[index] for node in box.nodes}
    for run in runs:
        for index, (number, shown) in product(run[1:], enumerate(layers[run[0]])):
            row_of.update(dict.fromkeys(layers[index][number].nodes, row_of[shown.nodes[0]]))
    hidden = {node for run in runs for index in run[1:] for box in layers[index] for node in box.nodes}

    width, height = _BOX_INCHES
    picture = figure.Figure(figsize=(2.4 * width, height * (last + 2)), dpi=_DOTS_PER_INCH)
    agg.FigureCanvasAgg(picture)
    axes = picture.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(-0.7, 1.7)
    axes.set_ylim(last + 1, -1)
    for number, run in enumerate(runs):
        boxes, name = layers[run[0]], _short(parts.chunks[run[0]].name, 34)
        if boxes:
            top = row_of[boxes[0].nodes[0]] - 0.5
            colour = "#eef3fa" if number % 2 else "#dfe8f5"
            axes.add_patch(patches.Rectangle((-0.69, top), 1.72, len(boxes), color=colour, zorder=0))
            label = f"layer {run[0]}: {name}" if len(run) == 1 else f"layers {run[0]} .. {run[-1]}, alike: {name}"
            axes.text(-0.67, top + 0.5, label, va="center", fontsize=7)
    for row, box in enumerate(rows):
        is_end = row < first or row == last
        axes.add_patch(
            patches.Rectangle((0, row - 0.36), 1, 0.72, facecolor="#fff3d6" if is_end else "white", edgecolor="#666")
        )
        axes.text(0.5, row, _short(box.label, 82), ha="center", va="center", fontsize=6.5, family="monospace")
    pairs = {
        (source, row_of[node])
        for node in traced.body
        for source in node.all_input_nodes
        if node in row_of and (node not in hidden or run_of.get(source) != run_of[node])
    }
    pairs |= {(node, last) for node in traced.outputs}
    for (start, stop), size in sorted(_arcs(parts, row_of, pairs).items()):
        _draw_arc(axes, patches, start, stop, size)
    picture.savefig(path, format="png")


def _runs(layers: Sequence[Sequence[Box]]) -> list[range]:
    """Neighbouring layers of the same boxes but for their numbers, of which a picture shows the first."""
    keys = [tuple(re.sub(r"\d+", "#", box.label) for box in boxes) for boxes in layers]
    found = repetitions(keys, max_period=1, min_repeats=2)
    return [range(start, start + repeats) for start, _, repeats in found]


def _arcs(parts: Partition, row_of: dict[Node, int], pairs: set[tuple[Node, int]]) -> dict[tuple[int, int], int]:
    """Bytes that go from one row to another, each value counted once per reader; pairs are values and readers' rows."""
    arcs: Counter[tuple[int, int]] = Counter()
    for source, stop in pairs:
        start = row_of.get(source, stop)
        again = source in parts.recomputed and stop > start + 1
        if start < stop and not again:
            arcs[start, stop] += value_bytes(source)
    return arcs


def _draw_arc(axes: Any, patches: Any, start: int, stop: int, size: int) -> None:
    text = format_bytes(size)
    arrow = {"arrowstyle": "-|>", "mutation_scale": 7, "color": "#33557f", "linewidth": 0.8}
    if stop == start + 1:
        axes.add_patch(patches.FancyArrowPatch((0.5, start + 0.36), (0.5, stop - 0.36), **arrow))
        axes.text(1.02, start + 0.5, text, va="center", fontsize=5.5, color="#33557f")
        return
    reach = min(0.62, 0.06 + 0.03 * (stop - start))
    path = importlib.import_module("matplotlib.path").Path
    curve = path(
        [(1, start), (1 + reach, start), (1 + reach, stop), (1, stop)],
        [path.MOVETO, path.CURVE4, path.CURVE4, path.CURVE4],
    )
    axes.add_patch(patches.FancyArrowPatch(path=curve, **arrow))
    axes.text(1 + 0.76 * reach, (start + stop) / 2, text, va="center", fontsize=5.5, color="#33557f")


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
