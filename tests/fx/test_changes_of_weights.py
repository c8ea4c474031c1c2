"""Weights, tables and modules that change between calls, and code that asks for gradients."""

from __future__ import annotations

import contextlib
import copy
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import is_grad_enabled, nn
from torch import is_grad_enabled as records_gradients

import roundpipe
from roundpipe.core.errors import ConfigError
from roundpipe.fx.guards.guards import Guards
from roundpipe.fx.trace.tracer import trace
from tests.fx.against_eager import vectors
from tests.fx.cases_changes import Inside, Reads, doubled
from tests.fx.test_shapes import Layers


class TakesOver(nn.Module):
    """Has the dtype and the shape of a weight burned in."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = self.linear(x + torch.sin(torch.arange(8).to(x.dtype) / 3))
        return x / self.linear.weight.shape[0]


def _other_rows(model: TakesOver) -> None:
    torch.manual_seed(1)
    model.linear.weight.data, model.linear.bias.data = torch.randn(12, 8), torch.randn(12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.double(), "embed.weight has dtype torch.float64 now, traced with dtype torch.float32"),
        (lambda m: m.bfloat16(), "embed.weight has dtype torch.bfloat16 now"),
        (_other_rows, "linear.weight has shape (12, 8) now, traced with shape (8, 8)"),
        (lambda m: setattr(m, "scale", torch.ones(1)), "scale has shape (1,) now, traced with shape (8,)"),
    ],
)
def test_weights_that_get_another_dtype_or_shape(change: Callable[[Any], object], words: str) -> None:
    model, ids = TakesOver(), torch.randint(0, 9, (4, 3))
    guards = trace(model, (), {"ids": ids}).guards
    assert isinstance(guards, Guards) and guards.check((), {"ids": ids}) is None
    with roundpipe.compile(model, devices=["cpu"]) as pipe, torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(pipe(ids), model(ids))
            change(model)
        torch.testing.assert_close(pipe(ids), model(ids))
        assert pipe.trace_count == 2
    assert words in str(guards.check((), {"ids": ids}))


class Grows(nn.Module):
    """Keeps a table that it makes longer where a batch needs that."""

    def __init__(self, registers: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.registers = registers
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("second", None, persistent=False)

    def grow(self, length: int) -> None:
        if self.registers:
            self.register_buffer("table", torch.arange(float(length)), persistent=False)
        else:
            self.table = torch.arange(float(length))
        self.second = self.table.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if int(x.detach()[:, 0].max()) > self.table.shape[0]:
            self.grow(int(x.detach()[:, 0].max()))
        return self.linear(x) + self.table[:1] + 1


@pytest.mark.parametrize("registers", [False, True])
def test_tables_that_a_forward_grows_do_not_trace_again(registers: bool) -> None:
    model = nn.Sequential(Grows(registers), nn.Linear(8, 8), Grows(registers), nn.Linear(8, 8))
    with roundpipe.compile(model, devices=["cpu"]) as pipe, torch.no_grad():
        for length in (2, 6, 9, 12):
            x = torch.full((4, 8), float(length))
            eager = copy.deepcopy(model)
            torch.testing.assert_close(pipe(x), eager(x))
            assert len(model[0].table) == len(eager[0].table)
        assert pipe.trace_count == 1


def test_what_nobody_reads_may_change() -> None:
    model = Reads().double()
    guards = trace(model, (), vectors(4, 6)).guards
    assert isinstance(guards, Guards)
    model.number_of_steps = 3
    model.layers[0].register_forward_hook(doubled)  # of a leaf: it runs with it
    model.offset.mul_(2)  # the graph holds this very tensor
    assert guards.check((), vectors(3, 6)) is None


def test_the_forwards_own_changes_do_not_trace_again() -> None:
    """A graph that is the same before and after them serves a model that ran in eager mode in between, too."""

    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.config = types.SimpleNamespace(kind=None)
            self.installed = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.installed:
                self.layers[2].register_forward_hook(lambda module, inputs, output: None)
                self.installed = True
            self.config.kind = self.config.kind or "regression"
            return self.layers[2](self.layers[1](self.layers[0](x)))

    model = Model().double()
    guards = trace(model, (), vectors(4, 6)).guards
    assert isinstance(guards, Guards)
    model(**vectors(4, 6))
    assert guards.check((), vectors(3, 6)) is None


def test_hooks_that_a_forward_installs_on_what_is_looked_into_do_not_trace_again() -> None:
    """Those of the other modules are as they were."""

    class Model(Inside):
        installed = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.installed:
                self.inner.register_forward_hook(doubled)
                self.installed = True
            return super().forward(x)

    model = Model(Reads()).double()
    guards = trace(model, (), vectors(4, 6)).guards
    assert isinstance(guards, Guards)
    model(**vectors(4, 6))
    assert guards.check((), vectors(3, 6)) is None
    model.register_forward_hook(doubled)
    change = guards.check((), vectors(3, 6))
    assert change is not None and change.message == "the hooks of a Model are others now"


def test_replaced_modules_are_refused() -> None:
    model = Reads().double()
    with roundpipe.compile(model, example_kwargs=vectors(4, 6), devices="cpu", name="replaced") as pipe:
        model.layers[1] = nn.Linear(8, 8).double()
        with pytest.raises(ConfigError, match="compile it again"):
            pipe.forward_backward(input_kwargs=vectors(4, 6), loss_fn=lambda out, _: out.sum())


class Asks(Layers):
    """Says whether gradients are recorded, by another factor."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        asked = torch.is_grad_enabled() if self.how == "mode" else x.requires_grad
        return self.layers[1](x * 2 if asked else x)


