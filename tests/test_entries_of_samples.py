"""Lists with an entry for each sample, which nobody cuts: by default the batch that they belong to runs whole."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from roundpipe.runtime.config import resolve
from roundpipe.runtime.microbatch.lists import are_of_samples
from roundpipe.runtime.microbatch.split import split
from tests.runtime.models import assert_same, gradients, pair

NUMBER, WIDTH, CLASSES = 6, 8, 5
WHOLE = "So the batch is not cut but runs as one microbatch. If the entries belong to the samples"


def detector() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 4 * CLASSES))


class InParts(nn.Module):
    """Can't be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.body = detector()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + 0.0 * float(self.body(x).sum().item() > 1e9)


def targets(number: int = NUMBER) -> list[dict[str, torch.Tensor]]:
    sizes = [1 + index * 7 % 4 for index in range(number)]
    return [
        {"labels": torch.arange(size) % CLASSES, "size": torch.tensor([4, index])} for index, size in enumerate(sizes)
    ]


def set_loss(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    """Of the queries of each image against its own targets."""
    each = [
        F.cross_entropy(queries.view(4, CLASSES)[: len(own["labels"])], own["labels"])
        for queries, own in zip(outputs, label, strict=False)
    ]
    return torch.stack(each).sum() / len(label)


def ragged_loss(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    each = [F.mse_loss(row[: len(own)], own) for row, own in zip(outputs, label, strict=False)]
    return torch.stack(each).mean()


def class_loss(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    each = [F.cross_entropy(row[None], torch.tensor([int(own)])) for row, own in zip(outputs, label, strict=False)]
    return torch.stack(each).mean()


RAGGED = [torch.ones(1 + index * 5 % 7) * index for index in range(NUMBER)]  # one is as long as the batch
OF_SAMPLES = [
    (targets(), set_loss),
    (tuple(targets()), set_loss),
    (targets(2), set_loss),  # sizes are as long as the batch
    (RAGGED, ragged_loss),
    (tuple(RAGGED), ragged_loss),
    ([1, 4, 0, 2, 3, 1], class_loss),
    ([torch.tensor(1)] * NUMBER, class_loss),
    (np.arange(NUMBER) % CLASSES, class_loss),
]


@pytest.mark.parametrize("make", [detector, InParts])
@pytest.mark.parametrize(("label", "loss_fn"), OF_SAMPLES)
def test_by_default_a_batch_with_entries_for_each_sample_runs_whole(label: Any, loss_fn: Any, make: Any) -> None:
    x = torch.randn(len(label), WIDTH, generator=torch.Generator().manual_seed(1))
    with pair(make) as (piped, net, reference), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            expected = loss_fn(reference(x), label)
            expected.backward()
            loss = piped.forward_backward((x,), label=label, loss_fn=loss_fn, loss_reduction="mean")
            piped.synchronize()
            torch.testing.assert_close(loss, expected.detach())
            assert_same(gradients(net), gradients(reference))
    told = [str(each.message) for each in caught if "as many entries" in str(each.message)]
    assert len(told) == 1 and "label: a list or array" in told[0] and WHOLE in told[0], told
    assert not any("dim 0 is not as long" in str(each.message) for each in caught)


def test_a_number_that_is_given_cuts_and_the_warning_says_that_entries_are_not() -> None:
    seen: list[tuple[int, int]] = []

    def loss_fn(outputs: torch.Tensor, label: Any) -> torch.Tensor:
        seen.append((len(outputs), len(label)))
        return set_loss(outputs, label)

    config = RoundPipeRunConfig(num_microbatch=3, loss_reduction="mean")
    with (
        pair(InParts) as (piped, _, _),
        pytest.warns(UserWarning, match="but only tensors are split, so every"),
    ):
        piped.forward_backward((torch.randn(NUMBER, WIDTH),), label=targets(), loss_fn=loss_fn, run_config=config)
    assert seen == [(2, NUMBER)] * 3


class Words(nn.Module):
    """Takes the words of each sample in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.words, self.last = detector(), nn.Embedding(10, 4 * CLASSES), nn.Linear(4 * CLASSES, CLASSES)

    def forward(self, x: torch.Tensor, words: list[torch.Tensor]) -> torch.Tensor:
        own = torch.stack([self.words(each).mean(0) for _, each in zip(x, words, strict=False)])
        return self.last(self.body(x) + own)


def test_an_argument_with_entries_for_each_sample_has_the_batch_run_whole() -> None:
    torch.manual_seed(2)
    words = [torch.randint(10, (1 + index % 3,)) for index in range(NUMBER)]
    x, label = torch.randn(NUMBER, WIDTH), torch.randint(CLASSES, (NUMBER,))
    with (
        pair(Words) as (piped, net, reference),
        pytest.warns(UserWarning, match=r"args\[1\]: a list or array of as"),
    ):
        torch.testing.assert_close(piped(x, words), reference(x, words))
        expected = F.cross_entropy(reference(x, words), label)
        expected.backward()
        loss = piped.forward_backward((x, words), label=label, loss_fn=F.cross_entropy, loss_reduction="mean")
        piped.synchronize()
        torch.testing.assert_close(loss, expected.detach())
        assert_same(gradients(net), gradients(reference))


class Cached(nn.Module):
    """Takes keys and values of earlier tokens, one pair for each of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUMBER))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, past: list[Any], weights: list[torch.Tensor]) -> torch.Tensor:
        for layer, (keys, values), weight in zip(self.layers, past, weights, strict=True):
            x = torch.tanh(layer(x) + keys + values) * weight
        return self.last(x)


