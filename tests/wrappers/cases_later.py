"""What the tests beside it share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import roundpipe
from roundpipe.wrappers.lazy_outputs import holds_lazy
from tests.equality import assert_same_gradients

WIDTH = 16


DEVICES = ["cpu", "cpu", "cpu"]


Body = Callable[["Listed", torch.Tensor], Any]


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


class Listed(nn.Module):
    """Calls the elements of a list as its body says."""

    def __init__(self, body: Body, blocks: list[nn.Module] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks or [block() for _ in range(4)])
        self.body = body
        self.looked: list[Any] = []

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


def wrapped(model: nn.Module, **options: Any) -> Any:
    return roundpipe.wrap_model_to_roundpipe(model, use_sequential_preset=False, devices=DEVICES, **options)


def batch(size: int = 10) -> torch.Tensor:
    return torch.randn(size, WIDTH, dtype=torch.float64, requires_grad=True)


def total(outputs: Any) -> torch.Tensor:
    tensors = [one for one in roundpipe.core.trees.tensors(outputs) if one.is_floating_point()]
    return torch.stack([(one**2).sum() for one in tensors]).sum()


def check(body: Body, x: torch.Tensor | None = None, blocks: list[nn.Module] | None = None, **options: Any) -> Listed:
    """Outputs and gradients, of the arguments too, are eager's; twice, once without gradients."""
    torch.manual_seed(0)
    model = Listed(body, blocks).double()
    reference = copy.deepcopy(model)
    x = batch() if x is None else x
    other = x.detach().clone().requires_grad_(x.requires_grad)
    overrides = {model.blocks[index]: config for index, config in options.pop("of_blocks", {}).items()}
    skipped = [model.blocks[index] for index in options.pop("skipped", ())]
    with wrapped(model, override_config=overrides, skip_modules=skipped, **options) as pipe:
        outputs, expected = pipe(x), reference(other)
        assert not holds_lazy(outputs)
        torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
        total(outputs).backward()
        total(expected).backward()
        pipe.synchronize()
        torch.testing.assert_close(x.grad, other.grad, rtol=1e-10, atol=1e-10)
        assert_same_gradients(model, reference, 1e-10)
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), reference(other), rtol=1e-12, atol=1e-12)
    return model
