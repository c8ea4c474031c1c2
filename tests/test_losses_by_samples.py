"""Means that loss_fn makes itself: by the graph's counts, else by samples, with a word where these are not right."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from roundpipe.core import trees
from tests.runtime.models import assert_same, gradients
from tests.test_losses import KINDS, VOCABULARY, padded, wrap

WEIGHT = torch.linspace(0.1, 5, VOCABULARY, dtype=torch.float64)
SEEN = []


def each(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def target(label):
    return label[0].clamp(min=0)


def noted(loss_fn):
    """A loss that can't be traced, since it writes what it has seen as text."""

    def noting(logits, label):
        loss = loss_fn(logits, label)
        SEEN.append(f"{loss.item():.4f}")
        return loss

    return noting


def by_target(logits, label, **options):
    return F.cross_entropy(logits.flatten(0, 1), target(label).flatten(), **options)


def over_mask(logits, label):
    return (each(logits, target(label)) * label[1]).sum() / label[1].sum()


def over_clamped(logits, label):
    return (each(logits, target(label)) * label[1]).sum() / label[1].sum().clamp(min=1)


def selected(logits, label):
    return each(logits, target(label))[label[1].bool()].mean()


def by_class(logits, label):
    return by_target(logits, label, weight=WEIGHT)


def without_class(logits, label):
    return by_target(logits, label, ignore_index=0)


def root(logits, label):
    return F.mse_loss(logits.mean(-1), label[0].double()).sqrt()


def overlap(logits, label):
    first = logits.softmax(-1)[..., 0]
    return 1 - 2 * (first * label[1]).sum() / (first + label[1]).sum()


def total(logits, label):
    return by_target(logits, label, reduction="sum")


def over_more(logits, label):
    """A divisor that is no sum, but made of one; microbatches without targets count as well."""
    return (each(logits, target(label)) * label[1]).sum() / (0.5 * label[1].sum() + 3)


def over_number(logits, label):
    return -2 * each(logits, target(label)).sum() / label[0].numel() + 0.1 * F.cross_entropy(
        logits[:, 0], target(label)[:, 0]
    )


def by_hand(logits, label):
    chosen = logits.log_softmax(-1).gather(-1, target(label).unsqueeze(-1)).squeeze(-1)
    return -(chosen * label[1]).sum() / label[1].sum()


def with_elements(logits, label):
    return by_target(logits, label, ignore_index=0) + 0.3 * logits.logsumexp(-1).square().mean()


def two_quotients(logits, label):
    return [over_mask(logits, label), over_clamped(-logits, label) + over_more(logits, label)]


def by_sample(logits, label):
    return ((each(logits, target(label)) * label[1]).sum(1) / label[1].sum(1).clamp(min=1)).mean()


def squares(logits, label):
    return (logits.mean(-1) - target(label)).square().mean(0).sum()


def over_length(logits, label):
    return each(logits, target(label)).sum() / len(label[0]) + 0.1 * logits.logsumexp(-1).square().mean()


PENALTY = nn.Parameter(torch.ones(3).double())


def penalised(logits, label):
    return F.mse_loss(logits.mean(-1), label[0].double()) + PENALTY.square().sum()


def run(kind, loss_fn, label, num=2, calls=1, returned=None, **options):
    """Whether a call gives the loss and the gradients of the whole batch, and what it warns of."""
    model, piped = wrap(kind, devices=["cpu"] * 2, model_run_config=RoundPipeRunConfig(num, **options))
    reference, (ids, _) = copy.deepcopy(model), padded(len(label[0]))
    expected = loss_fn(reference(ids), label)
    torch.autograd.backward(expected)
    PENALTY.grad = None
    with piped, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            model.zero_grad()
            loss = piped.forward_backward((ids,), label=label, loss_fn=returned or loss_fn, loss_reduction="mean")
            piped.synchronize()
    PENALTY.grad = None
    texts = [str(each.message) for each in caught if "nothing overlaps" not in str(each.message)]
    try:
        torch.testing.assert_close(loss, trees.map_tensors(expected, torch.Tensor.detach), rtol=0, atol=1e-12)
        assert_same(gradients(model), gradients(reference), 1e-12)
    except AssertionError:
        return False, texts
    return True, texts


def masked(size=7):
    _, labels = padded(size)
    return labels, (labels != -100).double()


