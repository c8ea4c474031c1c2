"""Runs a traced graph node by node, to compare it with the model it was traced from.

The code generator is tested on its own; what is tested here is that the graph itself is right.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.fx
from torch import nn

from roundpipe.core import trees
from roundpipe.fx.arguments import CallForm
from roundpipe.fx.graph.nodes import GraphInterpreter
from roundpipe.fx.graph.traced import OutputValue, TracedGraph


class _Replay(GraphInterpreter):
    def __init__(self, traced: TracedGraph, arguments: Any) -> None:
        super().__init__()
        self.traced = traced
        self.arguments = arguments

    def placeholder(self, node: torch.fx.Node) -> Any:
        return trees.get(self.arguments, self.traced.input_paths[node.name])

    def get_attr(self, node: torch.fx.Node) -> Any:
        return self.traced.attribute(str(node.target))

    def call_module(self, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        return self.traced.model.get_submodule(str(node.target))(*args, **kwargs)


def replay(traced: TracedGraph, *args: Any, **kwargs: Any) -> Any:
    """The model's outputs, computed by the graph."""
    run = _Replay(traced, CallForm(traced.model).normalise(args, kwargs))
    for node in (*traced.graph.nodes,)[:-1]:
        run.values[node] = run.run_node(node)
    named = {node.name: value for node, value in run.values.items()}
    return trees.map_leaves(traced.output, lambda leaf: named[leaf.name] if isinstance(leaf, OutputValue) else leaf)


def measure(
    model: nn.Module, call: Callable[..., Any], inputs: dict[str, Any], loss_of: Callable[[Any], torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    """Loss, gradients and buffers after one call and its backward; the model's buffers are put back."""
    buffers = [
        (module, key, buffer, buffer.clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    given = trees.map_tensors(inputs, lambda tensor: tensor.clone())
    loss = loss_of(call(**given))
    loss.backward()
    result: dict[str, torch.Tensor | None] = {"loss": loss.detach().clone()}
    for name, parameter in model.named_parameters():
        result[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
    result.update({f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()})
    with torch.no_grad():
        for module, key, buffer, was in buffers:
            buffer.data = was
            module._buffers[key] = buffer  # a forward may have put another in its place
    return result


def largest_difference(
    first: dict[str, torch.Tensor | None], second: dict[str, torch.Tensor | None]
) -> tuple[float, str]:
    """The largest relative difference of two measurements, and where it is."""
    worst, where = 0.0, ""
    scale = max(
        [t.abs().max().item() for name, t in first.items() if t is not None and "gradient" in name and t.numel()]
        + [1e-12]
    )
    for name in first:
        a, b = first[name], second.get(name)
        if a is None or b is None:
            difference = 0.0 if a is b or _vanishes(a) and _vanishes(b) else float("inf")
        elif a.shape != b.shape:
            difference = float("inf")
        elif not a.is_floating_point():
            difference = 0.0 if torch.equal(a, b) else float("inf")
        else:
            base = a.abs().max().item() + (1e-4 * scale if "gradient" in name else 1e-12) if a.numel() else 1.0
            difference = (a - b).abs().max().item() / base if a.numel() else 0.0
        if not difference <= worst:
            worst, where = difference, name
    return worst, where


def _vanishes(tensor: torch.Tensor | None) -> bool:
    return tensor is None or not tensor.abs().max().item()


def eager_difference(
    traced: TracedGraph, inputs: dict[str, Any], loss_of: Callable[[Any], torch.Tensor]
) -> tuple[float, str]:
    """How far the graph is from the model it was traced from, on some inputs."""
    eager = measure(traced.model, traced.model, inputs, loss_of)
    graph = measure(traced.model, lambda **given: replay(traced, **given), inputs, loss_of)
    return largest_difference(eager, graph)
