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

import copy
import functools
import gc
import logging
import random
import warnings
import weakref
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe
from roundpipe.core.errors import TraceError
from roundpipe.fx.operations import ApplyFunction
from roundpipe.fx.passes.lower import LowerOptions
from roundpipe.fx.source import RETRACES_BEFORE_WARNING, TracedSource
from roundpipe.fx.trace.tracer import trace
from tests.fx.against_eager import check, vectors
from tests.fx.models import CustomFunction, VmapMask, attention_inputs, causal_inputs, llama, padded_inputs
from tests.fx.models import vectors as flat_vectors
from tests.fx.test_shapes import Layers

Kernel = tuple[bool, bool]

# ---------------------------------------------------------------------------------- 1: other paths for fakes


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


@pytest.mark.parametrize("num_layers", [4, 13])  # blocks that are looked into, and blocks kept whole
@pytest.mark.parametrize("inputs", [causal_inputs, padded_inputs])
def test_attention_runs_the_same_kernels_as_eager(
    monkeypatch: pytest.MonkeyPatch, num_layers: int, inputs: Any
) -> None:
    pytest.importorskip("transformers")
    model, given = llama(num_layers), inputs(4, 16)
    chain = TracedSource(model, LowerOptions(), on_failure=_raise).chain_for((), given)
    assert chain is not None and len(chain) > 3
    eager = kernels(monkeypatch, lambda: model(**given))
    assert eager == {(False, True) if inputs is causal_inputs else (True, False)}
    assert kernels(monkeypatch, lambda: chain.run(**given)) == eager


def _raise(error: TraceError) -> None:
    raise error


# ---------------------------------------------------------------------------------- 2: sizes


def test_equal_sizes_are_not_one_size() -> None:
    class Model(Layers):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return self.layers[1](torch.tanh(self.layers[0](x))).mean(1) + F.one_hot(ids, 8).sum(1)

    def inputs(batch: int, length: int) -> dict[str, Any]:
        return {"x": torch.randn(batch, 4, 8).double(), "ids": torch.randint(0, 8, (batch, length))}

    seen = check(Model, inputs, sizes=[(8, 8), (4, 4), (6, 3), (2, 8)])
    assert seen.trace_count == 1


# ---------------------------------------------------------------------------------- 3, 4: vmap, autograd functions


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
    assert sum(isinstance(node.target, ApplyFunction) for node in traced.body) == 4


# ---------------------------------------------------------------------------------- 5: what is no node


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


# ---------------------------------------------------------------------------------- 6: what a forward remembers


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


class Holds(Layers):
    """A module that remembers, between two that don't."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.inner(self.layers[0](x)))


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


# ---------------------------------------------------------------------------------- 7: writes, hooks


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


def test_a_write_to_a_parameter_is_refused() -> None:
    class Clamps(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return x @ self.weight

    with pytest.raises(TraceError, match="writes a parameter"):
        trace(Clamps().double(), (), vectors(4, 6))


def test_memory_layout_of_activations_is_never_burned_in() -> None:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)  # fakes lie in another order here than real ones
            return self.layers[0](x) if x.is_contiguous() else self.layers[1](x)

    assert check(Model).fell_back


# ---------------------------------------------------------------------------------- 8, 9: devices, arguments


def test_a_device_literal_is_an_attribute_of_the_layer() -> None:
    class Model(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layers[0](x) + torch.ones(8, device=x.device, dtype=x.dtype)
            return self.layers[1](h)

    chain = TracedSource(Model().double(), "time", on_failure=_raise).chain_for((), vectors(4, 6))
    assert chain is not None and any(spec.execution_device for spec in chain.specs)


def test_leaves_get_plain_lists_and_dicts() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, items: list[torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
            assert type(items) is list and type(options) is dict and type(options["scales"]) is list
            return self.linear(items[0]) * options["scales"][0] + items[1]

    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(Inner() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer, inner in zip(self.layers, self.inner, strict=False):
                x = inner([layer(x), x], {"scales": [0.5, 2], "of": x})
            return x

    assert check(Model).num_layers > 1


# ---------------------------------------------------------------------------------- 10: autograd inside a forward


class Penalty(nn.Module):
    """Scales by the gradient of its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.linear(given).pow(2).sum(), given, create_graph=True)
        return x + gradient * 0.1


