"""Eager's side of every comparison: the microbatch loop that the contract is written in, and how to compare."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import roundpipe


def split(inputs: dict[str, Any], num_microbatches: int) -> list[dict[str, Any]]:
    """Keyword arguments cut evenly on dim 0, larger pieces first."""
    pieces = {name: torch.tensor_split(value, num_microbatches) for name, value in inputs.items()}
    return [{name: piece[index] for name, piece in pieces.items()} for index in range(num_microbatches)]


def eager_forward_backward(
    model: nn.Module,
    inputs: dict[str, Any],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    num_microbatches: int,
) -> torch.Tensor:
    """Sum of the microbatches' losses; gradients add up in ``.grad``."""
    losses = []
    for piece in split(inputs, num_microbatches):
        loss = loss_fn(model(**piece), None)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def difference(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Largest difference relative to the expected tensor's largest value; a missing gradient is zero."""
    if found is None and expected is None:
        return 0.0
    if expected is None:
        return float(found.abs().max())
    if found is None:
        return float(expected.abs().max())
    assert found.shape == expected.shape
    found, expected = found.detach(), expected.detach()
    if not found.numel():
        return 0.0
    scale = max(float(expected.abs().max()), 1e-3)
    return float((found.double() - expected.double()).abs().max()) / scale


def assert_same_gradients(model: nn.Module, reference: nn.Module, tolerance: float) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        gap = difference(parameter.grad, expected[name].grad)
        assert gap <= tolerance, f"gradient of {name} is off by {gap:.3e}"


def assert_same_state(model: nn.Module, reference: nn.Module, tolerance: float) -> None:
    expected = reference.state_dict()
    state = model.state_dict()
    assert list(state) == list(expected)
    for name, tensor in state.items():
        gap = difference(tensor, expected[name])
        assert gap <= tolerance, f"{name} is off by {gap:.3e}"


def assert_mean_is_eagers(
    model: nn.Module, args: tuple[Any, ...], label: Any, loss_fn: Callable[..., torch.Tensor], **options: Any
) -> None:
    """The loss and the gradients of one step with ``loss_reduction="mean"``; ``options`` are those of `compile`."""
    eager = copy.deepcopy(model)
    with roundpipe.compile(model, devices=["cpu"] * 2, **options) as pipe:
        loss = pipe.forward_backward(input_args=args, label=label, loss_fn=loss_fn, loss_reduction="mean")
        pipe.synchronize()
    expected = loss_fn(eager(*args), label)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    found, others = ({name: each.grad for name, each in side.named_parameters()} for side in (model, eager))
    torch.testing.assert_close(found, others)
