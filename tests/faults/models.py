"""The campaign's models, and how each is wrapped."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import roundpipe
from tests.faults.points import HOOK, POINTS, SAMPLE_STEP, PointFunction, point

WIDTH = 8
NUM_LAYERS = 4
NUM_SAMPLES = 8
KINDS = ("traced", "by hand", "module by module", "fallback")


class Layer(nn.Module):
    """A linear layer with places for faults behind it; the first feature, which names the sample, stays."""

    def __init__(self, index: int, has_function: bool = False) -> None:
        super().__init__()
        self.index = index
        self.has_function = has_function
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([x[:, :1], torch.tanh(self.linear(x))[:, 1:]], 1)
        if self.has_function:
            y = PointFunction.apply(y, self.index)
        return point(y, self.index)


def visiting_hook(layer: Layer, args: Any, output: torch.Tensor) -> torch.Tensor:
    """A forward hook with a place for faults."""
    return point(output, HOOK + layer.index)


class Runs(nn.Module):
    """Runs its layers one after the other."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Decides(Runs):
    """Runs them behind a branch on data, which can't be traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x if x.sum() < 1e9 else -x


def make_model(kind: str, *, has_hooks: bool, has_function: bool) -> nn.Module:
    """A model of one of `KINDS`."""
    layers = [Layer(index, has_function and index % 2 == 1) for index in range(NUM_LAYERS)]
    for layer in layers if has_hooks else ():
        layer.register_forward_hook(visiting_hook)
    if kind == "by hand":
        return nn.Sequential(*layers)
    return (Decides if kind == "fallback" else Runs)(nn.ModuleList(layers))


def wrap(kind: str, model: nn.Module, x: torch.Tensor, **options: Any) -> Any:
    """The model of one of `KINDS` in its wrapper."""
    if kind == "by hand":
        return roundpipe.RoundPipe(model, **options)
    if kind == "module by module":
        return roundpipe.wrap_model_to_roundpipe(model, use_sequential_preset=False, lower_threshold=1, **options)
    return roundpipe.compile(model, example_args=(x,), lower_threshold=1, **options)


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Samples, the first feature of which says which each is, and labels."""
    x, label = (torch.randn(NUM_SAMPLES, WIDTH, dtype=torch.float64) for _ in range(2))
    x[:, 0] = torch.arange(NUM_SAMPLES) * SAMPLE_STEP
    return x, label


def loss_of(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """The loss function, with a place for faults."""
    POINTS.visit("loss_fn", outputs)
    return (outputs - label).square().sum()


def split_input(args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> Any:
    """The automatic rule as a function, with a place for faults; likewise the two below."""
    POINTS.visit("split_input")
    return [(piece,) for piece in args[0].tensor_split(number)], [{}] * number


def split_label(label: torch.Tensor, number: int) -> list[torch.Tensor]:
    """See `split_input`."""
    POINTS.visit("split_label")
    return list(label.tensor_split(number))


def merge_output(outputs: list[torch.Tensor]) -> torch.Tensor:
    """See `split_input`."""
    POINTS.visit("merge_output")
    return torch.cat(outputs)
