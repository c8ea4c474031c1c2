"""Parts and the code around them: names, lists, attributes, replaced modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import (
    AutoRoundPipe,
    ConfigError,
    Device,
    RoundPipeRunConfig,
    wrap_model_to_roundpipe,
)
from roundpipe.wrappers.auto import PartsProgram
from tests.equality import assert_same_gradients, assert_same_state
from tests.wrappers.cases_parts import WIDTH, Caller, auto


class Experts(nn.Module):
    """Two experts, each for those rows that its sign fits."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 1)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, goes_to: torch.Tensor) -> torch.Tensor:
        out = x * self.router(x)
        for index, expert in enumerate(self.experts):
            (rows,) = torch.where(goes_to == index)
            out = out.index_add(0, rows, expert(x[rows]))
        return out


@pytest.mark.parametrize("budget_bytes", [None, 40_000])
def test_an_expert_that_no_token_goes_to_gets_gradients_of_zero(budget_bytes: int | None) -> None:
    model = Experts().double()
    reference = copy.deepcopy(model)
    parts = {module: RoundPipeRunConfig() for module in [model.router, *model.experts]}
    devices = [Device("cpu", memory_bytes=budget_bytes)] * 2
    with AutoRoundPipe(PartsProgram(model, parts), name="whole", devices=devices) as pipe:
        for goes_to in (torch.arange(6) % 2, torch.zeros(6), torch.ones(6), torch.arange(6) % 2):
            x = torch.randn(6, WIDTH, dtype=torch.float64)
            found, expected = pipe(x, goes_to), reference(x, goes_to)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            found.square().sum().backward()
            expected.square().sum().backward()
            pipe.synchronize()
            assert_same_gradients(model, reference, 1e-10)
            assert all(parameter.grad is not None for parameter in model.parameters())
            for one in (model, reference):
                one.zero_grad()


def test_names_of_modules_are_free() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("reads", "makes", "unpack", "model", "source"):
                self.add_module(name, nn.Linear(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.source(self.model(self.unpack(self.makes(self.reads(x)))))

    model = Named()
    x = torch.randn(4, WIDTH)
    with auto(model) as pipe:
        torch.testing.assert_close(pipe(x), model(x))


def test_a_list_argument_that_is_only_read_is_no_obstacle(recwarn: pytest.WarningsRecorder) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, others: list[torch.Tensor], *, scale: dict[str, float]) -> torch.Tensor:
            return self.linear(x + others[0]) * scale["value"]

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reads = Reads()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.reads(x, [x, 2 * x], scale={"value": 0.5})

    model = Calls()
    x = torch.randn(4, WIDTH)
    with auto(model) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
    assert not recwarn


def test_modules_that_write_into_what_the_one_before_made_stay_together(recwarn: pytest.WarningsRecorder) -> None:
    stack = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
    model = nn.ModuleDict({"stack": stack})
    model.forward = lambda x: model["stack"](x)  # type: ignore[method-assign]
    reference = copy.deepcopy(stack)
    x = torch.randn(4, WIDTH)
    with auto(model) as pipe:
        pipe.model["stack"](x).sum().backward()
        pipe.synchronize()
    reference(x).sum().backward()
    assert_same_gradients(stack, reference, 1e-6)
    assert not recwarn


def test_attributes_of_modules_on_the_host_are_the_models() -> None:
    model = Caller()
    x = torch.randn(4, WIDTH)
    with auto(model) as pipe:
        pipe.factor = 3.0
        assert model.factor == 3.0
        out = pipe(x)
        torch.testing.assert_close(out, 3 * model.linear(x))
        assert model.aux is not None and model.aux.requires_grad
        torch.testing.assert_close(pipe.aux, out.sum())


def test_replaced_submodules_are_refused() -> None:
    model = Caller()
    with auto(model) as pipe:
        model.linear = nn.Linear(WIDTH, WIDTH)
        with pytest.raises(ConfigError, match="submodules of a Caller were replaced"):
            pipe(torch.randn(4, WIDTH))


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_statistics_are_written_in_training_after_a_backward_in_evaluation(without_gradients: Any) -> None:
    torch.manual_seed(0)
    model = Normalized().double()
    reference = copy.deepcopy(model)
    options: Any = {"use_sequential_preset": False, "lower_threshold": 1, "upper_threshold": 0, "devices": ["cpu"]}
    config = RoundPipeRunConfig(num_microbatch=1)
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    with wrap_model_to_roundpipe(model, model_run_config=config, **options) as pipe:
        for called in (pipe, reference):
            called.eval()
            called(x).sum().backward()
            called.train()
            with without_gradients():
                called(x)
        assert_same_state(model, reference, 1e-12)


def test_a_copy_of_what_has_other_modules_by_now_says_to_wrap_again() -> None:
    model = Normalized()
    with auto(model) as pipe:
        model.norm = nn.BatchNorm1d(WIDTH)
        with pytest.raises(ConfigError, match="a BatchNorm1d was replaced or removed.*wrap it again"):
            copy.deepcopy(pipe)
