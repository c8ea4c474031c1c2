"""Losses of all samples together that are cut into microbatches: told of once, with a way out that is exact."""

import copy
import logging
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.runtime.models import assert_same, gradients

NUMBER = 10


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).double()


def batch(number=NUMBER):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(number, 6, generator=generator).double()
    label = {
        "class": torch.randint(4, (number,), generator=generator),
        "reward": torch.randn(number, generator=generator).double(),
        "mask": torch.randint(2, (number, 4), generator=generator).double(),
    }
    return x, label


def halves(x, label):
    return x[: len(x) // 2], x[len(x) // 2 :]


def of_views(x, label):
    first, second = x.chunk(2)
    return -F.cosine_similarity(first, second.detach()).mean()


def preferred(x, label):
    better, worse = halves(x.log_softmax(-1)[:, 0], label)
    return -F.logsigmoid(0.1 * (better - worse)).mean()


def advantages(x, label):
    normalised = (label["reward"] - label["reward"].mean()) / (label["reward"].std() + 1e-4)
    return -(x.log_softmax(-1).gather(1, label["class"][:, None])[:, 0] * normalised).mean()


def variance(x, label):
    return F.relu(1 - (x.var(0) + 1e-4).sqrt()).mean()


def centred(x, label):
    return F.cross_entropy(x - x.mean(0), label["class"])


def interleaved(x, label):
    return -F.logsigmoid(x[0::2] - x[1::2]).mean()


def overlap(x, label):
    p, mask = x.sigmoid(), label["mask"]
    return 1 - (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)


def overlap_of_classes(x, label):
    p, mask = x.sigmoid(), label["mask"]
    return (1 - (2 * (p * mask).sum(0) + 1) / (p.sum(0) + mask.sum(0) + 1)).mean()


MIXED = {
    of_views: "compare samples with each other",
    preferred: "compare samples with each other",
    advantages: "compare samples with each other",
    variance: "compare samples with each other",
    centred: "compare samples with each other",
    interleaved: "compare samples with each other",
    overlap: "a quotient of two",
    overlap_of_classes: "a quotient of two",
}


def calls(loss_fn, number=NUMBER, times=1, **options):
    """Whether calls give loss and gradients of the whole batch, and what they warn of."""
    model = network()
    reference, (x, label) = copy.deepcopy(model), batch(number)
    expected = loss_fn(reference(x), label)
    expected.backward()
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            model.zero_grad()
            loss = piped.forward_backward((x,), label=label, loss_fn=loss_fn, **options)
            piped.synchronize()
    try:
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
        assert_same(gradients(model), gradients(reference), 1e-12)
    except AssertionError:
        return False, [str(each.message) for each in caught]
    return True, [str(each.message) for each in caught]


@pytest.mark.parametrize("loss_fn", MIXED)
def test_a_loss_that_mixes_samples_is_told_of_once_and_exact_for_the_batch(loss_fn):
    options = {"loss_reduction": "mean", "run_config": RoundPipeRunConfig(3)}
    is_right, texts = calls(loss_fn, times=2, **options)
    assert not is_right and len(texts) == 1 and MIXED[loss_fn] in texts[0] and "loss_scope='batch'" in texts[0]
    assert calls(loss_fn, loss_scope="batch") == (True, [])
    assert calls(loss_fn, loss_reduction="mean", run_config=RoundPipeRunConfig(1)) == (True, [])


def test_pairs_of_neighbours_in_microbatches_that_split_none_are_right_without_a_word():
    options = {"loss_reduction": "mean", "run_config": RoundPipeRunConfig(3)}
    assert calls(interleaved, 12, **options) == (True, [])


def test_torch_logs_nothing_of_sizes_that_are_tried():
    """As long as a trace is for pairs, other sizes don't fit it."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    try:
        model = nn.Sequential(network(), nn.Linear(4, 3).double())
        with roundpipe.compile(model, devices=["cpu"] * 2) as piped, pytest.warns(UserWarning, match="samples"):
            piped.forward_backward((batch()[0],), loss_fn=interleaved, loss_reduction="mean")
    finally:
        log.removeHandler(handler)
    assert not records


class OwnLoss(nn.Module):
    """A model that computes a loss of two encoders, or of two views, itself."""

    def __init__(self, compare):
        super().__init__()
        self.first, self.second = network(), network()
        self.scale = nn.Parameter(torch.tensor(1.0).double())
        self.compare = compare

    def forward(self, x):
        loss = self.compare(self.scale, F.normalize(self.first(x), dim=-1), F.normalize(self.second(-x), dim=-1))
        return {"loss": loss}


def contrastive(scale, first, second):
    scores, targets = first @ second.T * scale.exp(), torch.arange(len(first))
    return (F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)) / 2


def two_views(scale, first, second):
    views = (first * scale + second).chunk(2)
    return (views[0] - views[1]).square().mean()


def centred_targets(scale, first, second):
    return F.cross_entropy(first - first.mean(0), second.detach().argmax(-1))


@pytest.mark.parametrize("compare", [contrastive, two_views, centred_targets])
@pytest.mark.parametrize("reduction", ["mean", "sum", None])
@pytest.mark.parametrize("call", ["forward_backward", "forward_loss"])
def test_a_models_own_loss_that_compares_samples_is_told_of_once(compare, reduction, call):
    model, (x, _) = OwnLoss(compare), batch(12)
    expected = model(x)["loss"].detach()
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            getattr(piped, call)((x,), loss_fn=lambda outputs, _: outputs["loss"], loss_reduction=reduction)
        texts = [str(each.message) for each in caught]
        assert len(texts) == 1 and "OwnLoss computes itself compares samples with each other" in texts[0]
        assert "num_microbatch=1" in texts[0] and "loss_scope='batch'" in texts[0]
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped, warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = getattr(piped, call)(
            (x,), loss_fn=lambda outputs, _: outputs["loss"], run_config=RoundPipeRunConfig(1, loss_reduction=reduction)
        )
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)


def test_a_models_own_comparison_beside_a_term_of_loss_fn_is_told_of():
    with roundpipe.compile(OwnLoss(contrastive), devices=["cpu"] * 2) as piped:
        with pytest.warns(UserWarning, match="num_microbatch=1, if the model itself compares them"):
            piped.forward_backward(
                (batch()[0],), loss_fn=lambda outputs, _: 0.5 * outputs["loss"] + 1, loss_reduction="mean"
            )


class Recurrent(nn.Module):
    """Takes samples along the second dimension, and has each step's output predict the next step's input."""

    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        predicted = self.head(self.gru(x)[0])
        return {"loss": F.mse_loss(predicted[:-1], x[1:]), "predicted": predicted}


@pytest.mark.parametrize("is_own", [True, False])
def test_steps_along_the_first_dimension_are_no_samples(is_own):
    torch.manual_seed(0)
    model = Recurrent().double()
    reference, x = copy.deepcopy(model), torch.randn(6, 6, 6).double()
    expected = reference(x)["loss"]
    expected.backward()

    def loss_fn(outputs, label):
        return outputs["loss"] if is_own else F.mse_loss(outputs["predicted"][:-1], label[1:])

    spec = TensorChunkSpec(1)
    config = RoundPipeRunConfig(3, loss_reduction="mean", split_input=((spec,), None), split_label=spec)
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped, warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = piped.forward_backward((x,), label=x, loss_fn=loss_fn, run_config=config)
        piped.synchronize()
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
        assert_same(gradients(model), gradients(reference), 1e-12)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda h: (h @ h.T).logsumexp(1).mean(), "compares samples with each other"),
        (lambda h: (h.softmax(-1).mean(0) * h.mean(0)).sum(), "has products or other functions of means"),
    ],
    ids=["a contrastive one", "a balancing one"],
)
def test_a_scalar_of_a_plain_call_is_told_of_by_how_it_mixes(loss, words):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            h = self.linear(x)
            return h, loss(h)

    with roundpipe.compile(Own(), devices=["cpu"] * 2) as piped:
        with pytest.warns(UserWarning, match=rf"output\[1\] of Own {words}.*use num_microbatch=1"):
            piped(torch.randn(9, 6))
