"""Buffers that a forward gives another size in place, as observers for quantization do."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig

WIDTH = 6
ONE = RoundPipeRunConfig(num_microbatch=1)


class Observer(nn.Module):
    """Its buffers get their size in the first forward, or grow; others lie beside them."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)
        self.register_buffer("before", torch.arange(4.0))
        self.register_buffer("largest", torch.zeros(start))
        self.register_buffer("behind", torch.arange(40.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.layer(x)
        found = made.detach().abs().amax(0)
        if self.largest.numel() < 3:
            self.largest.resize_(found.shape).copy_(found)
        else:
            self.largest.copy_(torch.maximum(self.largest, found))
        return made / (self.largest + 1) + self.before.sum() + self.behind.sum()


def assert_trains_alike(model: nn.Module, reference: nn.Module, num_devices: int) -> None:
    with roundpipe.compile(model, devices=["cpu"] * num_devices) as piped:
        for scale in (1, 2, 3):
            x, label = scale * torch.randn(9, WIDTH), torch.randint(3, (9,))
            loss = piped.forward_backward(
                (x,), label=label, loss_fn=F.cross_entropy, loss_reduction="mean", run_config=ONE
            )
            expected = F.cross_entropy(reference(x), label)
            expected.backward()
            piped.synchronize()
            torch.testing.assert_close(loss, expected.detach())
            state, wanted = model.state_dict(), reference.state_dict()
            assert state.keys() == wanted.keys()
            for name, tensor in wanted.items():
                torch.testing.assert_close(state[name], tensor, msg=lambda text, name=name: f"{name}: {text}")
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_they_keep_what_they_get_and_leave_others_alone(start: int, num_devices: int) -> None:
    torch.manual_seed(0)
    model = Observer(start)
    assert_trains_alike(model, copy.deepcopy(model), num_devices)


@pytest.mark.parametrize("version", [0, 1])
def test_models_prepared_for_quantization_train_like_plain(version: int) -> None:
    quantization = pytest.importorskip("torch.ao.quantization")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 3)).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch names its successor
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm", version=version)
        quantization.prepare_qat(model, inplace=True)
    assert_trains_alike(model, copy.deepcopy(model), 2)
