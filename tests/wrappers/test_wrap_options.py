"""Options of wrapping, and models that are cut."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ConfigError, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.wrappers.auto import HostRunner
from tests.equality import assert_same_gradients
from tests.wrappers.cases_wrap import (
    DEVICES,
    TOLERANCE,
    WIDTH,
    Branching,
    Nested,
    block,
    inputs,
    squared,
    wrapped,
)


def test_override_config() -> None:
    model = Branching().double().eval()
    sizes: dict[str, list[int]] = {"first": [], "second": []}
    model.blocks[0][0].register_forward_hook(lambda module, args, output: sizes["first"].append(len(output)))
    model.blocks[1][0].register_forward_hook(lambda module, args, output: sizes["second"].append(len(output)))
    with wrapped(
        model,
        override_config={model.blocks[0]: RoundPipeRunConfig(num_microbatch=2)},
        model_run_config=RoundPipeRunConfig(num_microbatch=4),
    ) as pipe:
        with torch.no_grad():
            pipe(**inputs())
        assert sizes == {"first": [6, 6], "second": [3] * 4}
        with torch.no_grad():
            pipe(**inputs(), roundpipe_run_config=RoundPipeRunConfig(num_microbatch=3))
        assert sizes == {"first": [6] * 4, "second": [3] * 4 + [4] * 3}


def test_outputs_of_list_elements_kept_apart() -> None:
    class Straight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([block() for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for one in self.blocks:
                x = one(x)
                self.kinds.append(type(x).__name__)
            return x

    model = Straight().double().eval()
    model.kinds = []  # type: ignore[assignment]
    reference = copy.deepcopy(model)
    apart = {one: RoundPipeRunConfig(merge_output=False) for one in model.blocks[:-1]}
    x = torch.randn(9, WIDTH, dtype=torch.float64)
    with wrapped(model, override_config=apart) as pipe:
        found = pipe(x)
        assert model.kinds == ["RoundPipePackedData", "RoundPipePackedData", "Tensor"]
        squared(found, None).backward()
        pipe.synchronize()
    squared(reference(x), None).backward()
    torch.testing.assert_close(found, reference(x), rtol=TOLERANCE, atol=TOLERANCE)
    assert_same_gradients(model, reference, 1e-10)


def test_the_model_itself_skipped_is_given_back() -> None:
    model = Branching()
    assert wrapped(model, skip_modules=[model]) is model


@pytest.mark.parametrize("given", [3, "head", ["head"], [0], nn.Linear(2, 2), iter([])])
def test_skipped_modules_are_modules(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"skip_modules.*\[model\.head\]"):
        wrapped(Branching(), skip_modules=given)
    with pytest.raises(ConfigError, match=r"skip_modules.*\[model\.head\]"):
        roundpipe.compile(Branching(), skip_modules=given)


def test_options_without_effect_are_named() -> None:
    model = Branching()
    with pytest.warns(UserWarning, match=r"skip_modules: blocks\.1\.0 is inside"):
        wrapped(model, skip_modules=[model.blocks[1][0]]).close()
    with pytest.warns(UserWarning, match=r"override_config: the options of blocks have no effect"):
        wrapped(model, override_config={model.blocks: RoundPipeRunConfig()}).close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lower_threshold": -1}, "lower_threshold=-1"),
        ({"upper_threshold": "1GiB"}, "upper_threshold='1GiB'"),
        ({"override_config": {nn.Linear(1, 1): RoundPipeRunConfig()}}, "not a module of the model"),
        ({"tensor_parallel": 2}, "tensor_parallel"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrapped(Branching(), **options)


def test_a_wrapped_model_is_not_wrapped_again() -> None:
    with wrapped(Branching()) as pipe, pytest.raises(ConfigError, match="already; pass the original"):
        wrapped(pipe)


class Traceable(Nested):
    """Says itself what it takes."""

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(4, 8)}


@pytest.mark.parametrize("preset", [None, True])
@pytest.mark.parametrize("options", [{}, {"example_args": (torch.randn(4, 8),)}])
def test_a_traceable_model_is_cut(preset: bool | None, options: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = Nested() if options else Traceable()
    with caplog.at_level(logging.INFO, "roundpipe.api"):
        pipe = wrap_model_to_roundpipe(model, preset, devices=DEVICES, **options)
    with pipe:
        assert type(pipe) is RoundPipe
        assert pipe.trace_count == 1
        assert len(caplog.records) == 1
        assert "graph compiler" in caplog.text
        pipe(torch.randn(6, 8))


class Misleading(Nested):
    """Has inherited an example that its forward does not take."""

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.ones(3, 5, dtype=torch.long)}


@pytest.mark.parametrize("preset", [None, True])
def test_an_example_of_its_own_that_does_not_fit_decides_nothing(
    preset: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "roundpipe.api"):
        pipe = wrap_model_to_roundpipe(Misleading(), preset, devices=DEVICES)
    with pipe:
        assert len(caplog.records) == 1 and "at its first call" in caplog.text
        assert "not traced yet" in pipe.partition_table()
        pipe(torch.randn(6, 8))
        # a fallback has layers in its table, too
        assert pipe._runner.fallback is None and "layer" in pipe.partition_table()


def test_required_of_a_model_that_shows_only_with_its_own_example_that_it_can_not_be_traced() -> None:
    class Own(Branching):
        @property
        def dummy_inputs(self) -> dict[str, torch.Tensor]:
            return {"x": torch.randn(4, 8)}

    with wrap_model_to_roundpipe(Own(), True, devices=DEVICES) as pipe:
        with pytest.raises(NotImplementedError, match=r"use_sequential_preset=True, but Own"):
            pipe(torch.randn(6, 8))
    with wrap_model_to_roundpipe(Own(), devices=DEVICES) as pipe, torch.no_grad():
        pipe(torch.randn(6, 8))
        assert isinstance(pipe._runner.fallback, HostRunner)  # which of two warnings came is said elsewhere


def test_without_an_example_it_is_cut_at_the_first_call(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "roundpipe.api"):
        pipe = wrap_model_to_roundpipe(Nested(), devices=DEVICES)
    with pipe:
        assert pipe.trace_count == 0
        assert "at its first call" in caplog.text
        pipe(torch.randn(6, 8))
        assert pipe.trace_count == 1
