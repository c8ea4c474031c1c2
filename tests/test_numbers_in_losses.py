"""Losses that compute with numbers of Python's, which ``item()`` gives: for a log, or for themselves."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch.nn import functional as F

import roundpipe
from roundpipe.fx.trace.kept import NumberOfTensor, Unreadable
from tests.test_logs_of_losses import CLASSES, X, Y, model, train

Tensor = torch.Tensor


def hits(outputs: Tensor, label: Tensor) -> Tensor:
    return (outputs.argmax(-1) == label).sum()


LOGS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "percent": lambda outputs, label, loss: 100 * (outputs.argmax(-1) == label).float().mean().item(),
    "error": lambda outputs, label, loss: 1 - hits(outputs, label).item() / len(label),
    "error of targets": lambda outputs, label, loss: 1.0 - hits(outputs, label).item() / (label != -100).sum().item(),
    "error as a tensor": lambda outputs, label, loss: 1 - hits(outputs, label) / (label != -100).sum(),
    "of a size": lambda outputs, label, loss: hits(outputs, label).item() / label.shape[0] * 100,
    "joint": lambda outputs, label, loss: (loss.item() + 3 * outputs.square().mean().item()) / 2 - 0.5,
    "joint with a tensor": lambda outputs, label, loss: 2 + loss.detach() * 2 - loss.item(),
    "negative": lambda outputs, label, loss: -loss.item() + 0,
    "targets": lambda outputs, label, loss: (label != -100).sum().item(),
    "twice": lambda outputs, label, loss: (label != -100).sum().item() + 2 * hits(outputs, label).item(),
    "share": lambda outputs, label, loss: (label != -100).float().mean().item(),
    "several offsets": lambda outputs, label, loss: 5 - (1 - (2 - loss.item())),
}


@pytest.mark.parametrize("name", LOGS)
def test_arithmetic_for_a_log_is_that_of_the_batch(name: str) -> None:
    """And the loss is, which is weighed though the label's own numbers differ in each microbatch."""
    logs = dict[str, Any]()

    def loss_fn(outputs: Tensor, label: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs, label)
        logs["value"] = LOGS[name](outputs, label, loss)
        return loss

    net = model()
    expected = loss_fn(net(X), Y).detach()
    logged = logs["value"]
    for number in (1, 2, 3, 5):
        logs.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(train(loss_fn, number, net), expected)
        assert type(logs["value"]) is type(logged)
        torch.testing.assert_close(logs["value"], logged, rtol=1e-5, atol=1e-5)


