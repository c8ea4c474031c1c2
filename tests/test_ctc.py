"""CTC losses, whose samples are in the second dimension and whose targets may lie one behind the other in one row."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.runtime.models import assert_same, gradients

NUMBER, LENGTH, CLASSES = 6, 12, 5
LENGTHS = torch.tensor([4, 1, 3, 2, 4, 1])
TARGETS = torch.arange(NUMBER * 4).view(NUMBER, 4) % (CLASSES - 1) + 1


class Speech(nn.Module):
    """Gives scores per step; with targets also the loss, as the models of transformers do."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.reduction = reduction

    def forward(self, x, targets=None, lengths=None):
        scores = self.layers(x)
        if targets is None:
            return scores
        steps = torch.full((len(x),), x.shape[1])
        row = targets[torch.arange(targets.shape[1]) < lengths[:, None]]
        log_probs = scores.log_softmax(-1).transpose(0, 1)
        return {"loss": F.ctc_loss(log_probs, row, steps, lengths, reduction=self.reduction), "scores": scores}


def by_function(reduction):
    def loss_fn(scores, label):
        steps = torch.full((len(scores),), scores.shape[1])
        return F.ctc_loss(scores.log_softmax(-1).transpose(0, 1), *label[:1], steps, label[1], 0, reduction)

    return loss_fn


def by_module(reduction):
    criterion = nn.CTCLoss(reduction=reduction)

    def loss_fn(scores, label):
        steps = torch.full((len(scores),), scores.shape[1])
        return criterion(scores.log_softmax(-1).transpose(0, 1), label[0], steps, label[1])

    return loss_fn


def own(reduction):
    return lambda outputs, _: outputs["loss"]


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("make", [by_function, by_module, own])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_and_gradients_are_those_of_the_batch(reduction, make, number):
    torch.manual_seed(1)
    model, x = Speech(reduction).double(), torch.randn(NUMBER, LENGTH, 3, dtype=torch.float64)
    reference, loss_fn = copy.deepcopy(model), make(reduction)
    args, label = ((x, TARGETS, LENGTHS), None) if make is own else ((x,), (TARGETS, LENGTHS))
    expected = loss_fn(reference(*args), label)
    expected.backward()
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped, warnings.catch_warnings():
        warnings.simplefilter("error")
        config = RoundPipeRunConfig(num_microbatch=number)
        loss = piped.forward_backward(args, label=label, loss_fn=loss_fn, loss_reduction=reduction, run_config=config)
        piped.synchronize()
    torch.testing.assert_close(loss, expected.detach())
    assert_same(gradients(model), gradients(reference), 1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_among_the_outputs_is_that_of_the_batch(reduction):
    model, x = Speech(reduction), torch.randn(NUMBER, LENGTH, 3)
    expected = model(x, TARGETS, LENGTHS)["loss"]
    config = RoundPipeRunConfig(num_microbatch=4)
    with roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=config) as piped, warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(piped(x, TARGETS, LENGTHS)["loss"], expected)


def test_a_sum_of_which_a_mean_is_made_is_told_of():
    args = torch.randn(NUMBER, LENGTH, 3), TARGETS, LENGTHS
    config = RoundPipeRunConfig(num_microbatch=3)
    with roundpipe.compile(Speech("sum"), devices=["cpu"] * 2) as piped, pytest.warns(UserWarning, match="is a sum"):
        piped.forward_backward(args, loss_fn=own("sum"), loss_reduction="mean", run_config=config)
