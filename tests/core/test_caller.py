"""Warnings and default names point at the user's line, by whatever way the call takes through torch and the package."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe

Call = Callable[[roundpipe.RoundPipe], Any]
ONE_SAMPLE = torch.randn(1, 4)


def called(model: roundpipe.RoundPipe) -> Any:
    return model(ONE_SAMPLE)  # here


def forward_called(model: roundpipe.RoundPipe) -> Any:
    return model.forward(ONE_SAMPLE)  # here


def trained(model: roundpipe.RoundPipe) -> Any:
    return model.forward_backward((ONE_SAMPLE,), loss_fn=lambda out, _: out.sum())  # here


def inside_a_sequential(model: roundpipe.RoundPipe) -> Any:
    return nn.Sequential(nn.Identity(), model)(ONE_SAMPLE)  # here


def with_hooks(model: roundpipe.RoundPipe) -> Any:
    handle = model.register_forward_hook(lambda module, args, output: None)
    try:
        return model(ONE_SAMPLE)  # here
    finally:
        handle.remove()


def behind_a_decorator(model: roundpipe.RoundPipe) -> Any:
    return torch.no_grad()(model)(ONE_SAMPLE)  # here


def with_a_leaf_of_another_length(model: roundpipe.RoundPipe) -> Any:
    label = torch.zeros(3)
    return model.forward_backward((torch.randn(4, 4),), {}, label, lambda out, y: out.sum() + y.sum())  # here


def line_of(function: Any) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(index for index, line in enumerate(lines) if line.rstrip().endswith("# here"))


@pytest.fixture(params=["traced", "by children", "module by module"])
def model(request: pytest.FixtureRequest) -> Iterator[roundpipe.RoundPipe]:
    torch.manual_seed(0)
    settings: Any = {"devices": ["cpu", "cpu"], "model_run_config": roundpipe.RoundPipeRunConfig(num_microbatch=3)}
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU()), nn.Linear(4, 4))
    if request.param == "traced":
        made = roundpipe.compile(net, example_args=(torch.randn(4, 4),), **settings)
    elif request.param == "by children":
        made = roundpipe.RoundPipe(net, **settings)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = roundpipe.compile(Branching(net), example_args=(torch.randn(4, 4),), **settings)
        assert isinstance(made, roundpipe.AutoRoundPipe)
    with made:
        yield made


class Branching(nn.Module):
    """Its own code asks where an activation lies, so that it stays Python on the host."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.first, self.second, self.last = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(x))
        return self.last(hidden) if hidden.data_ptr() != 1 else hidden


@pytest.mark.parametrize(
    "call",
    [
        called,
        forward_called,
        trained,
        inside_a_sequential,
        with_hooks,
        behind_a_decorator,
        with_a_leaf_of_another_length,
    ],
)
def test_a_warning_about_microbatches_points_at_the_call(model: roundpipe.RoundPipe, call: Call) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(model)
    found = [one for one in caught if " instead of " in str(one.message) or "label: dim 0" in str(one.message)]
    assert len(found) == 1, [str(one.message) for one in caught]
    assert found[0].filename == __file__
    assert found[0].lineno == line_of(call)
