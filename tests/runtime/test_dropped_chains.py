"""What the runtime knows of a chain ends with the chain: however many traces, no more is held than the kept ones."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.fx import source

DTYPE = torch.float64


class Scaled(nn.Module):
    """Needs a trace of its own for every number; has a tensor that is a constant of the trace."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=DTYPE) for _ in range(2))
        self.register_buffer("shift", torch.ones(8, dtype=DTYPE))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * int(f"{number}") + self.shift + torch.tensor([0.5], dtype=x.dtype)
        return x


def loss_of(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    return outputs.square().sum()


def known_layers(pipe: Any) -> int:
    """The most layers that the host's side or a worker knows."""
    # what is kept too long shows in memory alone, and too late
    engine = pipe._session.engine
    return max(len(pipe._session.host._layers), *(len(worker._replicas) for worker in engine._workers))


@pytest.mark.filterwarnings("ignore:.*was traced")
def test_dropped_traces_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_TRACES", 2)
    model = Scaled()
    x = torch.randn(6, 8, dtype=DTYPE)
    layers: list[weakref.ref[nn.Module]] = []
    counts = []
    with roundpipe.compile(model, devices=["cpu"] * 2) as pipe:
        for number in range(1, 7):
            pipe.forward_backward((x, number), loss_fn=loss_of)
            layers += [weakref.ref(layer) for layer in pipe._runner.last_chain]  # generated: not in the model
            gc.collect()
            counts.append(known_layers(pipe))
        pipe.forward_backward((x, 6), loss_fn=loss_of)
        gc.collect()
        assert pipe.trace_count == 6
        per_trace = len(pipe._runner.last_chain)  # a table shows it only as text
        assert known_layers(pipe) <= 3 * per_trace and counts[-1] == counts[3], counts
        assert sum(layer() is not None for layer in layers) <= 3 * per_trace
        # a table that grows with every trace is what this is about
        host = pipe._session.host
        assert set(host._owners.values()) <= set(host._packed)
        assert len(host._packed) <= 3 * per_trace


@pytest.mark.long
def test_layers_that_a_newer_trace_shares_stay_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a dropped trace are still the model's: one buffer for both, one copy per upload."""
    monkeypatch.setattr(source, "MAX_TRACES", 1)
    model = Scaled()
    x = torch.randn(6, 8, dtype=DTYPE)
    with roundpipe.compile(model, devices=["cpu"]) as pipe, torch.no_grad():
        for number in (1, 2, 3, 4):
            torch.testing.assert_close(pipe(x, number), model(x, number))
            gc.collect()
        # numbers are right for weights that are not packed, too
        chain, host = pipe._runner.last_chain, pipe._session.host
        weights = [host.layer(spec.name, layer) for spec, layer in zip(chain.specs, chain, strict=True)]
        assert all(one.is_packed() for one in weights if one.num_packed and any(e.is_parameter for e in one.slots))


def test_forward_and_backward_apart_over_a_dropped_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that waits for its backward keeps its chain."""
    monkeypatch.setattr(source, "MAX_TRACES", 1)
    model = Scaled()
    x = torch.randn(6, 8, dtype=DTYPE)
    model(x, 1).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with roundpipe.compile(model, devices=["cpu"] * 2) as pipe:
        output = pipe(x, 1)
        with torch.no_grad():
            for number in (2, 3):
                pipe(x, number)
                gc.collect()
        output.square().sum().backward()
        pipe.synchronize()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
