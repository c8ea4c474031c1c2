"""Numbers that change at every step: inputs of the graph, or else a warning names them, and what it advises helps."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe
from roundpipe.fx.guards.failure import RETRACES_BEFORE_WARNING, Failure

NUM_STEPS = RETRACES_BEFORE_WARNING + 2
DTYPE = torch.float64


class Rates:
    rate = 0.0


class AnnealedHead(nn.Module):
    """Reads a number in many ways, of which one changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.rate, self.table, self.pair = 0.0, {"rate": 0.0}, [0.0, 0.0]
        self.register_buffer("weight", torch.zeros(()))

    def forward(self, x: torch.Tensor, given: Any = 0.0) -> torch.Tensor:
        rate = self.rate + self.table["rate"] + self.pair[1] + Rates.rate + given
        return self.linear(x) * (1 + rate + self.weight)


class HeadByTheNumber(AnnealedHead):
    """What it does with the rate takes a number itself."""

    def forward(self, x: torch.Tensor, given: Any = 0.0) -> torch.Tensor:
        rate = self.rate + self.table["rate"] + self.pair[1] + Rates.rate + given
        return self.linear(x) * float(f"{rate}")


def _set(model: Any, where: str, rate: float) -> None:
    if where == "Head.rate":
        model.rate = rate
    elif where == "'rate' of Head.table":
        model.table["rate"] = rate
    elif where == "1 of Head.pair":
        model.pair[1] = rate
    elif where == "Rates.rate":
        Rates.rate = rate


def steps(
    model: nn.Module, before: Callable[[int], Any], loss_at: Callable[[int], Any], given: Callable[[int], Any]
) -> tuple[list[str], int]:
    """Some steps, whose losses are eager's: what was said of traces, and how many traces of the model there were."""
    x, label = torch.randn(6, 8, dtype=DTYPE), torch.arange(6) % 4
    with (
        warnings.catch_warnings(record=True) as caught,
        roundpipe.compile(model, devices=["cpu"]) as pipe,
    ):
        warnings.simplefilter("always")
        for step in range(NUM_STEPS):
            before(step)
            kwargs, loss_fn = {"x": x, **given(step)}, loss_at(step)
            loss = pipe.forward_backward(input_kwargs=kwargs, label=label, loss_fn=loss_fn, loss_reduction="mean")
            torch.testing.assert_close(loss, loss_fn(model(**kwargs), label).detach())
            pipe.synchronize()
        said = [str(one.message) for one in caught if "one after the other" in str(one.message)]
        return said, pipe.trace_count


def nothing(step: int) -> dict[str, Any]:
    return {}


def plain_loss(step: int) -> Any:
    return F.cross_entropy


PLACES = ["Head.rate", "'rate' of Head.table", "1 of Head.pair", "Rates.rate"]


@pytest.mark.parametrize("where", PLACES)
def test_a_number_of_the_model_is_an_input(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rates, "rate", 0.0)
    model = AnnealedHead().to(DTYPE)
    assert steps(model, lambda step: _set(model, where, step * 0.5), plain_loss, nothing) == ([], 2)


@pytest.mark.parametrize("where", PLACES)
def test_a_number_that_can_be_none_is_named(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rates, "rate", 0.0)
    model = HeadByTheNumber().to(DTYPE)
    said, num_traces = steps(model, lambda step: _set(model, where, step * 0.5), plain_loss, nothing)
    assert num_traces == NUM_STEPS and len(said) == 1
    name = where.replace("Head", "HeadByTheNumber")
    assert f"{name} is a Python number" in said[0] and "0-dim tensor" in said[0]


def test_so_are_they_among_the_arguments() -> None:
    def given(step: int) -> dict[str, Any]:
        return {"given": 0.5 + step}

    assert steps(AnnealedHead().to(DTYPE), nothing, plain_loss, given) == ([], 2)
    said, num_traces = steps(HeadByTheNumber().to(DTYPE), nothing, plain_loss, given)
    assert num_traces == NUM_STEPS and len(said) == 1 and "argument given is a Python number" in said[0]


def test_what_is_no_number_has_other_advice() -> None:
    assert "Keep it fixed" in Failure("x is a list now").advice


