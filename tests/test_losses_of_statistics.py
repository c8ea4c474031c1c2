"""Losses of outputs without samples, losses that are added up although they are means, and samples by their places."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe
from roundpipe import RoundPipeRunConfig

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Gives logits, a mean over the samples of its features, and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.scales = nn.Parameter(torch.tensor([0.5, -0.25]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.features(x))
        return self.head(hidden) * self.scales.exp().mean(), hidden.mean(0), self.scales


def run(loss_fn: Loss, num_microbatch: int, num_devices: int = 1, **options: Any) -> tuple[Any, Any, list[str]]:
    """A loss and gradients, those of eager, and what was said."""
    torch.manual_seed(0)
    net, x, y = Net().double(), torch.randn(8, 6).double(), torch.randint(4, (8,))
    expected = loss_fn(net(x), y)
    expected.backward()
    eager = [expected.detach(), *(parameter.grad for parameter in net.parameters())]
    net.zero_grad()
    config = RoundPipeRunConfig(num_microbatch=num_microbatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with roundpipe.compile(net, devices=["cpu"] * num_devices, model_run_config=config) as pipe:
            for _ in range(2):
                net.zero_grad()
                loss = pipe.forward_backward(input_args=(x,), label=y, loss_fn=loss_fn, **options)
            pipe.synchronize()
    return [loss, *(parameter.grad for parameter in net.parameters())], eager, [str(each.message) for each in caught]


RIGHT: dict[str, Loss] = {
    "a sum of weights": lambda out, y: F.cross_entropy(out[0], y) + out[2].exp().sum(),
    "a mean of weights": lambda out, y: F.cross_entropy(out[0], y) + out[2].exp().mean(),
    "one of the weights": lambda out, y: F.cross_entropy(out[0], y) - out[2][1],
    "a learned factor": lambda out, y: (-out[2][0]).exp() * F.cross_entropy(out[0], y) + out[2][0],
    "a sum of means": lambda out, y: F.cross_entropy(out[0], y) + 0.5 * out[1].sum(),
    "a mean of means": lambda out, y: F.cross_entropy(out[0], y) + out[1].mean(),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("num_microbatch", [2, 3, 4])
def test_what_is_linear_in_outputs_without_samples_is_that_of_the_batch(name: str, num_microbatch: int) -> None:
    """Also where there are as many of them as a microbatch has samples."""
    found, eager, said = run(RIGHT[name], num_microbatch, 2, loss_reduction="mean")
    torch.testing.assert_close(found, eager)
    is_known = "of means" not in name or num_microbatch != 3  # else nothing tells what the means are over
    assert not (said and is_known)


@pytest.mark.parametrize("num_microbatch", [2, 3])
def test_a_function_of_means_that_the_model_gives_is_told_of(num_microbatch: int) -> None:
    loss_fn: Loss = lambda out, y: F.cross_entropy(out[0], y) + (out[1] * out[1]).sum()  # noqa: E731
    _, _, said = run(loss_fn, num_microbatch, loss_reduction="mean")
    assert len(said) == 1 and "a function of means" in said[0]


ADDED: dict[str, tuple[Loss, str]] = {
    "cross entropy": (
        lambda out, y: F.cross_entropy(out[0], y),
        "each is a mean, or made of means: these and their gradients are 3 times",
    ),
    "two means": (lambda out, y: F.cross_entropy(out[0], y) + 0.1 * out[0].square().mean(), "made of means"),
    "a mean and a sum": (lambda out, y: F.cross_entropy(out[0], y) + 1e-3 * out[0].abs().sum(), "made of means"),
    "an offset": (lambda out, y: 1 - F.cosine_similarity(out[0], out[0].detach() + 1).mean(), "made of means"),
    "a sign": (lambda out, y: -out[0].log_softmax(-1)[:, 0].mean(), "made of means"),
    "a factor": (lambda out, y: 2 * F.cross_entropy(out[0], y), "made of means"),
    "divided by another number": (lambda out, y: F.cross_entropy(out[0], y) / 4, "made of means"),
    "in float32": (lambda out, y: F.cross_entropy(out[0].float(), y), "each is a mean"),
    "over a mask": (
        lambda out, y: (F.cross_entropy(out[0], y, reduction="none") * (y > 0)).sum() / (y > 0).sum(),
        "each is a mean",
    ),
    "pairs": (
        lambda out, y: F.cross_entropy(out[0] @ out[0].T, torch.arange(len(y)), reduction="sum"),
        "compare samples with each other",
    ),
    "a root": (lambda out, y: out[0].square().mean().sqrt(), "a function of means"),
}


@pytest.mark.parametrize("name", ADDED)
def test_losses_that_should_not_be_added_up_are_told_of_once(name: str) -> None:
    loss_fn, expected = ADDED[name]
    _, _, said = run(loss_fn, 3)
    assert len(said) == 1 and said[0].startswith("the losses of the 3 microbatches were added up, but")
    assert expected in said[0]
    assert not run(loss_fn, 1)[2]


SUMS: dict[str, tuple[Loss, dict[str, str]]] = {
    "sum": (lambda out, y: F.cross_entropy(out[0], y, reduction="sum"), {}),
    "divided as it is told to": (lambda out, y: F.cross_entropy(out[0], y) / 3, {}),
    "multiplied as it is told to": (lambda out, y: (F.cross_entropy(out[0], y) + out[0].mean()) * (1 / 3), {}),
    "asked for": (lambda out, y: F.cross_entropy(out[0], y), {"loss_reduction": "sum"}),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_that_are_meant_are_not_told_of(name: str) -> None:
    loss_fn, options = SUMS[name]
    assert not run(loss_fn, 3, **options)[2]


TAKEN: dict[str, tuple[Loss, str]] = {
    "the first output": (lambda out, y: F.cross_entropy(out[0] - out[0][0], y), "compare samples"),
    "the last output": (lambda out, y: F.cross_entropy(out[0] - out[0][-1], y), "compare samples"),
    "the first label": (lambda out, y: (out[0].mean(1) - (y - y[0])).square().mean(), "compare samples"),
    "over a number that is no number of samples": (
        lambda out, y: F.cross_entropy(out[0], y, reduction="sum") / 8,
        "gives sums, which nothing divides",
    ),
    "each one": (lambda out, y: sum(F.cross_entropy(out[0][i], y[i]) for i in range(len(y))) / len(y), ""),
    "columns": (lambda out, y: (out[0][:, 0] - out[0][:, 1]).square().mean(), ""),
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("num_microbatch", [2, 3])
def test_samples_that_are_taken_by_their_places_are_told_of_unless_all_are(name: str, num_microbatch: int) -> None:
    loss_fn, expected = TAKEN[name]
    found, eager, said = run(loss_fn, num_microbatch, loss_reduction="mean")
    assert len(said) == bool(expected) and expected in "".join(said)
    if not expected:
        torch.testing.assert_close(found, eager)
