"""Models that run in parts and see a batch as a whole: by default their batches are not cut."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig, TraceError
from roundpipe.core.errors import TraceCause
from tests.runtime.models import assert_same, gradients

WIDTH, NUMBER = 6, 9


class Parts(nn.Module):
    """Layers, behind which a test's own code runs."""

    def __init__(self, run: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("queue", torch.randn(WIDTH, 2 * NUMBER))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))
        self.calls = 0
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def ends_early(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = torch.tanh(layer(x))
        if x.abs().mean() < 0.45:
            return x
    return 2 * x


def follows_slowly(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.teacher.weight.mul_(0.9).add_(model.layers[0].weight, alpha=0.1)
    return model.layers[1](model.layers[0](x)) - model.teacher(x)


def counts(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return model.layers[0](x) / model.calls


def enqueues(model: Any, x: torch.Tensor) -> torch.Tensor:
    """As MoCo does."""
    outputs = model.layers[0](x) + (x @ model.queue.clone()).mean(1, keepdim=True)
    position = int(model.position)
    with torch.no_grad():
        model.queue[:, position : position + len(x)] = model.teacher(x).T
        model.position[0] = (position + len(x)) % model.queue.shape[1]
    return outputs


class Remembers(nn.Module):
    """Has its state in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.zeros_like(x) if self.state is None else self.state
        outputs = self.layer(x + before)
        self.state = outputs.detach()
        return outputs


class Enqueues(nn.Module):
    """Reads the position at once, and may draw, so that it stays whole for another reason."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.layer, self.draws = nn.Linear(WIDTH, WIDTH), draws
        self.register_buffer("state", torch.ones(WIDTH, 2 * NUMBER))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        position = int(self.position)
        outputs = self.layer(x) + (x @ self.state.clone()).mean(1, keepdim=True) + 0.0 * self.draws * random.random()
        with torch.no_grad():
            self.state[:, position : position + len(x)] = x.T
            self.position[0] = (position + len(x)) % self.state.shape[1]
        return outputs


@pytest.mark.parametrize("make", [Remembers, lambda: Enqueues(False), lambda: Enqueues(True)])
def test_state_of_a_module_is_that_of_the_whole_batch(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), make(), nn.Linear(WIDTH, WIDTH)).double()
    reference = copy.deepcopy(model)
    x, label = torch.randn(3, NUMBER, WIDTH, dtype=torch.float64), torch.randint(WIDTH, (NUMBER,))
    with roundpipe.compile(model, devices=["cpu", "cpu"]) as piped:
        for batch in x:
            expected = F.cross_entropy(reference(batch), label)
            expected.backward()
            loss = piped.forward_backward((batch,), label=label, loss_fn=F.cross_entropy, loss_reduction="mean")
            torch.testing.assert_close(loss, expected.detach())
        piped.synchronize()
        assert_same(gradients(model), gradients(reference))
        torch.testing.assert_close(model[1].state, reference[1].state)


@pytest.mark.parametrize("run", [ends_early, follows_slowly, counts, enqueues])
def test_by_default_numbers_are_those_of_the_whole_batch(run: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    model = Parts(run).double()
    reference = copy.deepcopy(model)
    x, label = torch.randn(NUMBER, WIDTH, dtype=torch.float64), torch.randint(WIDTH, (NUMBER,))
    expected = F.cross_entropy(reference(x), label)
    expected.backward()
    with roundpipe.compile(model, devices=["cpu", "cpu"]) as piped:
        with pytest.warns(UserWarning, match="So the batch is not cut but runs as one microbatch"):
            loss = piped.forward_backward((x,), label=label, loss_fn=F.cross_entropy, loss_reduction="mean")
        piped.synchronize()
        torch.testing.assert_close(loss, expected.detach())
        assert_same(gradients(model), gradients(reference))
        torch.testing.assert_close(piped(x), reference(x))
        assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))
        torch.testing.assert_close(model.teacher.weight, reference.teacher.weight)


def test_a_model_with_a_module_that_decides_by_its_buffer_is_traced_and_told_of() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Enqueues(False), nn.Linear(WIDTH, WIDTH))
    x, config = torch.randn(NUMBER, WIDTH), RoundPipeRunConfig(num_microbatch=3)
    with roundpipe.compile(model, devices=["cpu"], fallback=False) as piped, torch.no_grad():
        with pytest.warns(UserWarning, match="buffer 1.position, which the forward reads, changes with each batch"):
            piped(x, roundpipe_run_config=config)


def test_a_decision_by_a_buffer_that_changes_is_shown_where_it_is_taken() -> None:
    model, x = Parts(enqueues), torch.randn(NUMBER, WIDTH)
    with pytest.raises(TraceError, match=r"position = int\(model.position\).*decision on buffer position") as caught:
        roundpipe.compile(model, example_args=(x,), fallback=False)
    assert caught.value.cause is TraceCause.BUFFER_DATA


def test_a_number_that_is_given_stays_and_what_differs_is_said() -> None:
    torch.manual_seed(0)
    model = Parts(counts).double()
    x = torch.randn(NUMBER, WIDTH, dtype=torch.float64)
    config = RoundPipeRunConfig(num_microbatch=3)
    with roundpipe.compile(model, devices=["cpu", "cpu"], model_run_config=config) as piped, torch.no_grad():
        with pytest.warns(UserWarning, match="may differ from those of the batch; with num_microbatch=1 they don't"):
            piped(x)
        assert model.calls == 3
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # said once
            piped(x)
