"""The traced graph is the model: same loss, gradients and buffers, at sizes it was not traced at."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundpipe.core import trees
from roundpipe.core.errors import TraceError
from roundpipe.core.modes import Modes
from roundpipe.fx.fakes import is_fake
from roundpipe.fx.graph.grammar import lint
from roundpipe.fx.graph.nodes import draws_random, has_effect, mutated_by, writes_buffers
from roundpipe.fx.trace.tracer import trace
from tests.fx.models import (
    CASES,
    AssignsBuffer,
    BranchAtRoot,
    BranchCaught,
    BranchInside,
    Case,
    InPlace,
    ManyOutputs,
    PythonRandom,
    Regions,
    ResNet,
    causal_inputs,
    linears,
    llama,
    vectors,
)
from tests.fx.replay import eager_difference, replay

BATCHES = (4, 6, 3, 1)


def built(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = case.build().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def leaves_of(traced: Any) -> list[str]:
    return [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize("name", CASES)
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


@pytest.mark.parametrize("name", ["llama", "bert", "resnet", "in_place"])
def test_an_example_of_one_sample_serves_more(name: str) -> None:
    case = CASES[name]
    traced = trace(built(case), (), case.inputs(1, case.lengths[0]))
    assert traced.guards is not None
    for batch in (1, 3):
        inputs = case.inputs(batch, case.lengths[-1])
        assert traced.guards.check((), inputs) is None
        assert eager_difference(traced, inputs, case.loss)[0] < 1e-5


# ---------------------------------------------------------------------------------- leaves


@pytest.mark.parametrize("num_layers", [4, 13, 26])
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
    assert "models.py" in traced.opaque["layers.1"]
    assert {"layers.0", "layers.1", "layers.2", "layers.3"} <= set(leaves_of(traced))


# ---------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("build", [BranchAtRoot, BranchCaught])
def test_a_branch_on_activations_at_the_root_is_refused(build: type[nn.Module]) -> None:
    with pytest.raises(TraceError, match=r"models\.py:\d+ \(.*x\.sum\(\) > 0.*activation.*submodule"):
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


# ---------------------------------------------------------------------------------- node meta


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


def test_module_names_the_forward() -> None:
    traced = trace(llama(), (), causal_inputs(2, 8))
    modules = {node.meta["module"] for node in traced.body}
    assert {"", "model", "model.layers.0"} <= modules


# ---------------------------------------------------------------------------------- nothing is touched


def _snapshot(model: nn.Module) -> list[Any]:
    return [
        (name, dict(module.__dict__), dict(module._parameters), dict(module._buffers), dict(module._modules),
         dict(module._forward_hooks))
        for name, module in model.named_modules()
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "assigns_buffer", "branch_inside", "resnet"])
def test_the_model_and_random_states_are_untouched(name: str) -> None:
    case = CASES[name]
    model = built(case)
    inputs = case.inputs(4, case.lengths[0])
    values = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    before, call = _snapshot(model), nn.Module.__call__
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    trace(model, (), inputs)
    assert nn.Module.__call__ is call
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert (states[2] == numpy.random.get_state()[1]).all()
    for was, now in zip(before, _snapshot(model), strict=True):
        assert was[0] == now[0]
        for old, new in zip(was[1:], now[1:], strict=True):
            assert old.keys() == new.keys() and all(old[key] is new[key] for key in old)
    assert all(torch.equal(values[key], tensor) for key, tensor in model.state_dict().items())


def test_a_failed_trace_touches_nothing() -> None:
    model = BranchAtRoot()
    before, call, apply = _snapshot(model), nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
    with pytest.raises(TraceError):
        trace(model, (), vectors(4, 0))
    assert nn.Module.__call__ is call and torch.autograd.Function.__dict__["apply"] is apply
    for was, now in zip(before, _snapshot(model), strict=True):
        assert all(was[1][key] is now[1][key] for key in was[1])
    assert not any(is_fake(tensor) for tensor in model.state_dict(keep_vars=True).values())


def test_other_threads_are_not_traced() -> None:
    results: list[torch.Tensor] = []
    other = nn.Linear(16, 16)
    started, stop = threading.Event(), threading.Event()

    def call() -> None:
        while not stop.is_set():
            results.append(other(torch.ones(2, 16)))
            started.set()

    thread = threading.Thread(target=call)
    thread.start()
    started.wait(10)
    traced = trace(llama(), (), causal_inputs(2, 8))
    stop.set()
    thread.join()
    assert not any(is_fake(result) for result in results)
    assert len(leaves_of(traced)) >= 6


# ---------------------------------------------------------------------------------- forms of calls


def test_output_structure_is_kept() -> None:
    model = llama()
    inputs = causal_inputs(2, 8)
    eager, graph = model(**inputs), replay(trace(model, (), inputs), **inputs)
    assert type(graph) is type(eager) and list(graph) == list(eager)
    out = replay(trace(ManyOutputs(), (), CASES["many_outputs"].inputs(2, 0)), **CASES["many_outputs"].inputs(3, 0))
    assert out["count"] == 4 and out["none"] is None and isinstance(out["aux"][1], list)


def test_positional_and_keyword_calls_are_one() -> None:
    model = built(CASES["llama"])
    inputs = causal_inputs(2, 8)
    traced = trace(model, (inputs["input_ids"],), {"labels": inputs["labels"]})
    assert traced.guards is not None
    assert traced.guards.check((), {"input_ids": inputs["input_ids"], "labels": inputs["labels"]}) is None
    assert traced.guards.check((), {**inputs}) is not None


def test_a_reentrant_checkpoint_in_glue_is_looked_through() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpoints(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.layers = linears()
            self.reentrant = reentrant

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            for layer in self.layers[1:]:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
            return x

    for reentrant in (True, False):
        traced = trace(Checkpoints(reentrant), (), vectors(4, 0))
        assert leaves_of(traced) == [f"layers.{index}" for index in range(4)]
        assert eager_difference(traced, vectors(6, 0), lambda out: out.pow(2).sum())[0] < 1e-5


def test_deep_copies_of_argument_objects_survive() -> None:
    traced = trace(llama(use_cache=True), (), causal_inputs(2, 8))
    for node in traced.body:
        if node.op == "call_function":
            copy.deepcopy(node.target)


def test_a_meta_model_takes_no_memory() -> None:
    with torch.device("meta"):
        model = llama(6, hidden_size=4096, intermediate_size=11008, num_attention_heads=32)
    traced = trace(model, (), causal_inputs(1, 8))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert len(leaves_of(traced)) >= 8
    assert traced.guards is not None and traced.guards.check((), causal_inputs(3, 12)) is None


def test_inputs_are_counted_and_constants_are_found() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears()
            self.offset = torch.arange(16.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x + self.offset)

    model = Adds()
    traced = trace(model, (), vectors(4, 0))
    assert traced.example_elements == 64
    assert [value is model.offset for value in traced.constants.values()] == [True]
    assert trees.tensors(replay(traced, **vectors(3, 0)))[0].shape == (3, 16)


def test_evaluation_mode_without_gradients() -> None:
    model = built(CASES["bert"]).eval()
    inputs = CASES["bert"].inputs(4, 16)
    with torch.no_grad():
        traced = trace(model, (), inputs)
        assert traced.guards is not None and traced.guards.check((), CASES["bert"].inputs(1, 24)) is None
        assert torch.equal(replay(traced, **inputs).logits, model(**inputs).logits)
    assert not any(draws_random(node) for node in traced.body)


def test_a_leaf_that_returns_a_decision_is_never_burned_in() -> None:
    class Flags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> Any:
            return self.linear(x), bool(x.sum() > 1e6)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears()
            self.flags = Flags()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, flag = self.flags(self.layers[0](x))
            return x * 2 if flag else self.layers[1](x)

    with pytest.raises(TraceError):
        trace(Model(), (), vectors(4, 0))


def test_inputs_without_data() -> None:
    with torch.device("meta"):
        model, inputs = llama(), causal_inputs(2, 8)
    traced = trace(model, (), inputs)
    assert len(leaves_of(traced)) >= 8


def test_compiled_modules_trace_as_written() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears()
            self.compiled = torch.compile(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), backend="eager")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.compiled(self.layers[0](x)))

    traced = trace(Model(), (), vectors(4, 0))
    assert len(leaves_of(traced)) >= 3
    assert eager_difference(traced, vectors(3, 0), lambda out: out.pow(2).sum())[0] < 1e-5


def test_a_users_hook_keeps_its_module_whole() -> None:
    model = llama()
    fired: list[str] = []
    model.model.layers[1].register_forward_hook(lambda *_: fired.append("layer 1"))
    traced = trace(model, (), causal_inputs(2, 8))
    assert "model.layers.1" in leaves_of(traced) and "model.layers.0" not in leaves_of(traced)
    fired.clear()
    replay(traced, **causal_inputs(2, 8))
    assert fired == ["layer 1"]


def test_hidden_states_of_whole_blocks() -> None:
    pytest.importorskip("transformers")
    traced = trace(llama(13), (), {**causal_inputs(2, 8), "output_hidden_states": True})
    inputs = {**causal_inputs(3, 12), "output_hidden_states": True}
    assert traced.guards is not None and traced.guards.check((), inputs) is None

    def loss(out: Any) -> torch.Tensor:
        assert len(out.hidden_states) == 14
        return out.loss + sum(state.mean() for state in out.hidden_states)

    assert eager_difference(traced, inputs, loss)[0] < 1e-5


def test_a_model_typed_into_an_interpreter_is_located() -> None:
    source = (
        "import torch\n"
        "class Typed(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.linear = torch.nn.Linear(4, 4)\n"
        "    def forward(self, x):\n"
        "        y = self.linear(x)\n"
        "        return y if y.sum() > 0 else x\n"
    )
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "<stdin>", "exec"), namespace)
    with pytest.raises(TraceError, match="<stdin>:8"):
        trace(namespace["Typed"](), (torch.randn(2, 4),))
