"""Batches that are lists of tensors: what tells whether entries are samples, and what happens if nothing does."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from roundpipe.runtime.microbatch.lists import unclear_list
from tests.runtime.models import assert_same, gradients

NUMBER, CLASSES = 4, 5


class Detector(nn.Module):
    """Takes images `[3, height, width]` in a list, as torchvision's do, and normalizes the channels of each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh())
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]] | None = None) -> Any:
        mean = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)
        features = self.body(torch.stack([image.mean((1, 2), keepdim=True) + image - mean for image in images]))
        logits = self.head(features.mean((2, 3)))
        if targets is None:
            return [{"scores": scores} for scores in logits]
        return F.cross_entropy(logits, torch.stack([target["label"] for target in targets]))


class DetectorInParts(Detector):
    """Can't be traced."""

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]] | None = None) -> Any:
        super().forward(images)[0]["scores"].tolist()
        return super().forward(images, targets)


def samples() -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    torch.manual_seed(1)
    images = [torch.rand(3, 12, 12) * (index + 1) for index in range(NUMBER)]
    return images, [{"label": torch.tensor(index)} for index in range(NUMBER)]


@pytest.mark.parametrize("kind", [Detector, DetectorInParts])
def test_a_list_of_images_is_not_cut_along_its_channels(kind: type[Detector]) -> None:
    torch.manual_seed(0)
    model = kind()
    reference, (images, targets) = copy.deepcopy(model), samples()
    expected = reference(images, targets)
    expected.backward()
    with roundpipe.compile(model, devices=["cpu", "cpu"]) as piped:
        with pytest.warns(UserWarning, match=r"args\[0\] is a list of 4, and nothing but it tells"):
            loss = piped.forward_backward(
                (images, targets), loss_fn=lambda loss, _: loss, run_config=RoundPipeRunConfig(loss_reduction="mean")
            )
        piped.synchronize()
        torch.testing.assert_close(loss, expected.detach())
        assert_same(gradients(model), gradients(reference))
        with torch.no_grad():
            found, plain = piped.eval()(images), reference.eval()(images)
    assert [entry["scores"].shape for entry in found] == [(CLASSES,)] * NUMBER
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours["scores"], theirs["scores"])


def test_a_number_that_was_given_cuts_but_targets_make_that_strange() -> None:
    images, targets = samples()
    with roundpipe.compile(Detector(), devices=["cpu", "cpu"]) as piped:
        with pytest.warns(UserWarning, match=r"Each entry is cut along dimension 0 \(3\), although another list"):
            piped.forward_backward((images, targets), loss_fn=lambda loss, _: loss, run_config=RoundPipeRunConfig(3))


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, views: list[torch.Tensor]) -> torch.Tensor:
        return self.net(views[0]) + self.net(views[1])


def test_a_label_tells_that_the_samples_are_in_dimension_0() -> None:
    torch.manual_seed(0)
    model, views, label = Views(), [torch.rand(6, 6), torch.rand(6, 6)], torch.randint(CLASSES, (6,))
    expected = F.cross_entropy(model(views), label)
    lengths, seen = [], []

    def loss_fn(logits: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        lengths.append(len(logits))
        seen.append(own.clone())
        return F.cross_entropy(logits, own)

    with roundpipe.compile(model, devices=["cpu", "cpu"]) as piped, warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = piped.forward_backward((views,), label=label, loss_fn=loss_fn, loss_reduction="mean")
    torch.testing.assert_close(loss, expected.detach())
    assert lengths == [6] and [len(each) for each in seen] == [2, 2, 2]
    assert torch.equal(torch.cat(seen), label)


def images(*sizes: int) -> list[torch.Tensor]:
    return [torch.zeros(3, size, size) for size in sizes]


IMAGES = images(8, 9)


@pytest.mark.parametrize(
    ("args", "kwargs", "label", "name"),
    [
        ((IMAGES,), {}, None, "args[0]"),
        ((tuple(IMAGES),), {}, None, "args[0]"),
        ((images(8),), {}, None, "args[0]"),
        ((), {"samples": [{"image": image} for image in IMAGES]}, None, "kwargs['samples']"),
        ((IMAGES,), {"sizes": torch.zeros(2, 2)}, None, "args[0]"),  # as many as images
        ((IMAGES,), {"times": torch.zeros(3)}, None, None),  # as long as dimension 0
        ((IMAGES,), {}, torch.zeros(3), None),
        ((IMAGES,), {}, torch.zeros(2), "args[0]"),
        (([torch.zeros(8, 4), torch.zeros(8, 1)],), {}, None, None),  # inputs and labels of a data loader
        (([torch.zeros(8, 3, 4, 4), torch.zeros(8, dtype=torch.long)],), {}, None, None),
        ((torch.zeros(8, 4), IMAGES), {}, None, None),  # a tensor that is no entry comes first
        ((), {}, None, None),
        (([],), {}, None, None),
        ((["a text", "another"],), {}, None, None),
    ],
)
def test_which_lists_tell_nothing(args: Any, kwargs: Any, label: Any, name: str | None) -> None:
    found = unclear_list(args, kwargs, label)
    assert (found and found.name) == name


def test_packed_data_has_told_how_it_is_cut() -> None:
    packed = roundpipe.RoundPipePackedData([(torch.zeros(2, 4), torch.zeros(2, 4))] * 2)
    assert unclear_list((packed,), {}) is None
