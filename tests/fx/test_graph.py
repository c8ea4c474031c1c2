"""The grammar of traced graphs: each rule is broken once and named; liveness, aliases, orderings."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, Node

from roundpipe.core import trees
from roundpipe.core.errors import TraceError
from roundpipe.fx.graph.nodes import (
    draws_random,
    has_effect,
    is_accessor,
    live_before,
    modes_of,
    module_of,
    mutated_by,
    needed_for,
    producer_of,
    value_of,
    writes_buffers,
)
from roundpipe.fx.graph.traced import OutputValue, TracedGraph, lint, output_names
from roundpipe.fx.operations import assign_buffer
from roundpipe.fx.passes.cuts import Memory
from tests.fx import handmade


class Small(nn.Module):
    """One input, a leaf, glue, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(x) * self.scale
        return {"sum": y.sum(), "y": y}


def traced() -> TracedGraph:
    return handmade.trace(Small(), torch.randn(2, 4))


def nodes_of(graph: TracedGraph) -> dict[str, Node]:
    return {"output" if node.op == "output" else node.name: node for node in graph.graph.nodes}


def test_a_good_graph_passes() -> None:
    graph = traced()
    lint(graph)
    assert [node.name for node in graph.placeholders] == ["x"]
    assert [node.name for node in graph.body] == ["linear", "mul", "sum_1"]
    assert [node.name for node in graph.outputs] == ["sum_1", "mul"]
    assert graph.attribute("linear.weight") is graph.model.linear.weight
    assert len(graph.parameters_of(nodes_of(graph)["linear"])) == 2


def set_meta(node: str, **meta: Any) -> Callable[[TracedGraph], None]:
    return lambda graph: nodes_of(graph)[node].meta.update(meta)


def set_target(node: str, target: Any) -> Callable[[TracedGraph], None]:
    return lambda graph: setattr(nodes_of(graph)[node], "target", target)


def late_placeholder(graph: TracedGraph) -> None:
    with graph.graph.inserting_after(nodes_of(graph)["linear"]):
        node = graph.graph.placeholder("late")
    node.meta["value"] = nodes_of(graph)["x"].meta["value"]
    graph.input_paths["late"] = ()


def read_too_early(graph: TracedGraph) -> None:
    nodes = nodes_of(graph)
    nodes["linear"].args = (nodes["mul"],)


def two_of_a_name(graph: TracedGraph) -> None:
    nodes_of(graph)["mul"].name = "linear"


def without_output(graph: TracedGraph) -> None:
    graph.graph.erase_node(nodes_of(graph)["output"])


def without_value(graph: TracedGraph) -> None:
    del nodes_of(graph)["mul"].meta["value"]


def mutates_later(graph: TracedGraph) -> None:
    nodes = nodes_of(graph)
    nodes["mul"].meta.update(effect=True, mutates=(nodes["sum_1"],))


def mutates_silently(graph: TracedGraph) -> None:
    nodes = nodes_of(graph)
    nodes["mul"].meta["mutates"] = (nodes["linear"],)


def bad_assignment(graph: TracedGraph) -> None:
    nodes = nodes_of(graph)
    nodes["mul"].target = assign_buffer


def method_of_nothing(graph: TracedGraph) -> None:
    nodes_of(graph)["sum_1"].args = ()


def unbound_path(graph: TracedGraph) -> None:
    graph.input_paths["ghost"] = ()


def without_path(graph: TracedGraph) -> None:
    graph.input_paths.clear()


def wrong_template(graph: TracedGraph) -> None:
    graph.output = {"y": OutputValue("mul")}


def outputs_no_tuple(graph: TracedGraph) -> None:
    output = nodes_of(graph)["output"]
    output.args = (nodes_of(graph)["mul"],)


