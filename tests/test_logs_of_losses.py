"""Losses that log parts of themselves: they are traced, weighed and tiled all the same, and log what plain ones do."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig

NUMBER, CLASSES = 12, 5
torch.manual_seed(5)
X, Y = torch.randn(NUMBER, 16), torch.randint(CLASSES, (NUMBER,))
Y[4:7] = -100  # other numbers of targets in each microbatch


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, CLASSES))


def train(loss_fn: Any, number: int = 3, net: nn.Module | None = None, **options: Any) -> torch.Tensor:
    net = model() if net is None else net
    with roundpipe.compile(net, devices=["cpu", "cpu"]) as piped:
        config = RoundPipeRunConfig(num_microbatch=number)
        loss: torch.Tensor = piped.forward_backward(
            (X,), label=Y, loss_fn=loss_fn, run_config=config, **{"loss_reduction": "mean", **options}
        )
    return loss


def accuracy(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(-1) == label).float().sum() / (label != -100).sum()


def logging_loss(logs: dict[str, Any], history: list[Any]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss, smooth = F.cross_entropy(outputs, label), F.cross_entropy(outputs, label, label_smoothing=0.1)
        logs.update(loss=loss.detach(), smooth=smooth.item(), percent=100 * loss.detach().cpu())
        logs["accuracy"], logs["hits"] = accuracy(outputs, label), (outputs.argmax(-1) == label).sum()
        logs["parts"], logs["name"] = {"all": [loss.item(), smooth.detach()]}, "a loss"
        logs["samples"], logs["scores"], logs["classes"] = label.shape[0], 2 * outputs.numel(), outputs.shape[-1]
        history.append(logs["loss"])
        return loss + 0.5 * smooth

    return loss_fn


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_logs_are_those_of_plain_pytorch(number: int) -> None:
    expected: tuple[dict[str, Any], list[Any]] = {}, []
    found: tuple[dict[str, Any], list[Any]] = {}, []
    loss = logging_loss(*expected)(model()(X), Y)
    torch.testing.assert_close(train(logging_loss(*found), number), loss.detach())
    assert found[0].pop("name") == expected[0].pop("name")
    torch.testing.assert_close(found, expected)
    assert type(found[0]["smooth"]) is float and not found[0]["accuracy"].requires_grad


def test_a_loss_that_logs_runs_in_tiles() -> None:
    """It fits only so: its outputs take 24 MB at a time, and more in a backward."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 60_000))
    x, label, logs = torch.randn(64, 16), torch.randint(60_000, (64,)), {}
    label[40:] = -100

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(outputs, label)
        logs["loss"], logs["item"] = loss.detach(), loss.item()
        return loss

    expected = loss_fn(net(x), label).detach()
    devices = [roundpipe.Device("cpu", memory_bytes="52MiB")]
    with roundpipe.compile(net, devices=devices) as piped:
        config = RoundPipeRunConfig(num_microbatch=2)
        loss = piped.forward_backward((x,), label=label, loss_fn=loss_fn, loss_reduction="mean", run_config=config)
        report = str(piped.report())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logs["loss"], expected)
    assert logs["item"] == logs["loss"].item()
    assert "in the last layer with the loss" in report


def test_a_variable_is_set() -> None:
    latest: Any = None

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        nonlocal latest
        loss = F.cross_entropy(outputs, label)
        latest = loss.detach()
        return loss

    torch.testing.assert_close(train(loss_fn), latest)


def test_what_a_log_holds_between_calls_does_not_matter(caplog: pytest.LogCaptureFixture) -> None:
    logs, history = dict[str, Any](), list[Any]()
    loss_fn = logging_loss(logs, history)
    caplog.set_level(logging.INFO, logger="roundpipe")
    with roundpipe.compile(model(), devices=["cpu"]) as piped:
        for step in range(4):
            piped.forward_backward((X,), label=Y, loss_fn=loss_fn, loss_reduction="mean")
            assert len(history) == step + 1
            logs["loss"] = step
        assert "tracing a loss function again" not in caplog.text
        logs["seconds"] = 1.0  # a key of the user's own
        history.clear()
        loss = piped.forward_backward((X,), label=Y, loss_fn=loss_fn, loss_reduction="mean")
    assert len(history) == 1 and logs["seconds"] == 1.0
    torch.testing.assert_close(loss, logs["loss"] + 0.5 * logs["smooth"])


def test_a_new_log_for_each_step_gets_its_values() -> None:
    expected = logging_loss({}, [])(model()(X), Y).detach()
    with roundpipe.compile(model(), devices=["cpu", "cpu"]) as piped:
        for _ in range(5):
            logs, history = dict[str, Any](), list[Any]()
            piped.forward_backward((X,), label=Y, loss_fn=logging_loss(logs, history), loss_reduction="mean")
            torch.testing.assert_close(logs["loss"] + 0.5 * logs["smooth"], expected)
            assert len(history) == 1
            logs.clear()
            history.clear()  # so that the next ones are equal to these


