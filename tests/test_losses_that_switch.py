"""What a loss function changes about the model for a while, such as adapters that it switches off, no layer sees."""

import contextlib
import copy
import threading
import time

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.runtime.models import DTYPE, assert_same, batch, gradients

WIDTH = 6


class Adapted(nn.Module):
    """A frozen layer with an adapter that can be switched off."""

    def __init__(self):
        super().__init__()
        self.base, self.adapter = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.is_on = True

    def forward(self, x):
        made = self.base(x)
        return torch.tanh(made + self.adapter(x) if self.is_on else made)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def network():
    torch.manual_seed(0)
    return Network().to(DTYPE)


@contextlib.contextmanager
def switched_off(model):
    """As PEFT does it: by an attribute, and adapters are not trained meanwhile."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for layer in model.layers:
        layer.is_on = False
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for layer in model.layers:
            layer.is_on = True


def preference(model, seconds):
    """A loss beside what the model gives without its adapters, which takes a while."""

    def loss_fn(outputs, x):
        with torch.no_grad(), switched_off(model):
            expected = model(x)
            time.sleep(seconds)
        return -nn.functional.logsigmoid((outputs - expected).sum(-1)).mean()

    return loss_fn


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_adapters_that_a_loss_switches_off_are_on_for_the_layers(num_devices):
    own, x = network(), batch(8)
    reference = copy.deepcopy(own)
    expected = preference(reference, 0.0)(reference(x), x)
    expected.backward()
    config = RoundPipeRunConfig(num_microbatch=4)
    with roundpipe.compile(own, devices=["cpu"] * num_devices, model_run_config=config) as piped:
        for _ in range(2):
            loss = piped.forward_backward((x,), label=x, loss_fn=preference(own, 0.02), loss_reduction="mean")
            torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
            assert_same(gradients(own), gradients(reference))
            own.zero_grad()
        with torch.no_grad():
            found = piped.forward_loss((x,), label=x, loss_fn=preference(own, 0.02), loss_reduction="mean")
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-10)


def test_what_a_loss_has_frozen_when_its_trace_ends_is_trained():
    own, x = network(), batch(8)

    def loss_fn(outputs, _):
        own.layers[0].adapter.requires_grad_(False)
        expected = own(x[: len(outputs)]).detach().sum().item()  # where a trace ends
        own.layers[0].adapter.requires_grad_(True)
        return (outputs - expected).square().mean()

    with roundpipe.compile(own, devices=["cpu"]) as piped:
        piped.forward_backward((x,), loss_fn=loss_fn, loss_reduction="mean")
        assert all(each.grad is not None for each in own.parameters() if each.requires_grad)
        assert sum(each.requires_grad for each in own.parameters()) == 12


def test_parameters_of_an_update_are_those_of_the_step_whatever_is_frozen_meanwhile():
    own, x, is_frozen, norms = network(), batch(8), threading.Event(), []
    with roundpipe.compile(own, devices=["cpu"]) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)

        def step_fn():
            assert is_frozen.wait(10)
            names = [name for name, _ in piped.optim_named_parameters()]
            norms.append((len(names), float(nn.utils.clip_grad_norm_(piped.optim_parameters(), 0.1))))
            optimizer.step()
            optimizer.zero_grad()

        piped.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().mean(), loss_reduction="mean")
        handle = piped.step(step_fn)
        with switched_off(own):
            assert list(piped.optim_parameters()) == []
            is_frozen.set()
            handle.result()
        assert norms[0][0] == 12 and norms[0][1] > 0
