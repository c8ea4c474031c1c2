"""Tensors with a row for each sample that a loss keeps for metrics: they are those of the batch, or are told of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe

NUMBER, WIDTH, CLASSES = 11, 6, 4
X, Y = torch.randn(NUMBER, WIDTH, generator=torch.Generator().manual_seed(1)), torch.arange(NUMBER) % CLASSES
Keep = Callable[[torch.Tensor, torch.Tensor], Any]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, CLASSES))


ROWS: dict[str, Keep] = {
    "predictions": lambda outputs, label: outputs.argmax(-1),
    "logits": lambda outputs, label: outputs.detach(),
    "outputs": lambda outputs, label: outputs,
    "labels": lambda outputs, label: label,
    "probabilities": lambda outputs, label: outputs.detach().softmax(-1).cpu(),
    "hits": lambda outputs, label: outputs.argmax(-1) == label,
    "losses": lambda outputs, label: F.cross_entropy(outputs, label, reduction="none").detach(),
    "flat": lambda outputs, label: outputs.detach().reshape(-1),
    "nested": lambda outputs, label: {"first": [outputs.argmax(-1), label]},
}
MIXED: dict[str, Keep] = {
    "order": lambda outputs, label: outputs.argmax(-1).flip(0),
    "sorted": lambda outputs, label: outputs.detach().sort(0).values,
    "centred": lambda outputs, label: outputs.detach() - outputs.detach().mean(0),
    "means": lambda outputs, label: outputs.detach().mean(0),
    "pairs": lambda outputs, label: (outputs @ outputs.T).detach(),
    "columns": lambda outputs, label: outputs.detach().T,
}


def run(keep: Keep, reduction: Any, *, returns_outputs: bool = False) -> tuple[Any, Any, list[str]]:
    """What a call leaves, what it does in plain PyTorch, and warnings of it."""
    found: dict[str, Any] = {}
    net = model()

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        found["value"] = keep(outputs, label)
        return F.cross_entropy(outputs, label, reduction=reduction)

    loss_fn(net(X), Y)
    expected = found.pop("value")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with roundpipe.compile(net, devices=["cpu", "cpu"]) as piped:
            piped.forward_backward(
                (X,), label=Y, loss_fn=loss_fn, loss_reduction=reduction, return_outputs=returns_outputs
            )
    texts = [str(each.message) for each in caught]
    return found["value"], expected, [text for text in texts if "loss_fn left the value of the last" in text]


@pytest.mark.parametrize("returns_outputs", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_rows_are_those_of_the_batch(name: str, returns_outputs: bool) -> None:
    found, expected, told = run(ROWS[name], "mean", returns_outputs=returns_outputs)
    torch.testing.assert_close(found, expected)
    assert not told


@pytest.mark.parametrize("name", MIXED)
def test_what_is_not_of_single_samples_is_told_of(name: str) -> None:
    found, expected, told = run(MIXED[name], "mean")
    assert len(told) == 1, told
    assert found.shape != expected.shape or not torch.equal(found, expected)


@pytest.mark.parametrize("name", sorted({*ROWS} - {"flat"}))
def test_a_loss_that_runs_as_it_is_is_told_of(name: str) -> None:
    _, _, told = run(ROWS[name], "sum")
    assert len(told) == 1, told


def test_a_large_tensor_is_told_of() -> None:
    keep = lambda outputs, label: outputs.detach()[:, None, None, :].repeat(1, 200, 200, 1)  # noqa: E731
    found, expected, told = run(keep, "mean")
    assert len(found) < len(expected) and len(told) == 1, told


def test_each_is_appended() -> None:
    kept: list[torch.Tensor] = []

    def append(outputs: torch.Tensor, label: torch.Tensor) -> int:
        kept.append(label)
        return 0

    _, _, told = run(append, "mean")
    assert torch.equal(torch.cat(kept[1:]), Y)  # the first is of plain PyTorch
    assert not told
