"""Scalars that a model computes by itself, sample by sample, and returns: losses, or parts of one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.runtime.models import assert_same, gradients

NUMBER, VOCABULARY = 9, 20
Tensor = torch.Tensor


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x: Tensor, noise: Tensor) -> Any:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        divergence = -0.5 * torch.sum(1 + log_variance - mean**2 - log_variance.exp())
        return self.decoder(mean + noise * (0.5 * log_variance).exp()), divergence


class OwnSum(Autoencoder):
    def forward(self, x: Tensor, noise: Tensor) -> Any:
        made, divergence = super().forward(x, noise)
        return F.mse_loss(made, x, reduction="sum") + 0.1 * divergence


class OwnMean(Autoencoder):
    def forward(self, x: Tensor, noise: Tensor) -> Any:
        made, divergence = super().forward(x, noise)
        return (made - x).square().sum(-1).mean() + 0.1 * divergence / len(x)


class OwnBoth(Autoencoder):
    def forward(self, x: Tensor, noise: Tensor) -> Any:
        made, divergence = super().forward(x, noise)
        return F.mse_loss(made, x) + 0.1 * divergence


def of_parts(outputs: Any, label: Any) -> Tensor:
    made, divergence = outputs
    return F.mse_loss(made, label) + 0.1 * divergence


def of_sums(outputs: Any, label: Any) -> Tensor:
    made, divergence = outputs
    return 2 * divergence + made.square().sum()


def own(outputs: Any, label: Any) -> Any:
    return outputs


def check(
    net: nn.Module, args: Any, label: Any, loss_fn: Any, number: int, reduction: Any, warned: bool = False
) -> None:
    """Both loops are as plain PyTorch, without a warning; ``reduction``: of the one that is no plain loop."""
    reference, plain = copy.deepcopy(net), copy.deepcopy(net)
    expected = loss_fn(reference(*args), label)
    expected.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with roundpipe.compile(plain, devices=["cpu"] * 2, model_run_config=RoundPipeRunConfig(number)) as piped:
            loss = loss_fn(piped(*args), label)
            loss.backward()
            piped.synchronize()
        with roundpipe.compile(net, devices=["cpu"] * 2, model_run_config=RoundPipeRunConfig(number)) as piped:
            other = piped.forward_backward(args, label=label, loss_fn=loss_fn, loss_reduction=reduction)
            piped.synchronize()
    for found, model in ((loss.detach(), plain), (other, net)):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-6)
        assert_same(gradients(model), gradients(reference), 1e-5)


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize(
    ("kind", "loss_fn", "reduction"),
    [
        (Autoencoder, of_parts, "mean"),
        (OwnSum, own, "sum"),
        (OwnMean, own, "mean"),
        (OwnBoth, own, "mean"),
    ],
)
def test_sums_and_means_over_samples_are_those_of_the_batch(
    kind: type[nn.Module], loss_fn: Callable[..., Any], reduction: str, number: int
) -> None:
    """Also in uneven microbatches."""
    torch.manual_seed(0)
    x, noise = torch.randn(NUMBER, 6), torch.randn(NUMBER, 2)
    check(kind(), (x, noise), x, loss_fn, number, reduction)


class OwnDivision(nn.Module):
    """A language model that divides by a number of its own making."""

    def __init__(self, by: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Linear(8, VOCABULARY)
        self.by = by

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.hidden(self.embedding(ids))))
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return losses / self.by(labels)


def tokens() -> tuple[Tensor, Tensor]:
    """With other numbers of targets in each sample."""
    torch.manual_seed(1)
    ids = torch.randint(VOCABULARY, (NUMBER, 6))
    labels = ids.roll(-1, 1)
    labels[torch.arange(6)[None] >= torch.randint(1, 7, (NUMBER, 1))] = -100
    return ids, labels


@pytest.mark.parametrize("number", [2, 3])
def test_a_sum_that_is_divided_by_its_targets_is_that_of_the_batch(number: int) -> None:
    check(OwnDivision(lambda labels: labels.ne(-100).sum()), tokens(), None, own, number, "mean")


BY_NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "int": lambda labels: int(labels.ne(-100).sum()),
    "a list": lambda labels: sum(labels.ne(-100).sum(1).tolist()),
    "one over it": lambda labels: 1 / (1 / int(labels.ne(-100).sum())),
}


@pytest.mark.parametrize("name", BY_NUMBERS)
def test_a_sum_over_a_number_that_data_gave_is_no_sum(name: str) -> None:
    """Each microbatch has its own where code may use it as a size, so nothing tells what the loss is."""
    (ids, labels), net = tokens(), OwnDivision(BY_NUMBERS[name])
    with roundpipe.compile(net, devices=["cpu"] * 2, model_run_config=RoundPipeRunConfig(3)) as piped:
        with pytest.warns(UserWarning, match="nothing tells how it comes from the samples: it is the average"):
            loss = piped(ids, labels)
        expected = torch.stack([net(*each) for each in zip(ids.chunk(3), labels.chunk(3), strict=True)]).mean()
        torch.testing.assert_close(loss.detach(), expected.detach())
    with roundpipe.compile(net, devices=["cpu"] * 2, model_run_config=RoundPipeRunConfig(3)) as piped:
        with pytest.warns(UserWarning, match="computes itself was added up over 3 microbatches. If it is a mean"):
            piped.forward_backward((ids, labels), loss_fn=own)


def test_numbers_of_the_code_are_factors_all_the_same() -> None:
    """Beside one that data gave, which is another."""

    class Scaled(OwnDivision):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            longest = int(labels.ne(-100).sum(1).amax())
            return 0.125 * super().forward(ids[:, :longest], labels[:, :longest])

    check(Scaled(lambda labels: labels.ne(-100).sum()), tokens(), None, own, 3, "mean")


def test_a_sum_of_the_models_own_in_a_mean_is_told() -> None:
    torch.manual_seed(0)
    x, noise = torch.randn(NUMBER, 6), torch.randn(NUMBER, 2)
    with roundpipe.compile(Autoencoder(), devices=["cpu"] * 2) as piped:
        with pytest.warns(UserWarning, match="loss_fn gives sums, which nothing divides"):
            piped.forward_backward((x, noise), loss_fn=of_sums, loss_reduction="mean")


SEEN = []


class Remembers(nn.Module):
    """A leaf that leaves what it sees outside of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(x)
        return self.linear(x)


