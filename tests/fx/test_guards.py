"""A trace is used only for calls that would record it again; a refusal says what varied."""

from __future__ import annotations

import array
import dataclasses
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core import trees
from roundpipe.fx.trace.tracer import trace
from tests.fx.cases_guards import failure_of, guards_of
from tests.fx.inputs import causal_inputs, vectors
from tests.fx.models import CASES, llama
from tests.fx.modules import ResNet, linears
from tests.fx.replay import eager_difference


class ScaledLinears(nn.Module):
    """Linear layers with a number and a flag among the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor, scale: float = 1.0, extra: Any = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * scale
        return x if extra is None else x + extra


def test_plain_values_and_structure() -> None:
    guards = guards_of(ScaledLinears(), {"x": torch.randn(4, 16), "scale": 0.5})
    assert guards.check((torch.randn(2, 16), 0.5), {}) is None
    assert "scale is 0.25, traced with 0.5" in str(failure_of(guards, {"x": torch.randn(4, 16), "scale": 0.25}))
    assert "extra" in str(failure_of(guards, {"x": torch.randn(4, 16), "scale": 0.5, "extra": torch.ones(1)}))
    assert "float64" in str(failure_of(guards, {"x": torch.randn(4, 16).double(), "scale": 0.5}))
    assert "3 dimensions" in str(failure_of(guards, {"x": torch.randn(4, 4, 16), "scale": 0.5}))


@dataclasses.dataclass
class Options:
    """An argument with a tensor."""

    bias: torch.Tensor


class Further(Options):
    """The same of another class."""


class LooksAtContainers(nn.Module):
    """Decides by the classes of its arguments, and by what is an empty container."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor, extra: Any = None, options: Any = None) -> torch.Tensor:
        x = self.layers[0](x) * (2 if extra is not None else 1)
        for kind, factor in ((tuple, 3), (dict, 5), (Further, 7)):
            x = x * (factor if isinstance(extra, kind) or isinstance(options, kind) else 1)
        if isinstance(options, dict):
            x = x * (11 if options.get("more") is not None else 1)
            x = x * (13 if isinstance(options.get("more"), tuple) else 1)
        return self.layers[1](x)


def test_containers_of_arguments() -> None:
    bias = torch.ones(16)
    variants: list[tuple[dict[str, Any], str]] = [
        ({}, "extra"),
        ({"extra": []}, "extra is empty list, traced with not given"),
        ({"extra": ()}, "extra is empty tuple"),
        ({"extra": {}}, "extra is empty dict"),
        ({"extra": [bias]}, "extra[0]"),
        ({"extra": (bias,)}, "extra"),
        ({"options": Options(bias)}, "options"),
        ({"options": Further(bias)}, "options"),
        ({"options": {"bias": bias}}, "options"),
        ({"options": {"bias": bias, "more": []}}, "options"),
        ({"options": {"bias": bias, "more": ()}}, "options"),
    ]
    model = LooksAtContainers()
    first = guards_of(model, vectors(4, 0))
    with roundpipe.compile(model, devices=["cpu"]) as pipe, torch.no_grad():
        for inputs in (vectors(4, 0), vectors(6, 1)):
            for extra, words in variants:
                expected = model(**inputs, **extra)  # another branch is another factor
                torch.testing.assert_close(pipe(**inputs, **extra), expected, rtol=1e-4, atol=1e-3)
                if extra:
                    assert words in str(failure_of(first, {**inputs, **extra}))
        assert pipe.trace_count == len(variants)  # each once


