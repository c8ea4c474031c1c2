"""Which models give a sample what belongs to its place in the batch, or to the size of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roundpipe.fx.passes.sample_dependence import dependence_of_samples
from roundpipe.fx.trace.tracer import trace
from tests.fx.test_sample_dependence import WIDTH, Model, Outer, where


def added_to_earlier(model: Any, x: torch.Tensor) -> torch.Tensor:
    later, earlier = torch.tril_indices(len(x), len(x), -1)
    return model.core(x.index_add(0, later, x[earlier]))


def written_elsewhere(model: Any, x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(x)
    for index in range(len(x)):
        made[len(x) - 1 - index] = model.second(x[index])
    return model.core(made)


BY_PLACE: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "spread places": lambda model, x: model.core(x * torch.linspace(0, 1, x.shape[0])[:, None]),
    "a window over places": lambda model, x: model.core(x * torch.hann_window(x.shape[0])[:, None]),
    "listed places": lambda model, x: model.core(x * torch.tensor([float(i) for i in range(len(x))])[:, None]),
    "number in a tensor": lambda model, x: model.core(x + torch.full((len(x), 1), float(len(x)))),
    "number as a tensor": lambda model, x: model.core(x / torch.tensor(float(len(x)))),
    "number that fills": lambda model, x: model.core(x * x.new_full((x.shape[0], 1), x.shape[0])),
    "all pairs": added_to_earlier,
    "stored by place": lambda model, x: model.core(x + model.table.weight[: len(x)]),
    "stored by place and size": lambda model, x: model.core(x * model.table.weight[: x.shape[0]]),
    "members of an ensemble": lambda model, x: model.core(x * model.pair.repeat_interleave(len(x) // 2, 0)),
    "members in turn": lambda model, x: model.core(x * model.pair.repeat(x.shape[0] // 2, 1)),
    "scaled by a number": lambda model, x: model.last((h := model.first(x)) / h.detach().std().item()),
    "numbers of a list": lambda model, x: model.core(x - torch.tensor(model.first(x).detach().mean(0).tolist())),
    "a count": lambda model, x: model.core(x * torch.bincount((x[:, 0] > 0).long(), minlength=2)[0]),
    "counts": lambda model, x: model.core(x / torch.unique((x > 0).long(), return_counts=True)[1].max()),
    "resized": lambda model, x: model.core(F.interpolate(x.T[None], scale_factor=2.0, mode="linear")[0, :, ::2].T),
    "scaled in turn": lambda model, x: model.core(torch.stack([v * (i + 1) for i, v in enumerate(x)])),
    "the last one first": lambda model, x: model.core(torch.stack(list(x.unbind())[::-1])),
    "numbered in turn": lambda model, x: model.core(torch.stack([v + torch.tensor(float(i)) for i, v in enumerate(x)])),
    "stored in turn": lambda model, x: model.core(torch.stack([v + model.table.weight[i] for i, v in enumerate(x)])),
    "written elsewhere": written_elsewhere,
}


def joined_in_turn(model: Any, x: torch.Tensor) -> torch.Tensor:
    made = None
    for sample in x:
        one = model.second(sample)[None]
        made = one if made is None else torch.cat([made, one])
    return model.last(made)


def padded_in_turn(model: Any, x: torch.Tensor) -> torch.Tensor:
    made = x.new_zeros(len(x), 4, WIDTH)
    for index, sample in enumerate(x):
        made[index, :2] = model.second(sample)
        made[index, 2] = 1.0
    return model.core(made.sum(1))


def two_of_each(model: Any, x: torch.Tensor) -> torch.Tensor:
    made: list[torch.Tensor] = []
    for sample in x.split(1):
        made += [model.first(sample), model.second(sample) * torch.arange(WIDTH) + torch.tensor(0.5)]
    return model.last(torch.cat(made)).view(-1, 2, 3).sum(1)


def with_powers(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Numbers that count something else, some of which may be as many as samples."""
    return model.core(sum(x * (power + 1) for power in range(12)))


APART: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "joined in turn": joined_in_turn,
    "padded in turn": padded_in_turn,
    "two of each": two_of_each,
    "other numbers": with_powers,
    "alike for all": lambda model, x: model.core(
        x * torch.full((len(x), 1), 0.5) * torch.tensor([2.0] * len(x))[:, None]
    ),
    "a window over features": lambda model, x: model.core(x * torch.hann_window(WIDTH) + torch.linspace(0, 1, WIDTH)),
    "stored features": lambda model, x: model.core(x + model.table.weight[: x.shape[1]].mean(0)),
    "members for each": lambda model, x: model.core(x + model.pair.repeat(len(x), 1).view(len(x), 2, -1).mean(1)),
    "each for members": lambda model, x: model.core(
        x + model.pair.repeat_interleave(len(x), 0).view(2, -1, WIDTH).mean(0)
    ),
    "a number that is not used": lambda model, x: (torch.bincount((x[:, 0] > 0).long()), model.core(x))[1],
    "each kind once": lambda model, x: (lambda kinds, which: model.core(model.table(kinds)[which]))(
        *torch.unique((x[:, 0] > 0).long(), return_inverse=True)
    ),
    "resized in each": lambda model, x: model.core(F.interpolate(x[:, None], scale_factor=2.0)[:, 0, ::2]),
}


class Paired(Model):
    """Has a row for each of two members of an ensemble, too."""

    def __init__(self, run: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__(run)
        self.pair = nn.Parameter(torch.randn(2, WIDTH))


def outer(run: Callable[[Any, torch.Tensor], Any]) -> nn.Module:
    model = Outer(run)
    model.blocks[0].inside = Paired(run)
    return model


@pytest.mark.parametrize("name", BY_PLACE)
def test_what_goes_by_the_place_of_a_sample_is_found(name: str) -> None:
    assert where(Paired(BY_PLACE[name]))
    assert where(outer(BY_PLACE[name]))


@pytest.mark.parametrize("name", APART)
def test_what_is_alike_for_all_samples_is_left_alone(name: str) -> None:
    assert where(Paired(APART[name])) == ""
    assert where(outer(APART[name])) == ""
    assert where(Paired(APART[name]), number=1) == ""


class OfLengths(nn.Module):
    """Takes as much of each sample as a list says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        made = [self.first(sample)[:length].mean() for sample, length in zip(x, lengths, strict=False)]
        return self.last(torch.stack(made)[:, None].expand(-1, WIDTH))


def test_lists_may_have_something_else_for_each_sample() -> None:
    traced = trace(OfLengths(), (torch.randn(4, WIDTH), [3, 4, 2, 5]), {})
    assert dependence_of_samples(traced).where == ""


class OfImages(nn.Module):
    """Fills places with features of images, which it makes one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        features = torch.cat([self.first(image)[None] for image in images])
        return self.last(self.first(x).masked_scatter(x > 0, features))


def test_what_is_joined_of_samples_may_fill_places_of_all() -> None:
    traced = trace(OfImages(), (torch.randn(4, WIDTH), torch.randn(4, WIDTH)), {})
    assert dependence_of_samples(traced).where == ""
