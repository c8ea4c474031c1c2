"""What the tests beside it share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.wrappers.auto import HostRunner
from roundpipe.wrappers.parts import Part
from tests.equality import assert_same_gradients, assert_same_state, eager_forward_backward

DEVICES = ["cpu", "cpu"]


WIDTH = 48


TOLERANCE = 1e-12


def block(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, width))


class Branching(nn.Module):
    """Blocks in a list, around which the root decides by data."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(()))
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.seen = self.seen + len(x)
        hidden = self.embed(x)
        for one in self.blocks:
            hidden = hidden + one(hidden)
        if hidden.abs().sum() > 0:
            hidden = 2 * hidden
        return self.head(self.norm(hidden)) * self.scale


class Nested(nn.Module):
    """Containers in containers, and a module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, WIDTH), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)))
        self.branches = nn.ModuleDict({"left": nn.ModuleList([block(), block()]), "right": block()})
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.activation = nn.ReLU(inplace=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(x)
        for one in self.branches["left"]:
            hidden = one(hidden) + hidden
        hidden = self.shared(hidden) + self.shared(self.branches["right"](hidden))
        return self.head(self.activation(hidden))


THREE = RoundPipeRunConfig(num_microbatch=3)
"""By default, models that decide by an activation run a batch in one piece."""


def squared(output: torch.Tensor, label: Any) -> torch.Tensor:
    return (output**2).sum()


def inputs(batch: int = 12) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(batch, 8, dtype=torch.float64)}


def quiet(call: Callable[[], Any]) -> Any:
    """A call that may warn, once, that nothing overlaps."""
    with pytest.warns(UserWarning, match="nothing overlaps"):
        return call()


def train_like_eager(model: nn.Module, wrap: Callable[[nn.Module], RoundPipe], steps: int = 3) -> None:
    """Losses, gradients, buffers and optimizer steps equal eager's."""
    reference = copy.deepcopy(model)
    parameters = list(model.parameters())
    with wrap(model) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=1e-3, momentum=0.9)
        eager = torch.optim.SGD(reference.parameters(), lr=1e-3, momentum=0.9)
        for step in range(steps):
            batch = inputs()

            def run(batch: dict[str, torch.Tensor] = batch) -> torch.Tensor:
                return pipe.forward_backward(input_kwargs=batch, loss_fn=squared, run_config=THREE)

            loss = quiet(run) if step == 0 else run()
            expected = eager_forward_backward(reference, batch, squared, num_microbatches=3)
            torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=TOLERANCE)
            pipe.synchronize()
            assert_same_gradients(model, reference, 1e-10)
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            eager.step()
            eager.zero_grad()
        pipe.synchronize()
        assert_same_state(model, reference, 1e-10)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert not any(isinstance(module, RoundPipe) for module in model.modules())


def wrapped(model: nn.Module, **options: Any) -> Any:
    return wrap_model_to_roundpipe(model, use_sequential_preset=False, name="wrapped", devices=DEVICES, **options)


def tree_parts(pipe: Any) -> dict[str, Part]:
    """Qualified name -> part, in the wrapped tree, which no public name shows."""
    return parts_in(pipe._runner)  # the table has no thresholds and no modules


def parts_in(runner: HostRunner) -> dict[str, Part]:
    parts = {part.module: part for part in runner.tree.parts}
    named = runner.model.named_modules(remove_duplicate=False)
    return {name: parts[module] for name, module in named if module in parts}
