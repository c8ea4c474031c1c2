"""Generated layers as modules: code, copies, errors, inputs and outputs."""

from __future__ import annotations

import copy
import enum
import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe.core.layers import EXECUTION_DEVICE
from roundpipe.fx.graph.traced import lint
from roundpipe.fx.passes import codegen
from tests.fx import handmade
from tests.fx.cases_codegen import Block, Decoder, UNet, chain_of, compile_by_hand, float64
from tests.fx.layerwise import assert_equals_eager, run_layers


class Colour(enum.Enum):
    RED = 1


class Odd(str):
    """A string that its repr does not make again."""

    def __repr__(self) -> str:
        return "<odd>"


@dataclass
class Settings:
    scale: float


def scaled(x: torch.Tensor, colour: Any, options: Any, device: Any) -> torch.Tensor:
    """Glue with arguments of every kind."""
    assert isinstance(colour, Colour)
    assert type(options) is dict and type(options["list"]) is list, "plain containers, not fx's"
    assert isinstance(options["name"], Odd)
    assert options["infinite"] == float("inf")
    return x * options["settings"].scale + torch.zeros(1, dtype=options["dtype"], device=device)


def test_arguments_without_a_literal_become_attributes() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.graph = nn.Linear(4, 4)  # a name that torch.fx has taken
            self.meta = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.meta(torch.tanh(self.graph(x)))

    model = float64(Model())
    traced = handmade.trace(model, torch.randn(4, 4, dtype=torch.float64))
    tanh = next(node for node in traced.graph.nodes if node.name == "tanh")
    options = {
        "list": [1, (2.5, None)],
        "name": Odd("x"),
        "settings": Settings(2.0),
        "dtype": torch.float64,
        "infinite": float("inf"),
    }
    tanh.target = scaled
    tanh.args = (*tanh.args, Colour.RED, options, torch.device("cpu"))
    chain = chain_of(traced)
    x = torch.randn(3, 4, dtype=torch.float64)
    for copied in (chain, copy.deepcopy(chain)):
        assert torch.equal(copied.run(x), model.meta(model.graph(x) * 2))
    spec = next(spec for spec in chain.specs if spec.execution_device)
    layer = chain[chain.specs.index(spec)]
    assert getattr(layer, EXECUTION_DEVICE) == torch.device("cpu")
    assert EXECUTION_DEVICE in layer.code
    moved = copy.copy(layer)
    setattr(moved, EXECUTION_DEVICE, torch.device("meta"))
    assert getattr(layer, EXECUTION_DEVICE) == torch.device("cpu")


def test_layers_share_the_users_modules() -> None:
    model = float64(Decoder())
    ids = torch.randint(0, 50, (4, 6))
    chain = compile_by_hand(model, ids, ids, leaves=(Block,))
    assert chain[1].layers.get_submodule("1") is model.layers[1]
    names = {id(p): name for name, p in model.named_parameters()}
    for layer in chain:
        for name, parameter in layer.named_parameters():
            assert names[id(parameter)] == name or model.head.weight is parameter
    chain.eval()
    assert not model.layers[0].training


def test_a_chain_is_a_sequential_and_survives_deepcopy() -> None:
    model = float64(Decoder())
    ids = torch.randint(0, 50, (4, 6))
    chain = compile_by_hand(model, ids, ids)
    assert isinstance(chain, nn.Sequential)
    clone = copy.deepcopy(chain)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert not torch.equal(clone.run(ids, ids)["loss"], chain.run(ids, ids)["loss"])
    tied = [p for p in clone.parameters() if p.shape == (50, 16)]
    assert len(tied) == 1
    clone.run(ids, ids)["loss"].backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_forward_hooks_on_layers_fire_and_a_copy_has_its_own_dicts() -> None:
    ids = torch.randint(0, 50, (4, 6))
    chain = compile_by_hand(float64(Decoder()), ids, ids)
    calls: list[int] = []
    chain[1].register_forward_hook(lambda *_: calls.append(1))
    chain.run(ids, ids)
    assert calls == [1]
    shallow = copy.copy(chain[0])
    assert type(shallow) is type(chain[0])
    shallow._modules.clear()
    assert chain[0]._modules


def test_generated_code_reads_well() -> None:
    ids = torch.randint(0, 50, (4, 6))
    chain = compile_by_hand(float64(Decoder()), ids, ids, leaves=(Block,))
    lines = [line.split(";")[0].strip() for line in chain[1].code.strip().splitlines()]
    assert lines == [
        "def forward(self, carry):",
        "ids = carry['ids']",
        "layers_0 = carry['layers_0']",
        "unsqueeze = ids.unsqueeze(1)",
        "lt = unsqueeze < 3",
        'layers_1 = getattr(self.layers, "1")(layers_0, lt)',
        "pass_on = roundpipe_fx_operations_pass_on(carry, ('ids', 'labels'), {'layers_1': layers_1})",
        "return pass_on",
    ]


def test_a_users_error_passes_whole(capsys: pytest.CaptureFixture[str]) -> None:
    ids = torch.randint(0, 50, (4, 6))
    chain = compile_by_hand(float64(Decoder()), ids, ids)
    with pytest.raises(IndexError) as caught:
        chain.run(torch.full((4, 6), 99), ids)
    assert any("embedding" in str(entry) for entry in caught.traceback)
    assert capsys.readouterr().err == ""


def test_missing_arguments_are_a_type_error_of_the_forward() -> None:
    ids = torch.randint(0, 50, (4, 6))
    chain = compile_by_hand(float64(Decoder()), ids, ids)
    with pytest.raises(TypeError, match="labels"):
        chain.run(ids)


def test_outputs_are_new_containers_of_the_same_types() -> None:
    @dataclass
    class Result:
        values: list[torch.Tensor]
        note: str | None
        size: torch.Tensor

    model = float64(UNet())
    traced = handmade.trace(model, torch.randn(2, 4, 10, dtype=torch.float64))
    template = traced.output
    traced.output = Result([template, template], None, template)
    output = next(node for node in traced.graph.nodes if node.op == "output")
    output.args = ((output.args[0][0],) * 3,)
    lint(traced)
    chain = chain_of(traced)
    x = torch.randn(2, 4, 10, dtype=torch.float64)
    first, second = chain.run(x), chain.run(x)
    assert type(first) is Result and first.note is None
    assert first.values is not second.values
    assert torch.equal(first.values[1], model(x))


def test_an_input_or_a_parameter_can_be_an_output() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            mask = y > 0
            for layer in self.layers:
                x = layer(x)
            return x, y, self.weight, mask

    model = float64(Model())
    x, y = torch.randn(2, 3, 4, dtype=torch.float64).unbind(0)
    chain = compile_by_hand(model, x, y)
    for got in (chain.run(x, y), run_layers(chain, x, y)):
        assert torch.equal(got[0], model(x, y)[0])
        assert got[1] is y and got[2] is model.weight and torch.equal(got[3], y > 0)


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_any_number_of_layers(num_layers: int) -> None:
    model = float64(Decoder())
    ids = torch.randint(0, 50, (4, 6))
    with handmade.cuts_into(num_layers):
        chain = compile_by_hand(model, ids, ids)
    assert len(chain) == num_layers
    assert_equals_eager(model, chain, ids, ids, loss_of=lambda out: out["loss"])


def test_signature_of_public_functions() -> None:
    assert list(inspect.signature(codegen.generate).parameters) == ["traced", "partition", "costs"]