def contrastive(logits, label):
    first, second = logits[:, 0], logits[:, 1]
    return F.cross_entropy(first @ second.T, torch.arange(len(logits)))


WRONG = {
    "a comparison": (contrastive, "compare samples with each other"),
    "over a mask": (over_mask, "not in proportion"),
    "over a clamped mask": (over_clamped, "not in proportion"),
    "of selected targets": (selected, "not in proportion"),
    "by classes": (by_class, "not in proportion"),
    "without a class": (without_class, "not in proportion"),
    "a root": (root, "a function of means"),
    "an overlap": (overlap, "a function of means"),
    "a sum": (total, "loss_fn gives sums"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("num", [2, 3])
def test_a_loss_that_is_no_mean_over_samples_is_told_of_once(kind, name, num):
    loss_fn, words = WRONG[name]
    is_right, texts = run(kind, loss_fn, masked(), num, calls=2, returned=noted(loss_fn))
    assert not is_right and len(texts) == 1 and words in texts[0]
    is_right, texts = run(kind, loss_fn, masked(), num, calls=2)
    assert is_right != bool(texts)


COUNTED = [over_mask, over_clamped, over_more, over_number, by_hand, with_elements, two_quotients]


@pytest.mark.parametrize("loss_fn", COUNTED)
@pytest.mark.parametrize("options", [{"num": 2}, {"num": 3}, {"num": 7, "tiles": 2}, {"num": 1}])
def test_sums_over_what_label_counts_are_those_of_the_whole_batch(loss_fn, options):
    assert run("traced", loss_fn, masked(), **options) == (True, [])


def test_a_mean_over_a_mask_of_zeros_is_what_it_is_for_the_whole_batch():
    labels, mask = masked()
    assert run("traced", over_clamped, (labels, torch.zeros_like(mask)), 3) == (True, [])


def test_what_all_microbatches_have_in_common_is_no_count_of_theirs():
    """Also if it has as many elements as a microbatch has samples."""

    def over_common(logits, label):
        return (each(logits, target(label)) * label[1]).sum() / label[2].sum()

    is_right, texts = run("traced", over_common, (*masked(12), torch.ones(3).double()), 5)
    assert not is_right and "every microbatch gets the whole tensor" in texts[0] and "loss_fn gives sums" in texts[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss_fn", [by_sample, squares, over_length, penalised])
@pytest.mark.parametrize("num", [2, 3])
def test_a_mean_over_samples_is_right_without_a_word(kind, loss_fn, num):
    for returned in (loss_fn, noted(loss_fn)):
        assert run(kind, loss_fn, masked(), num, returned=returned) == (True, [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss_fn", [over_mask, selected, by_class])
def test_microbatches_that_count_the_same_are_right_without_a_word(kind, loss_fn):
    labels = torch.arange(5).repeat(6, 1)
    labels[:, 3:] = -100
    for returned in (loss_fn, noted(loss_fn)):
        assert run(kind, loss_fn, (labels, (labels != -100).double()), 3, returned=returned) == (True, [])


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_that_the_warning_asks_for_makes_it_right(kind):
    for returned in (over_mask, by_class):
        weigh = (lambda label: label[1].sum()) if returned is over_mask else (lambda label: WEIGHT[target(label)].sum())
        given = noted(returned)
        assert run(
            kind, returned, masked(), 3, returned=lambda x, y, f=given, w=weigh: (f(x, y).nan_to_num(), w(y))
        ) == (
            True,
            [],
        )


def test_a_models_own_mean_over_samples_is_right_without_a_word():
    """Where there is no graph of the model, autograd's shows it."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x, y):
            return {"loss": F.mse_loss(self.linear(x), y)}

    model = Own().double()
    reference, (x, y) = copy.deepcopy(model), (torch.randn(7, 3).double(), torch.randn(7, 2).double())
    expected = reference(x, y)["loss"]
    expected.backward()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped, warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = piped.forward_backward((x, y), loss_fn=lambda outputs, _: outputs["loss"], loss_reduction="mean")
        piped.synchronize()
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
        assert_same(gradients(model), gradients(reference), 1e-12)


def test_what_keeps_a_loss_from_being_counted_is_named():
    def logging(logits, label):
        loss = over_mask(logits, label)
        float(loss.detach())
        return loss

    is_right, texts = run("traced", logging, masked(), 3)
    assert not is_right
    assert "but there is none: at " in texts[0] and "float(loss.detach())" in texts[0]
