"""An evaluation needs less memory than training: it is refused only where it does not fit by itself."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import Device, DeviceMemoryError

WORDS = 4000


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, WORDS, bias=False))


def run_on(model: nn.Module, memory_bytes: int) -> roundpipe.RoundPipe:
    config = roundpipe.RoundPipeRunConfig(num_microbatch=2, tiles="off")
    return roundpipe.compile(model, devices=[Device("cpu", memory_bytes=memory_bytes)], model_run_config=config)


def test_outputs_as_large_as_the_device_are_evaluated(model: nn.Module) -> None:
    ids = torch.randint(0, WORDS, (8, 32))
    logits_bytes, weight_bytes = 4 * 32 * WORDS * 4, WORDS * 16 * 4
    budget_bytes = logits_bytes + 3 * weight_bytes
    with run_on(model, budget_bytes) as pipe:
        pipe.eval()
        for _ in range(2):
            with torch.no_grad():
                found = pipe(ids)
        assert pipe.peak_device_bytes() <= budget_bytes
    torch.testing.assert_close(found, model(ids))


def test_training_beside_it_is_refused_and_it_goes_on(model: nn.Module) -> None:
    reference, ids = copy.deepcopy(model), torch.randint(0, WORDS, (8, 32))
    budget_bytes = 4 * 32 * WORDS * 4 + 3 * WORDS * 16 * 4
    with run_on(model, budget_bytes) as pipe:
        with torch.no_grad():
            torch.testing.assert_close(pipe(ids), reference(ids))
        for _ in range(2):
            with pytest.raises(DeviceMemoryError, match="num_microbatch="):
                pipe.forward_backward((ids,), loss_fn=lambda logits, _: logits.square().sum())
            with torch.no_grad():
                torch.testing.assert_close(pipe(ids), reference(ids))
        more = roundpipe.RoundPipeRunConfig(num_microbatch=8)
        pipe.forward_backward((ids,), loss_fn=lambda logits, _: logits.square().sum(), run_config=more)
        pipe.synchronize()
    reference(ids).square().sum().backward()
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_what_can_train_is_evaluated_by_the_same_plan(model: nn.Module) -> None:
    ids = torch.randint(0, WORDS, (8, 32))
    with run_on(model, 10**8) as pipe:
        pipe.forward_backward((ids,), loss_fn=lambda logits, _: logits.square().sum())
        table = str(pipe.partition_table())
        with torch.no_grad():
            pipe(ids)
        assert str(pipe.partition_table()) == table
