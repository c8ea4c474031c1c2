"""What went wrong in earlier attempts at tracing: each is handled, or refused loudly.

1. code that takes another path for fakes, so that attention gets an explicit mask: `test_attention_runs_...`
2. sizes that are equal in the example are taken for one, or fixed for no reason: `test_equal_sizes_are_not_one_size`
3. functions below vmap escape: `test_a_mask_made_by_vmap_is_recorded_below_it`
4. custom backwards vanish: `test_a_custom_backward_is_one_node`
5. an activation becomes a constant: `test_an_activation_that_escapes_is_refused`, and those behind it
6. buffers assigned, attributes changed: `test_shapes.py` (WritesBuffers), and the tests of state below
7. hooks, `retain_grad`, `__setitem__`, versions: `test_shapes.py` (Hooks, WritesInPlace), and below
8. device literals: `test_a_device_literal_is_an_attribute_of_the_layer`
9. no fake kernel: `test_tracer.py` (qwen3_moe); arguments frozen by torch.fx: `test_leaves_get_plain_lists_and_dicts`
10. contexts, counters, `autograd.grad`, hooks on carried values: `test_shapes.py` (AttentionKernels, Hooks), and below
11. roots that branch on activations: `test_shapes.py`; Python's random numbers: `test_random_numbers_...`
"""

from __future__ import annotations

import functools
import gc
import logging
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe
from roundpipe.core.errors import TraceError
from roundpipe.fx.passes.lower import LowerOptions
from roundpipe.fx.source import TracedSource
from roundpipe.fx.trace.tracer import trace
from tests.fx.against_eager import check, vectors
from tests.fx.cases_traps import Holds, _raise
from tests.fx.inputs import causal_inputs, padded_inputs
from tests.fx.inputs import vectors as flat_vectors
from tests.fx.models import llama
from tests.fx.modules import CustomFunction, VmapMask, attention_inputs
from tests.fx.test_shapes import Layers
from tests.repeats import repeats

Kernel = tuple[bool, bool]


