"""Losses that log into a dict or list that the training loop makes anew for each step: one trace serves all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.test_logs_of_losses import X, Y, model

NUM_STEPS = 4
LOGS: dict[str, Any] = {}
Step = tuple[Any, Any]
"""A loss and what it logs into."""


def log(logs: Any, loss: torch.Tensor) -> torch.Tensor:
    if isinstance(logs, list):
        logs.append(loss.item())
    else:
        logs["loss"], logs["half"] = loss.detach(), [(loss / 2).item()]
    return loss


def same_function(make: Callable[[], Any]) -> Iterator[Step]:
    logs = make()

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return log(logs, F.cross_entropy(outputs, label))

    for _ in range(NUM_STEPS):
        logs = make()
        yield loss_fn, logs


def function_per_step(make: Callable[[], Any]) -> Iterator[Step]:
    for _ in range(NUM_STEPS):
        logs = make()

        def loss_fn(outputs: torch.Tensor, label: torch.Tensor, logs: Any = logs) -> torch.Tensor:
            return log(logs, F.cross_entropy(outputs, label))

        yield loss_fn, logs


def closure_per_step(make: Callable[[], Any]) -> Iterator[Step]:
    def made(logs: Any) -> Any:
        return lambda outputs, label: log(logs, F.cross_entropy(outputs, label))

    for _ in range(NUM_STEPS):
        logs = make()
        yield made(logs), logs


def logged(outputs: torch.Tensor, label: torch.Tensor, logs: Any) -> torch.Tensor:
    return log(logs, F.cross_entropy(outputs, label))


def partial_per_step(make: Callable[[], Any]) -> Iterator[Step]:
    for _ in range(NUM_STEPS):
        logs = make()
        yield functools.partial(logged, logs=logs), logs


def into_global(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return log(LOGS, F.cross_entropy(outputs, label))


def global_variable(make: Callable[[], Any]) -> Iterator[Step]:
    global LOGS
    for _ in range(NUM_STEPS):
        LOGS = make()
        yield into_global, LOGS


class LogsOwner:
    logs: Any

    def loss(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return log(self.logs, F.cross_entropy(outputs, label))


class LogsModule(nn.Module):
    logs: Any

    def forward(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return log(self.logs, F.cross_entropy(outputs, label))


def attribute(make: Callable[[], Any]) -> Iterator[Step]:
    owner = LogsOwner()
    for _ in range(NUM_STEPS):
        owner.logs = make()
        yield owner.loss, owner.logs


def attribute_of_module(make: Callable[[], Any]) -> Iterator[Step]:
    owner = LogsModule()
    for _ in range(NUM_STEPS):
        owner.logs = make()
        yield owner, owner.logs


def inside_another(make: Callable[[], Any]) -> Iterator[Step]:
    every = {"train": make(), "number": 3}

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return log(every["train"], F.cross_entropy(outputs, label))

    for _ in range(NUM_STEPS):
        every["train"] = make()
        yield loss_fn, every["train"]


WAYS = [
    same_function,
    function_per_step,
    closure_per_step,
    partial_per_step,
    global_variable,
    attribute,
    attribute_of_module,
    inside_another,
]


def run(steps: Iterator[Step]) -> tuple[list[Any], list[Any], int]:
    """What each step left, and what it should have, as plain loops leave it; and how many traces there were."""
    left, expected = [], []
    net = model()
    with roundpipe.compile(net, devices=["cpu", "cpu"]) as piped:
        for loss_fn, logs in steps:
            loss = piped.forward_backward(
                (X,), label=Y, loss_fn=loss_fn, loss_reduction="mean", run_config=RoundPipeRunConfig(num_microbatch=3)
            )
            plain = F.cross_entropy(net(X), Y).detach()
            torch.testing.assert_close(loss, plain)
            left.append(logs)
            expected.append([plain.item()] if isinstance(logs, list) else {"loss": plain, "half": [plain.item() / 2]})
        num_traces = piped._runner.tails.trace_count  # private: only the log tells of traces of a loss
    return left, expected, num_traces


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [dict, list])
def test_one_trace_serves_all_steps(way: Callable[..., Iterator[Step]], make: Callable[[], Any]) -> None:
    left, expected, num_traces = run(way(make))
    torch.testing.assert_close(left, expected)
    assert len({id(logs) for logs in left}) == NUM_STEPS and num_traces == 1


@pytest.mark.parametrize("reads", [False, True])
def test_what_is_made_anew_and_holds_the_same_needs_no_trace(reads: bool) -> None:
    made: dict[str, Any] = {}

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        factor = made["nested"]["factors"][0] if reads else len(made)
        return F.cross_entropy(outputs, label) * factor

    net = model()
    plain = F.cross_entropy(net(X), Y).detach()
    with roundpipe.compile(net, devices=["cpu", "cpu"]) as piped:
        for step, factor in enumerate((2.0, 2.0, 2.0, 3.0, 3.0)):
            made = {"nested": {"factors": [factor]}, "name": "a loss"}
            loss = piped.forward_backward((X,), label=Y, loss_fn=loss_fn, loss_reduction="mean")
            torch.testing.assert_close(loss, plain * (factor if reads else 2))
            traces = piped._runner.tails.trace_count  # as above
            assert traces == 1 if step < 3 else traces <= 2
            if reads and step == 4:
                made["nested"]["factors"][0] = 5.0  # in the one that was never traced
                loss = piped.forward_backward((X,), label=Y, loss_fn=loss_fn, loss_reduction="mean")
                torch.testing.assert_close(loss, plain * 5)


def test_what_else_is_in_it_counts() -> None:
    scale = {"value": 0.0}

    def steps() -> Iterator[Step]:
        for number in range(NUM_STEPS):
            logs = {"scale": number + 1.0}

            def loss_fn(outputs: torch.Tensor, label: torch.Tensor, logs: Any = logs) -> torch.Tensor:
                return log(logs, F.cross_entropy(outputs, label)) * logs["scale"]

            scale["value"] = number + 1.0
            yield loss_fn, logs

    net = model()
    plain = F.cross_entropy(net(X), Y).detach()
    with roundpipe.compile(net, devices=["cpu", "cpu"]) as piped:
        for loss_fn, logs in steps():
            loss = piped.forward_backward((X,), label=Y, loss_fn=loss_fn, loss_reduction="mean")
            torch.testing.assert_close(loss, plain * scale["value"])
            torch.testing.assert_close(logs, {"scale": scale["value"], "loss": plain, "half": [plain.item() / 2]})


def test_two_names_of_one_dict_of_which_one_gets_another() -> None:
    first: dict[str, Any] = {}
    second = first

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = log(first, F.cross_entropy(outputs, label))
        second["other"] = loss.detach() * 2
        return loss

    net = model()
    plain = F.cross_entropy(net(X), Y).detach()
    with roundpipe.compile(net, devices=["cpu", "cpu"]) as piped:
        for number in range(3):
            first = {}
            second = first if number == 0 else {}
            piped.forward_backward((X,), label=Y, loss_fn=loss_fn, loss_reduction="mean")
            torch.testing.assert_close(second["other"], plain * 2)
            torch.testing.assert_close(first["loss"], plain)
            assert ("other" in first) == (number == 0) and ("loss" in second) == (number == 0)


def test_an_object_of_another_class_in_its_place() -> None:
    class Upper(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            super().__setitem__(key.upper(), value)

    logs: dict[str, Any] = {}

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return log(logs, F.cross_entropy(outputs, label))

    net = model()
    with roundpipe.compile(net, devices=["cpu", "cpu"]) as piped:
        for make, names in ((dict, ["loss", "half"]), (Upper, ["LOSS", "HALF"]), (dict, ["loss", "half"])):
            logs = make()
            piped.forward_backward((X,), label=Y, loss_fn=loss_fn, loss_reduction="mean")
            assert list(logs) == names
