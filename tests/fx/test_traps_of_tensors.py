"""Traps of tensors: buffers, layouts, in-place writes, random numbers, sizes."""

from __future__ import annotations

import copy
import logging
import random
import warnings
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import TraceError
from roundpipe.fx.guards.failure import RETRACES_BEFORE_WARNING
from roundpipe.fx.passes.lower import LowerOptions
from roundpipe.fx.source import TracedSource
from roundpipe.fx.trace.tracer import trace
from tests.fx.against_eager import check, vectors
from tests.fx.cases_traps import Holds, _raise
from tests.fx.test_shapes import Layers


def test_a_write_to_a_parameter_is_refused() -> None:
    class Clamps(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return x @ self.weight

    with pytest.raises(TraceError, match="writes a parameter"):
        trace(Clamps().double(), (), vectors(4, 6))


def test_a_decision_on_numbers_drawn_in_place_is_refused() -> None:
    class Draws(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            keep = torch.zeros(3, 3).bernoulli_(0.5)
            return self.layers[0](x) if keep.sum() > 4 else self.layers[1](x)

    with pytest.raises(TraceError, match="__bool__ asks for the data"):
        trace(Draws().double(), (), vectors(4, 6))


def test_memory_layout_of_activations_is_never_burned_in() -> None:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)  # fakes lie in another order here than real ones
            return self.layers[0](x) if x.is_contiguous() else self.layers[1](x)

    assert check(Model).fell_back


def test_a_device_literal_is_an_attribute_of_the_layer() -> None:
    class Model(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layers[0](x) + torch.ones(8, device=x.device, dtype=x.dtype)
            return self.layers[1](h)

    chain = TracedSource(Model().double(), LowerOptions(), on_failure=_raise).chain_for((), vectors(4, 6))
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


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_random_numbers_of_python_and_numpy_fall_back(draw: Any) -> None:
    class Model(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x) * (1.0 if draw() < 2 else 0.0))

    model = Model().double()
    with pytest.raises(TraceError, match="random"):
        trace(model, (), vectors(4, 6))
    assert check(Model).fell_back


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
            return self.layers[1](self.layers[0](x) * float(f"{scale}"))

    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.INFO, "roundpipe.fx.source"):
        warnings.simplefilter("always")
        with roundpipe.compile(Model().double(), devices=["cpu"], name="varies") as pipe:
            for index in range(RETRACES_BEFORE_WARNING + 1):
                pipe.forward_backward(
                    input_kwargs={**vectors(2, 3), "scale": 1.0 + index}, loss_fn=lambda out, _: out.sum()
                )
            assert pipe.trace_count == RETRACES_BEFORE_WARNING + 1
    lines = [record.message for record in caplog.records if "again" in record.message]
    assert len(lines) == RETRACES_BEFORE_WARNING and all("scale" in line for line in lines)
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
