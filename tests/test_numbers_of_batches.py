"""Numbers that a forward reads from its arguments, and computes with, are those of the whole batch."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import roundpipe
from roundpipe.fx.guards.piece_numbers import NumberOfPiece
from tests.runtime.models import gradients

NUM_SAMPLES, WIDTH, NUM_CLASSES = 9, 6, 3
LENGTHS = torch.tensor([2, 7, 3, 1, 4, 2, 3, 1, 9])
Scale = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

OF_BATCH: dict[str, Scale] = {
    "a sum": lambda h, lengths: h / lengths.sum().item(),
    "a sum, by a method": lambda h, lengths: h.div(lengths.sum().item()),
    "a mean": lambda h, lengths: h * lengths.float().mean().item(),
    "a mean, as a float": lambda h, lengths: h * float(lengths.float().mean()),
    "one that is at least 1": lambda h, lengths: h / max(lengths.sum().item(), 1),
    "one computed with": lambda h, lengths: h / (2 * lengths.sum().item() + 1),
    "two of them": lambda h, lengths: h * (lengths.sum().item() / (lengths.max().item() + lengths.min().item())),
    "a root": lambda h, lengths: h / lengths.sum().item() ** 0.5,
    "over it": lambda h, lengths: 1 / lengths.sum().item() * h,
    "a limit": lambda h, lengths: h * 2 if lengths.sum().item() > 20 else h,
    "integers over it": lambda h, lengths: h * (lengths / lengths.sum().item())[:, None],
}
OF_PIECE: dict[str, Scale] = {
    "a size": lambda h, lengths: h + h.new_ones(lengths.sum().item()).mean(),
    "computed sizes": lambda h, lengths: h + h.new_ones(2, lengths.sum().item() // 2 + 1).mean(),
    "places": lambda h, lengths: h * torch.ones(lengths.sum().item())[0 * lengths + lengths.sum().item() - 1, None],
    "each sample's": lambda h, lengths: h * h.new_tensor(lengths.tolist())[:, None],
    "each sample's, as floats": lambda h, lengths: h * h.new_tensor([float(each) for each in lengths])[:, None],
    "each sample's, computed with": lambda h, lengths: h * h.new_tensor([1 / each.item() for each in lengths])[:, None],
    "whether there are any": lambda h, lengths: h * 2 if lengths.sum().item() > 0 else h,
}


class Scaled(nn.Module):
    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.inner, self.outer, self.scale = nn.Linear(5, WIDTH), nn.Linear(WIDTH, NUM_CLASSES), scale

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.outer(self.scale(self.inner(x).tanh(), lengths))
        return logits


class OwnLoss(nn.Module):
    """``reduce`` makes a loss of what each sample has, given the lengths."""

    def __init__(self, reduce: Scale) -> None:
        super().__init__()
        self.inner, self.outer, self.reduce = nn.Linear(5, WIDTH), nn.Linear(WIDTH, NUM_CLASSES), reduce

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(self.outer(self.inner(x).tanh()), label, reduction="none")
        return self.reduce(losses, lengths)


def example() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(NUM_SAMPLES, 5), LENGTHS, torch.randint(NUM_CLASSES, (NUM_SAMPLES,))


@pytest.mark.parametrize("scale", [*OF_BATCH.values(), *OF_PIECE.values()], ids=[*OF_BATCH, *OF_PIECE])
def test_outputs_are_those_of_the_batch(scale: Scale) -> None:
    x, lengths, label = example()
    model = Scaled(scale)
    eager = copy.deepcopy(model)
    with roundpipe.compile(model, devices=["cpu"] * 2) as pipe:
        for order in (slice(None), torch.arange(NUM_SAMPLES).flip(0)):
            model.zero_grad()
            eager.zero_grad()
            loss = F.cross_entropy(pipe(x[order], lengths[order]), label[order])
            loss.backward()
            expected = F.cross_entropy(eager(x[order], lengths[order]), label[order])
            expected.backward()
            assert_close(loss, expected)
            assert_close(gradients(model), gradients(eager))


def test_another_batch_has_other_numbers() -> None:
    x, lengths, _ = example()
    model = Scaled(OF_BATCH["a sum"])
    with roundpipe.compile(model, devices=["cpu"] * 2) as pipe, torch.no_grad():
        for number in (1, 3, 1):
            assert_close(pipe(x, lengths * number), model(x, lengths * number))


@pytest.mark.parametrize(
    "reduce",
    [
        lambda losses, lengths: losses.sum() / lengths.sum().item(),
        lambda losses, lengths: (losses * lengths).sum() / max(lengths.sum().item(), 1),
        lambda losses, lengths: losses.sum() / float(lengths.sum()),
        lambda losses, lengths: losses.mean() * lengths.float().mean().item(),
    ],
    ids=["a sum", "a weighted sum", "a sum over a float", "a mean"],
)
def test_own_losses_are_those_of_the_batch(reduce: Scale) -> None:
    arguments = example()
    model = OwnLoss(reduce)
    eager = copy.deepcopy(model)
    with roundpipe.compile(model, devices=["cpu"] * 2) as pipe:
        loss = pipe(*arguments)
        loss.backward()
    expected = eager(*arguments)
    expected.backward()
    assert_close(loss, expected)
    assert_close(gradients(model), gradients(eager))


def test_what_is_averaged_over_microbatches_has_their_own_numbers() -> None:
    arguments = example()
    model = OwnLoss(lambda losses, lengths: losses.median() / lengths.sum().item())
    pieces = [[each[first : first + 3] for each in arguments] for first in (0, 3, 6)]
    expected = sum(model(*piece) for piece in pieces) / 3
    with (
        roundpipe.compile(model, devices=["cpu"] * 2) as pipe,
        pytest.warns(UserWarning, match="is the average over the 3 microbatches"),
    ):
        loss = pipe(*arguments, roundpipe_run_config=roundpipe.RoundPipeRunConfig(num_microbatch=3))
    assert_close(loss, expected)


def test_a_number_is_the_piece_s_to_whom_it_is_a_size() -> None:
    taken: list[str] = []
    number = NumberOfPiece(3, 12, lambda: taken.append("batch"))
    assert list(range(number)) == [0, 1, 2] and [*"abcde"][:number] == ["a", "b", "c"]
    assert number == 3 and number > 0 and number >= 1 and not number < 1 and not number <= 0
    assert list(range(2 * number + 1 - number)) == [0, 1, 2, 3]
    assert type(pickle.loads(pickle.dumps(number))) is int
    assert not taken
    assert float(number) == 12 and number / 2 == 6 and 6 / number == 0.5 and number > 5 and not number < 5
    assert len(taken) == 5


def test_a_piece_that_has_none_is_divided_by_what_the_batch_has() -> None:
    assert 6 / NumberOfPiece(0, 12, lambda: None) == 0.5


def test_a_batch_in_one_piece_tells_nothing_of_mixing() -> None:
    x, lengths, _ = example()
    model = Scaled(OF_BATCH["a sum"])
    whole = roundpipe.RoundPipeRunConfig(num_microbatch=1)
    with roundpipe.compile(model, devices=["cpu"] * 2) as pipe, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        assert_close(pipe(x, lengths, roundpipe_run_config=whole), model(x, lengths))
        assert_close(pipe(x, lengths), model(x, lengths))


@pytest.mark.parametrize(
    "scale",
    [
        lambda h, lengths: h / int(lengths.sum()),
        lambda h, lengths: h / sum(lengths.tolist()),
        lambda h, lengths: h * (1 / int(lengths.sum().item())),
    ],
    ids=["int", "a list's sum", "one over it"],
)
def test_a_number_of_all_samples_that_may_be_a_size_keeps_the_batch_whole(scale: Scale) -> None:
    x, lengths, _ = example()
    model = Scaled(scale)
    with roundpipe.compile(model, devices=["cpu"] * 2) as pipe, torch.no_grad():
        with pytest.warns(UserWarning, match="mixes the samples of a batch: the number that is read at .*test_numbers"):
            assert_close(pipe(x, lengths), model(x, lengths))


@pytest.mark.parametrize("number", [5, 4, 3, 2])
def test_microbatches_of_one_sample_meet_the_others(number: int) -> None:
    """Their graph serves no batch, so that it has their own numbers: the batch is not cut."""
    x, lengths, label = example()
    model = OwnLoss(lambda losses, lengths: (losses * lengths).sum() / lengths.sum().item())
    eager = copy.deepcopy(model)
    with roundpipe.compile(model, devices=["cpu"] * 2) as pipe:
        for batch in ((x, lengths, label), (x[:number], lengths[:number], label[:number])):
            model.zero_grad()
            eager.zero_grad()
            loss, expected = pipe(*batch), eager(*batch)
            loss.backward()
            expected.backward()
            assert_close(loss, expected)
            assert_close(gradients(model), gradients(eager))


class Images(nn.Module):
    """Puts images in the places of their tokens, as many as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.vision, self.head = nn.Embedding(9, WIDTH), nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        embedded, features = self.tokens(ids), self.vision(images).flatten(0, 1)
        number = (ids == 0).sum().item()
        if number != features.shape[0] or number > ids.numel():
            raise ValueError(f"{number} tokens, {features.shape[0]} features")
        return self.head(embedded.masked_scatter((ids == 0)[..., None], features))


def test_whether_there_are_as_many_is_asked_of_each_microbatch() -> None:
    torch.manual_seed(0)
    ids, images = torch.randint(1, 9, (NUM_SAMPLES, 7)), torch.randn(NUM_SAMPLES, 2, 4)
    ids[:, 2:4] = 0
    model = Images()
    with roundpipe.compile(model, devices=["cpu"] * 2) as pipe, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        assert_close(pipe(ids, images), model(ids, images))
