"""Losses that go from sample to sample, and microbatches of a single sample."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.equality import assert_mean_is_eagers
from tests.runtime.models import gradients

NUM_SAMPLES, LENGTH, VOCABULARY = 9, 10, 12
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and labels with more or less padding."""
    torch.manual_seed(0)
    ids, labels = torch.randint(20, (NUM_SAMPLES, LENGTH)), torch.randint(1, VOCABULARY, (NUM_SAMPLES, LENGTH))
    labels[torch.arange(LENGTH) >= torch.randint(1, LENGTH + 1, (NUM_SAMPLES, 1))] = -100
    return ids, labels


def net() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, VOCABULARY))


IN_LOOPS: dict[str, Loss] = {
    "a stack": lambda out, label: torch.stack([F.cross_entropy(a, b) for a, b in zip(out, label, strict=True)]).mean(),
    "a sum over their number": lambda out, label: (
        sum((F.cross_entropy(out[i], label[i]) for i in range(len(label))), torch.zeros(())) / len(label)
    ),
    "without padding": lambda out, label: torch.stack(
        [F.cross_entropy(a[b != -100], b[b != -100]) for a, b in zip(out, label, strict=True)]
    ).mean(),
}


@pytest.mark.parametrize("loss_fn", IN_LOOPS.values(), ids=IN_LOOPS)
def test_a_mean_of_samples_losses_is_that_of_the_batch(loss_fn: Loss) -> None:
    """Microbatches of one size: each sample's loss was weighed by the targets of those at its place."""
    ids, labels = tokens()
    assert_mean_is_eagers(net(), (ids,), labels, loss_fn, model_run_config=RoundPipeRunConfig(3))


def each(loss: Loss) -> Loss:
    """The mean of a loss over samples that code takes one by one."""
    return lambda out, label: sum((loss(out[i], label[i]) for i in range(len(out))), torch.zeros(())) / len(out)


