"""Losses of rows that a mask picks, and of targets expanded like the logits, run in tiles with eager's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe
from roundpipe import Device, RoundPipeRunConfig
from tests.fx.test_tiles import VOCABULARY, Decoder, assert_tiles_change_nothing, chain_of, regions_of, tokens, train
from tests.repeats import repeats


def by_labels(logits, labels):
    return F.cross_entropy(logits[labels != -100], labels[labels != -100])


def by_one_mask(logits, labels):
    mask = labels > 5
    return F.cross_entropy(logits[mask].float().double(), labels[mask].long(), reduction="sum") / mask.sum()


def shifted_and_flat(logits, labels):
    rows, targets = logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1)
    mask = targets >= 0
    return F.cross_entropy(rows[mask].view(-1, VOCABULARY), targets[mask].view(-1))


def weighted(logits, labels):
    mask, weight = labels >= 0, torch.linspace(0.1, 1, VOCABULARY).double()
    return F.cross_entropy(logits[mask] / 2, labels[mask], weight=weight, label_smoothing=0.1, ignore_index=7)


def capped_first(logits, labels):
    mask = labels >= 3
    return F.cross_entropy(torch.tanh(logits[mask] / 2).mul(2), labels[mask])


def nothing_picked(logits, labels):
    none, some = labels > VOCABULARY, labels > 3
    return F.cross_entropy(logits[none], labels[none], reduction="sum") + F.cross_entropy(logits[some], labels[some])


def like_each_row(logits, labels):
    return F.mse_loss(logits, labels.double().unsqueeze(-1).expand_as(logits))


def like_each_sample(logits, labels):
    return F.mse_loss(logits, labels[:, :1, None].double().expand_as(logits))


def like_each_class(logits, labels):
    targets = torch.linspace(0, 1, VOCABULARY).double().expand_as(logits)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")


PICKED = [by_labels, by_one_mask, shifted_and_flat, weighted, capped_first, nothing_picked]
LIKE = [like_each_row, like_each_sample, like_each_class]
KEPT = ["by_one_mask", "shifted_and_flat", "weighted", "nothing_picked", "like_each_sample"]


@pytest.mark.parametrize("name", repeats([loss.__name__ for loss in (*PICKED, *LIKE)], KEPT))
def test_they_run_in_tiles(name: str) -> None:
    (loss,) = (loss for loss in (*PICKED, *LIKE) if loss.__name__ == name)
    assert ("head",) in assert_tiles_change_nothing(Decoder(loss, 1).double(), *tokens())


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_nothing_is_picked_at_all(reduction: str) -> None:
    def loss(logits, labels):
        mask = labels > VOCABULARY
        return F.cross_entropy(logits[mask], labels[mask], reduction=reduction)

    model = Decoder(loss, 1).double()
    chain = chain_of(model, *tokens())
    assert ("head",) in regions_of(chain)
    whole, tiled = (train(chain, model, number, *tokens()) for number in (1, 3))
    for one, other in zip(tiled, whole, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


class Overflowing(Decoder):
    """Logits of tokens that a mask leaves out are not finite."""

    def forward(self, ids, labels):
        logits = self.head(self.embed(ids))
        logits = logits / (labels >= 0).double().unsqueeze(-1)
        mask = labels >= 0
        return F.cross_entropy(logits[mask], labels[mask])


def test_what_is_left_out_need_not_be_finite() -> None:
    model = Overflowing(None, 0).double()
    chain = chain_of(model, *tokens())
    assert ("head",) in regions_of(chain)
    whole, tiled = (train(chain, model, number, *tokens()) for number in (1, 3))
    assert torch.isfinite(whole[0])
    torch.testing.assert_close(tiled[0], whole[0])


def read_elsewhere(logits, labels):
    picked = logits[labels > 3]
    return F.cross_entropy(picked, labels[labels > 3]) + picked.square().mean()


def other_masks(logits, labels):
    one, other = labels > 3, labels.flip(0).flip(0) > 3
    return F.cross_entropy(logits[one], labels[other])


def labels_that_are_written(logits, labels):
    targets = labels.clone()
    targets[0] = 5
    return F.cross_entropy(logits[targets > 3], targets[targets > 3])


def a_softmax_before(logits, labels):
    mask = labels >= 3
    return F.nll_loss(torch.tanh(logits[mask] / 2).mul(2).log_softmax(-1), labels[mask])


def a_square_root(logits, labels):
    mask = labels > 3
    return F.cross_entropy(logits[mask].abs().sqrt(), labels[mask])


@pytest.mark.parametrize(
    "loss", [read_elsewhere, other_masks, labels_that_are_written, a_softmax_before, a_square_root]
)
def test_others_run_whole(loss: Any) -> None:
    assert ("head",) not in assert_tiles_change_nothing(Decoder(loss, 1).double(), *tokens())


def test_a_loss_function_of_picked_rows_trains_in_less_memory() -> None:
    """Beside eager PyTorch, with budgets in which the logits of all rows have no room."""

    def loss_fn(logits, labels):
        mask = labels >= 100
        return F.cross_entropy(logits[mask], labels[mask], reduction="sum") / 50

    torch.manual_seed(0)
    ids = torch.randint(0, 1024, (8, 32))
    states, peaks = [], []
    for devices, tiles in ((None, None), ([Device("cpu", 10**9)], "off"), ([Device("cpu", 3_000_000)], None)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(1024, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1024, bias=False))
        if devices is None:
            loss = loss_fn(model(ids), ids)
            loss.backward()
        else:
            options = RoundPipeRunConfig(num_microbatch=1, tiles=tiles)
            with roundpipe.compile(model, example_args=(ids,), devices=devices, model_run_config=options) as pipe:
                loss = pipe.forward_backward((ids,), label=ids, loss_fn=loss_fn)
                pipe.synchronize()
                peaks.append(pipe.peak_device_bytes())
        states.append([torch.as_tensor(loss).detach(), *(parameter.grad for parameter in model.parameters())])
    assert peaks[1] < 3_000_000 < peaks[0]
    for state in states[1:]:
        for one, eager in zip(state, states[0], strict=True):
            torch.testing.assert_close(one, eager, rtol=1e-4, atol=1e-6)