BROKEN: dict[str, Callable[[TracedGraph], None]] = {
    "a placeholder comes after": late_placeholder,
    "reads 'mul', which no earlier node makes": read_too_early,
    "name 'linear' is given twice": two_of_a_name,
    "no output node": without_output,
    "meta has no 'value'": without_value,
    "is a list, not a tensor": set_meta("mul", value=[1]),
    "a placeholder must be a tensor": set_meta("x", value=3),
    "'ghost' is neither in the model nor a constant": set_target("linear", "ghost"),
    "'scale' is a Tensor, not a module": set_target("linear", "scale"),
    "'nothing' can't be called": set_target("mul", "nothing"),
    "needs a name and a node": method_of_nothing,
    "meta\\['effect'\\] is 1, not a bool": set_meta("mul", effect=1),
    "meta\\['random'\\] is None, not a bool": set_meta("mul", random=None),
    "meta\\['module'\\] is None": set_meta("mul", module=None),
    "is a object, not Modes": set_meta("mul", modes=object()),
    "not a tuple of nodes": set_meta("mul", mutates=["linear"]),
    "writes 'sum_1', which no earlier node makes": mutates_later,
    "meta\\['effect'\\] is not set": mutates_silently,
    "an input or attribute has no effects": set_meta("scale", effect=True),
    "only a leaf module can have": set_meta("mul", buffers_written=True),
    "assignment to a buffer must have the buffer": bad_assignment,
    "the placeholder has no input path": without_path,
    "input paths without a placeholder: \\['ghost'\\]": unbound_path,
    "the output template names \\['mul'\\]": wrong_template,
    "must be a tuple of nodes": outputs_no_tuple,
}


@pytest.mark.parametrize("message", BROKEN, ids=[broken.__name__ for broken in BROKEN.values()])
def test_each_broken_rule_is_named(message: str) -> None:
    graph = traced()
    BROKEN[message](graph)
    with pytest.raises(TraceError, match=message):
        lint(graph)


def test_meta_defaults() -> None:
    node = Graph().placeholder("x")
    assert value_of(node) is None and modes_of(node) is None
    assert not draws_random(node) and not has_effect(node)
    assert mutated_by(node) == () and module_of(node) == ""
    assert not writes_buffers(node)


def test_accessors_and_their_producers() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    parts = graph.call_method("split", (x, 2))
    first = graph.call_function(operator.getitem, (parts, 0))
    row = graph.call_function(operator.getitem, (first, 0))
    x.meta["value"] = first.meta["value"] = row.meta["value"] = torch.ones(4)
    assert is_accessor(first) and not is_accessor(row)
    assert producer_of(first) is parts and producer_of(row) is row


def test_output_value_is_a_leaf_of_a_template() -> None:
    template = {"a": OutputValue("x"), "b": (OutputValue("y"), None)}
    assert output_names(template) == ["x", "y"]
    assert trees.map_leaves(template, lambda leaf: leaf) == template
    assert OutputValue("x") == OutputValue("x") and len({OutputValue("x"), OutputValue("x")}) == 1


def test_liveness() -> None:
    graph = traced()
    order = graph.body
    live = [{node.name for node in values} for values in live_before(order, graph.outputs)]
    assert live == [{"x", "scale"}, {"linear", "scale"}, {"mul"}, {"mul", "sum_1"}]


class Aliases(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        row = y[0]
        before = y.sum()
        row.add_(1)
        return y + before


def test_aliases_share_a_group() -> None:
    graph = handmade.trace(Aliases(), torch.randn(2, 4))
    names = {tuple(node.name for node in group) for group in Memory(graph).values.values()}
    assert ("mul", "getitem", "add_") in names


def test_a_value_needs_what_it_reads_and_earlier_writes_to_its_memory() -> None:
    graph = handmade.trace(Aliases(), torch.randn(2, 4))
    nodes = nodes_of(graph)
    assert [node.name for node in needed_for(graph.body, [nodes["sum_1"]])] == ["mul", "sum_1"]
    assert [node.name for node in needed_for(graph.body, [nodes["add"]])] == ["mul", "getitem", "sum_1", "add_", "add"]


@pytest.mark.parametrize("value", [torch.full((3,), 2.0), torch.ones(5), torch.ones(3, dtype=torch.int64)])
def test_assigned_buffers_keep_their_object(value: torch.Tensor) -> None:
    buffer = torch.zeros(3, dtype=value.dtype)
    assert assign_buffer(buffer, value) is buffer
    assert torch.equal(buffer, value) and buffer.data_ptr() != value.data_ptr()
