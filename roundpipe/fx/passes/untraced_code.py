"""Whether the code of a model that has no graph mixes the samples of a batch; see `sample_dependence`."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch import nn

from roundpipe.core import trees
from roundpipe.core.modes import autocast_as_on_accelerator
from roundpipe.core.module_tree import modules_in
from roundpipe.effects.snapshot import PythonSnapshot
from roundpipe.fx.arguments import CallForm
from roundpipe.fx.graph.traced import OutputValue, TracedGraph
from roundpipe.fx.passes.sample_dependence import where_code_mixes


def where_untraced_code_mixes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What mixes samples in a model's forward, in words; empty if nothing shows that anything does.

    Its Python runs on fakes, as for a trace; what a trace can't record is no matter here. It runs on a twin, and what
    it changes elsewhere is put back. None if that can't be: it uses up something, such as an iterator, or it can't run
    on fakes.
    """
    if PythonSnapshot(modules_in(model)).reach.closed:
        return None
    with autocast_as_on_accelerator():
        return where_code_mixes(_arguments_alone(model, *CallForm(model).normalise(args, kwargs)))


def _arguments_alone(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedGraph:
    """A graph that has placeholders for the tensors of arguments, and nothing else."""
    traced = TracedGraph(torch.fx.Graph(), model)

    def named(tensor: torch.Tensor) -> OutputValue:
        node = traced.graph.placeholder(f"argument_{len(traced.placeholders)}")
        node.meta["value"] = tensor
        return OutputValue(node.name)

    traced.arguments = [trees.map_tensors(arg, named) for arg in args], trees.map_tensors(kwargs, named)
    return traced
