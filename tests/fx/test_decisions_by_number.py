"""Forwards that go by the number of samples: pieces of a batch would go another way, so that it is not cut."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe import RoundPipeRunConfig
from roundpipe.fx.passes.sample_dependence import dependence_of_samples
from roundpipe.fx.trace.tracer import trace
from tests.fx.test_sample_dependence import WIDTH, Model

Run = Callable[[Any, torch.Tensor], torch.Tensor]


def _by_number(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.core(x) * (2 if len(x) > 4 else 1)


def _by_more_than_one(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.core(x) * (2 if x.shape[0] > 1 else 1)


def _checked(model: Any, x: torch.Tensor) -> torch.Tensor:
    """What models do that does not go by the number."""
    h = model.core(x)
    assert x.shape[0] == h.shape[0]
    if h.shape[:-1] != x.shape[:-1] or len(x) <= 0:
        raise ValueError("other samples")
    return torch.cat([h, h.new_zeros(x.shape[0], max(len(x), 1) // len(x))], 1)


def _broadcast(model: Any, x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(WIDTH)[None]
    if x.shape[0] != places.shape[0]:  # as transformers do for masks
        places = places.expand(x.shape[0], -1)
    return model.core(x + places)


def _by_length(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.core(x) * (2 if x.shape[1] > 4 else 1)


def _sample_by_sample(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([model.core(x[index]) for index in range(len(x))])


def warnings_of(run: Run, number: int, num_microbatches: int | None, earlier: int = 0) -> list[str]:
    """What is said of a model's call with so many samples, whose outputs are eager's if the batch is not cut."""
    torch.manual_seed(0)
    model = Model(run)
    config = RoundPipeRunConfig() if num_microbatches is None else RoundPipeRunConfig(num_microbatch=num_microbatches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with roundpipe.compile(model, devices=["cpu", "cpu"], model_run_config=config) as pipe:
            for size in filter(None, (earlier, number)):
                x = torch.randn(size, WIDTH)
                expected, found = model(x), pipe(x)
                if num_microbatches is None:
                    torch.testing.assert_close(found, expected)
    return [str(each.message) for each in caught if "mixes the samples" in str(each.message)]


@pytest.mark.parametrize(("run", "number"), [(_by_number, 9), (_by_more_than_one, 2), (_by_more_than_one, 3)])
def test_a_batch_is_not_cut_whose_pieces_are_decided_on_otherwise(run: Run, number: int) -> None:
    (warning,) = warnings_of(run, number, None)
    assert f"decision by their number, another than for a microbatch, at {__file__}" in warning


def test_a_later_batch_is_not_cut_either() -> None:
    assert warnings_of(_by_number, 9, None, earlier=4)


def test_a_number_of_microbatches_that_is_given_stays() -> None:
    (warning,) = warnings_of(_by_number, 9, 3)
    assert "decision by their number" in warning and "microbatches" in warning


@pytest.mark.parametrize("run", [_checked, _broadcast, _by_length, _sample_by_sample])
@pytest.mark.parametrize("number", [2, 9])
def test_other_decisions_are_no_matter(run: Run, number: int) -> None:
    assert not warnings_of(run, number, None)


@pytest.mark.parametrize(
    "run",
    [
        lambda model, x: model.core(x) - model.core(x)[-1:],
        lambda model, x: model.core(x) * torch.tensor(len(x)),
        lambda model, x: model.core(x) * torch.tensor(list(x.shape)).prod(),
        lambda model, x: model.core(x) * torch.full((), len(x)),
    ],
)
def test_the_last_sample_and_integers_that_are_their_number_are_found(run: Run) -> None:
    assert dependence_of_samples(trace(Model(run), (torch.randn(8, WIDTH),))).where


@pytest.mark.parametrize(
    "run",
    [
        lambda model, x: model.core(x)[:, -1:],
        lambda model, x: model.core(x) * torch.tensor(x.shape[1]),
        lambda model, x: model.core(x) * torch.full((), x.shape[1]),
    ],
)
def test_those_of_something_else_are_not(run: Run) -> None:
    assert not dependence_of_samples(trace(Model(run), (torch.randn(8, WIDTH),))).where