def in_place(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    losses = torch.zeros(len(out))
    for i in range(len(out)):
        losses[i] = F.mse_loss(out[i], label[i])
    return losses.mean()


def with_rows_kept(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    for i in range(len(out)):
        total += F.smooth_l1_loss(out[i : i + 1], label[i : i + 1]) / len(out)
    return total


ONE_BY_ONE: dict[str, Loss] = {
    "rows kept": with_rows_kept,
    "rows split": lambda out, label: torch.stack(
        [F.mse_loss(a, b) for a, b in zip(out.split(1), label.split(1), strict=True)]
    ).mean(),
    "put in places": in_place,
    "put together again": lambda out, label: F.mse_loss(
        torch.cat([out[i : i + 1].tanh() for i in range(len(out))]), label
    ),
    "a root of each": each(lambda out, label: (out - label).pow(2).sum().sqrt()),
    "a quotient of each": each(lambda out, label: (out.sigmoid() * label).sum() / (out.sigmoid().sum() + 1)),
    "a statistic of each": each(lambda out, label: ((out - out.mean()) / out.std() - label).pow(2).mean()),
    "the larger of two of each": each(lambda out, label: torch.stack([out.max(), label.min()]).max()),
}


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("num_microbatch", [3, 6])
@pytest.mark.parametrize("loss_fn", ONE_BY_ONE.values(), ids=ONE_BY_ONE)
def test_samples_taken_one_by_one_are_not_compared(loss_fn: Loss, num_microbatch: int) -> None:
    model, x, label = scores(6)
    assert_mean_is_eagers(model, (x,), label, loss_fn, model_run_config=RoundPipeRunConfig(num_microbatch))


@pytest.mark.filterwarnings("error::UserWarning")
def test_weights_of_samples_taken_one_by_one_are_no_divisors() -> None:
    model, x, label = scores(6)
    weighted = each(lambda out, label: label[0].abs() * F.mse_loss(out, label))
    assert_mean_is_eagers(model, (x,), label, weighted, model_run_config=RoundPipeRunConfig(3))


COMPARED: dict[str, tuple[Loss, int]] = {
    "neighbours": (lambda out, label: (out[1:] - out[:-1]).pow(2).mean(), 2),
    "two": (lambda out, label: (out[0] * out[1]).sum(), 2),
    "a sample with the mean": (lambda out, label: sum((each - out.mean(0)).pow(2).sum() for each in out), 2),
    "pairs": (lambda out, label: sum((a - b).norm() for i, a in enumerate(out) for b in out[:i]), 2),
    "the largest": (
        lambda out, label: torch.stack([F.mse_loss(a, b) for a, b in zip(out, label, strict=True)]).max(),
        1,
    ),
    "a root of the sum": (lambda out, label: each(F.mse_loss)(out, label).sqrt(), 1),
}


@pytest.mark.parametrize("name", COMPARED)
def test_samples_taken_one_by_one_and_compared_are_told_of(name: str) -> None:
    """In microbatches of two samples, and of one, where two are not needed."""
    loss_fn, least = COMPARED[name]
    for size in range(least, 3):
        model, x, label = scores(6)
        with (
            roundpipe.compile(model, devices=["cpu"], model_run_config=RoundPipeRunConfig(6 // size)) as pipe,
            pytest.warns(UserWarning, match="loss and gradients differ from those of the whole batch"),
        ):
            pipe.forward_backward(input_args=(x,), label=label, loss_fn=loss_fn, loss_reduction="mean")


def test_columns_of_labels_are_of_all_samples() -> None:
    """What is taken along another dimension is counted as before."""

    def spans(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        first, second = label.unbind(1)
        return F.cross_entropy(out[:, 0], first) + F.cross_entropy(out[:, 1], second)

    ids, labels = tokens()
    assert_mean_is_eagers(net(), (ids,), labels[:, :2], spans, model_run_config=RoundPipeRunConfig(3))


def scores(number: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(number, 5), torch.randn(number, 4)


@pytest.mark.parametrize("number", [3, 6])
def test_a_tensor_of_the_batch_in_a_closure_is_told_of(number: int) -> None:
    """Two samples don't fit it, and one is repeated for it."""
    model, x, teacher = scores(number)

    def distilled(out: torch.Tensor, label: object) -> torch.Tensor:
        return F.kl_div(out.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")

    with (
        roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=RoundPipeRunConfig(number)) as pipe,
        pytest.warns(UserWarning, match="the losses of microbatches do not make up that of all together"),
    ):
        pipe.forward_backward(input_args=(x,), loss_fn=distilled, loss_reduction="mean")


def test_a_sum_over_classes_that_one_sample_each_has_is_told_of() -> None:
    model, x, _ = scores(3)

    def by_class(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(out, label, reduction="none")
        means = [losses[label == k].sum() / (label == k).sum().clamp(min=1) for k in range(4)]
        return torch.stack(means).sum() / 4

    with (
        roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=RoundPipeRunConfig(3)) as pipe,
        pytest.warns(UserWarning, match="loss_fn gives sums, which nothing divides"),
    ):
        pipe.forward_backward(input_args=(x,), label=torch.arange(3), loss_fn=by_class, loss_reduction="mean")


class SumAndCount(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        total = F.cross_entropy(self.net(ids).flatten(0, 1), labels.flatten(), reduction="sum")
        return total, (labels != -100).sum(), labels.numel()


@pytest.mark.parametrize("place", [1, 2])
def test_a_sum_over_a_count_that_the_model_gives_is_that_of_the_batch_in_a_plain_loop(place: int) -> None:
    arguments = tokens()
    model = SumAndCount()
    eager = copy.deepcopy(model)
    with roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=RoundPipeRunConfig(3)) as pipe:
        outputs = pipe(*arguments)
        loss = outputs[0] / outputs[place]
        loss.backward()
    others = eager(*arguments)
    expected = others[0] / others[place]
    expected.backward()
    assert_close(loss, expected)
    assert_close(gradients(model), gradients(eager))


def test_a_quotient_of_outputs_is_told_of() -> None:
    arguments = tokens()
    with (
        roundpipe.compile(SumAndCount(), devices=["cpu"] * 2, model_run_config=RoundPipeRunConfig(3)) as pipe,
        pytest.warns(UserWarning, match="divided by numbers that are not in proportion"),
    ):
        pipe.forward_backward(
            input_args=arguments, loss_fn=lambda outputs, label: outputs[0] / outputs[1], loss_reduction="mean"
        )
