"""Devices load their libraries in the workers' threads, beside the trace of the first call."""

import threading

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.runtime.device.cpu import CpuBackend

pytestmark = pytest.mark.timeout(60)


RUNS = threading.Event()


class Traced(nn.Module):
    """Tells when its code runs for the first time, which is on fakes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        RUNS.set()
        return self.linear(x)


@pytest.mark.parametrize("has_attention", [False, True])
def test_a_device_warms_up_while_the_model_is_traced(monkeypatch, has_attention):
    model, happened = Traced(), []
    RUNS.clear()

    def warm_up(self, *, has_attention=False):
        assert RUNS.wait(10), "the model's code waits for the device"
        happened.append(("warm", has_attention, threading.current_thread().name))

    def take_budget(self):
        happened.append(("budget",))
        return before(self)

    before = CpuBackend.take_budget
    monkeypatch.setattr(CpuBackend, "warm_up", warm_up)
    monkeypatch.setattr(CpuBackend, "take_budget", take_budget)
    if has_attention:
        model.attention = nn.MultiheadAttention(4, 1)
        model.attention.requires_grad_(False)
    device = roundpipe.Device("cpu", memory_bytes=2**20)
    with roundpipe.compile(model, name="warm", devices=[device]) as piped:
        loss = piped.forward_backward(input_args=(torch.ones(2, 4),), loss_fn=lambda out, _: out.square().mean())
        assert loss.item() > 0
    assert happened[0] == ("warm", has_attention, "roundpipe warm worker 0")
    assert [each[0] for each in happened].count("warm") == 1
    assert ("budget",) in happened
