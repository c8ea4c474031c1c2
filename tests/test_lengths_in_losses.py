"""``len`` in the code of a loss, wherever that code is: it counts samples, as ``shape[0]`` does."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig

NUMBER, CLASSES = 8, 5
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def data(number: int = NUMBER) -> tuple[torch.Tensor, torch.Tensor]:
    """Five of eight classes are those that the model finds."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(number, 6, generator=generator)
    label = model()(x).argmax(1)
    label[5:] = (label[5:] + 1) % CLASSES
    return x, label


LOGS: dict[str, Any] = {}


def logging_accuracy(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    LOGS["accuracy"] = (outputs.argmax(1) == label).sum() / len(label)
    return F.cross_entropy(outputs, label)


def with_factor(factor: float, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return factor * logging_accuracy(outputs, label)


class Losses:
    def method(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return logging_accuracy(outputs, label)

    __call__ = method


class Criterion(nn.Module):
    def forward(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return logging_accuracy(outputs, label)


TYPED_IN = """
def loss_fn(outputs, label):
    logs["accuracy"] = accuracy(outputs, label) if accuracy else (outputs.argmax(1) == label).sum() / len(label)
    return F.cross_entropy(outputs, label)


def share(outputs, label):
    return (outputs.argmax(1) == label).sum() / len(label)
"""


def typed_in(**variables: Any) -> dict[str, Any]:
    """Variables of a file that was never imported, as in a notebook."""
    found = {"logs": LOGS, "F": F, "accuracy": None, **variables}
    exec(TYPED_IN, found)  # no file has this code, which is what is tested
    return found


KINDS: dict[str, Loss] = {
    "a function": logging_accuracy,
    "a lambda": lambda outputs, label: logging_accuracy(outputs, label),
    "a partial": functools.partial(with_factor, 1.0),
    "a method": Losses().method,
    "an object": Losses(),
    "a module": Criterion(),
    "typed in": typed_in(__name__="typed_in")["loss_fn"],
    "without a file": typed_in()["loss_fn"],
    "a helper of another file": typed_in(accuracy=typed_in(__name__="helpers")["share"])["loss_fn"],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [2, 4])
def test_a_share_of_samples_is_that_of_the_batch(kind: str, number: int) -> None:
    x, label = data()
    config = RoundPipeRunConfig(num_microbatch=number)
    LOGS.clear()
    with roundpipe.compile(model(), devices=["cpu"]) as piped:
        loss = piped.forward_backward((x,), label=label, loss_fn=KINDS[kind], loss_reduction="mean", run_config=config)
    torch.testing.assert_close(loss, F.cross_entropy(model()(x), label).detach())
    torch.testing.assert_close(LOGS["accuracy"], torch.tensor(5 / 8))


def absolute_error(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (outputs - label[:, None]).abs().sum() / len(label)


def two_means(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    targets = label.where(label > 0, -100)
    return absolute_error(outputs, label) + F.cross_entropy(outputs, targets)


def summed_cross_entropy(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, label, reduction="sum") / len(outputs)


@pytest.mark.parametrize("loss_fn", [absolute_error, two_means, summed_cross_entropy])
@pytest.mark.parametrize("number", [NUMBER, 7])
def test_a_sum_over_the_length_is_a_mean(loss_fn: Loss, number: int) -> None:
    """Of which nobody is told that nothing divides it; with uneven microbatches, too."""
    x, label = data(number)
    net, reference = model(), model()
    expected = loss_fn(reference(x), label)
    expected.backward()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="loss_reduction=")
        with roundpipe.compile(net, devices=["cpu"]) as piped:
            config = RoundPipeRunConfig(num_microbatch=2)
            loss = piped.forward_backward((x,), label=label, loss_fn=loss_fn, loss_reduction="mean", run_config=config)
            piped.synchronize()
    torch.testing.assert_close(loss, expected.detach())
    for found, own in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.grad, own.grad)


def over_float(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    LOGS["accuracy"] = (outputs.argmax(1) == label).sum() / float(len(label))
    LOGS["size"] = outputs.detach().square().sum() / float(outputs.numel())
    return (outputs - label[:, None]).abs().sum() / float(label.shape[0])


def over_a_number_of_its_own(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Not over that of samples, or over a whole number, which may be anything: it is a sum, and so is what it logs."""
    LOGS["accuracy"], LOGS["size"] = (outputs.argmax(1) == label).sum() / 3.0, float(len(label))
    LOGS["accumulated"] = (outputs.argmax(1) == label).sum() / 4
    return F.cross_entropy(outputs, label)


@pytest.mark.parametrize("number", [2, 4])
def test_a_sum_over_a_plain_number_of_samples_is_a_mean(number: int) -> None:
    """Such as ``float(len(label))``, which makes the graph one for this number of samples."""
    x, label = data()
    net, config = model(), RoundPipeRunConfig(num_microbatch=number)
    expected = over_float(net(x), label).detach()
    logs = LOGS.copy()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="loss_reduction=")
        with roundpipe.compile(net, devices=["cpu"]) as piped:
            loss = piped.forward_backward(
                (x,), label=label, loss_fn=over_float, loss_reduction="mean", run_config=config
            )
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(LOGS, logs)


def test_a_sum_over_another_number_is_a_sum() -> None:
    x, label = data()
    with roundpipe.compile(model(), devices=["cpu"]) as piped:
        config = RoundPipeRunConfig(num_microbatch=2)
        piped.forward_backward(
            (x,), label=label, loss_fn=over_a_number_of_its_own, loss_reduction="mean", run_config=config
        )
    torch.testing.assert_close(LOGS["accuracy"], torch.tensor(5 / 3.0))
    torch.testing.assert_close(LOGS["accumulated"], torch.tensor(5 / 4))
    assert LOGS["size"] == NUMBER / 2  # of the last microbatch


def test_a_file_has_no_len_of_its_own_afterwards() -> None:
    helpers = typed_in(__name__="helpers")
    function = typed_in(accuracy=helpers["share"])["loss_fn"]
    assert isinstance(function, types.FunctionType)
    x, label = data()
    with roundpipe.compile(model(), devices=["cpu"]) as piped:
        piped.forward_backward((x,), label=label, loss_fn=function, loss_reduction="mean")
    assert "len" not in helpers and "len" not in function.__globals__ and "len" not in globals()