class ScaledByHeld(nn.Module):
    """Takes a number from something that can be written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor, held: Any) -> torch.Tensor:
        return self.layers[1](self.layers[0](x) * float(max(held)))


@pytest.mark.parametrize(
    ("held", "write"),
    [
        (np.ones(2), lambda held: held.fill(3.0)),
        (array.array("d", [1.0]), lambda held: held.__setitem__(0, 3.0)),
        ({1.0}, lambda held: held.add(3.0)),
        (deque([1.0]), lambda held: held.append(3.0)),
    ],
)
def test_arguments_that_are_written_in_place(held: Any, write: Callable[[Any], object]) -> None:
    model, inputs = ScaledByHeld(), vectors(4, 0)
    guards = guards_of(model, {**inputs, "held": held})
    with roundpipe.compile(model, devices=["cpu"]) as pipe, torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(pipe(**inputs, held=held), model(**inputs, held=held), rtol=1e-4, atol=1e-5)
            assert pipe.trace_count == 1
        assert guards.check((), {**inputs, "held": held}) is None
        write(held)
        torch.testing.assert_close(pipe(**inputs, held=held), model(**inputs, held=held), rtol=1e-4, atol=1e-5)
    assert "held was written in place" in str(failure_of(guards, {**inputs, "held": held}))


def test_sizes_that_are_plain_numbers_are_named() -> None:
    guards = guards_of(ResNet(), {"x": torch.randn(2, 3, 8, 8)})
    failure = failure_of(guards, {"x": torch.randn(2, 3, 12, 8)})
    assert "dimension 2 of x is 12, traced with 8" in failure.message
    assert [dim for _, dim in failure.varying] == [2]
    traced = trace(ResNet(), (), {"x": torch.randn(2, 3, 8, 8)}, dynamic=failure.varying)
    assert traced.guards is not None
    assert traced.guards.check((), {"x": torch.randn(3, 3, 12, 8)}) is None
    assert eager_difference(traced, {"x": torch.randn(3, 3, 12, 8)}, lambda out: out.pow(2).sum())[0] < 1e-5


def test_an_empty_batch_is_refused() -> None:
    assert "empty" in str(failure_of(guards_of(ScaledLinears(), vectors(4, 0)), vectors(0, 0)))


def test_flags() -> None:
    model = ScaledLinears()
    guards = guards_of(model, vectors(4, 0))
    model.eval()
    assert "eval mode" in str(failure_of(guards, vectors(4, 0)))
    model.train()
    model.layers[1].weight.requires_grad_(False)
    assert "layers.1.weight" in str(failure_of(guards, vectors(4, 0)))
    model.layers[1].weight.requires_grad_(True)
    with torch.no_grad():
        assert guards.check((), vectors(4, 0)) is None  # none of its code asked
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast on cpu" in str(failure_of(guards, vectors(4, 0)))
    assert guards.check((), vectors(4, 0)) is None


def test_a_known_shape_is_checked_fast() -> None:
    model = llama(12)
    inputs = causal_inputs(4, 16)
    del inputs["attention_mask"]
    guards = guards_of(model, inputs)
    guards.check((), inputs)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        guards.check((), inputs)
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3, f"{min(times) * 1e6:.0f} us"


def test_inputs_keep_their_paths() -> None:
    case = CASES["many_outputs"]
    traced = trace(case.build(), (), case.inputs(4, 0))
    arguments = ((), case.inputs(2, 0))
    assert [trees.get(arguments, path).shape[0] for path in traced.input_paths.values()] == [2, 2]


def test_a_scripted_module_with_weights_is_a_leaf_whose_weights_are_watched() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()))
    model = nn.Sequential(nn.Linear(8, 8), scripted, nn.Linear(8, 8))
    traced = trace(model, (torch.randn(4, 8),), {})
    assert list(traced.opaque) == ["1"] and traced.guards is not None
    assert traced.guards.check((torch.randn(6, 8),), {}) is None
    scripted.double()
    failure = traced.guards.check((torch.randn(6, 8),), {})
    assert "1.0.weight has dtype torch.float64 now, traced with dtype torch.float32" in str(failure)
    scripted.float()
    model.get_submodule("1.1").running_mean = torch.zeros(8, dtype=torch.float64)
    assert "1.1.running_mean has dtype torch.float64 now" in str(traced.guards.check((torch.randn(6, 8),), {}))
