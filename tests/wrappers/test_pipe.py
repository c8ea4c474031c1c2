"""The wrapper itself: names and attributes, modes, random numbers, the optimizer's side, life and death."""

import copy
import sys

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import ConfigError
from tests.runtime.models import (
    DTYPE,
    assert_same,
    batch,
    eager_round,
    gradients,
    mlp,
    square_loss,
)
from tests.wrappers.cases_pipe import train_once


def test_a_sequential_has_one_layer_per_child():
    with roundpipe.RoundPipe(mlp(5)) as piped:
        assert "5 layers" in str(piped) and "0 .. 4 (5x)" in str(piped)


def test_a_child_that_is_there_twice_is_two_layers():
    shared = nn.Linear(3, 3)
    with roundpipe.RoundPipe(nn.Sequential(shared, nn.Tanh(), shared)) as piped:
        assert "3 layers" in str(piped)


def test_any_other_module_is_one_layer():
    class Own(nn.Sequential):
        def forward(self, value):
            return super().forward(value) * 2

    for model in (nn.Linear(6, 6, dtype=DTYPE), Own(*mlp(3))):
        reference = copy.deepcopy(model)
        expected, _ = eager_round(reference, (batch(),), num=3)
        with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
            assert "1 layer," in str(piped)
            torch.testing.assert_close(train_once(piped), expected, rtol=0, atol=1e-10)
        assert_same(gradients(model), gradients(reference))


def test_the_name_is_the_callers_line_by_default():
    with roundpipe.RoundPipe(mlp(1), name="mine") as piped:
        assert str(piped).startswith("mine: ")
    line = sys._getframe().f_lineno + 1
    with roundpipe.RoundPipe(mlp(1)) as piped:
        assert str(piped).startswith(f"test_pipe.py:{line}: ")


def test_attributes_are_those_of_the_model():
    model = mlp(2)
    model.note = "before"
    with roundpipe.RoundPipe(model) as piped:
        assert piped.model is model
        assert piped.note == "before"
        piped.note = "after"
        piped.added = nn.Linear(2, 2)
        assert model.note == "after" and isinstance(model.added, nn.Linear)
        del piped.note
        assert not hasattr(model, "note") and not hasattr(piped, "note")
        assert "added" in dir(piped) and "step" in dir(piped)
        del piped.added
        with pytest.raises(AttributeError, match="nothing"):
            piped.nothing


def test_attributes_are_those_of_the_original_model_if_one_is_set():
    model, original = mlp(2), nn.Module()
    original.inner, original.config = model, {"layers": 2}
    with roundpipe.RoundPipe(model) as piped:
        piped.set_original_model(original)
        assert piped.config == {"layers": 2} and piped.model is model
        piped.config = None
        assert original.config is None
        assert list(piped.state_dict()) == list(original.state_dict())
        assert dict(piped.named_parameters()).keys() == dict(original.named_parameters()).keys()
        piped.eval()
        assert not original.training and not model.training and not piped.training
        piped.train()
        assert original.training and model.training and piped.training


def test_parameters_buffers_and_state_are_the_models():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).to(DTYPE)
    with roundpipe.RoundPipe(model) as piped:
        assert all(a is b for a, b in zip(piped.parameters(), model.parameters(), strict=True))
        assert all(a is b for a, b in zip(piped.buffers(), model.buffers(), strict=True))
        assert list(piped.state_dict()) == list(model.state_dict())
        assert [name for name, _ in piped.named_modules()] == [name for name, _ in model.named_modules()]
        assert list(piped.children()) == list(model.children())


def test_modes_follow_the_model():
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6)).to(DTYPE).eval()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        assert not piped.training
        expected = model(batch())
        torch.testing.assert_close(piped(batch()), expected, rtol=0, atol=1e-12)
        piped.train()
        assert model[1].training
        assert not torch.equal(piped(batch()), expected)
        model.eval()  # behind the wrapper's back
        torch.testing.assert_close(piped(batch()), model(batch()), rtol=0, atol=1e-12)


def test_weights_can_be_converted_but_not_moved():
    model = mlp(2)
    with roundpipe.RoundPipe(model) as piped:
        train_once(piped)
        piped.float()
        assert all(p.dtype is torch.float32 for p in model.parameters())
        loss = piped.forward_backward((batch().float(),), loss_fn=square_loss)
        assert loss.dtype is torch.float32
        with pytest.raises(ConfigError, match="streamed to the devices"):
            piped.to("meta")
