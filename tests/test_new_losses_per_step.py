"""Loss modules that the training loop makes anew for each step: one trace serves all that are alike."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.runtime.models import gradients

NUM_STEPS = 4
WEIGHT = torch.tensor([0.5, 1.0, 2.0])
torch.manual_seed(0)
X, Y = torch.randn(6, 5), torch.randint(3, (6,))
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


class Scaled(nn.Module):
    def __init__(self, scale: float, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.scale, self.inner, self.seen = scale, inner or nn.CrossEntropyLoss(), {"a": 1.0}

    def forward(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.scale * self.inner(outputs, label) * self.seen["a"]
        return loss


class Logging(nn.Module):
    """Leaves a value of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: Any = None

    def forward(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(outputs, label)
        self.latest = loss.detach()
        return loss


class WithWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(()) + 0.5)

    def forward(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, label) * self.factor.detach()


ALIKE: dict[str, Callable[[int], Loss]] = {
    "a class of torch": lambda step: nn.CrossEntropyLoss(ignore_index=-1),
    "one with a weight": lambda step: nn.CrossEntropyLoss(WEIGHT),
    "a class of one's own": lambda step: Scaled(0.5, nn.CrossEntropyLoss(label_smoothing=0.1)),
    "in a function": lambda step, make=nn.CrossEntropyLoss: functools.partial(
        lambda loss, *given: loss(*given), make()
    ),
    "in a closure": lambda step: (lambda criterion: lambda *given: criterion(*given))(Scaled(2.0)),
}
OTHERS: dict[str, Callable[[int], Loss]] = {
    "another number": lambda step: Scaled(0.5 + step),
    "another setting": lambda step: nn.CrossEntropyLoss(label_smoothing=0.1 * step),
    "another mode": lambda step: nn.CrossEntropyLoss(ignore_index=(-1, 0)[step % 2]),
    "another module inside": lambda step: Scaled(0.5, (nn.CrossEntropyLoss(), nn.MultiMarginLoss())[step % 2]),
    "another weight": lambda step: nn.CrossEntropyLoss(WEIGHT * (1 + step)),
    "weights of its own": lambda step: WithWeights(),
    "another class": lambda step: (nn.CrossEntropyLoss, nn.MultiMarginLoss)[step % 2](),
}


def trained(make: Callable[[int], Loss]) -> int:
    """Trains with a loss of each step's own, compared with eager mode; gives how often a loss was traced."""
    net = model()
    eager = copy.deepcopy(net)
    config = RoundPipeRunConfig(num_microbatch=3)
    with roundpipe.compile(net, devices=["cpu"], model_run_config=config) as pipe:
        for step in range(NUM_STEPS):
            loss_fn = make(step)
            pipe.zero_grad()
            eager.zero_grad()
            loss = pipe.forward_backward((X,), label=Y, loss_fn=loss_fn, loss_reduction="mean")
            expected = loss_fn(eager(X), Y)
            expected.backward()
            assert_close(loss, expected.detach())
            assert_close(gradients(net), gradients(eager))
        return int(pipe._runner.tails.trace_count)  # private: only the log tells of traces of a loss


@pytest.mark.parametrize("make", ALIKE.values(), ids=ALIKE)
def test_one_trace_serves_modules_that_are_alike(make: Callable[[int], Loss]) -> None:
    assert trained(make) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_others_are_traced_by_themselves(make: Callable[[int], Loss]) -> None:
    trained(make)


@pytest.mark.parametrize("holds", [lambda loss: loss, lambda loss: lambda *given: loss(*given)], ids=["it", "held"])
def test_each_gets_what_its_own_call_leaves(holds: Callable[[Any], Loss]) -> None:
    net = model()
    with roundpipe.compile(net, devices=["cpu"], model_run_config=RoundPipeRunConfig(num_microbatch=3)) as pipe:
        for step in range(NUM_STEPS):
            loss_fn = Logging()
            x = X * (1 + step)
            pipe.forward_backward((x,), label=Y, loss_fn=holds(loss_fn), loss_reduction="mean")
            assert_close(loss_fn.latest, F.cross_entropy(net(x), Y).detach())


def test_one_that_was_changed_is_not_like_a_new_one() -> None:
    net, made = model(), []
    eager = copy.deepcopy(net)
    with roundpipe.compile(net, devices=["cpu"], model_run_config=RoundPipeRunConfig(num_microbatch=3)) as pipe:
        for factor in (1.0, 2.0, 3.0):
            for earlier in made:
                earlier.seen["a"] = 100.0
            made.append(Scaled(0.5))
            made[-1].seen["a"] = factor
            loss = pipe.forward_backward((X,), label=Y, loss_fn=made[-1], loss_reduction="mean")
            assert_close(loss, made[-1](eager(X), Y).detach())
