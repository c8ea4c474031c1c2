"""Means by weights of classes, which count by what the targets of each microbatch weigh: against eager."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.runtime.models import assert_same, gradients
from tests.test_losses import VOCABULARY, Tokens, padded

WEIGHT = torch.linspace(0.1, 5, VOCABULARY, dtype=torch.float64)


class Flat(Tokens):
    """Scores for each token, in one dimension with the samples."""

    def forward(self, ids):
        return super().forward(ids).transpose(1, 2)


class HasLoss(Tokens):
    """Computes the loss itself."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", WEIGHT.clone())

    def forward(self, ids, labels):
        logits = super().forward(ids)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=self.weight), "logits": logits}


def smoothed(scores, labels):
    return F.cross_entropy(scores, labels, weight=WEIGHT, label_smoothing=0.1)


def made_inside(scores, labels):
    weight = torch.tensor([0.5] * 4 + [2.0] * (VOCABULARY - 4), dtype=torch.float64)
    return F.cross_entropy(scores, labels, weight=weight, ignore_index=3)


def likelihood(scores, labels):
    return 2 * F.nll_loss(F.log_softmax(scores, 1), labels, weight=WEIGHT.to(scores.device))


LOSSES = {
    "module": nn.CrossEntropyLoss(weight=WEIGHT),
    "smoothed": smoothed,
    "made inside": made_inside,
    "likelihood": likelihood,
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("num", [2, 3])
def test_a_mean_by_classes_is_that_of_the_whole_batch(name, num):
    model, loss_fn = Flat().double(), LOSSES[name]
    reference = copy.deepcopy(model)
    ids, labels = padded()
    labels[labels == -100] = 3 if name == "made inside" else -100
    expected = loss_fn(reference(ids), labels)
    expected.backward()
    with roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=RoundPipeRunConfig(num)) as piped:
        loss = piped.forward_backward((ids,), label=labels, loss_fn=loss_fn, loss_reduction="mean")
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
        piped.synchronize()
        assert_same(gradients(model), gradients(reference), 1e-12)


def test_weights_of_classes_that_change_between_calls():
    model, loss_fn = Flat().double(), nn.CrossEntropyLoss(weight=WEIGHT.clone())
    ids, labels = padded()
    with roundpipe.compile(model, devices=["cpu"], model_run_config=RoundPipeRunConfig(3)) as piped:
        for change in range(3):
            if change == 1:
                loss_fn.weight.copy_(WEIGHT.flip(0))
            if change == 2:
                loss_fn.weight = WEIGHT.square()
            with torch.no_grad():
                expected = loss_fn(model(ids), labels)
            loss = piped.forward_loss((ids,), label=labels, loss_fn=loss_fn, loss_reduction="mean")
            torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)


def test_a_models_own_mean_by_classes():
    model = HasLoss().double()
    reference = copy.deepcopy(model)
    ids, labels = padded()
    expected = reference(ids, labels)["loss"]
    expected.backward()
    with roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=RoundPipeRunConfig(3)) as piped:
        loss = piped.forward_backward(
            (ids, labels), loss_fn=lambda outputs, label: outputs["loss"], loss_reduction="mean"
        )
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
        piped.synchronize()
        assert_same(gradients(model), gradients(reference), 1e-12)
        with torch.no_grad():
            torch.testing.assert_close(piped(ids, labels)["loss"], expected.detach(), rtol=0, atol=1e-12)
