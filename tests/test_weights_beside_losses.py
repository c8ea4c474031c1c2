"""Weights that loss_fn returns beside losses: a word where they are not what the losses are divided by."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe

RUN = roundpipe.RoundPipeRunConfig(num_microbatch=4)
LABEL = torch.tensor([3, 0, 1, -100, 2, 2, -100, -100, 1, 0, 3, 3, -100, 1, 2, 0])


def count(label):
    return (label != -100).sum()


def accuracy(logits, label):
    return (logits.argmax(-1) == label).float().mean()


def contrast(logits):
    return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


def masked(logits, label):
    losses = F.cross_entropy(logits, label, reduction="none")
    return losses.sum() / count(label).clamp(min=1)


def by_mask(logits, label):
    mask = (label != -100).float()
    return (F.cross_entropy(logits, label, reduction="none") * mask).sum() / (mask.sum() + 1e-5)


def confidence(logits):
    return logits[:, 0].detach().sigmoid()


def by_confidence(logits, label):
    losses = F.cross_entropy(logits, label.clamp(min=0), reduction="none")
    return (losses * confidence(logits)).sum() / confidence(logits).sum()


RIGHT = {
    "targets": lambda logits, label: (F.cross_entropy(logits, label), count(label)),
    "targets, doubled": lambda logits, label: (F.cross_entropy(logits, label), 2.0 * count(label).item()),
    "targets as a float": lambda logits, label: (F.cross_entropy(logits, label), count(label).float()),
    "weights of outputs": lambda logits, label: (by_confidence(logits, label), confidence(logits).sum()),
    "a mask's sum": lambda logits, label: (by_mask(logits, label), (label != -100).float().sum()),
    "samples": lambda logits, label: (logits.pow(2).mean(), len(label)),
    "a microbatch without targets": lambda logits, label: (masked(logits, label), count(label)),
    "a quotient": lambda logits, label: (masked(logits, label), count(label)),
    "for each": lambda logits, label: (
        [F.cross_entropy(logits, label), logits.pow(2).mean()],
        [count(label), len(label)],
    ),
}
NO_WEIGHT = "no weight is what its loss is divided by"
SUM = "loss_fn gives sums"
WRONG = {
    "an accuracy": (lambda logits, label: (F.cross_entropy(logits, label), accuracy(logits, label)), NO_WEIGHT),
    "its number": (lambda logits, label: (F.cross_entropy(logits, label), accuracy(logits, label).item()), NO_WEIGHT),
    "no hit at all": (lambda logits, label: (F.cross_entropy(logits, label), (logits > 99).sum()), NO_WEIGHT),
    "samples": (lambda logits, label: (F.cross_entropy(logits, label), len(label)), NO_WEIGHT),
    "one for two": (
        lambda logits, label: ([F.cross_entropy(logits, label), logits.pow(2).mean()], count(label)),
        NO_WEIGHT,
    ),
    "a sum": (lambda logits, label: (F.cross_entropy(logits, label, reduction="sum"), count(label)), SUM),
    "sums": (
        lambda logits, label: (
            [F.cross_entropy(logits, label, reduction="sum"), F.mse_loss(logits, 0 * logits, reduction="sum")],
            [count(label), len(label)],
        ),
        SUM,
    ),
    "a comparison": (lambda logits, label: (contrast(logits), len(label)), "they compare samples with each other"),
}


def train(loss_fn, label=LABEL):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    args = (torch.randn(16, 8),)
    plain = loss_fn(model(*args), label)[0]
    with roundpipe.compile(model, devices=["cpu"]) as compiled, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loss = compiled.forward_backward(args, label=label, loss_fn=loss_fn, run_config=RUN, loss_reduction="mean")
            compiled.zero_grad()
    return loss, plain, [str(each.message) for each in caught if "averaged the losses" in str(each.message)]


@pytest.mark.parametrize("case", RIGHT)
def test_a_weight_that_the_loss_is_divided_by_gives_the_mean_of_the_batch(case):
    label = LABEL.index_fill(0, torch.arange(4), -100) if case == "a microbatch without targets" else LABEL
    loss, plain, told = train(RIGHT[case], label)
    torch.testing.assert_close(loss, plain)
    assert not told


@pytest.mark.parametrize("case", WRONG)
def test_another_number_beside_the_loss_is_told_of_once(case):
    loss_fn, words = WRONG[case]
    loss, plain, told = train(loss_fn)
    assert not torch.allclose(torch.as_tensor(loss), torch.as_tensor(plain), rtol=1e-3)
    (text,) = told
    assert "by the weights beside them" in text
    assert words in text
