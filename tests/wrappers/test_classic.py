"""`roundpipe.Pipe`, the classic interface: stages by numbers of layers, chunks, and two ways to balance."""

from __future__ import annotations

import copy
import re
import time
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import ConfigError
from tests.equality import assert_same_gradients, eager_forward_backward

CPUS = ["cpu", "cpu"]


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def squared(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    return outputs.square().sum()


@pytest.mark.parametrize("balance", [[5], [2, 3], [1, 1, 2, 1]])
def test_training_equals_eager(balance: list[int]) -> None:
    module, reference = sequential(), sequential()
    x = torch.randn(8, 6, dtype=torch.float64)
    with roundpipe.Pipe(module, chunks=4, balance=balance, devices=CPUS) as pipe:
        loss = pipe.forward_backward((x,), loss_fn=squared)
        squared(pipe(x), None).backward()
        pipe.synchronize()
        expected = eager_forward_backward(reference, {"input": x}, squared, 4)
        eager_forward_backward(reference, {"input": x}, squared, 4)
        torch.testing.assert_close(loss, expected)
        assert_same_gradients(module, reference, 1e-10)
        assert [*pipe.parameters()] == [*module.parameters()]


def test_chunks_and_balance_are_what_runs() -> None:
    sizes = []
    with roundpipe.Pipe(sequential(), chunks=4, balance=[2, 3], devices=CPUS) as pipe:
        pipe.forward_backward(
            (torch.randn(8, 6, dtype=torch.float64),),
            loss_fn=lambda outputs, label: (sizes.append(len(outputs)), outputs.sum())[1],
        )
        table = pipe.partition_table()
    assert sizes == [2, 2, 2, 2]
    stages = re.findall(r"^(F\d+|U|B\d+) +(\d) \.\. (\d)", table, re.MULTILINE)
    assert stages == [("F0", "0", "1"), ("U", "2", "4"), ("B1", "0", "1")]


def test_to_changes_the_dtype() -> None:
    with roundpipe.Pipe(sequential(), chunks=2, balance=[2, 3], devices=CPUS) as pipe:
        assert pipe.to(torch.float32) is pipe
        assert pipe(torch.randn(4, 6)).dtype is torch.float32


def test_a_copy_has_the_same_stages() -> None:
    with roundpipe.Pipe(sequential(), chunks=2, balance=[2, 3], devices=CPUS) as pipe:
        twin = copy.deepcopy(pipe)
        x = torch.randn(4, 6, dtype=torch.float64)
        with twin:
            torch.testing.assert_close(twin(x), pipe(x))
            assert isinstance(twin, roundpipe.Pipe)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"module": nn.Linear(2, 2)}, "takes an nn.Sequential, got Linear"),
        ({"module": nn.Sequential()}, "without layers"),
        ({"balance": [2, 2]}, "covers 4 layers, and the nn.Sequential has 5"),
        ({"balance": [5, 0]}, "each at least 1"),
        ({"chunks": 0}, "chunks=0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        roundpipe.Pipe(**{"module": sequential(), "balance": [2, 3], "devices": CPUS, **arguments})


def test_without_balance_there_is_a_stage_per_device() -> None:
    with roundpipe.Pipe(sequential(), devices=CPUS) as pipe:
        assert pipe(torch.randn(4, 6, dtype=torch.float64)).shape == (4, 3)
        assert "3 stages in a round" in pipe.partition_table()


def test_balance_by_size() -> None:
    layers = nn.Sequential(nn.Linear(10, 30), nn.Linear(30, 10), nn.Linear(10, 60), nn.ReLU())
    assert roundpipe.balance_by_size(2, layers) == [2, 2]
    assert roundpipe.balance_by_size(4, layers) == [1, 1, 1, 1]
    with pytest.raises(ConfigError, match="give 1 to 4"):
        roundpipe.balance_by_size(5, layers)


class Slow(nn.Module):
    """Counts its calls in a buffer, and takes a while."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        time.sleep(self.seconds)
        return x * 2


def test_balance_by_time_measures_copies() -> None:
    layers = nn.Sequential(Slow(0.06), Slow(0.02), Slow(0.02), Slow(0.02))
    assert roundpipe.balance_by_time(2, layers, torch.randn(2, 2)) == [1, 3]
    assert all(float(layer.calls) == 0 for layer in layers)
