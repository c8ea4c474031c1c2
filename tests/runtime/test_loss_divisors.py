"""What autograd's graph of a loss shows: names and fields of its nodes, which are private to torch, are as expected."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roundpipe.core.allocations import Allocations
from roundpipe.runtime.engine.loss_divisors import LossPart, ends_of, terms_of, verdict

SCALE = nn.Parameter(torch.tensor(0.5))
LABELS = torch.tensor([[0, 1, -100], [2, -100, -100], [3, 3, 3], [4, 0, -100]])
WEIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
MASK = (LABELS != -100).float()
NUMBER = MASK.sum().item()
DIVIDED, UNKNOWN, BENT, SUM, COMPARES = "divided", "unknown", "not linear", "sum", "compares samples"


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def entropy(x, **options):
    return F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), **options)


def ordered(x):
    return torch.arange(len(x))


def each(x):
    return entropy(x, reduction="none").view(MASK.shape)


LOSSES = {
    "targets": (entropy, [(DIVIDED, NUMBER)]),
    "classes": (lambda x: entropy(x, weight=WEIGHT), [(DIVIDED, WEIGHT[LABELS[LABELS >= 0]].sum().item())]),
    "in two dimensions": (lambda x: F.cross_entropy(x.transpose(1, 2), LABELS), [(DIVIDED, NUMBER)]),
    "smoothed": (lambda x: entropy(x, label_smoothing=0.2), [(DIVIDED, NUMBER / 0.8), (DIVIDED, NUMBER / 0.04)]),
    "probabilities": (lambda x: F.cross_entropy(x[:, 0], x[:, 1].detach().softmax(-1)), [(DIVIDED, 4)]),
    "targets as a sum": (lambda x: entropy(x, reduction="sum"), [(SUM, 1)]),
    "elements": (lambda x: F.mse_loss(x, torch.zeros_like(x)), [(DIVIDED, 60)]),
    "logits": (lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x)), [(DIVIDED, 60)]),
    "absolute": (lambda x: F.l1_loss(x, torch.zeros_like(x)), [(DIVIDED, 60)]),
    "divergence": (lambda x: F.kl_div(x, x.detach().exp(), reduction="batchmean"), [(DIVIDED, 4)]),
    "a mask": (lambda x: (each(x) * MASK).sum() / MASK.sum(), [(DIVIDED, NUMBER)]),
    "a number": (lambda x: each(x).sum() / 12, [(DIVIDED, 12)]),
    "a factor": (lambda x: 0.25 * each(x).sum(), [(DIVIDED, 4)]),
    "negative": (lambda x: 1 - -(each(x).sum() / 3) + 2, [(DIVIDED, 3)]),
    "samples": (lambda x: (each(x).sum(1) / MASK.sum(1)).mean(), [(DIVIDED, 4)]),
    "samples, then elements": (lambda x: x.square().mean(0).sum(), [(DIVIDED, 4)]),
    "selected": (lambda x: each(x)[MASK.bool()].mean(), [(DIVIDED, NUMBER)]),
    "in another dtype": (lambda x: (each(x).sum() / 2).double().clone().view(1).squeeze(), [(DIVIDED, 2)]),
    "two": (lambda x: entropy(x) + 0.5 * x.square().mean(), [(DIVIDED, NUMBER), (DIVIDED, 120)]),
    "in a list": (lambda x: torch.stack([entropy(x), x.mean()]).mean(), [(DIVIDED, 2 * NUMBER), (DIVIDED, 120)]),
    "weights": (lambda x: entropy(x) + SCALE.exp().sqrt() + (3 * SCALE).sum(), [(DIVIDED, NUMBER)]),
    "by a weight": (lambda x: entropy(x) * torch.exp(-SCALE), [(DIVIDED, NUMBER / torch.exp(-SCALE).item())]),
    "over a weight": (lambda x: entropy(x) / SCALE, [(DIVIDED, NUMBER / 2)]),
    "a sum of elements": (lambda x: x.square().sum(), [(UNKNOWN, 1)]),
    "scalars by weights": (lambda x: (torch.stack([entropy(x), x.mean()]) * WEIGHT[:2]).mean(), [(UNKNOWN, 1)]),
    "a function of its own": (lambda x: Double.apply(entropy(x)), [(UNKNOWN, 1)]),
    "flooded": (lambda x: (entropy(x) - 0.1).abs() + 0.1, [(BENT, 1)]),
    "similarities": (lambda x: F.cross_entropy(x[:, 0] @ x[:, 1].T, ordered(x)), [(COMPARES, 1)]),
    "distances": (lambda x: torch.cdist(x[:, 0], x[:, 1]).mean() + x.mean(), [(COMPARES, 1), (DIVIDED, 60)]),
    "distances of pairs": (lambda x: F.pdist(x.flatten(1)).sum() / 6, [(COMPARES, 1)]),
    "in each sample": (lambda x: sum((each @ each.T).mean() for each in x) / 4, [(UNKNOWN, 4)] * 4),
    "products in each sample": (lambda x: (x @ x.transpose(1, 2)).mean(), [(DIVIDED, 36)]),
    "products with weights": (lambda x: (x.flatten(1) @ SCALE.expand(15, 2)).mean(), [(DIVIDED, 8)]),
    "a root": (lambda x: x.square().mean().sqrt(), [(BENT, 1)]),
    "a product": (lambda x: entropy(x) * x.square().mean(), [(BENT, 1)]),
    "over outputs": (lambda x: 3 / x.square().mean(), [(BENT, 1)]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_terms(name):
    torch.manual_seed(0)
    loss_fn, expected = LOSSES[name]
    outputs = torch.randn(4, 3, 5, requires_grad=True) * 1
    found = [(term.kind, term.divisor()) for term in terms_of(loss_fn(outputs), ends_of({"logits": outputs}))]
    assert [kind for kind, _ in found] == [kind for kind, _ in expected]
    torch.testing.assert_close([number for _, number in found], [float(number) for _, number in expected])


def test_outputs_that_are_leaves_or_scalars_or_not_known():
    leaf = torch.randn(4, requires_grad=True)
    assert terms_of(leaf.mean(), ends_of(leaf)) == [LossPart(DIVIDED, (4.0,), others=())]
    scalar = leaf.mean()
    assert terms_of(scalar / 3, ends_of(scalar)) == [LossPart(UNKNOWN, (3.0,))]
    assert terms_of(scalar) == [LossPart(DIVIDED, (4.0,), others=())]
    assert terms_of(scalar.sqrt()) == [LossPart(UNKNOWN)], "it may be of weights"
    assert terms_of(scalar.detach()) == [LossPart(UNKNOWN)]
    assert ends_of([leaf.detach(), 3]) == frozenset()


def test_means_are_told_from_sums_and_from_what_something_else_divides():
    x = torch.randn(4, 6, requires_grad=True)
    target = torch.tensor([0, 1, -100, 2])
    means = [x.mean(), x.mean(1).mean(), F.cross_entropy(x, target), 2 * x.square().mean() + x.sum()]
    for loss in means:
        assert any(term.is_mean() for term in terms_of(loss)), loss
    each = [F.cross_entropy(a, b) for a, b in zip(x, target.clamp(min=0), strict=True)]
    sums = [x.sum(), x.mean(1).sum(), F.cross_entropy(x, target, reduction="sum") / 4, torch.stack(each).sum()]
    assert any(term.is_mean() for term in terms_of(torch.stack(each).mean()))
    for loss in (*sums, x.mean() / 3, x.mean() * 3 / 7, x.norm()):
        assert not any(term.is_mean() for term in terms_of(loss)), loss


@pytest.mark.parametrize(
    ("terms", "shares", "expected"),
    [
        ([[LossPart(DIVIDED, (2.0,))], [LossPart(DIVIDED, (4.0,))]], [1 / 3, 2 / 3], "right"),
        ([[LossPart(UNKNOWN, (2.0,))], [LossPart(UNKNOWN, (4.0,))]], [1 / 2, 1 / 2], "not by samples"),
        ([[LossPart(UNKNOWN, (2.0,))], [LossPart(UNKNOWN, (2.0,))]], [1 / 3, 2 / 3], "unknown"),
        ([[LossPart(DIVIDED, (2.0,))], [LossPart(DIVIDED, (4.0,))]], [0.5, 0.5], "not by samples"),
        ([[LossPart(DIVIDED, (0.0,))], [LossPart(DIVIDED, (4.0,))]], [0.5, 0.5], "not by samples"),
        ([[LossPart(DIVIDED, (torch.tensor(256.0).half(),))], [LossPart(DIVIDED, (257.0,))]], [0.5, 0.5], "right"),
        ([[LossPart(SUM)], [LossPart(SUM)]], [0.5, 0.5], "sum"),
        ([[LossPart(SUM), LossPart(SUM)]] * 2, [0.5, 0.5], "sum"),
        ([[LossPart(SUM), LossPart(DIVIDED, (2.0,))]] * 2, [0.5, 0.5], "not by samples"),
        ([[LossPart(BENT)], [LossPart(BENT)]], [0.5, 0.5], "not linear"),
        ([[LossPart(COMPARES), LossPart(SUM)]] * 2, [0.5, 0.5], "compares samples"),
        ([[LossPart(UNKNOWN)], [LossPart(DIVIDED, (2.0,))]], [0.5, 0.5], "unknown"),
        ([[LossPart(DIVIDED, (2.0,))], []], [0.5, 0.5], "unknown"),
        ([[], []], [0.5, 0.5], "right"),
    ],
)
def test_verdicts(terms, shares, expected):
    assert verdict(terms, shares) == expected


def test_numbers_of_the_code_are_read_where_a_mode_counts_memory():
    x = torch.randn(4, requires_grad=True)
    with Allocations():
        (term,) = terms_of(x.sum() / 50)
    assert term.divisor() == 50