@pytest.mark.parametrize("at_root", [True, False])
def test_autograd_inside_a_forward_falls_back(at_root: bool) -> None:
    assert check(Penalty if at_root else lambda: Holds(Penalty())).fell_back


def test_requires_grad_of_a_parameter_is_not_changed_in_a_forward() -> None:
    class Freezes(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.layers[0].weight.requires_grad_(False)
            return self.layers[1](self.layers[0](x))

    with pytest.raises(TraceError, match="requires_grad_ changes a parameter"):
        trace(Freezes().double(), (), vectors(4, 6))


def test_python_numbers_among_the_arguments_are_guarded() -> None:
    class Model(Layers):
        def forward(self, x: torch.Tensor, scale: float = 1.0, options: Any = None) -> torch.Tensor:
            return self.layers[1](self.layers[0](x) * scale) * (options or {"gain": 1})["gain"]

    guards = trace(Model().double(), (), {**vectors(4, 6), "scale": 0.5, "options": {"gain": 2}}).guards
    assert guards is not None
    assert guards.check((), {**vectors(2, 6), "scale": 0.5, "options": {"gain": 2}}) is None
    assert guards.check((), {**vectors(2, 6), "scale": 0.25, "options": {"gain": 2}}) is not None
    assert guards.check((), {**vectors(2, 6), "scale": 0.5, "options": {"gain": 3}}) is not None
    assert guards.check((), {**vectors(2, 6), "scale": 0.5}) is not None


def test_what_is_read_of_an_input_itself_is_read_at_every_call() -> None:
    class Model(Layers):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x) if 3 in ids else self.layers[1](x)
            return self.layers[2](x) * ids.tolist()[0][0]

    ids = torch.tensor([[1, 3], [2, 2]])
    guards = trace(Model().double(), (), {**vectors(2, 2), "ids": ids}).guards
    assert guards is not None and guards.check((), {**vectors(2, 2), "ids": ids}) is None
    assert guards.check((), {**vectors(2, 2), "ids": torch.tensor([[1, 2], [2, 2]])}) is not None
    assert guards.check((), {**vectors(2, 2), "ids": torch.tensor([[5, 3], [2, 2]])}) is not None


# ---------------------------------------------------------------------------------- 11: random numbers of Python


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_random_numbers_of_python_and_numpy_fall_back(draw: Any) -> None:
    class Model(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x) * (1.0 if draw() < 2 else 0.0))

    model = Model().double()
    with pytest.raises(TraceError, match="random"):
        trace(model, (), vectors(4, 6))
    assert check(Model).fell_back


# ---------------------------------------------------------------------------------- guards at run time


class NoiseOfAGenerator(Layers):
    """Adds numbers from a generator that is made anew in every call, or lives on."""

    def __init__(self, lives_on: bool, all_sizes: bool) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3) if lives_on else None
        self.all_sizes = all_sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        generator = self.generator or torch.Generator().manual_seed(3)
        shape = (1, 1, 8) if self.all_sizes else x.shape  # such numbers can't be drawn on fakes
        return self.layers[0](x) + torch.rand(shape, generator=generator, dtype=x.dtype)


@pytest.mark.parametrize("lives_on", [True, False])
@pytest.mark.parametrize(("at_root", "all_sizes"), [(True, True), (False, True), (False, False)])
def test_a_generator_of_ones_own_is_where_eager_has_it(at_root: bool, all_sizes: bool, lives_on: bool) -> None:
    def build() -> nn.Module:
        noise = NoiseOfAGenerator(lives_on, all_sizes)
        return noise if at_root else Holds(noise)

    assert check(build).fell_back == (at_root or lives_on)


