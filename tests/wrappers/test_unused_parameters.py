"""Loops whose optimizer is stepped by itself, where some steps give some parameters no gradient."""

import copy

import pytest
import torch
from torch import nn

import roundpipe
from tests.runtime.models import DTYPE, assert_same, batch, mlp, square_loss

LISTS = {"copies": lambda piped: piped.optim_parameters(), "own": lambda piped: piped.model.parameters()}
lists = pytest.mark.parametrize("parameters", LISTS.values(), ids=LISTS)


class Branches(nn.Module):
    """The second branch is used if asked for."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, both: bool):
        hidden = self.first(x)
        return self.head(hidden + self.second(x) if both else hidden)


@lists
@pytest.mark.parametrize("is_cleared_first", [False, True])
@pytest.mark.parametrize("uses_both", [lambda number: number % 2 == 0, lambda number: False], ids=["at times", "never"])
@pytest.mark.filterwarnings("error:gradients came")
def test_a_parameter_that_is_not_used(uses_both, parameters, is_cleared_first):
    torch.manual_seed(0)
    model = Branches().to(DTYPE)
    expected = copy.deepcopy(model)
    plain = torch.optim.AdamW(expected.parameters(), lr=0.05)
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.AdamW(parameters(piped), lr=0.05)
        for number in range(5):
            for module, own in ((piped, optimizer), (expected, plain)):
                if is_cleared_first:
                    own.zero_grad()
                square_loss(module(batch(seed=number), both=uses_both(number)), None).backward()
                own.step()
                if not is_cleared_first:
                    own.zero_grad()
    assert_same(model.state_dict(), expected.state_dict())


@lists
@pytest.mark.filterwarnings("error:gradients came")
def test_an_optimizer_that_evaluates_the_loss_itself(parameters):
    torch.manual_seed(0)
    model = mlp()
    expected = copy.deepcopy(model)

    def closure(module, own, number):
        def evaluate():
            own.zero_grad()
            loss = square_loss(module(batch(seed=number)), None)
            loss.backward()
            return loss

        return evaluate

    plain = torch.optim.LBFGS(expected.parameters(), lr=0.05, max_iter=3)
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.LBFGS(parameters(piped), lr=0.05, max_iter=3)
        for number in range(3):
            optimizer.step(closure(piped, optimizer, number))
            plain.step(closure(expected, plain, number))
    assert_same(model.state_dict(), expected.state_dict())