def test_a_freezing_schedule_is_named_although_the_model_is_evaluated_in_between() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(NUM_STEPS)], nn.Linear(8, 4)).to(DTYPE)
    for parameter in model[:-1].parameters():
        parameter.requires_grad_(False)
    x, label = torch.randn(6, 8, dtype=DTYPE), torch.arange(6) % 4
    with warnings.catch_warnings(record=True) as caught, roundpipe.compile(model, devices=["cpu"]) as pipe:
        warnings.simplefilter("always")
        for step in reversed(range(NUM_STEPS)):
            model[step].weight.requires_grad_(True)
            pipe.train()
            pipe.forward_backward((x,), label=label, loss_fn=F.cross_entropy)
            pipe.eval()
            pipe(x)
    said = [str(one.message) for one in caught if "one after the other" in str(one.message)]
    assert len(said) == 1 and "weight has requires_grad True now" in said[0] and "change of the model" in said[0]


def test_objects_of_a_loss_that_are_others_at_each_step_are_named() -> None:
    def loss_at(step: int) -> Any:
        weights = [torch.full((4,), 1.0 + step, dtype=DTYPE)]
        return lambda outputs, label: sum(F.cross_entropy(outputs, label, weight=weight) for weight in weights)

    said, _ = steps(AnnealedHead().to(DTYPE), nothing, loss_at, nothing)
    assert len(said) == 1 and "weights: not the same" in said[0] and "same function at every step" in said[0]


def test_a_buffer_or_an_argument_without_dimensions_is_read_anew() -> None:
    model, given = AnnealedHead().to(DTYPE), torch.zeros((), dtype=DTYPE)

    def write(step: int) -> None:
        model.weight.fill_(step * 0.5)
        given.fill_(step * 0.25)

    assert steps(model, write, plain_loss, lambda step: {"given": given}) == ([], 1)


def weighted(outputs: torch.Tensor, label: torch.Tensor, beta: Any) -> torch.Tensor:
    return F.cross_entropy(outputs, label) + beta * outputs.square().mean()


def by_closure(beta: Any) -> Any:
    return lambda outputs, label: weighted(outputs, label, beta)


def by_default(beta: Any) -> Any:
    return lambda outputs, label, beta=beta: weighted(outputs, label, beta)


def by_partial(beta: Any) -> Any:
    return functools.partial(weighted, beta=beta)


def inside_another(beta: Any) -> Any:
    inner = by_closure(beta)
    return lambda outputs, label: inner(outputs, label)


@pytest.mark.parametrize("loss_with", [by_closure, by_default, by_partial, inside_another])
def test_a_number_of_a_loss_is_named(loss_with: Callable[[Any], Any]) -> None:
    said, num_traces = steps(AnnealedHead().to(DTYPE), nothing, lambda step: loss_with(step * 0.5), nothing)
    assert num_traces == 1 and len(said) == 1
    assert "the loss function" in said[0] and "beta is a Python number" in said[0]


def test_a_variable_of_one_loss_is_read_anew() -> None:
    beta = 0.0

    def loss(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return weighted(outputs, label, beta)

    def anneal(step: int) -> None:
        nonlocal beta
        beta = step * 0.5

    said, _ = steps(AnnealedHead().to(DTYPE), anneal, lambda step: loss, nothing)
    assert not said


@pytest.mark.parametrize("loss_with", [by_closure, by_default, by_partial])
def test_a_tensor_without_dimensions_is_read_anew_by_a_loss(loss_with: Callable[[Any], Any]) -> None:
    beta = torch.zeros((), dtype=DTYPE)
    said, _ = steps(
        AnnealedHead().to(DTYPE), lambda step: beta.fill_(step * 0.5), lambda step: loss_with(beta), nothing
    )
    assert not said


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, ids, labels):
        logits = self.head(self.embedding(ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_a_loss_that_the_model_computes_is_traced_for_all_lengths():
    model = Language()
    with roundpipe.compile(model, devices=["cpu", "cpu"]) as pipe, warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in range(5, 13):
            ids = torch.randint(11, (6, length))
            loss = pipe.forward_backward((ids, ids), loss_fn=lambda out, _: out["loss"], loss_reduction="mean")
            torch.testing.assert_close(loss, model(ids, ids)["loss"])
        assert pipe.trace_count == 1
        assert pipe._runner.tails.trace_count <= 2  # private: only the log tells of traces of a loss
