"""Losses that return numbers of Python's: nothing trains by these, and whoever returns one is told so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import LossError, RoundPipeRunConfig

torch.manual_seed(5)
X, Y = torch.randn(8, 6), torch.randint(5, (8,))
Y[::3] = -100


class Equal:
    """Raises when it is compared, as many a user's object does."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    __hash__ = None  # type: ignore[assignment]


def loss_of(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, label)


RETURNED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "float": lambda outputs, label: float(loss_of(outputs, label)),
    "item": lambda outputs, label: loss_of(outputs, label).item(),
    "tolist": lambda outputs, label: loss_of(outputs, label).tolist(),
    "a list with one": lambda outputs, label: [loss_of(outputs, label), loss_of(outputs, label).item()],
    "an object": lambda outputs, label: Equal(),
}


@pytest.mark.parametrize("returned", RETURNED)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("call", ["forward_backward", "forward_loss"])
def test_a_number_is_no_loss(returned: str, reduction: str, call: str) -> None:
    with roundpipe.compile(nn.Sequential(nn.Linear(6, 5), nn.Tanh()), devices=["cpu"]) as piped:
        config = RoundPipeRunConfig(num_microbatch=2, loss_reduction=reduction)
        with pytest.raises(LossError, match="must return a tensor or a non-empty sequence of tensors"):
            getattr(piped, call)((X,), label=Y, loss_fn=RETURNED[returned], run_config=config)


@pytest.mark.parametrize("call", ["forward_backward", "forward_loss"])
def test_a_number_is_a_weight(call: str) -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
    with roundpipe.compile(net, devices=["cpu"]) as piped:
        config = RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean")
        loss = getattr(piped, call)(
            (X,), label=Y, loss_fn=lambda o, label: (loss_of(o, label), (label != -100).sum().item()), run_config=config
        )
    torch.testing.assert_close(loss, loss_of(net(X), Y).detach())