def by_targets(outputs: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(outputs, label, reduction="sum") / (label != -100).sum().item()


def by_a_product(outputs: Tensor, label: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, label, reduction="none", ignore_index=-100)
    scale = 1 / ((label != -100).sum().item() * 2)
    return losses.sum() * scale


def with_an_offset(outputs: Tensor, label: Tensor) -> Tensor:
    return 3 - 0.5 * F.cross_entropy(outputs, label) + 1


def of_cosines(outputs: Tensor, label: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(outputs, F.one_hot(label.clamp(min=0), CLASSES).float()).mean()


def of_two(outputs: Tensor, label: Tensor) -> Tensor:
    mask = (label != -100).float()
    return (1 - (outputs.square().mean(-1) * mask).sum() / mask.sum()) + (F.cross_entropy(outputs, label) - 2)


@pytest.mark.parametrize("number", [2, 3, 5])
@pytest.mark.parametrize("loss_fn", [by_targets, with_an_offset, of_cosines, of_two])
def test_a_loss_with_numbers_is_that_of_the_batch(loss_fn: Callable[[Tensor, Tensor], Tensor], number: int) -> None:
    net, reference = model(), model()
    expected = loss_fn(reference(X), Y)
    expected.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(train(loss_fn, number, net), expected.detach())
    for parameter, other in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


OPERATIONS: list[Callable[[Any, Any], Any]] = [
    lambda x, number: x + number,
    lambda x, number: number + x,
    lambda x, number: x - number,
    lambda x, number: number - x,
    lambda x, number: x * number,
    lambda x, number: number * x,
    lambda x, number: x / number,
    lambda x, number: number / x,
    lambda x, number: x**number,
    lambda x, number: number**x,
    lambda x, number: x * -number,
    lambda x, number: x * abs(number),
    lambda x, number: x / (number / 7 + 1),
]


@pytest.mark.parametrize("value", [333, -2.5, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_number_does_to_tensors_what_a_plain_one_does(value: float, dtype: torch.dtype, shape: Any) -> None:
    """Also in the dtype that comes of it."""
    x = torch.full(shape, 3).to(dtype)
    number = NumberOfTensor(torch.tensor(value), lambda: pytest.fail("it is asked for"))
    for operation in OPERATIONS:
        try:
            expected = operation(x, value)
        except RuntimeError:  # integers to negative powers
            continue
        found = operation(x, number)
        assert found.dtype == expected.dtype
        rounding = 2**-7 if dtype == torch.bfloat16 else 1e-6  # some of torch's operators round plain numbers to it
        torch.testing.assert_close(found, expected, rtol=rounding, atol=0.0)


def test_a_number_may_be_handed_on_but_not_be_looked_at() -> None:
    class Asked(Exception):
        pass

    def refuse() -> NoReturn:
        raise Asked

    number = NumberOfTensor(torch.tensor(2.0), refuse)
    assert isinstance(number + 1, NumberOfTensor) and isinstance(2 * number - number, NumberOfTensor)
    for look in (
        float,
        int,
        bool,
        str,
        round,
        lambda it: it > 1,
        lambda it: it + "a",
        lambda it: it + Unreadable(refuse),
    ):
        with pytest.raises(Asked):
            look(number)


def makes_room(outputs: Tensor, label: Tensor) -> Tensor:
    weights = torch.ones(int(label.clamp(min=0).amax().item()) * 0 + CLASSES)
    return F.cross_entropy(outputs, label, weights)


def is_an_argument(outputs: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(outputs, label, torch.full((CLASSES,), 2.0 + label.amin().item() * 0))


def decides(outputs: Tensor, label: Tensor) -> Tensor:
    loss = F.cross_entropy(outputs, label)
    return 2 * loss if label.amax().item() < CLASSES else loss


@pytest.mark.parametrize("loss_fn", [makes_room, is_an_argument, decides])
def test_numbers_of_the_label_are_plain_where_code_needs_it(
    loss_fn: Callable[[Tensor, Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="roundpipe")
    x, label = X[:6], Y[:3].repeat(2)
    expected = loss_fn(model()(x), label).detach()
    with roundpipe.compile(model(), devices=["cpu"]) as piped:
        config = roundpipe.RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean")
        loss = piped.forward_backward((x,), label=label, loss_fn=loss_fn, run_config=config)
    torch.testing.assert_close(loss, expected)
    assert "loss_fn is called as it is" not in caplog.text


@pytest.mark.parametrize("reduction", ["mean", None])
def test_numbers_of_the_last_microbatch_are_named(reduction: str | None) -> None:
    logs, history = dict[str, Any](), list[Any]()

    def loss_fn(outputs: Tensor, label: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs, label, reduction=reduction or "sum")
        logs["perplexity"], logs["square"] = loss.exp().item(), loss.item() ** 2
        logs["two"], logs["name"], logs["rows"] = 2.0, "a loss", outputs.detach()
        history.append(loss.item())
        return loss

    net = model()
    with pytest.warns(
        UserWarning, match=r"\['perplexity'\], .*\['square'\]: loss_fn left .* last of 3 microbatches"
    ) as caught:
        train(loss_fn, net=net, loss_reduction=reduction)
    others = [each for each in caught if "perplexity" not in str(each.message)]
    (warning,) = set(caught) - set(others)
    assert len(others) == (reduction is None)  # there, the rows that were kept are the last microbatch's as well
    assert "two" not in str(warning.message) and "rows" not in str(warning.message)
    assert ("With loss_reduction='mean'" in str(warning.message)) == (reduction is None)
    loss = F.cross_entropy(net(X[8:]), Y[8:], reduction=reduction or "sum")
    torch.testing.assert_close(logs["perplexity"], loss.exp().item())
    torch.testing.assert_close(logs["square"], loss.item() ** 2)
    assert len(history) == (3 if reduction is None else 1)


@pytest.mark.parametrize("number", [1, 3])
def test_numbers_that_are_alike_are_not_named(number: int) -> None:
    """Of one microbatch, or the same in each; nan is, too."""
    logs = dict[str, Any]()

    def loss_fn(outputs: Tensor, label: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs, label)
        logs["alike"], logs["nan"] = (
            (outputs.detach() * 0).exp().amax().item(),
            (outputs.detach() * float("nan")).amax(),
        )
        if number == 1:
            logs["perplexity"] = loss.exp().item()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(loss_fn, number)
    assert logs["alike"] == 1.0