def test_what_code_leaves_while_a_graph_is_looked_at_is_taken_back() -> None:
    class Model(Autoencoder):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Remembers()  # type: ignore[assignment]

    torch.manual_seed(0)
    x, noise = torch.randn(NUMBER, 6), torch.randn(NUMBER, 2)
    SEEN.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what it remembers
        with roundpipe.compile(Model(), devices=["cpu"] * 2) as piped:
            piped.forward_backward((x, noise), label=x, loss_fn=of_parts, loss_reduction="mean")
    assert all(type(seen) is Tensor for seen in SEEN)


class OfPixels(nn.Module):
    """A loss over the masked pixels of images."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor, mask: Tensor) -> Tensor:
        losses = F.l1_loss(self.layers(images), images, reduction="none").mean(1)
        return (losses * mask).sum() / mask.sum()


OF_IMAGES: dict[str, list[nn.Module]] = {
    "convolutions": [nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.ConvTranspose2d(4, 3, 3, padding=1)],
    "padding by what is there": [nn.ReflectionPad2d(1), nn.Conv2d(3, 3, 3)],
    "pooling and resizing": [nn.MaxPool2d(2), nn.Conv2d(3, 3, 1), nn.Upsample(scale_factor=2, mode="bilinear")],
    "averages": [nn.AdaptiveAvgPool2d(4), nn.Conv2d(3, 3, 1), nn.Upsample(scale_factor=2)],
}


@pytest.mark.parametrize("layers", OF_IMAGES.values(), ids=OF_IMAGES)
def test_a_mean_over_masked_pixels_is_that_of_the_batch(layers: list[nn.Module]) -> None:
    torch.manual_seed(0)
    mask = torch.arange(8)[None, :, None] < torch.randint(1, 8, (NUMBER, 1, 8))
    check(OfPixels(copy.deepcopy(layers)), (torch.randn(NUMBER, 3, 8, 8), mask), None, own, 3, "mean")


class OfPatches(OfPixels):
    """The mask is of patches, of which the code knows how many there are."""

    def forward(self, images: Tensor, mask: Tensor) -> Tensor:
        pixels = mask.reshape(-1, 4, 4).repeat_interleave(2, 1).repeat_interleave(2, 2).unsqueeze(1).contiguous()
        losses = F.l1_loss(self.layers(images), images, reduction="none")
        return (losses * pixels).sum() / (pixels.sum() + 1e-5) / 3


@pytest.mark.parametrize("number", [2, 3])
def test_a_mean_over_masked_patches_is_that_of_the_batch(number: int) -> None:
    torch.manual_seed(0)
    mask = torch.rand(NUMBER, 16) < torch.linspace(0.2, 0.9, NUMBER)[:, None]
    args = torch.randn(NUMBER, 3, 8, 8), mask
    check(OfPatches([nn.Conv2d(3, 3, 1)]), args, None, own, number, "mean")


LEAST: dict[str, Callable[[Tensor], Any]] = {
    "a small rest": lambda mask: mask.sum() + 1e-6,
    "a least number": lambda mask: mask.sum().clamp(min=1),
}


@pytest.mark.parametrize("num_masked", [0, 1, NUMBER])
@pytest.mark.parametrize("by", LEAST.values(), ids=LEAST)
def test_microbatches_without_targets_count_for_nothing(by: Callable[[Tensor], Any], num_masked: int) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return ((self.linear(x) - x).square().mean(-1) * mask).sum() / by(mask)

    torch.manual_seed(0)
    check(Masked(), (torch.randn(NUMBER, 6), torch.arange(NUMBER) < num_masked), None, own, 3, "mean")
