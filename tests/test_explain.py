"""`explain`: the report of a model that can be traced, of one that can't, and the graph as DOT."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ConfigError, TraceError, explain
from roundpipe.explain import _folded


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        return out if out.sum() > 0 else -out  # the line to name


class Model(nn.Module):
    """Blocks with a residual, one that stays whole, and a skip over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(6)])
        self.gate = Gate()
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = x * 2
        for block in self.blocks:
            x = x + block(x)
        if x.shape[0] > 3:
            x = x + skipped
        return self.head(self.gate(x))


def example() -> tuple[torch.Tensor]:
    return (torch.randn(4, 8),)


def test_the_report() -> None:
    model = Model()
    found = explain(model, example())
    text = str(found)
    assert found.error is None and found.chain is not None
    assert "inputs x: f32[4, 8]" in text
    assert "6 times, the first of them:\n    blocks.0 (Sequential) -> f32[4, 8]" in text
    assert "gate (Gate) -> f32[4, 8]" in text and "head (Linear) -> f32[4, 2]" in text
    assert f"Traced into {len(found.chain.specs)} layers; 1 of its modules stayed whole" in text
    assert list(found.opaque) == ["gate"]
    line = next(
        number for number, one in enumerate(Path(__file__).read_text().splitlines(), 1) if "line to name" in one
    )
    assert f"test_explain.py:{line}" in found.opaque["gate"] and found.opaque["gate"] in text
    assert any("> 3" in guard and "test_explain.py" in guard for guard in found.guards)
    assert all(guard in text for guard in found.guards)


def test_carried_values_are_those_of_the_layers() -> None:
    found = explain(Model(), example())
    assert found.chain is not None
    assert len(found.cuts) == len(found.chain.specs) - 1
    for values, cost in zip(found.cuts, found.chain.costs, strict=False):
        assert sum(size for _, size in values) == cost.carry_bytes
        assert all(size == 4 * 8 * 4 for _, size in values)
    assert "behind layer 0" in str(found)


def test_a_model_that_can_not_be_traced() -> None:
    found = explain(Gate(), example())
    assert isinstance(found.error, TraceError)
    assert found.traced is found.chain is None and found.opaque == {} and found.guards == [] and found.cuts == ()
    text = str(found)
    assert text.startswith("Gate can't be cut into layers.")
    assert "test_explain.py" in text and "if out.sum() > 0" in text
    assert "Move this code into a submodule" in text and "AutoRoundPipe" in text


def test_on_meta_and_with_the_models_own_example() -> None:
    class WithExample(Model):
        @property
        def dummy_inputs(self) -> dict[str, torch.Tensor]:
            return {"x": torch.zeros(6, 8)}

    with torch.device("meta"):
        model = WithExample()
    assert "inputs x: f32[6, 8]" in str(explain(model))
    assert "inputs x: f32[5, 8]" in str(explain(model, example_kwargs={"x": torch.zeros(5, 8, device="meta")}))
    with pytest.raises(ConfigError, match="Model has no dummy_inputs"):
        explain(Model())


def test_a_compiled_model_is_explained_like_its_original() -> None:
    model = Model()
    inputs = example()
    with roundpipe.compile(model, example_args=inputs, devices=["cpu"]) as pipe:
        assert str(explain(pipe, inputs)) == str(explain(model, inputs))


def test_the_model_is_left_alone() -> None:
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    explain(model, (torch.zeros(4, 8),))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_graph_as_dot(tmp_path: Path) -> None:
    file = tmp_path / "model.dot"
    found = explain(Model(), example(), graph=file)
    text = file.read_text()
    assert text.startswith("digraph model {\n") and text.endswith("}\n")
    assert text.count("{") == text.count("}")
    assert found.chain is not None
    assert text.count("subgraph cluster_") == len(found.chain.specs)
    declared = set(re.findall(r'^ +"([^"]+)" \[(?:shape=ellipse|label)', text, re.MULTILINE))
    edges = re.findall(r'^ +"([^"]+)" -> "([^"]+)"', text, re.MULTILINE)
    assert {name for edge in edges for name in edge} == declared
    assert ("x", "mul") in edges and any(target == "outputs" for _, target in edges)


def test_folding_keeps_what_differs() -> None:
    lines = ["a", "b0 4", "c0 4", "b1 4", "c1 4", "b2 4", "c2 4", "d"]
    assert list(_folded(lines)) == ["a", "3 times, the first of them:", "  b0 4", "  c0 4", "d"]
    assert list(_folded(["x", "y", "z"])) == ["x", "y", "z"]
    assert list(_folded([])) == []
