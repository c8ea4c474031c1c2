"""Modes, hooks and weights that change around a call."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe
from tests.equality import assert_same_gradients
from tests.fx.against_eager import check, vectors
from tests.fx.cases_changes import Inside, doubled
from tests.fx.test_shapes import Layers


def test_a_mode_set_before_the_backward_is_the_next_calls() -> None:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.norm(self.layers[0](x).transpose(1, 2)).transpose(1, 2))

    gradients = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Model().double()
        x = torch.linspace(-1, 1, 4 * 6 * 8).double().view(4, 6, 8).sin()
        with roundpipe.compile(model, example_kwargs={"x": x}, devices="cpu", name="m") as pipe:
            one = roundpipe.RoundPipeRunConfig(num_microbatch=1)
            out = pipe(x, roundpipe_run_config=one) if compiled else model(x)
            model.eval()
            out.pow(2).sum().backward()
            pipe.synchronize()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for was, now in zip(*gradients, strict=True):
        torch.testing.assert_close(now, was)


class Gate(nn.Module):
    """Hands its argument back, at some sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[0] > 2 else self.linear(x)


class Normalises(nn.Module):
    """Keeps running statistics through a function, or a buffer through ``.data``: no version counter sees it."""

    def __init__(self, by_function: bool) -> None:
        super().__init__()
        self.linear, self.by_function = nn.Linear(8, 8), by_function
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.by_function:
            self.mean.data.add_(0.25)
            return self.linear(x) + self.mean
        return F.batch_norm(self.linear(x).transpose(1, 2), self.mean, self.var, training=True).transpose(1, 2)


class Shrinks(nn.Module):
    """Writes its weight in the forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight
        if self.how == "in place":
            with torch.no_grad():
                weight[0].mul_(0.5)
        elif self.how == "data":
            weight.data.mul_(0.9)
        else:
            weight.data = weight.data * 0.9
        return self.linear(x)


class Twice(nn.Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(super().__call__(x)) * 2


class Between(Layers):
    """A few modules of one kind, each beside what goes into it."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for part in self.parts:
            x = torch.tanh(x) + part(x)
        return self.layers[1](x)


def test_a_result_is_not_mistaken_for_the_argument() -> None:
    assert not check(lambda: Between(Gate), sizes=[(8, 6), (3, 6), (2, 6), (8, 5)]).fell_back


@pytest.mark.parametrize("by_function", [True, False])
@pytest.mark.parametrize("in_glue", [True, False])
def test_buffers_that_are_written_unseen(by_function: bool, in_glue: bool) -> None:
    inner = Inside(Normalises(by_function)) if in_glue else None
    seen = check(lambda: Between(lambda: Normalises(by_function)) if inner is None else Inside(Normalises(by_function)))
    assert not seen.fell_back


