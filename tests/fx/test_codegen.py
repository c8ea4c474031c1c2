"""Generated chains of models that plain symbolic tracing can follow; ends, copies, readable code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from roundpipe.core.modes import Modes
from roundpipe.fx.graph.traced import TracedGraph, lint
from roundpipe.fx.operations import assign_buffer
from roundpipe.fx.passes import codegen
from roundpipe.fx.passes.cost import measure
from roundpipe.fx.passes.partition import partition
from tests.fx import handmade
from tests.fx.cases_codegen import Block, Decoder, UNet, chain_of, compile_by_hand, float64
from tests.fx.layerwise import assert_equals_eager, run_layers


class Residual(nn.Module):
    """A ResNet block with in-place activations."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm_1 = nn.BatchNorm2d(channels)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm_2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm_1(self.conv_1(x)))
        y = self.norm_2(self.conv_2(y))
        y += x
        return self.relu(y)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList([Residual(8) for _ in range(4)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu_(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class SharedNorm(nn.Module):
    """One BatchNorm called at the start and in the middle, between layers that don't need it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(8)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = x
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + x
            if index in (1, 4):
                x = self.norm(x)
            if index == 4:
                middle = x
        return x, middle


@pytest.mark.parametrize("leaves", [(), (Block,)], ids=["descended", "blocks"])
@pytest.mark.parametrize("tied", [True, False])
def test_decoder_equals_eager(leaves: Any, tied: bool) -> None:
    model = float64(Decoder(tied=tied))
    ids, labels = torch.randint(0, 50, (4, 6)), torch.randint(0, 50, (4, 6))
    chain = compile_by_hand(model, ids, labels, leaves=leaves)
    assert len(chain) >= 4
    for batch, length in ((4, 6), (2, 9), (1, 3)):
        ids, labels = torch.randint(0, 50, (batch, length)), torch.randint(0, 50, (batch, length))
        assert_equals_eager(model, chain, ids, labels, loss_of=lambda out: out["loss"])
        assert_equals_eager(model, chain, ids=ids, labels=labels)


def test_masks_are_recomputed_not_carried() -> None:
    ids = torch.randint(0, 50, (4, 6))
    chain = compile_by_hand(float64(Decoder()), ids, ids, leaves=(Block,))
    made = [name for spec in chain.specs for name in spec.makes]
    assert made == ["layers_0", "layers_1", "layers_2", "layers_3", "head", "cross_entropy"]
    assert all("ids" in spec.reads for spec in chain.specs[:4])
    assert chain.specs[-1].reads == ("labels", "layers_3")


def test_convolutions_with_in_place_activations() -> None:
    model = float64(ConvNet())
    chain = compile_by_hand(model, torch.randn(4, 3, 6, 6, dtype=torch.float64))
    assert len(chain) >= 4
    image = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    before = image.clone()
    assert_equals_eager(model, chain, image)
    assert torch.equal(image, before)


def test_in_place_on_a_carried_value_works_on_a_clone() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                y = layer(x)
                x = y.mul_(2)
            return x.mul_(2)

    model = float64(Model())
    chain = compile_by_hand(model, torch.randn(3, 4, dtype=torch.float64))
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert_equals_eager(model, chain, x)


def test_input_written_in_place_is_the_callers_no_more() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.add_(1)
            for layer in self.layers:
                x = layer(x)
            return x

    model = float64(Model())
    chain = compile_by_hand(model, torch.randn(3, 4, dtype=torch.float64))
    x = torch.randn(3, 4, dtype=torch.float64)
    before = x.clone()
    want = model(x.clone())
    assert torch.equal(chain.run(x), want)
    assert torch.equal(run_layers(chain, x), want)
    assert torch.equal(x, before)


def test_skips_of_any_span() -> None:
    model = float64(UNet())
    chain = compile_by_hand(model, torch.randn(2, 4, 10, dtype=torch.float64))
    assert len(chain) >= 4
    assert_equals_eager(model, chain, torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True))


def test_calls_of_a_module_that_writes_buffers_stay_in_one_layer() -> None:
    model = float64(SharedNorm())
    chain = compile_by_hand(model, torch.randn(4, 6, dtype=torch.float64))
    assert len(chain) >= 3
    assert sum("norm" in spec.module_names for spec in chain.specs) == 1
    assert_equals_eager(model, chain, torch.randn(5, 6, dtype=torch.float64))


def test_shared_module_without_buffers_may_be_in_several_layers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(8, 8)
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(self.shared(layer(x)))
            return x

    model = float64(Model())
    chain = compile_by_hand(model, torch.randn(4, 8, dtype=torch.float64))
    assert sum("shared" in spec.module_names for spec in chain.specs) >= 2
    assert_equals_eager(model, chain, torch.randn(3, 8, dtype=torch.float64))


class Counting(nn.Module):
    """Glue reads a buffer, then assigns to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        x = x * self.mean
        new = x.mean(0) * 0.1 + self.mean
        x = self.layers[1](x)
        return self.layers[2](x) + new


def with_assignment(model: Counting, x: torch.Tensor) -> TracedGraph:
    traced = handmade.trace(model, x)
    nodes = {node.name: node for node in traced.graph.nodes}
    buffer, new = nodes["mean"], nodes["add"]
    with traced.graph.inserting_after(new):
        node = traced.graph.call_function(assign_buffer, (buffer, new))
    node.meta.update(value=None, effect=True, mutates=(buffer,), module="")
    lint(traced)
    return traced


def test_buffer_assignment_is_replayed() -> None:
    class Eager(Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            x = x * self.mean
            new = x.mean(0) * 0.1 + self.mean
            self.mean = new.detach()
            x = self.layers[1](x)
            return self.layers[2](x) + new

    model = float64(Counting())
    chain = chain_of(with_assignment(model, torch.randn(4, 4, dtype=torch.float64)))  # type: ignore[arg-type]
    eager = Eager().double()
    x = torch.randn(5, 4, dtype=torch.float64)
    eager.load_state_dict(model.state_dict())
    for _ in range(2):
        want, got = eager(x), chain.run(x)
        assert torch.allclose(got, want, rtol=1e-13, atol=0)
        torch.autograd.backward([want.sum(), got.sum()])
        assert torch.allclose(model.mean, eager.mean, rtol=1e-13, atol=0)
    for left, right in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(left.grad, right.grad, rtol=1e-12, atol=1e-14)


def test_modes_are_entered_around_modules_methods_and_functions() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.a(x) + torch.tanh(self.b(x).mul(2)))

    class Eager(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                frozen = torch.tanh(self.b(x).mul(2))
            return self.c(self.a(x) + frozen)

    model = float64(Model())
    traced = handmade.trace(model, torch.randn(4, 4, dtype=torch.float64))
    for node in traced.graph.nodes:
        if node.name in ("b", "mul", "tanh"):
            node.meta["modes"] = Modes(grad=False)
    with handmade.cuts_into(3):
        parts = partition(traced, measure(traced))
    assert not {node.name for node in parts.differentiable} & {"b", "mul", "tanh"}
    chain = codegen.generate(traced, parts, measure(traced))
    eager = Eager().double()
    eager.load_state_dict(model.state_dict())
    x = torch.randn(3, 4, dtype=torch.float64)
    chain.run(x).sum().backward()
    eager(x).sum().backward()
    assert model.b.weight.grad is None
    assert torch.equal(model.a.weight.grad, eager.a.weight.grad)
    assert "in_context" in "".join(layer.code for layer in chain)


def test_hooks_see_the_whole_gradient_and_are_left_out_without_autograd() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layers[0](x)
            y = self.layers[1](h)
            return self.layers[3](self.layers[2](y) + h)

    seen: list[torch.Tensor] = []
    model = float64(Model())
    traced = handmade.trace(model, torch.randn(4, 4, dtype=torch.float64))
    nodes = {node.name: node for node in traced.graph.nodes}
    with traced.graph.inserting_after(nodes["layers_1"]):
        hook = traced.graph.call_method("register_hook", (nodes["layers_0"], seen.append))
    hook.meta.update(value=None, effect=True)
    chain = chain_of(traced)
    x = torch.randn(3, 4, dtype=torch.float64)
    with torch.no_grad():
        run_layers(chain, x)
    output = run_layers(chain, x)
    output.sum().backward()
    want = torch.ones_like(output) @ model.layers[3].weight
    want = want + want @ model.layers[2].weight @ model.layers[1].weight
    assert len(seen) == 1
    assert torch.allclose(seen[0], want, rtol=1e-12)