def test_five_traces_in_a_row_name_the_input_that_varies(caplog: pytest.LogCaptureFixture) -> None:
    class Model(Layers):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return self.layers[1](self.layers[0](x) * scale)

    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.INFO, "roundpipe.fx.source"):
        warnings.simplefilter("always")
        with roundpipe.compile(Model().double(), devices=["cpu"], name="varies") as pipe:
            for index in range(RETRACES_BEFORE_WARNING + 1):
                pipe.forward_backward(
                    input_kwargs={**vectors(2, 3), "scale": 1.0 + index}, loss_fn=lambda out, _: out.sum()
                )
            assert pipe.trace_count == RETRACES_BEFORE_WARNING + 1
    lines = [record.message for record in caplog.records if "again" in record.message]
    assert len(lines) == RETRACES_BEFORE_WARNING and all("argument scale is" in line for line in lines)
    said = [str(one.message) for one in caught if "one after the other" in str(one.message)]
    assert len(said) == 1 and "scale is 6.0" in said[0]


class Remembers(nn.Module):
    """Its second call depends on its first, should the data not decide against that."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.last = None

    def forward(self, x):
        mean = x.mean(1)
        moved = x + (0.0 if self.last is None else self.last.mean())
        self.last = mean.detach()
        if mean[0, 0] > mean[0, 1]:
            return self.linear(x)
        return self.linear(moved)


def test_what_a_branch_keeps_for_the_next_call_is_never_lost():
    """In the traced branch nothing depends on it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Remembers()).double()
    model[0].requires_grad_(False)
    reference = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with roundpipe.compile(_Beside(model), devices=["cpu"]) as piped:
            twin = _Beside(reference)
            for seed in range(5):
                torch.manual_seed(seed)
                x = torch.randn(4, 6, 8, dtype=torch.float64)
                with torch.no_grad():
                    found = piped(x, roundpipe_run_config=roundpipe.RoundPipeRunConfig(num_microbatch=1))
                    torch.testing.assert_close(found, twin(x))


class _Beside(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.before, self.block = parts

    def forward(self, x):
        return self.before(x) + self.block(x)


class WritesWhatDropoutReturns(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.dropout = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linears[0](x)
        kept = self.dropout(made)
        for linear in self.linears[1:]:
            x = linear(x).tanh()
        kept.mul_(0.5)
        return x + kept + made * 3


@pytest.mark.parametrize(("p", "is_training"), [(0.0, True), (0.5, False)])
def test_dropout_that_drops_nothing_hands_back_its_input(p: float, is_training: bool) -> None:
    """Writing its output writes its input, in whatever layers the two are."""
    seen = check(lambda: AsBuilt(WritesWhatDropoutReturns(p).train(is_training)))
    assert seen.num_layers >= 3 and not seen.fell_back


class AsBuilt(nn.Module):
    """Keeps the training mode that its model was built in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def train(self, mode: bool = True) -> AsBuilt:
        self.training = mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


class CountsSome(nn.Module):
    """Writes its buffer only for some data, in a way that no version tells."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.ones(8))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if h.mean() > 3:
            self.average.data.mul_(0.9)
            return self.linear(h) * self.average
        return self.linear(h)


class CountsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.counts = CountsSome()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = self.counts(linear(x).sin() + 5)
        return x


def test_a_leaf_that_some_data_make_write_a_buffer_stays_in_one_layer_with_its_other_calls() -> None:
    seen = check(CountsTwice)
    assert not seen.fell_back


class CallsWithOtherWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        others = {"weight": self.weight, "bias": x.flatten(0, -2)[0]}
        return torch.func.functional_call(self.second, others, (x,))


def test_weights_in_the_place_of_others_are_the_ones_read() -> None:
    """Also by a method that somebody put onto the module, which is bound to the module itself."""
    models = [CallsWithOtherWeights().double()]
    models.append(copy.deepcopy(models[0]))
    inputs = vectors(4, 3)
    whole = roundpipe.RoundPipeRunConfig(num_microbatch=1)
    with roundpipe.compile(models[0], example_kwargs=inputs, devices=["cpu"], model_run_config=whole) as pipe:
        for edited in (False, True):
            for model in models:
                if edited:
                    forward = model.second.forward
                    model.second.forward = lambda x, old=forward: old(x) * 0.5  # type: ignore[misc]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = pipe.forward_backward(input_kwargs=inputs, loss_fn=lambda outputs, _: outputs.square().sum())
            assert found.item() == pytest.approx(models[1](**inputs).square().sum().item(), rel=1e-12)
