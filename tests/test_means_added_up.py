"""By default losses are added up; means are told of, also where no graph of the loss tells what it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig

LOG: list[Any] = []
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def logged(loss_fn: Loss) -> Loss:
    def logging(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(out, label)
        LOG.append(float(loss.detach()))
        return loss

    return logging


def printed(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(out, label)
    LOG.append(f"{loss.item():.3f}")
    return loss


def checked(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(out, label)
    assert torch.isfinite(loss).all()
    return loss


def of_two(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, label, reduction="sum") + out.abs().mean()


def classes(label: torch.Tensor) -> torch.Tensor:
    return F.one_hot(label, 3).float()


MEANS: dict[str, Loss] = {
    "with a log": logged(F.cross_entropy),
    "with a line of text": printed,
    "with a check": checked,
    "with a log, of squares": logged(lambda out, label: (out - classes(label)).square().mean()),
    "with a log, of two": logged(of_two),
    "of a normal distribution": lambda out, label: F.gaussian_nll_loss(out[:, 0], label.float(), out[:, 1].exp()),
    "of angles": lambda out, label: F.cosine_embedding_loss(out, classes(label), torch.ones(len(out))),
}
SUMS: dict[str, Loss] = {
    "with a log": logged(lambda out, label: F.cross_entropy(out, label, reduction="sum")),
    "over a number": logged(lambda out, label: F.cross_entropy(out, label, reduction="sum") / 8),
    "of means of samples": logged(lambda out, label: (out - classes(label)).square().mean(1).sum()),
    "means over microbatches": logged(lambda out, label: F.cross_entropy(out, label) / 2),
}


def step(loss_fn: Loss, **options: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    x, label = torch.randn(8, 5), torch.randint(3, (8,))
    with roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=RoundPipeRunConfig(2)) as pipe:
        pipe.forward_backward(input_args=(x,), label=label, loss_fn=loss_fn, **options)
        pipe.synchronize()


@pytest.mark.parametrize("loss_fn", MEANS.values(), ids=MEANS)
def test_means_are_told_of(loss_fn: Loss) -> None:
    with pytest.warns(UserWarning, match="were added up, but each is a mean, or made of means"):
        step(loss_fn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(loss_fn, loss_reduction="sum")  # that is what somebody wants


@pytest.mark.parametrize("loss_fn", SUMS.values(), ids=SUMS)
def test_sums_are_not_told_of(loss_fn: Loss) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(loss_fn)
