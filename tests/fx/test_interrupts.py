"""Ctrl-C while a model is traced."""

import signal

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch

import roundpipe


class Interrupted(nn.Module):
    """Gets signals before its second layer, and remembers how far it came."""

    num_signals = 1
    reached = -1

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if index == 1:
                for _ in range(Interrupted.num_signals):
                    signal.raise_signal(signal.SIGINT)
            x = layer(x)
            Interrupted.reached = index
        return x


@pytest.mark.parametrize("num_signals", [1, 2])
def test_it_comes_between_two_operators_and_leaves_no_mode(num_signals, monkeypatch):
    monkeypatch.setattr(Interrupted, "num_signals", num_signals)
    monkeypatch.setattr(Interrupted, "reached", -1)
    model, x = Interrupted(), torch.randn(2, 4)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        roundpipe.compile(model, example_args=(x,), devices=["cpu"])
    assert Interrupted.reached < 1
    # torch has no public name for it
    assert not _python_dispatch._get_current_dispatch_mode_stack() and not torch._C._len_torch_function_stack()
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.setattr(Interrupted, "num_signals", 0)
    with roundpipe.compile(model, example_args=(x,), devices=["cpu"]) as piped:
        torch.testing.assert_close(piped(x), model(x))