def test_what_layers_have_is_cut_though_there_are_as_many_layers_as_samples() -> None:
    torch.manual_seed(3)
    numbers = []

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        numbers.append(roundpipe.num_microbatches())
        return F.cross_entropy(outputs, label)

    weights = [torch.rand(WIDTH) for _ in range(NUMBER)]
    with pair(Cached) as (piped, _, reference), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in (NUMBER + 3, NUMBER):  # of the first batch it is plain that the weights are the layers'
            x, label = torch.randn(number, WIDTH), torch.randint(CLASSES, (number,))
            past = [(torch.randn(number, WIDTH), torch.randn(number, WIDTH)) for _ in range(NUMBER)]
            expected = F.cross_entropy(reference(x, past, weights), label)
            loss = piped.forward_backward((x, past, weights), label=label, loss_fn=loss_fn, loss_reduction="mean")
            torch.testing.assert_close(loss, expected.detach())
            assert numbers[-1] == 3
    assert not any("as many entries" in str(each.message) for each in caught)


class Cache:
    """Of keys, as a decoder's: an object for each layer, which has none at first."""

    def __init__(self, keys: Any) -> None:
        self.layers = [type("Layer", (), {})() for _ in range(4)]
        for layer in self.layers:
            layer.keys, layer.length = keys, torch.zeros(1)


@pytest.mark.parametrize("keys", [None, torch.zeros(4, 3)])
def test_layers_in_a_cache_are_no_samples(keys: Any) -> None:
    config = resolve(None, None, num_devices=2)
    assert not split((torch.zeros(4, 3), Cache(keys)), {}, None, config, warns=False).lists
    assert split((torch.zeros(4, 3), Cache(keys).layers), {}, None, config, warns=False).lists == ["args[1]"]


ROWS, TABLE = torch.zeros(4, 3), torch.zeros(7)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([ROWS] * 4, False),
        ([(ROWS, ROWS)] * 4, False),
        ([None, ROWS, None, ROWS], False),
        ([None] * 4, False),
        ((1, 2, 3, 4), False),
        ((ROWS, ROWS, torch.zeros(4, dtype=torch.long), TABLE), False),  # several things of one batch
        ([ROWS, TABLE, "a", 1], False),
        ([TABLE, TABLE, TABLE[:4], TABLE[:2]], True),
        ([(ROWS, 1), (TABLE.view(7, 1), 2)] * 2, True),
        ([{"boxes": ROWS}] * 4, True),
        ([{"boxes": TABLE}, {"boxes": ROWS, "masks": ROWS}, None, {}], True),
        (["a"] * 4, True),
        (("a",) * 4, True),
        ([1, 2, 3, 4], True),
        ([torch.tensor(1)] * 4, True),
    ],
)
def test_which_lists_have_an_entry_for_each_of_four_samples(entries: Any, expected: bool) -> None:
    assert are_of_samples(entries, 4) is expected
