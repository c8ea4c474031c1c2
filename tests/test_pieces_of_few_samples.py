"""Batches that must not be cut, although their pieces run: one sample for which something is repeated, models whose
outputs are not of the samples that are cut, and forwards that make gradients.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.runtime.models import assert_same, gradients

WIDTH = 6


class Masked(nn.Module):
    """Attention with a mask that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.last(F.scaled_dot_product_attention(*self.first(x).chunk(3, -1), attn_mask=mask))


class Placed(nn.Module):
    """Adds a table of positions that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x) + table))


class Stateful(nn.Module):
    """Takes a state whose samples are in dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x) + state[index])
        return x


class Prototypes(nn.Module):
    """Compares queries with a support set, which comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, support: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        centres = self.encoder(support).view(-1, WIDTH // 2, 8).mean(0)
        return -torch.cdist(self.encoder(query), centres)


class Adapting(nn.Module):
    """Takes a step of gradient descent for a support set."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, support: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        loss = self.last(torch.tanh(self.first(support))).square().mean()
        (gradient,) = torch.autograd.grad(loss, self.last.weight, create_graph=True)
        return F.linear(torch.tanh(self.first(query)), self.last.weight - 0.5 * gradient)


def double(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


CASES: list[tuple[type[nn.Module], tuple[torch.Tensor, ...]]] = [
    (Masked, (double(3, 3, WIDTH), torch.ones(3, 3, dtype=torch.bool).tril())),
    (Placed, (double(3, 3, WIDTH), double(3, WIDTH))),
    (Stateful, (double(3, WIDTH), double(4, 3, WIDTH))),
    (Prototypes, (double(6, WIDTH), double(9, WIDTH))),
    (Adapting, (double(6, WIDTH), double(6, WIDTH))),
]


@contextmanager
def pair(kind: Callable[[], nn.Module]) -> Iterator[tuple[Any, nn.Module, nn.Module]]:
    torch.manual_seed(0)
    net = kind().double()
    reference = copy.deepcopy(net)
    with roundpipe.compile(net, devices=["cpu", "cpu"]) as piped:
        yield piped, net, reference


@pytest.mark.parametrize(("kind", "arguments"), CASES, ids=[kind.__name__ for kind, _ in CASES])
def test_by_default_they_are_not_cut(kind: type[nn.Module], arguments: tuple[torch.Tensor, ...]) -> None:
    with pair(kind) as (piped, net, reference):
        expected = reference(*arguments)
        label = torch.randn_like(expected)
        F.mse_loss(expected, label).backward()
        with pytest.warns(UserWarning, match="microbatch"):
            loss = piped.forward_backward(arguments, label=label, loss_fn=F.mse_loss, loss_reduction="mean")
        piped.synchronize()
        torch.testing.assert_close(loss, F.mse_loss(expected, label).detach())
        assert_same(gradients(net), gradients(reference))
        torch.testing.assert_close(piped(*arguments), expected)


@pytest.mark.parametrize(("kind", "arguments"), CASES[:3], ids=[kind.__name__ for kind, _ in CASES[:3]])
def test_a_number_that_is_given_stays_and_what_differs_is_said(
    kind: type[nn.Module], arguments: tuple[torch.Tensor, ...]
) -> None:
    with pair(kind) as (piped, _, reference):
        label = torch.randn_like(reference(*arguments))
        options = {"loss_fn": F.mse_loss, "loss_reduction": "mean", "run_config": RoundPipeRunConfig(num_microbatch=3)}
        with pytest.warns(UserWarning, match="microbatches of one sample run, and of two they don't"):
            piped.forward_backward(arguments, label=label, **options)


class OneAtATime(nn.Module):
    """Can't run two samples, so that nothing is to be said of one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)).view(1, WIDTH))


def test_what_takes_one_sample_only_may_be_given_them_one_by_one() -> None:
    x, label = double(4, WIDTH), double(4, WIDTH)
    with pair(OneAtATime) as (piped, _, reference):
        expected = F.mse_loss(torch.cat([reference(row) for row in x.split(1)]), label)
        config = RoundPipeRunConfig(num_microbatch=4)
        with warnings.catch_warnings(action="error"):
            loss = piped.forward_backward(
                (x,), label=label, loss_fn=F.mse_loss, loss_reduction="mean", run_config=config
            )
        torch.testing.assert_close(loss, expected.detach())


class Equilibrium(nn.Module):
    """Has a hook at an activation while it is trained, which raises where no gradients are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.tanh(self.layer(x) + x)
        if self.training:
            z.register_hook(lambda gradient: 2 * gradient)
        return z


@pytest.mark.parametrize("is_classic", [False, True])
def test_a_hook_at_an_activation_of_an_early_layer(is_classic: bool) -> None:
    def make() -> nn.Module:
        rest = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(5))
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Equilibrium(), *rest)

    x, label = double(7, WIDTH), torch.randint(WIDTH, (7,))
    with pair(make) as (piped, net, reference):
        F.cross_entropy(reference(x), label).backward()
        if is_classic:
            F.cross_entropy(piped(x), label).backward()
        else:
            piped.forward_backward((x,), label=label, loss_fn=F.cross_entropy, loss_reduction="mean")
        piped.synchronize()
        assert_same(gradients(net), gradients(reference))


class Rows(nn.Module):
    """Can't be traced if it draws."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.layer, self.draws = nn.Linear(WIDTH, WIDTH), draws

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + (0.0 * random.random() if self.draws else 0.0)


@pytest.mark.parametrize("given", [None, 3], ids=["default", "given"])
@pytest.mark.parametrize("draws", [False, True], ids=["traced", "in parts"])
def test_fewer_samples_than_microbatches_that_somebody_asked_for_are_said_once(draws: bool, given: int | None) -> None:
    options = RoundPipeRunConfig(num_microbatch=given)
    for _ in range(2):
        with pair(lambda: Rows(draws)) as (piped, _, reference), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in (1, 1, 2, 6, 1):
                x = double(number, WIDTH)
                torch.testing.assert_close(piped(x, roundpipe_run_config=options), reference(x))
        told = [str(each.message) for each in caught if "so it runs as" in str(each.message)]
        assert told == ["the batch has 1 sample, so it runs as 1 microbatch instead of 3"][: given or 0]