@pytest.mark.parametrize("how", ["mode", "tensor"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_code_that_asks_for_gradients_gets_the_callers_answer(how: str, context: Any) -> None:
    model = Inside(Asks(how)).double()
    x = vectors(4, 6)["x"]
    with roundpipe.compile(model, example_kwargs={"x": x}, devices="cpu", name="asks") as pipe:
        for around in (context, contextlib.nullcontext, context):
            with around():
                torch.testing.assert_close(pipe(x).detach(), model(x).detach())
        assert pipe.trace_count == 2


def _function_that_asks() -> bool:
    return is_grad_enabled()


class AsksAtHand(Layers):
    """Asks for the grad mode by what is no attribute of torch; on data it can only run by itself."""

    def __init__(self, of_data: bool) -> None:
        super().__init__()
        self.of_data = of_data

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        if self.of_data and x.abs().max() > 1e9:
            x = x / 2
        return self.layers[1](x)


class AsksByName(AsksAtHand):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scaled(self.layers[0](x))
        return x * 2 if is_grad_enabled() else x


class AsksByAnother(AsksAtHand):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scaled(self.layers[0](x))
        return x * 2 if records_gradients() else x


class AsksAFunction(AsksAtHand):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scaled(self.layers[0](x))
        return x * 2 if _function_that_asks() else x


class AsksOfATensor(AsksAtHand):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scaled(self.layers[0](x))
        return x * 2 if _is_trained(x) else x


def _is_trained(x: torch.Tensor) -> bool:
    return x.requires_grad


def asking_in_a_closure(of_data: bool) -> nn.Module:
    asks = torch.is_grad_enabled

    class AsksInAClosure(AsksAtHand):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.scaled(self.layers[0](x))
            return x * 2 if asks() else x

    return AsksInAClosure(of_data)


ASKING = [AsksByName, AsksByAnother, AsksAFunction, AsksOfATensor, asking_in_a_closure]


@pytest.mark.parametrize("of_data", [False, True])
@pytest.mark.parametrize("make", ASKING)
def test_the_question_for_gradients_is_noticed_wherever_code_has_it_from(
    make: Callable[[bool], nn.Module], of_data: bool
) -> None:
    model = Inside(make(of_data)).double()
    x = vectors(4, 6)["x"]
    copied = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for make_pipe in (roundpipe.compile, roundpipe.wrap_model_to_roundpipe):  # what a trace found out is kept
            options = {} if make_pipe is roundpipe.compile else {"use_sequential_preset": False}
            with make_pipe(copy.deepcopy(copied), devices="cpu", name="asks at hand", **options) as pipe:
                for around in (contextlib.nullcontext, torch.no_grad):
                    with around():
                        torch.testing.assert_close(pipe(x).detach(), model(x).detach())
    assert records_gradients is is_grad_enabled is torch.is_grad_enabled
