"""The traced graph is the model: same loss, gradients and buffers, at sizes it was not traced at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundpipe.core.errors import TraceError
from roundpipe.core.modes import Modes
from roundpipe.fx.graph.nodes import draws_random, has_effect, mutated_by, writes_buffers
from roundpipe.fx.graph.traced import lint
from roundpipe.fx.trace.tracer import trace
from tests.fx.cases_tracer import built, leaves_of
from tests.fx.inputs import causal_inputs, vectors
from tests.fx.models import CASES, llama
from tests.fx.modules import (
    AssignsBuffer,
    BranchAtRoot,
    BranchCaught,
    BranchInside,
    InPlace,
    PythonRandom,
    Regions,
    ResNet,
    linears,
)
from tests.fx.replay import eager_difference
from tests.repeats import repeats

BATCHES = (6, 3, 1)


@pytest.mark.parametrize(
    "name",
    repeats(CASES, set(CASES) - {"llama", "llama_padded", "qwen3", "qwen3_moe", "gpt2_tied", "bert", "t5", "vit"}),
)
def test_one_trace_equals_eager_at_other_sizes(name: str) -> None:
    if name in ("llama", "llama_padded", "llama_with_cache", "qwen3", "gpt2_tied", "bert", "t5", "vit", "qwen3_moe"):
        pytest.importorskip("transformers")
    case = CASES[name]
    model = built(case)
    traced = trace(model, (), case.inputs(4, case.lengths[0]))
    assert traced.guards is not None
    lint(traced)
    for batch in BATCHES:
        for length in case.lengths:
            inputs = case.inputs(batch, length)
            assert traced.guards.check((), inputs) is None, (batch, length)
            difference, where = eager_difference(traced, inputs, case.loss)
            assert difference < 1e-5, (batch, length, where)


@pytest.mark.parametrize("name", repeats(["llama", "bert", "resnet", "in_place"], ["resnet", "in_place"]))
def test_an_example_of_one_sample_serves_more(name: str) -> None:
    case = CASES[name]
    traced = trace(built(case), (), case.inputs(1, case.lengths[0]))
    assert traced.guards is not None
    for batch in (1, 3):
        inputs = case.inputs(batch, case.lengths[-1])
        assert traced.guards.check((), inputs) is None
        assert eager_difference(traced, inputs, case.loss)[0] < 1e-5


@pytest.mark.parametrize("num_layers", repeats([4, 13, 26], ["4", "13"]))
def test_every_block_is_apart(num_layers: int) -> None:
    traced = trace(llama(num_layers), (), causal_inputs(2, 8))
    leaves = leaves_of(traced)
    assert "model.embed_tokens" in leaves and "lm_head" in leaves
    for index in range(num_layers):
        assert any(name.startswith(f"model.layers.{index}") for name in leaves)
    if num_layers >= 13:
        assert [n for n in leaves if n.startswith("model.layers")] == [
            f"model.layers.{index}" for index in range(num_layers)
        ]


def test_a_byte_limit_looks_into_blocks() -> None:
    model = llama(13)
    traced = trace(model, (), causal_inputs(2, 8), max_leaf_bytes=30_000)
    leaves = leaves_of(traced)
    assert "model.layers.0.self_attn" in leaves and "model.layers.12.mlp.up_proj" in leaves


def test_an_opaque_submodule_says_why() -> None:
    traced = trace(BranchInside(), (), vectors(4, 0))
    assert set(traced.opaque) == {"layers.1", "layers.3"}
    assert "modules.py" in traced.opaque["layers.1"]
    assert {"layers.0", "layers.1", "layers.2", "layers.3"} <= set(leaves_of(traced))


@pytest.mark.parametrize("build", [BranchAtRoot, BranchCaught])
def test_a_branch_on_activations_at_the_root_is_refused(build: type[nn.Module]) -> None:
    with pytest.raises(TraceError, match=r"modules\.py:\d+ \(.*x\.sum\(\) > 0.*activation.*submodule"):
        trace(build(), (), vectors(4, 0))


def test_python_random_numbers_in_glue_are_refused() -> None:
    with pytest.raises(TraceError, match=r"random\.random"):
        trace(PythonRandom(), (), vectors(4, 0))


def test_an_attribute_that_decides_is_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            for layer in self.layers:
                x = layer(x) * self.calls
            return x

    with pytest.raises(TraceError, match="calls"):
        trace(Counts(), (), vectors(4, 0))


def test_a_counter_that_decides_nothing_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            for layer in self.layers:
                x = layer(x)
            return x

    model = Counts()
    traced = trace(model, (), vectors(4, 0))
    assert "calls" in caplog.text and model.calls == 0
    assert eager_difference(traced, vectors(3, 0), lambda out: out.sum())[0] < 1e-5


def test_an_activation_kept_on_the_root_is_refused() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears()
            self.last: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            self.last = x
            return x

    with pytest.raises(TraceError, match="last"):
        trace(Keeps(), (), vectors(4, 0))


def test_an_activation_passed_through_an_attribute_is_seen() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.scale: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            self.inner.scale = x.sigmoid()
            x = self.inner(self.layers[1](x))
            self.inner.scale = None
            return self.layers[2](x)

    traced = trace(Outer(), (), vectors(4, 0))
    assert eager_difference(traced, vectors(6, 0), lambda out: out.pow(2).sum())[0] < 1e-5


def test_random_means_that_numbers_are_drawn() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.0))
            self.often = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
            self.attention = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.often(self.never(x))
            x = self.attention(x[:, None])[:, 0]
            return F.dropout(x, 0.1, self.training) + torch.rand(16)

    model = Drops()
    random_leaves = {str(node.target) for node in trace(model, (), vectors(4, 0)).body if draws_random(node)}
    assert any("often" in name for name in random_leaves)
    assert not any("never" in name or "attention" in name for name in random_leaves)
    calls = [n for n in trace(model, (), vectors(4, 0)).body if n.op == "call_function" and draws_random(n)]
    assert len(calls) == 2
    model.eval()
    drawing = [n for n in trace(model, (), vectors(4, 0)).body if draws_random(n)]
    assert [getattr(n.target, "__name__", "") for n in drawing] == ["rand"]


def test_writes_are_marked() -> None:
    traced = trace(InPlace(), (), vectors(4, 0))
    writing = [node for node in traced.body if mutated_by(node)]
    assert len(writing) == 12 and all(has_effect(node) for node in writing)
    norms = [n for n in trace(ResNet(), (), {"x": torch.randn(2, 3, 8, 8)}).body if writes_buffers(n)]
    assert norms and all("norm" in str(n.target) or "blocks" in str(n.target) for n in norms)
    assert not any(writes_buffers(n) for n in trace(ResNet().eval(), (), {"x": torch.randn(2, 3, 8, 8)}).body)


def test_buffer_assignments_are_effects() -> None:
    traced = trace(AssignsBuffer(), (), vectors(4, 0))
    names = [getattr(node.target, "__name__", "") for node in traced.body if has_effect(node)]
    assert names.count("assign_buffer") == 2


def test_modes_are_noted_where_they_differ() -> None:
    traced = trace(Regions(), (), vectors(4, 0))
    states = {str(node.target): node.meta.get("modes") for node in traced.body}
    assert states["layers.0"].autocast and states["layers.2"].autocast
    assert states["layers.1"] is None
    assert states["layers.3"].grad is False


def test_attention_kernels_are_among_the_modes() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layers[0](x)[None, None]
            with sdpa_kernel(SDPBackend.MATH):
                h = F.scaled_dot_product_attention(h, h, h)
            return self.layers[1](h[0, 0])

    traced = trace(Attends(), (), vectors(4, 0))
    (node,) = [n for n in traced.body if n.meta.get("modes") is not None]
    assert node.meta["modes"].attention_kernels == (False, False, True, False)
    before = Modes.current()
    with node.meta["modes"].enter():
        assert Modes.current() != before
    assert Modes.current() == before
