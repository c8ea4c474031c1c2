"""Hooks that keep gradients of activations, put onto them in a forward, or onto a module: where they keep them, and how
many."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipeRunConfig

KEPT: dict[str, Any] = {}


class GradCam(nn.Module):
    """Keeps the gradient of its features, as the class of the well-known recipe does."""

    def __init__(self, puts: Any) -> None:
        super().__init__()
        self.features, self.head, self.puts = nn.Linear(3, 4), nn.Linear(4, 2), puts
        self.gradient: Any = None
        self.gradients: list[torch.Tensor] = []
        self.count = 0

    def keep(self, gradient: torch.Tensor) -> None:
        self.gradient = KEPT["gradient"] = gradient
        self.gradients.append(gradient)
        self.count += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.features(x)
        if features.requires_grad:
            self.puts(self, features)
        out: torch.Tensor = self.head(features.tanh())
        return out


def by_method(module: Any, features: torch.Tensor) -> None:
    features.register_hook(module.keep)


def by_lambda(module: Any, features: torch.Tensor) -> None:
    features.register_hook(lambda gradient: module.keep(gradient))


def by_partial(module: Any, features: torch.Tensor) -> None:
    features.register_hook(functools.partial(type(module).keep, module))


def by_inner_function(module: Any, features: torch.Tensor) -> None:
    keep = lambda gradient: module.keep(gradient)  # noqa: E731
    features.register_hook(lambda gradient: keep(gradient))


def scaled(module: Any, features: torch.Tensor) -> None:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        module.keep(gradient)
        return gradient * 2

    features.register_hook(hook)


WAYS = [by_method, by_lambda, by_partial, by_inner_function, scaled]


def run(model: Any, x: torch.Tensor, number: int, *, is_classic: bool) -> list[str]:
    """Two steps; what was said."""
    KEPT.clear()
    config = RoundPipeRunConfig(num_microbatch=number)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with roundpipe.compile(model, devices=["cpu"], model_run_config=config) as pipe:
            for _ in range(2):
                if is_classic:
                    pipe(x).square().sum().backward()
                else:
                    pipe.forward_backward((x,), loss_fn=lambda out, _: out.square().sum(), loss_reduction="sum")
            pipe.synchronize()
            pipe(x)
    return [str(warning.message) for warning in caught if "hook" in str(warning.message)]


@pytest.mark.parametrize("is_classic", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_hooks_leave_gradients_on_the_users_module(way: Any, inside: bool, is_classic: bool) -> None:
    cam, x = GradCam(way), torch.randn(6, 3)
    model = nn.Sequential(cam, nn.Tanh(), nn.Linear(2, 2)) if inside else cam
    eager = copy.deepcopy(model)
    for _ in range(2):
        eager(x).square().sum().backward()
    own: Any = eager[0] if inside else eager
    said = run(model, x, 1, is_classic=is_classic)
    assert not said and cam.count == own.count == 2
    torch.testing.assert_close(cam.gradient, own.gradient)
    torch.testing.assert_close(cam.gradients, own.gradients)
    torch.testing.assert_close(KEPT["gradient"], own.gradient)
    torch.testing.assert_close(cam.features.weight.grad, own.features.weight.grad)


@pytest.mark.parametrize("is_classic", [False, True])
@pytest.mark.parametrize("way", [by_method, by_lambda])
def test_of_microbatches_the_last_gradient_is_kept_and_told_of(way: Any, is_classic: bool) -> None:
    model, x = GradCam(way), torch.randn(6, 3)
    eager = copy.deepcopy(model)
    eager(x).square().sum().backward()
    said = run(model, x, 3, is_classic=is_classic)
    assert len(said) == 1 and "a hook of the backward left tensors of the last of 3 microbatches" in said[0]
    torch.testing.assert_close(torch.cat(model.gradients[:3]), eager.gradient)
    torch.testing.assert_close(model.gradient, eager.gradient[4:])


@pytest.mark.parametrize("is_classic", [False, True])
def test_a_hook_of_a_modules_backward_is_told_of(is_classic: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def keep(module: nn.Module, of_inputs: Any, of_outputs: Any) -> None:
        KEPT["of outputs"] = of_outputs[0].detach().clone()

    model[2].register_full_backward_hook(keep)
    x = torch.randn(6, 3)
    assert not run(model, x, 1, is_classic=is_classic) and len(KEPT["of outputs"]) == 6
    said = run(model, x, 3, is_classic=is_classic)
    assert len(said) == 1 and said[0].startswith("global KEPT: a hook of the backward left tensors of the last of 3")


def test_gradients_that_are_appended_are_all_there() -> None:
    model, gradients = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), []
    model[2].register_full_backward_hook(lambda module, of_inputs, of_outputs: gradients.append(of_outputs[0]))
    assert not run(model, torch.randn(6, 3), 3, is_classic=False)
    assert [len(each) for each in gradients] == [2] * 6
