"""Models whose outputs the pieces of a batch don't make up: a list with one for each sample, or of two batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.runtime.models import assert_same, gradients, pair

NUMBER, WIDTH, CLASSES = 6, 8, 5
GIVEN = RoundPipeRunConfig(num_microbatch=3)


class OfSamples(nn.Module):
    """Returns a list with an entry for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, CLASSES))

    def forward(self, x: torch.Tensor) -> Any:
        return list(self.body(x))


class InDicts(OfSamples):
    """Returns a dict for each sample, as a detector."""

    def forward(self, x: torch.Tensor) -> Any:
        return [{"scores": scores, "best": scores.max()} for scores in self.body(x)]


class OfBatches(OfSamples):
    """Takes a batch with labels, and another without."""

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> Any:
        outputs = self.body(torch.cat([x, other]))
        return outputs[: len(x)], outputs[len(x) :]


class WithTable(OfSamples):
    """Compares each sample with a table that all share, which is of the samples' kind."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> Any:
        return self.body(x) @ self.body(table).T


def doubled(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: kind().double()


def rows(number: int) -> torch.Tensor:
    return torch.randn(number, WIDTH, dtype=torch.double)


def scores_of(outputs: Any) -> torch.Tensor:
    return torch.stack([each["scores"] if isinstance(each, dict) else each for each in outputs])


@pytest.mark.parametrize("kind", [OfSamples, InDicts])
@pytest.mark.parametrize("number", [NUMBER, NUMBER + 1])
def test_by_default_a_list_of_outputs_is_that_of_the_whole_batch(kind: type[nn.Module], number: int) -> None:
    with (
        pair(doubled(kind)) as (piped, net, reference),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            x, label = rows(number), torch.randint(CLASSES, (number,))
            outputs, expected = piped(x), reference(x)
            assert len(outputs) == number
            torch.testing.assert_close(outputs, expected)
            F.cross_entropy(scores_of(outputs), label).backward()
            F.cross_entropy(scores_of(expected), label).backward()
            piped.synchronize()
            assert_same(gradients(net), gradients(reference))
            with torch.no_grad():
                torch.testing.assert_close(piped(x), expected)
    (told,) = (str(each.message) for each in caught if "of one sample alone" in str(each.message))
    assert "So the batch is not cut but runs as one microbatch; merge_output can say how" in told


def test_a_loss_has_the_lists_of_the_pieces_which_go_with_their_labels() -> None:
    numbers: list[int] = []

    def loss_fn(outputs: Any, label: torch.Tensor) -> torch.Tensor:
        numbers.append(roundpipe.num_microbatches())
        return F.cross_entropy(scores_of(outputs), label)

    x, label = rows(NUMBER), torch.randint(CLASSES, (NUMBER,))
    with pair(doubled(OfSamples)) as (piped, net, reference), warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = F.cross_entropy(scores_of(reference(x)), label)
        expected.backward()
        loss = piped.forward_backward((x,), label=label, loss_fn=loss_fn, loss_reduction="mean")
        piped.synchronize()
        torch.testing.assert_close(loss, expected.detach())
        assert_same(gradients(net), gradients(reference))
    assert numbers[-1] == 3


def test_a_number_that_is_given_concatenates_the_entries_of_lists_and_says_so() -> None:
    with (
        pair(doubled(OfSamples)) as (piped, _, _),
        pytest.warns(UserWarning, match="concatenated along dimension 0 all"),
    ):
        outputs = piped(rows(NUMBER), roundpipe_run_config=GIVEN)
    assert [each.shape for each in outputs] == [(3 * CLASSES,)] * 2


@pytest.mark.parametrize("others", [3 * NUMBER, NUMBER + 4])
def test_by_default_a_batch_beside_another_one_runs_whole(others: int) -> None:
    def loss_fn(outputs: Any, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs[0], label) + outputs[1].softmax(1).square().mean()

    with (
        pair(doubled(OfBatches)) as (piped, net, reference),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        x, other, label = rows(NUMBER), rows(others), torch.randint(CLASSES, (NUMBER,))
        torch.testing.assert_close(piped(x, other), reference(x, other))
        for _ in range(2):
            expected = loss_fn(reference(x, other), label)
            expected.backward()
            loss = piped.forward_backward((x, other), label=label, loss_fn=loss_fn, loss_reduction="mean")
            piped.synchronize()
            torch.testing.assert_close(loss, expected.detach())
            assert_same(gradients(net), gradients(reference))
    (told,) = (str(each.message) for each in caught)
    assert "args[1] may be a batch of another size" in told and "output[1] has not those of the first" in told


def test_a_number_that_is_given_gives_all_of_another_batch_to_each_microbatch() -> None:
    x, other = rows(NUMBER), rows(3 * NUMBER)
    with (
        pair(doubled(OfBatches)) as (piped, _, _),
        pytest.warns(UserWarning, match=r"args\[1\]: dim 0 is not as long as the"),
    ):
        outputs = piped(x, other, roundpipe_run_config=GIVEN)
    assert [len(each) for each in outputs] == [NUMBER, 9 * NUMBER]


def test_a_table_that_samples_share_has_no_batch_run_whole() -> None:
    numbers: list[int] = []

    def loss_fn(outputs: Any, label: torch.Tensor) -> torch.Tensor:
        numbers.append(roundpipe.num_microbatches())
        return F.cross_entropy(outputs, label)

    x, table, label = rows(NUMBER), rows(9), torch.randint(9, (NUMBER,))
    with (
        pair(doubled(WithTable)) as (piped, _, reference),
        pytest.warns(UserWarning, match="dim 0 is not as long as the batch"),
    ):
        loss = piped.forward_backward((x, table), label=label, loss_fn=loss_fn, loss_reduction="mean")
        torch.testing.assert_close(loss, F.cross_entropy(reference(x, table), label).detach())
    assert numbers[-1] == 3