def kernels(monkeypatch: pytest.MonkeyPatch, call: Any) -> set[Kernel]:
    """Of every attention call: whether it has a mask, and whether it is causal by itself."""
    seen: set[Kernel] = set()
    original = F.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        seen.add((mask is not None, bool(kwargs.get("is_causal", False))))
        return original(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", watched)
        call()
    return seen


@pytest.mark.parametrize(
    "num_layers, is_padded",  # blocks that are looked into, and blocks kept whole
    repeats([(4, False), (4, True), (13, False), (13, True)], ["4-False", "13-True"]),
)
def test_attention_runs_the_same_kernels_as_eager(
    monkeypatch: pytest.MonkeyPatch, num_layers: int, is_padded: bool
) -> None:
    pytest.importorskip("transformers")
    model, given = llama(num_layers), (padded_inputs if is_padded else causal_inputs)(4, 16)
    chain = TracedSource(model, LowerOptions(), on_failure=_raise).chain_for((), given)
    assert chain is not None and len(chain) > 3
    eager = kernels(monkeypatch, lambda: model(**given))
    assert eager == {(True, False) if is_padded else (False, True)}
    assert kernels(monkeypatch, lambda: chain.run(**given)) == eager


def test_equal_sizes_are_not_one_size() -> None:
    class Model(Layers):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return self.layers[1](torch.tanh(self.layers[0](x))).mean(1) + F.one_hot(ids, 8).sum(1)

    def inputs(batch: int, length: int) -> dict[str, Any]:
        return {"x": torch.randn(batch, 4, 8).double(), "ids": torch.randint(0, 8, (batch, length))}

    seen = check(Model, inputs, sizes=[(8, 8), (4, 4), (6, 3), (2, 8)])
    assert seen.trace_count == 1


def test_a_mask_made_by_vmap_is_recorded_below_it() -> None:
    traced = trace(VmapMask(), (), attention_inputs(2, 6))
    assert not any("vmap" in str(node.target) for node in traced.body)
    assert traced.guards is not None and traced.guards.check((), attention_inputs(3, 6)) is None


def test_a_decision_on_a_size_below_vmap_is_guarded() -> None:
    class Model(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled = torch.vmap(lambda column: column * 2 if column.shape[0] > 3 else column, in_dims=1, out_dims=1)
            return self.layers[0](scaled(x))

    traced = trace(Model().double(), (), vectors(6, 0))
    assert traced.guards is not None and traced.guards.check((), vectors(5, 0)) is None
    failure = traced.guards.check((), vectors(2, 0))
    assert failure is not None and "x.size(0) > 3" in str(failure)


def test_a_custom_backward_is_one_node() -> None:
    traced = trace(CustomFunction(), (), flat_vectors(4, 0))
    assert sum(str(node.target).startswith("apply_") for node in traced.body) == 4


def test_an_activation_that_escapes_is_refused() -> None:
    kept: list[torch.Tensor] = []

    class Model(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(self.layers[0](x))
            return self.layers[1](kept[0])

    with pytest.raises(TraceError, match="kept"):
        trace(Model().double(), (), vectors(4, 6))
    assert not kept


def test_a_tensor_of_the_outside_is_a_constant() -> None:
    offset = torch.arange(8).double()

    class Model(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x) + offset)

    assert not check(Model).fell_back


def test_a_parameter_of_the_outside_is_refused() -> None:
    outside = nn.Parameter(torch.randn(8).double())

    class Model(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x) + outside)

    with pytest.raises(TraceError, match="neither a parameter"):
        trace(Model().double(), (), vectors(4, 6))


class Counts(Layers):
    """Multiplies by how often it was called."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.calls = {"attribute": 0, "dict": {"n": 0}, "list": [0]}.get(where, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.calls, int):
            self.calls += 1
            number = self.calls
        elif isinstance(self.calls, dict):
            self.calls["n"] += 1
            number = self.calls["n"]
        else:
            self.calls[0] += 1
            number = self.calls[0]
        return self.layers[0](x) * number


def counting_closure() -> Any:
    calls = 0

    def times_calls(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x * calls

    return times_calls


class CountsInAClosure(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.times_calls = counting_closure()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.times_calls(self.layers[0](x))


@pytest.mark.parametrize("where", ["attribute", "dict", "list", "closure"])
@pytest.mark.parametrize("at_root", [True, False])
def test_state_that_decides_is_never_burned_in(where: str, at_root: bool) -> None:
    def build() -> nn.Module:
        counts = CountsInAClosure() if where == "closure" else Counts(where)
        return counts if at_root else Holds(counts)

    assert check(build).fell_back


class LogsSizes(Layers):
    """Keeps the sizes that it saw, and multiplies by how many they are."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(x.shape[0])
        return self.layers[0](x) * len(self.sizes)


@pytest.mark.parametrize("at_root", [True, False])
def test_how_many_sizes_were_kept_is_never_burned_in(at_root: bool) -> None:
    assert check(LogsSizes if at_root else lambda: Holds(LogsSizes())).fell_back


def test_an_attribute_set_before_it_is_read_is_no_state() -> None:
    class Scratch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.scale, self.last = 1, None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scale = 1
            x = self.linear(x)
            self.last = x.detach()
            self.scale *= 2
            return x * self.scale + self.last

    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(Scratch() for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in (*self.layers, *self.inner):
                x = layer(x)
            return x

    seen = check(Model)
    assert not seen.fell_back and seen.num_layers > 1


def test_state_that_decides_nothing_is_said_to_stay(caplog: pytest.LogCaptureFixture) -> None:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, int] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen["calls"] = self.seen.get("calls", 0) + 1
            return self.layers[1](self.layers[0](x))

    model = Model().double()
    with caplog.at_level(logging.WARNING):
        trace(model, (), vectors(4, 6))
    assert "Model.seen" in caplog.text and not model.seen


def test_tracing_leaves_closures_and_globals_as_they_were() -> None:
    model = CountsInAClosure().double()
    with pytest.raises(TraceError, match="calls of counting_closure"):
        trace(model, (), vectors(4, 6))
    assert torch.equal(model.times_calls(torch.ones(1)), torch.ones(1))


@functools.lru_cache
def positions(length: int) -> torch.Tensor:
    return torch.arange(length).double()[:, None]


def test_no_fakes_are_left_in_caches() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + positions(x.shape[1])

    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.adds = nn.ModuleList(Adds() for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for adds in self.adds:
                x = adds(x)
            return x

    assert not check(Model, sizes=[(4, 6), (1, 6), (3, 6)], num_microbatches=1).fell_back
    assert type(positions(6)) is torch.Tensor


def test_tracing_keeps_no_model_alive() -> None:
    class Model(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x).reshape(-1, 8)).view(x.shape)

    model = Model().double()
    trace(model, (), vectors(4, 6))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_an_attribute_set_between_calls_traces_again() -> None:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.gain = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x) * self.gain)

    model = Model().double()
    guards = trace(model, (), vectors(4, 6)).guards
    assert guards is not None and guards.check((), vectors(3, 6)) is None
    model.gain = 3.0
    assert "gain is 3.0, traced with 2.0" in str(guards.check((), vectors(3, 6)))