class Trainer:
    def __init__(self) -> None:
        self.metrics: dict[str, list[Any]] = defaultdict(list)
        self.average: Any = 0.0

    def logs_by_name(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(outputs, label)
        self.metrics["loss"].append(loss.detach())
        self.metrics["accuracy"].append(accuracy(outputs, label).item())
        return loss

    def logs_an_average(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(outputs, label)
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return loss


def test_lists_by_name() -> None:
    """Lists that the first call makes, and to which others append."""
    trainer, reference = Trainer(), Trainer()
    net = model()
    with roundpipe.compile(net, devices=["cpu", "cpu"]) as piped:
        for _ in range(3):
            reference.logs_by_name(net(X), Y)
            piped.forward_backward((X,), label=Y, loss_fn=trainer.logs_by_name, loss_reduction="mean")
    torch.testing.assert_close(dict(trainer.metrics), dict(reference.metrics))


def test_an_average_is_taken_of_microbatches() -> None:
    """What is read again is computed as the loss is: for each microbatch."""
    trainer, reference = Trainer(), Trainer()
    net = model()
    for x, y in zip(X.chunk(3), Y.chunk(3), strict=True):
        reference.logs_an_average(net(x), y)
    with pytest.warns(UserWarning, match="averaged the losses of the 3 microbatches"):
        train(trainer.logs_an_average, net=net)
    torch.testing.assert_close(trainer.average, reference.average)


def test_of_a_sum_the_last_microbatch_is_left() -> None:
    logs = dict[str, Any]()

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(outputs, label, reduction="sum")
        logs["loss"] = loss.detach()
        return loss

    net = model()
    loss = train(loss_fn, net=net, loss_reduction="sum")
    torch.testing.assert_close(loss, loss_fn(net(X), Y).detach())
    *_, last = zip(net(X).chunk(3), Y.chunk(3), strict=True)
    train(loss_fn, net=net, loss_reduction="sum")
    torch.testing.assert_close(logs["loss"], F.cross_entropy(*last, reduction="sum").detach())


@pytest.mark.parametrize("number", [2, 5])
def test_a_mean_over_elements_of_outputs_is_that_of_the_batch(number: int) -> None:
    logs = dict[str, Any]()

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        logs["square"], logs["error"] = (outputs**2).mean().detach(), outputs.abs().mean(1).mean().item()
        return F.cross_entropy(outputs, label)

    net = model()
    train(loss_fn, number, net)
    found = logs.copy()
    loss_fn(net(X), Y)
    torch.testing.assert_close(found, logs)


def appends_labels(values: list[Any], outputs: torch.Tensor, label: torch.Tensor) -> None:
    values.extend(label)


def appends_numbers(values: list[Any], outputs: torch.Tensor, label: torch.Tensor) -> None:
    values.extend(outputs.argmax(1).tolist())


def appends_in_a_loop(values: list[Any], outputs: torch.Tensor, label: torch.Tensor) -> None:
    for row in F.cross_entropy(outputs, label, reduction="none").detach():
        values.append(row)


def appends_means_between(values: list[Any], outputs: torch.Tensor, label: torch.Tensor) -> None:
    values.append(F.cross_entropy(outputs, label).detach())
    values.extend(label)
    values.append((outputs.argmax(1) == label).float().mean())
    values.extend(outputs.argmax(1))


@pytest.mark.parametrize("append", [appends_labels, appends_numbers, appends_in_a_loop, appends_means_between])
@pytest.mark.parametrize("number", [1, 2, 3, 5])
@pytest.mark.parametrize("call", ["forward_backward", "forward_loss"])
def test_what_is_appended_for_each_sample_is_in_their_order(
    append: Callable[[list[Any], torch.Tensor, torch.Tensor], None], number: int, call: str
) -> None:
    """Beside an entry of a dict and another list, which has one value for each microbatch.

    In uneven microbatches, which such a loss is not traced for, each has its own values.
    """
    found, expected, parts, logs = list[Any](), list[Any](), list[torch.Tensor](), dict[str, Any]()

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(outputs, label)
        logs["loss"] = loss.detach()
        append(found, outputs, label)
        parts.append(label)
        return loss

    net, is_even = model(), NUMBER % number == 0
    for x, label in [(X, Y)] if is_even else zip(X.tensor_split(number), Y.tensor_split(number), strict=True):
        append(expected, net(x), label)
    config = RoundPipeRunConfig(num_microbatch=number, loss_reduction="mean")
    with roundpipe.compile(net, devices=["cpu", "cpu"]) as piped:
        for _ in range(2):
            found.clear()
            parts.clear()
            loss = getattr(piped, call)((X,), label=Y, loss_fn=loss_fn, run_config=config)
            torch.testing.assert_close(list(map(torch.as_tensor, found)), list(map(torch.as_tensor, expected)))
            torch.testing.assert_close(parts, list(Y.tensor_split(number)))
    if is_even:
        torch.testing.assert_close(loss, F.cross_entropy(net(X), Y).detach())
        torch.testing.assert_close(logs["loss"], loss)


def test_values_for_each_microbatch_are_in_the_order_of_these() -> None:
    """Two for each, of losses that are added up."""
    found, net = list[torch.Tensor](), model()

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        found.extend((outputs.detach().sum(), label.sum()))
        return F.cross_entropy(outputs, label, reduction="sum")

    train(loss_fn, net=net, loss_reduction="sum")
    parts = zip(net(X).detach().chunk(3), Y.chunk(3), strict=True)
    torch.testing.assert_close(found, [each.sum() for part in parts for each in part])
