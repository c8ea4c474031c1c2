"""`explain`: the report of a model that can be traced, of one that can't, and the graph as DOT."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ConfigError, TraceError, explain
from roundpipe.reports.tables import format_bytes
from roundpipe.tools.graph_report import folded


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


@pytest.mark.parametrize("balance", ["time", "size"])
def test_the_layers_are_those_that_compile_makes(balance: str) -> None:
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)]
    model, inputs = nn.Sequential(*blocks), (torch.randn(4, 32),)
    num_layers = []
    for memory_bytes in (None, 40_000):  # which is too little for a block
        devices = roundpipe.Device("cpu", memory_bytes=memory_bytes)
        explained = explain(model, inputs, devices=devices, balance=balance).chain
        with roundpipe.compile(model, example_args=inputs, devices=devices, balance=balance) as pipe:
            compiled = pipe._runner.source.latest  # no public method gives the layers as values
        assert explained is not None and compiled is not None
        assert explained.specs == compiled.specs and explained.costs == compiled.costs
        num_layers.append(len(compiled))
    assert num_layers[0] < num_layers[1]


def test_memory_is_that_of_a_run_and_of_each_layer_as_a_stage() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16)) for _ in range(3)))

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
            return {"loss": nn.functional.mse_loss(self.blocks(x), target)}

    model, inputs = WithLoss(), {"x": torch.randn(32, 16), "target": torch.randn(32, 16)}
    found = explain(model, example_kwargs=inputs, devices="cpu")
    config = roundpipe.RoundPipeRunConfig(num_microbatch=1)
    with roundpipe.compile(model, devices=roundpipe.Device("cpu", memory_bytes=10**9)) as pipe:
        pipe.forward_backward(input_kwargs=inputs, loss_fn=lambda outputs, _: outputs["loss"], run_config=config)
        table = pipe.partition_table().split("\n\n")[1]
    assert "and the loss" in table and "working memory" in table and table in str(found)
    assert found.costs is not None
    last, stage = found.costs[-1], found.device_memory["U"]
    assert (stage.weights, stage.gradients, stage.activations) == (
        last.weight_bytes,
        last.gradient_bytes,
        last.training_bytes,
    )
    assert re.search(rf"  U .* {re.escape(format_bytes(stage.activations))} ", str(found))
    assert found.as_json()["device_memory"]["U"]["activations"] == last.training_bytes


def test_a_model_that_can_not_be_traced() -> None:
    found = explain(Gate(), example())
    assert isinstance(found.error, TraceError)
    assert found.traced is found.chain is None and found.opaque == {} and found.guards == [] and found.cuts == ()
    text = str(found)
    assert text.startswith("Gate can't be cut into layers.")
    assert "test_explain.py" in text and "if out.sum() > 0" in text
    assert (
        "torch.where(condition, a, b)" in text and "move this code into a submodule" in text and "AutoRoundPipe" in text
    )


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


def test_an_example_of_its_own_is_named_where_it_may_be_wrong() -> None:
    class Misleading(Model):
        dummy_inputs: ClassVar = {"input_ids": torch.ones(3, 5, dtype=torch.long)}

        def forward(self, x: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
            return super().forward(x.float())  # type: ignore[union-attr]

    class Unfit(Model):
        dummy_inputs: ClassVar = Misleading.dummy_inputs

    class Own(Gate):
        dummy_inputs: ClassVar = {"x": example()[0]}

    for text in (str(found := explain(Misleading())), found.as_json()["error"]):
        assert "the model's own dummy_inputs (input_ids)" in text and "don't fit its forward" in text
        assert "give example_args=(...) or example_kwargs={...}" in text
    with pytest.raises(ConfigError, match=r"Unfit's own dummy_inputs \(input_ids\) don't fit its forward: .*'x'; give"):
        explain(Unfit())
    with pytest.raises(TypeError, match="missing a required argument"):
        explain(Unfit(), example_kwargs={"input_ids": torch.ones(1)})
    text = str(explain(Own()))
    assert "The example was the model's own dummy_inputs (x)" in text and "AutoRoundPipe" in text
    assert "dummy_inputs" not in str(explain(Own(), example()))
    assert "dummy_inputs" not in str(explain(Misleading(), example_kwargs={"input_ids": torch.ones(1)}))


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


def test_the_graph_as_a_picture(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image", reason="needs the extra [plot]")
    sizes = []
    for number in (1, 3):
        file = tmp_path / f"{number}.PNG"
        explain(
            nn.Sequential(*[Model() if index == 0 else nn.Linear(2, 2) for index in range(number)]),
            example(),
            graph=file,
        )
        pixels = image.imread(file)
        assert len(np.unique(pixels)) > 20, "it is blank"
        sizes.append(pixels.shape)
    assert sizes[1][0] > sizes[0][0] and sizes[1][1] == sizes[0][1]


def test_what_can_not_be_drawn_is_said_before_tracing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundpipe.tools.explain.trace", None)
    for name, message in (("model.svg", r"\.dot or \.png"), ("no/folder/model.dot", "no folder")):
        with pytest.raises(ConfigError, match=message):
            explain(Model(), example(), graph=tmp_path / name)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"matplotlib: pip install 'roundpipe\[plot\]'"):
        explain(Model(), example(), graph=tmp_path / "model.png")


def test_too_many_boxes_for_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra [plot]")
    monkeypatch.setattr("roundpipe.tools.graph_report.MAX_BOXES", 3)
    with pytest.raises(ConfigError, match="write it as .dot"):
        explain(Model(), example(), graph=tmp_path / "model.png")


def test_a_file_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken.dot").mkdir()
    with pytest.raises(ConfigError, match=r"taken\.dot.* can't be written"):
        explain(Model(), example(), graph=tmp_path / "taken.dot")


def test_as_plain_values() -> None:
    found = explain(Model(), example())
    values = found.as_json()
    assert json.loads(json.dumps(values)) == values
    assert values["opaque"] == found.opaque and values["guards"] == found.guards
    assert [cut["bytes"] for cut in values["cuts"]] == [sum(size for _, size in cut) for cut in found.cuts]
    gate = explain(Gate(), example())
    assert gate.as_json() == {"model": "Gate", "traced": False, "error": str(gate.error)}


def test_folding_keeps_what_differs() -> None:
    lines = ["a", "b0 4", "c0 4", "b1 4", "c1 4", "b2 4", "c2 4", "d"]
    assert list(folded(lines)) == ["a", "3 times, the first of them:", "  b0 4", "  c0 4", "d"]
    assert list(folded(["x", "y", "z"])) == ["x", "y", "z"]
    assert list(folded([])) == []
