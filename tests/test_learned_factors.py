"""Means in loss_fn with learned factors: exact whosever the weights are, which get their gradients."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.runtime.models import assert_same, gradients


class TwoTasks(nn.Module):
    """Scores of classes, of which some don't count, and values; with a log-variance of each task."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.classes, self.values = nn.Linear(16, 3), nn.Linear(16, 1)
        self.certain = nn.Module()
        self.certain.scale = nn.Parameter(torch.tensor(1.2))
        self.log_variances = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x):
        hidden = self.body(x)
        return self.classes(hidden), self.values(hidden)


class Uncertain(nn.Module):
    """A loss by a log-variance that is learned, as by Kendall, Gal and Cipolla."""

    def __init__(self):
        super().__init__()
        self.log_variance = nn.Parameter(torch.tensor(0.4))

    def forward(self, loss):
        return torch.exp(-self.log_variance) * loss + self.log_variance


class Criterion(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.tasks = nn.ModuleList([Uncertain(), Uncertain()]) if depth else None
        self.log_variances = nn.Parameter(torch.tensor([0.1, 0.2]))

    def forward(self, outputs, label):
        first, second = losses(outputs, label)
        if self.tasks is not None:
            return self.tasks[0](first) + self.tasks[1](second)
        return weighed(self.log_variances, first, second)


def losses(outputs, label):
    return F.cross_entropy(outputs[0], label["class"]), F.mse_loss(outputs[1], label["value"])


def weighed(log_variances, first, second):
    return (-log_variances[0]).exp() * first + (-log_variances[1]).exp() * second + log_variances.sum()


def of_model(model, criterion):
    return lambda outputs, label: weighed(model.log_variances, *losses(outputs, label))


def of_parts(model, criterion):
    def loss_fn(outputs, label):
        first, second = losses(outputs, label)
        return first / model.certain.scale.square() + model.certain.scale * second

    return loss_fn


def by_module(model, criterion):
    return criterion


def in_closure(model, criterion):
    return lambda outputs, label: 0.5 * criterion(outputs, label)


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, 8, generator=generator).double()
    classes = torch.randint(3, (11,), generator=generator)
    classes[:3] = -100
    return x, {"class": classes, "value": torch.randn(11, 1, generator=generator).double()}


@pytest.mark.parametrize("make", [of_model, of_parts, by_module, in_closure])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num", [2, 3])
def test_each_mean_counts_by_its_targets_with_a_learned_factor(make, depth, num):
    torch.manual_seed(0)
    both = nn.ModuleList([TwoTasks(), Criterion(depth)]).double()
    reference, (x, label) = copy.deepcopy(both), data()
    config = RoundPipeRunConfig(num, loss_reduction="mean")
    with roundpipe.compile(both[0], devices=["cpu"] * 2, model_run_config=config) as piped, warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = torch.optim.SGD([*piped.optim_parameters(), *both[1].parameters()], lr=0.1)
        other = torch.optim.SGD(reference.parameters(), lr=0.1)
        loss_fn, eager = make(*both), make(*reference)
        for _ in range(3):
            expected = eager(reference[0](x), label)
            expected.backward()
            loss = piped.forward_backward((x,), label=label, loss_fn=loss_fn)
            piped.synchronize()
            torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
            assert_same(gradients(both), gradients(reference), 1e-12)
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            other.step()
            other.zero_grad()
