"""Lets layers run in tiles: finds what of their graphs is worth it, once per kind of layer and sizes.

Invariant: a region is in a program only if it ran in tiles on fakes with results of the right sizes, forward and
backward, and by the same operators with the same numbers as when it runs whole.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.fx import Graph, Node

from roundpipe.core import trees
from roundpipe.core.contexts import contextmanager
from roundpipe.core.layers import Carry, LayerChain, is_differentiable
from roundpipe.core.module_tree import modules_in
from roundpipe.core.tiling import Tiles, in_tiles
from roundpipe.effects.snapshot import python_restored
from roundpipe.fx.fakes import code_on_fakes, fake_of, static_mode
from roundpipe.fx.passes.alike import layer_key, value_key
from roundpipe.fx.passes.codegen import Layer
from roundpipe.fx.passes.generated import sizes_key
from roundpipe.fx.passes.inner_tiles import tiled_leaf
from roundpipe.fx.passes.regions import GraphRun, RowGraph, row_spaces
from roundpipe.fx.passes.row_forms import run_in_rows
from roundpipe.fx.passes.shifts import shifts_moved
from roundpipe.fx.passes.tile_programs import TiledProgram, TilePlan
from roundpipe.fx.twin import make_twin

logger = logging.getLogger(__name__)


def tiled_program(graph: Graph, root: nn.Module, example: Carry) -> TiledProgram | None:
    """The program of a graph from a carry; None if no region of it is worth running in tiles.

    Args:
        root: where the graph's targets are.
        example: a carry of the sizes that the program is for, real or on fakes.
    """
    try:
        with _undone(root):
            fakes = _Fakes()
            plan = fakes.plan(graph, fakes.twin(root), fakes.of(example))
    except Exception as error:  # whatever the user's code raises on fakes
        logger.info("a graph runs untiled: %s: %s", type(error).__name__, error)
        return None
    return None if plan is None else plan.write(root)


def plan_tiles(graph: Graph, root: nn.Module, example: Carry) -> TilePlan | None:
    """What of a graph is worth running in tiles, in the space of rows where that saves most; all on fakes."""
    run = run_in_rows(graph, root, example)
    all_rows = [RowGraph(run, space) for space in row_spaces(run)[:4]]
    plans = list(map(_plan_in, all_rows))
    for moved in filter(None, map(shifts_moved, all_rows)):
        other = GraphRun(moved, root, example)
        plans += [_plan_in(RowGraph(other, space)) for space in row_spaces(other)[:4]]
    if not plans:
        return None
    plans.sort(key=lambda plan: -plan.saved_bytes)
    best = next((plan for plan in plans if plan.check(root)), plans[0])
    run, inside = best.rows.run, {node for region in best.regions for node in region.nodes}
    spaces = dict.fromkeys((best.rows.space, *row_spaces(run)[:1]))  # the regions' may be that of positions alone
    for node in run.graph.nodes:
        leaves = (tiled_leaf(run, node, space) for space in spaces if node not in inside)
        if (leaf := next(filter(None, leaves), None)) is not None:
            best.leaves[node] = leaf
    return best if best.regions or best.leaves else None


def _plan_in(rows: RowGraph) -> TilePlan:
    saved = [(rows.saved_bytes(region), region) for region in rows.regions()]
    paying = [(num_bytes, region) for num_bytes, region in saved if num_bytes > 0]
    return TilePlan(rows, [region for _, region in paying], sum(num_bytes for num_bytes, _ in paying))


# ---------------------------------------------------------------------------------- layers of a chain

_analysed: WeakKeyDictionary[LayerChain, set[Hashable]] = WeakKeyDictionary()
"""By chain, the sizes of arguments for which its layers, its last one, or all have programs."""


def add_tiles(chain: LayerChain, args: tuple[Any, ...], kwargs: dict[str, Any], tiles: Tiles) -> None:
    """Let those generated layers of a chain that have tiles run in them on microbatches of these arguments' sizes."""
    key = sizes_key(chain.entry(args, kwargs).values()), tiles.layers > 1, tiles.tail > 1
    known = _analysed.setdefault(chain, set())
    if key in known:
        return
    try:
        with _undone(chain):
            _add_programs(chain, args, kwargs, tiles)
    except Exception as error:  # whatever the user's code raises on fakes
        logger.info("%s runs untiled: %s: %s", chain.specs[0].name, type(error).__name__, error)
    known.add(key)


@contextmanager
def _undone(module: nn.Module) -> Iterator[None]:
    """What running a module on fakes changes is put back."""
    with python_restored(modules_in(module)), code_on_fakes(), torch.random.fork_rng(devices=[]), in_tiles(1):
        yield


class _Fakes:
    """Values and modules on fakes, whatever they are on; all that can have a gradient requires one."""

    def __init__(self) -> None:
        self._mode = static_mode()

    def of(self, value: Any) -> Any:
        return trees.map_tensors(value, self._tensor)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = fake_of(self._mode, tensor, torch.device("cpu"))
        return fake.requires_grad_() if is_differentiable(tensor) else fake

    def twin(self, module: nn.Module) -> nn.Module:
        fakes = {tensor: fake_of(self._mode, tensor, torch.device("cpu")) for tensor in module.buffers()}
        fakes.update((tensor, self._tensor(tensor)) for tensor in module.parameters())
        return make_twin(module, fakes)[0]

    def plan(self, graph: Graph, twin: nn.Module, reads: Carry) -> TilePlan | None:
        with self._mode, torch.enable_grad():
            return plan_tiles(graph, twin, reads)

    def run(self, layer: nn.Module, reads: Carry) -> Carry:
        with self._mode, torch.enable_grad():
            made: Carry = layer(dict(reads))
            return made


def _glue_of(layer: Layer, plan: TilePlan) -> Mapping[Node, str]:
    """The names of glue that the layer's program can be given."""
    glue = layer.programs.glue
    if glue is None or plan.rows.run.graph is not layer.graph:  # one that was rewritten makes its own
        return {}
    return {node: name for name, node in glue.nodes.items()}


def _add_programs(chain: LayerChain, args: tuple[Any, ...], kwargs: dict[str, Any], tiles: Tiles) -> None:
    fakes = _Fakes()
    carry = chain.entry(*fakes.of((args, kwargs)))
    known: dict[Hashable, tuple[TilePlan | None, list[Any]]] = {}
    for index, (spec, layer) in enumerate(zip(chain.specs, chain, strict=True)):
        reads = {name: carry[name] for name in spec.reads}
        tiled = layer if isinstance(layer, Layer) and tiles.of(index, len(chain)) > 1 else None
        key = layer_key(layer, spec), tuple(map(value_key, reads.values())), tiled is None
        if key not in known:
            twin = fakes.twin(layer)
            plan = None if tiled is None else fakes.plan(tiled.graph, twin, reads)
            made = fakes.run(twin, reads) if index < len(chain) - 1 else dict.fromkeys(spec.makes)  # nobody reads them
            values = [made[name] for name in spec.makes]
            is_own = plan is not None and tiled is not None and plan.rows.run.graph is not tiled.graph
            if not is_own:  # one that was rewritten serves this layer alone
                known[key] = plan, values
        else:
            plan, values = known[key]
        if tiled is not None:
            if plan is not None and key in known:
                plan = plan.moved(tiled.graph)
            tiled.programs.reads = spec.reads
            program = None if plan is None else plan.write(tiled, _glue_of(tiled, plan))
            tiled.programs.by_sizes[tiled.programs.key(reads)] = program
        carry.update((name, fakes.of(value)) for name, value in zip(spec.makes, values, strict=True))
