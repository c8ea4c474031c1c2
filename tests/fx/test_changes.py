"""What code changes behind a trace's back: a user's between two calls, the model's own where no graph shows it."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.fx.guards.guards import Guards
from roundpipe.fx.trace.tracer import trace
from tests.equality import assert_same_gradients
from tests.fx import cases_changes
from tests.fx.against_eager import vectors
from tests.fx.cases_changes import TABLE, Reads, doubled
from tests.fx.test_shapes import Layers


def _set_gain(model: Any) -> None:
    cases_changes.GAIN = 2.0


CHANGES: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda m: setattr(m, "gain", 2.0),
    "an attribute of another type": lambda m: setattr(m, "gain", 1),
    "an object": lambda m: setattr(m.config, "gain", 2.0),
    "another object": lambda m: setattr(m, "config", types.SimpleNamespace(gain=2.0)),
    "a named tuple": lambda m: setattr(m, "settings", m.settings._replace(gain=2.0)),
    "a dict": lambda m: m.options.update(gain=2.0),
    "a tensor in a dict": lambda m: m.options.update(table=torch.zeros(8).double()),
    "a list": lambda m: m.scales.insert(0, 2.0) or m.scales.reverse(),
    "a tensor": lambda m: setattr(m, "offset", torch.zeros(8).double()),
    "a leaf's attribute that another reads": lambda m: setattr(m.inner, "gain", 2.0),
    "an attribute of torch's own module": lambda m: setattr(m.norm, "eps", 0.5),
    "an attribute that was not there": lambda m: setattr(m, "extra", 2.0),
    "a class attribute": lambda m: setattr(type(m), "factor", 2.0),
    "a global": _set_gain,
    "a global dict": lambda m: TABLE.update(gain=2.0),
    "a hook of the root": lambda m: m.register_forward_hook(doubled),
    "a hook of what was looked into": lambda m: m.pair.register_forward_hook(doubled),
    "a backward hook": lambda m: m.pair.register_full_backward_pre_hook(lambda module, gradients: gradients),
    "a forward of its own": lambda m: setattr(m.pair, "forward", lambda x: x),
}


@pytest.fixture
def kept() -> Iterator[None]:
    """Puts back what the changes leave outside of the model."""
    yield
    cases_changes.GAIN, TABLE["gain"], Reads.factor = 1.0, 1.0, 1.0


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_between_calls_is_found(what: str, kept: None) -> None:
    model = Reads().double()
    guards = trace(model, (), vectors(4, 6)).guards
    assert isinstance(guards, Guards) and guards.check((), vectors(3, 6)) is None
    model(**vectors(3, 6))
    assert guards.check((), vectors(3, 6)) is None
    CHANGES[what](model)
    assert guards.check((), vectors(3, 6)) is not None


ALIKE: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "a list": (lambda m: setattr(m, "scales", [*m.scales]), lambda m: m.scales.append(2.0)),
    "a dict": (lambda m: setattr(m, "options", {**m.options}), lambda m: m.options.update(gain=2.0)),
    "a tuple": (lambda m: setattr(m, "sides", tuple(m.scales)), lambda m: setattr(m, "sides", (1.0, 2.0))),
}


@pytest.mark.parametrize("what", ALIKE)
def test_containers_with_the_same_contents_change_nothing(what: str) -> None:
    """As where adapters are switched back and forth: a library makes the list of active ones anew each time."""
    model = Reads().double()
    guards = trace(model, (), vectors(4, 6)).guards
    assert isinstance(guards, Guards)
    replace, change = ALIKE[what]
    replace(model)
    assert guards.check((), vectors(3, 6)) is None
    change(model)
    assert guards.check((), vectors(3, 6)) is not None


class MayScale(nn.Module):
    """Uses a parameter if it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_parameter("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if self.scale is None else self.linear(x) * self.scale


def test_parameters_that_come_and_go_are_found() -> None:
    model = nn.Sequential(MayScale(), nn.Linear(8, 8), MayScale()).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    with roundpipe.compile(model, devices=["cpu"]) as pipe, torch.no_grad():
        for scale in (None, nn.Parameter(torch.full((8,), 2.0).double()), None):
            model[0].scale = scale
            torch.testing.assert_close(pipe(x), model(x))
        assert pipe.trace_count == 2  # the first is kept
        model[2].linear.bias = None
        torch.testing.assert_close(pipe(x), model(x))


class LooksAtWeights(Layers):
    """Decides by what is there, and by what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x * 2 if self.layers[0].weight.requires_grad else x)
        x = x if self.mask is None else x * self.mask
        return self.layers[1](x * 3 if self.layers[0].bias is None else x)


def _replace(model: Any) -> None:
    model.layers[0].weight = nn.Parameter(torch.eye(8).double(), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m, "mask", torch.full((8,), 2.0).double()), "mask, which was None, is a tensor now"),
        (lambda m: setattr(m.layers[0], "bias", None), "layers.0.bias is None now"),
        (_replace, "layers.0.weight has requires_grad False now, traced with requires_grad True"),
    ],
)
def test_weights_that_appear_go_or_are_replaced(change: Callable[[Any], object], words: str) -> None:
    model = LooksAtWeights().double()
    guards = trace(model, (), vectors(4, 6)).guards
    assert isinstance(guards, Guards)
    eager = copy.deepcopy(model)
    with roundpipe.compile(model, devices=["cpu"]) as pipe:
        for _ in range(2):
            pipe.zero_grad()
            eager.zero_grad()
            inputs = vectors(4, 6)
            loss = pipe.forward_backward(input_kwargs=inputs, loss_fn=lambda out, label: out.pow(2).sum())
            expected = eager(**inputs).pow(2).sum()
            expected.backward()
            pipe.synchronize()
            torch.testing.assert_close(loss, expected.detach())
            assert_same_gradients(model, eager, 1e-10)
            if pipe.trace_count == 1:
                change(model)
                change(eager)
        assert pipe.trace_count == 2
    assert words in str(guards.check((), vectors(4, 6)))


class AsksTorch(Layers):
    """Decides by settings of torch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x) * (2 if torch.get_default_dtype() == torch.float64 else 1)
        return self.layers[1](x * 3 if torch.are_deterministic_algorithms_enabled() else x)


@pytest.mark.parametrize(
    ("setting", "value"), [(torch.set_default_dtype, torch.float64), (torch.use_deterministic_algorithms, True)]
)
def test_settings_of_torch_that_change(setting: Callable[[Any], object], value: Any) -> None:
    model, inputs = AsksTorch().double(), vectors(4, 6)
    before = {
        torch.set_default_dtype: torch.get_default_dtype(),
        torch.use_deterministic_algorithms: torch.are_deterministic_algorithms_enabled(),
    }
    try:
        with roundpipe.compile(model, devices=["cpu"]) as pipe, torch.no_grad():
            for now in (before[setting], value, before[setting], value):
                setting(now)
                torch.testing.assert_close(pipe(**inputs), model(**inputs))
            assert pipe.trace_count == 2
    finally:
        setting(before[setting])
