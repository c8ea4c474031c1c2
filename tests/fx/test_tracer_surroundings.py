"""What a trace leaves alone, how calls are bound, and where models come from."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.errors import TraceError
from roundpipe.fx.fakes import is_fake
from roundpipe.fx.graph.nodes import draws_random
from roundpipe.fx.trace.tracer import trace
from tests.fx.cases_tracer import built, leaves_of
from tests.fx.inputs import causal_inputs, vectors
from tests.fx.models import CASES, llama
from tests.fx.modules import BranchAtRoot, ManyOutputs, linears
from tests.fx.replay import eager_difference, replay
from tests.repeats import repeats


def test_module_names_the_forward() -> None:
    traced = trace(llama(), (), causal_inputs(2, 8))
    modules = {node.meta["module"] for node in traced.body}
    assert {"", "model", "model.layers.0"} <= modules


def _snapshot(model: nn.Module) -> list[Any]:
    return [
        (name, dict(module.__dict__), dict(module._parameters), dict(module._buffers), dict(module._modules),
         dict(module._forward_hooks))
        for name, module in model.named_modules()
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    repeats(
        ["llama", "qwen3_moe", "assigns_buffer", "branch_inside", "resnet"],
        ["assigns_buffer", "branch_inside", "resnet", "llama"],
    ),
)
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
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model, inputs = llama(), causal_inputs(2, 8)
    if transformers.__version__ < "5":  # which asks for the mask's data
        del inputs["attention_mask"]
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


@pytest.mark.long
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
