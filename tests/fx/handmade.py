"""Traced graphs made with `torch.fx.symbolic_trace`, so that cutting is tested without the tracer.

Only for models that plain symbolic tracing can follow. Values come from running the graph on fakes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.fx
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from roundpipe.core import balance, trees
from roundpipe.fx.graph.traced import OutputValue, TracedGraph, lint
from roundpipe.fx.passes import cuts
from roundpipe.fx.passes.cuts import CutChoice


@contextmanager
def cuts_into(num_layers: int) -> Iterator[None]:
    """Inside, graphs are cut into so many layers at most, evenly weighted, instead of the finest chain."""

    def even(choice: CutChoice) -> list[int]:
        # it stands in for a method, which knows these
        widths = choice._widths(max(choice._weights))
        narrow = [cut for cut in choice._legal if widths[cut] <= cuts.NARROW]
        return [stop for _, stop in balance.cut_into(choice._weights, num_layers, narrow)[:-1]]

    with mock.patch.object(CutChoice, "finest", even):
        yield


class _LeafTracer(torch.fx.Tracer):
    def __init__(self, leaves: Collection[str | type]) -> None:
        super().__init__()
        self.leaves = leaves

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        named = qualified_name in self.leaves or type(module) in self.leaves
        return named or super().is_leaf_module(module, qualified_name)


class _FakeRun(torch.fx.Interpreter):
    """Runs a graph on fakes and writes down what each node did."""

    def __init__(self, model: nn.Module, graph: torch.fx.Graph, mode: FakeTensorMode) -> None:
        super().__init__(model, graph=graph)  # type: ignore[arg-type]
        self.mode = mode
        self.weights: dict[int, Any] = {}

    def run_node(self, n: Node) -> Any:
        operands = {a: self.env[a] for a in n.all_input_nodes if isinstance(self.env[a], torch.Tensor)}
        before = {a: value._version for a, value in operands.items()}
        result = super().run_node(n)
        if n.op == "output":
            return result
        n.meta["value"] = result if isinstance(result, (torch.Tensor, int, float)) else None
        mutated = tuple(a for a, value in operands.items() if value._version != before[a])
        if mutated:
            n.meta["effect"], n.meta["mutates"] = True, mutated
        if n.op == "call_module":
            module = self.module.get_submodule(str(n.target))
            n.meta["random"] = any(isinstance(m, nn.Dropout) and m.p and m.training for m in module.modules())
            norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
            n.meta["buffers_written"] = any(m.training for m in norms)
        return result

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.module.get_submodule(target)
        weights = {n: self.fake(t) for n, t in (*module.named_parameters(), *module.named_buffers())}
        return torch.func.functional_call(module, weights, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self.fake(value) if isinstance(value, torch.Tensor) else value

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.weights:
            fake = self.mode.from_tensor(tensor)
            self.weights[id(tensor)] = fake
        return self.weights[id(tensor)]


def trace(model: nn.Module, *args: torch.Tensor, leaves: Collection[str | type] = ()) -> TracedGraph:
    """A model of tensor arguments as a traced graph."""
    graph = _LeafTracer(leaves).trace(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node in placeholders[len(args) :]:
        graph.erase_node(node)
    fakes = [mode.from_tensor(argument) for argument in args]
    with mode:
        _FakeRun(model, graph, mode).run(*fakes)
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    paths = {name: (trees.Access("item", 1), trees.Access("item", name)) for name in names}
    for node in graph.nodes:
        owner = node.meta.get("nn_module_stack")
        node.meta["module"] = list(owner.values())[-1][0] if owner else ""
    output = next(node for node in graph.nodes if node.op == "output")
    returned = torch.fx.node.map_aggregate(
        output.args[0], lambda leaf: OutputValue(leaf.name) if isinstance(leaf, Node) else leaf
    )
    template = _plain(returned)
    by_name = {node.name: node for node in graph.nodes}
    outputs = [by_name[leaf.name] for leaf in trees.leaves(template) if isinstance(leaf, OutputValue)]
    graph.erase_node(output)
    graph.output(tuple(outputs))
    traced = TracedGraph(
        graph=graph,
        model=model,
        input_paths=paths,
        output=template,
        example_elements=sum(argument.numel() for argument in args),
    )
    lint(traced)
    return traced


def _plain(value: Any) -> Any:
    """fx's immutable containers as plain ones."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value