class Grows(Layers):
    """Assigns a buffer that is longer than the one before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        self.mean = torch.cat([self.mean, x.detach().mean((0, 1))[:1]])
        return x + self.mean.sum()


@pytest.mark.parametrize("at_root", [True, False])
def test_a_buffer_that_grows_is_no_value_of_the_graph(at_root: bool) -> None:
    assert check(Grows if at_root else lambda: Holds(Grows())).fell_back == at_root


@pytest.mark.parametrize("by_the_user", [True, False])
def test_a_buffer_that_becomes_another_tensor_is_taken(by_the_user: bool) -> None:
    """By an assignment between calls, or by a call of the model's own forward, where its code can't be traced."""

    class Model(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[1](self.layers[0](x))
            if x.shape[1] == 5 and x.sum() > 0:
                x = x * 2
            self.mean = self.mean * 0.9 + x.detach().mean((0, 1)) * 0.1
            return self.layers[2](x + self.mean)

    models = [Model().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    config = roundpipe.RoundPipeRunConfig(num_microbatch=2)
    calls = [vectors(4, length)["x"] for length in ((6, 6) if by_the_user else (6, 5, 6))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = roundpipe.compile(models[0], example_args=(calls[0],), devices="cpu", name="b", model_run_config=config)
        with pipe:
            for x in calls:
                if by_the_user:
                    for model in models:
                        model.mean = torch.ones(8, dtype=torch.float64)
                loss = pipe.forward_backward(input_args=(x,), loss_fn=lambda out, label: out.pow(2).mean())
                pipe.synchronize()
                expected = sum(models[1](part).pow(2).mean() for part in x.tensor_split(2))
                torch.testing.assert_close(loss, expected.detach())
                torch.testing.assert_close(models[0].mean, models[1].mean)


def test_a_buffer_that_a_leaf_writes_decides_nothing() -> None:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x) * 2 if self.norm.num_batches_tracked > 1 else self.layers[0](x)
            return self.norm(x.transpose(1, 2))

    assert check(Model).fell_back


def test_writes_through_methods_are_marked() -> None:
    class Model(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layers[0](x)
            h[:, 0] = 1.0
            h.data.mul_(2.0)
            h.retain_grad()
            return self.layers[1](h)

    traced = trace(Model().double(), (), vectors(4, 6))
    effects = [str(getattr(node.target, "__name__", node.target)) for node in traced.body if node.meta.get("effect")]
    assert effects == ["set_item", "mul_", "retain_grad"]
