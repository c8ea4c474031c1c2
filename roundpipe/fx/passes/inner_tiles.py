"""Tiles in modules that a layer calls as a whole: those of their submodules whose forward is row-wise run in tiles.

A long stack's blocks are leaves of the graph, in which the MLP is such a submodule. While the layer calls the leaf, the
submodule's forward is replaced by one in tiles; it is judged by the operators that it runs, as nodes are.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.core.compiled_modules import is_compiled
from roundpipe.core.modes import has_saved_tensor_hooks
from roundpipe.core.tiled_regions import Region, RowResult
from roundpipe.core.tiling import Rows
from roundpipe.effects.snapshot import ContentsSnapshot
from roundpipe.fx.operations import NamedCall, call_leaf
from roundpipe.fx.passes.graph_run import GraphRun, OperatorEffects, attribute, has_own_function, why_opaque
from roundpipe.fx.passes.regions import RowSpace
from roundpipe.fx.passes.rows import RowWatch
from roundpipe.fx.passes.tile_check import difference


@dataclass(frozen=True, slots=True)
class TiledForward:
    """A submodule's forward in tiles, for calls of one form."""

    region: Region
    names: tuple[str, ...]
    """Of the last arguments, which are given by name."""
    shapes: tuple[torch.Size | None, ...]
    """Of its arguments; None: no tensor."""
    saved_bytes: int

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        is_known = tuple(kwargs) == self.names and tuple(map(_shape, values)) == self.shapes
        if not is_known or has_saved_tensor_hooks():  # a checkpoint would recompute it whole
            return type(module).forward(module, *args, **kwargs)
        (result,) = self.region(module, *values)
        return result


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, torch.Tensor) else None


@dataclass(frozen=True, slots=True)
class TiledLeaf:
    """Calls a leaf with the forward of some submodules, by path, in tiles."""

    forwards: Mapping[str, TiledForward]

    def __call__(self, leaf: nn.Module, *args: Any, **kwargs: Any) -> Any:
        modules = {path: leaf.get_submodule(path) for path in self.forwards}
        changed = {path: module for path, module in modules.items() if "forward" not in module.__dict__}
        try:
            for path, module in changed.items():
                module.__dict__["forward"] = functools.partial(self.forwards[path], module)
            return call_leaf(leaf, *args, **kwargs)
        finally:
            for module in changed.values():
                module.__dict__.pop("forward", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> TiledLeaf:
        return self


def leaf_of(run: GraphRun, node: Node) -> nn.Module | None:
    """The module that a node calls as a whole, if it does."""
    if node.op == "call_module":
        leaf: nn.Module = attribute(run.root, node)
        return leaf
    target = node.target.function if isinstance(node.target, NamedCall) else node.target
    return run.values[node.args[0]] if target is call_leaf and isinstance(node.args[0], Node) else None


def tiled_leaf(run: GraphRun, node: Node, space: RowSpace) -> TiledLeaf | None:
    """How a node that calls a module can do so in tiles; None if no submodule is worth it."""
    leaf = leaf_of(run, node)
    if leaf is None or isinstance(leaf, torch.jit.ScriptModule) or len(list(leaf.modules())) == 1:
        return None
    if any(map(is_compiled, leaf.modules())):  # torch would compile it anew, in pieces around the tiles
        return None
    found: dict[str, TiledForward] = {}
    calls = _calls_in(run, node, leaf)
    for path, module in leaf.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in found)
        if path and not is_inside and len(calls.get(path, ())) == 1:
            forward = _tiled_forward(module, space, *calls[path][0])
            if forward is not None:
                found[path] = forward
    return TiledLeaf(found) if found else None


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _calls_in(run: GraphRun, node: Node, leaf: nn.Module) -> dict[str, list[Arguments]]:
    """What each submodule of a leaf is called with."""
    calls: dict[str, list[Arguments]] = {}
    handles = []
    for path, module in leaf.named_modules():
        if path and not isinstance(module, torch.jit.ScriptModule):

            def note(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                calls.setdefault(path, []).append((args, kwargs))

            handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
    try:
        run.run_node(node)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _tiled_forward(
    module: nn.Module, space: RowSpace, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TiledForward | None:
    if not all(isinstance(value, (torch.Tensor, *trees.PLAIN)) for value in (*args, *kwargs.values())):
        return None
    if "forward" in module.__dict__ or any(map(why_opaque, module.modules())):
        return None
    values = [_leaf(value) for value in (*args, *kwargs.values())]
    rows: list[Rows | None] = [space.rows_of(value) if isinstance(value, torch.Tensor) else None for value in values]
    watch = RowWatch(space.sizes, [(value, dims) for value, dims in zip(values, rows, strict=True) if dims], [])
    before, number = ContentsSnapshot(module.modules()), len(args)
    with OperatorEffects() as effects, watch:
        result = module(*values[:number], **dict(zip(kwargs, values[number:], strict=True)))
    is_pure = not (before.diff() or before.holds_new_values() or effects.written - effects.born)
    if not is_pure or not isinstance(result, torch.Tensor) or watch.why_not or has_own_function([result], set()):
        return None
    found = watch.found(result)
    taken = zip(values, rows, strict=True)
    saved = watch.made_bytes - 2 * result.nbytes - sum(value.nbytes for value, dims in taken if dims)
    if not isinstance(found, tuple) or saved <= 0 or any(tensor._backward_hooks for tensor in effects.made):
        return None
    region = Region(
        function=_Forward(number, tuple(kwargs)),
        sizes=space.sizes,
        inputs=tuple(rows),
        results=(RowResult.like(result, found),),
        parameters=_parameters,
        draws_random=watch.draws_random,
    )
    try:
        if difference(region, module, values):
            return None
    except Exception:  # whatever the user's code raises in a tile
        return None
    return TiledForward(region, tuple(kwargs), tuple(map(_shape, values)), saved)


def _leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point())


def _parameters(module: nn.Module) -> list[torch.Tensor]:
    return list(module.parameters())


@dataclass(frozen=True, slots=True)
class _Forward:
    """A module's own forward, with positional arguments first."""

    number: int
    names: tuple[str, ...]

    def __call__(self, module: nn.Module, sizes: tuple[int, ...], *values: Any) -> tuple[Any]:
        named = dict(zip(self.names, values[self.number :], strict=True))
        return (type(module).forward(module, *values[: self.number], **named),)