@pytest.mark.parametrize("how", ["in place", "data", "other data"])
def test_a_leaf_that_writes_its_weight_falls_back(how: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = [Between(lambda: Shrinks(how)).double() for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        x = vectors(4, 6)["x"]
        with roundpipe.compile(models[0], example_kwargs={"x": x}, devices="cpu", name="shrinks") as pipe:
            for _ in range(2):
                one = roundpipe.RoundPipeRunConfig(num_microbatch=1)
                loss = pipe.forward_backward((x,), loss_fn=lambda out, _: out.pow(2).sum(), run_config=one)
                pipe.synchronize()
                torch.testing.assert_close(loss, models[1](x).pow(2).sum().detach())
            for parameter, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
                torch.testing.assert_close(parameter, expected)


def test_what_is_around_a_call_is_done_once() -> None:
    assert not check(lambda: Between(lambda: Twice(8, 8))).fell_back


class Borrows(Layers):
    """Calls a module with other weights, and one in another mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = {"weight": self.layers[1].weight * 2, "bias": x.mean((0, 1))}
        x = torch.func.functional_call(self.layers[0], weights, (self.layers[1](x),))
        x = self.norm(x.transpose(1, 2))
        self.norm.eval()
        x = self.norm(x).transpose(1, 2)
        self.norm.train(self.training)
        return self.layers[2](x)


def test_weights_and_modes_set_around_a_call_are_seen() -> None:
    assert not check(Borrows).fell_back


class LeavesAnotherMode(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layers[0](x).transpose(1, 2)).transpose(1, 2)
        self.norm.eval()
        return self.layers[1](x)


def test_a_forward_that_leaves_another_mode_falls_back() -> None:
    assert check(LeavesAnotherMode, num_microbatches=1).fell_back


@pytest.mark.parametrize("before", [True, False])
def test_backward_hooks_of_what_would_be_looked_into(before: bool) -> None:
    def build() -> nn.Module:
        stack = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)))
        if before:
            stack.register_full_backward_pre_hook(lambda module, gradients: tuple(g * 3 for g in gradients))
        else:
            stack.register_full_backward_hook(lambda module, gradients, _: tuple(g * 3 for g in gradients))
        return Inside(stack)

    assert not check(build).fell_back


class PassesOn(Layers):
    """One of its modules returns its input, past which those behind it may read."""

    def __init__(self, passing: nn.Module) -> None:
        super().__init__()
        self.passing = passing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.passing(self.layers[0](x)))


@pytest.mark.parametrize("passing", [nn.Identity(), nn.Dropout(0.0), nn.Sequential(nn.Identity())])
@pytest.mark.parametrize("inside", [False, True])
def test_hooks_put_onto_what_only_passes_values_on(passing: nn.Module, inside: bool) -> None:
    models = [PassesOn(copy.deepcopy(passing)).double()]
    models.append(copy.deepcopy(models[0]))
    inputs = vectors(4, 3)
    with roundpipe.compile(models[0], example_kwargs=inputs, devices=["cpu"]) as pipe:
        for _ in range(2):
            pipe.forward_backward(input_kwargs=inputs, loss_fn=lambda outputs, _: outputs.square().sum())
            models[1](**inputs).square().sum().backward()
            pipe.synchronize()
            assert_same_gradients(models[0], models[1], 1e-12)
            for model in models:
                hooked = list(model.passing.modules())[-1 if inside else 0]
                hooked.register_full_backward_hook(lambda module, gradients, _: tuple(g * 3 for g in gradients))


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.aux: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.aux = x.pow(2).mean()
        return x


class AddsUp(Layers):
    """Takes from its modules what they keep, after they are called or also before."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Keeps() for _ in range(3))
        self.before = before

    def forward(self, x: torch.Tensor) -> Any:
        x = self.layers[0](x)
        if self.before:
            return self.layers[1](x * (1 if self.parts[0].aux is None else 2)), self.parts[0](x.detach()).mean()
        for part in self.parts:
            x = x + part(x)
        return self.layers[1](x), sum(part.aux for part in self.parts)


@pytest.mark.parametrize("before", [True, False])
def test_what_modules_keep_for_others(before: bool) -> None:
    assert check(lambda: AddsUp(before), sizes=[(4, 6), (3, 6)]).fell_back is before


class ScalesItsFirstCall(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.is_new = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x))
        if self.is_new:
            self.is_new = False
            x = x * 2
        return x


def test_a_first_call_that_differs_falls_back() -> None:
    assert check(ScalesItsFirstCall, sizes=[(4, 6), (3, 6)]).fell_back


class Uncut(Layers):
    """A root whose data decides, around modules of which one does something else beside computing."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.norm = nn.BatchNorm1d(8)
        self.pair = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.shrinks = Shrinks("data")
        if what == "a hook of a sequence":
            self.pair.register_forward_hook(doubled)
        if what == "a frozen weight":
            self.shrinks.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pair(self.layers[0](x))
        if self.what == "a frozen weight":
            x = self.shrinks(x)
        if self.what == "other weights":
            x = torch.func.functional_call(self.layers[1], {"bias": x.mean((0, 1))}, (x,))
        if self.what == "another mode":
            self.norm.eval()
            x = self.norm(x.transpose(1, 2))
            self.norm.train()
            x = self.norm(x).transpose(1, 2)
        return self.layers[2](x) * 2 if x.sum() > 1e9 else self.layers[2](x)


@pytest.mark.parametrize("what", ["a hook of a sequence", "a frozen weight", "other weights", "another mode"])
def test_what_parts_of_an_uncut_model_do(what: str) -> None:
    assert check(lambda: Uncut(what), sizes=[(4, 6), (3, 6)]).fell_back


def test_a_mode_set_on_the_users_module_is_its_parts() -> None:
    class Model(Uncut):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 if self.pair.training else 1)

    model = Model("").double()
    x = vectors(4, 6)["x"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with roundpipe.compile(model, example_kwargs={"x": x}, devices="cpu", name="uncut") as pipe, torch.no_grad():
            for mode in (True, False):
                model.pair.train(mode)
                torch.testing.assert_close(pipe(x), model(x))
