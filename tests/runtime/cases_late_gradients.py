"""What tests of late gradients have in common: small ones that are late, and the same training without any."""

from contextlib import contextmanager

import pytest
from torch import nn

import roundpipe
from roundpipe.runtime.optimizer import late_gradients, pieces
from tests.runtime.models import assert_equal_bits

WIDTH = 8


@pytest.fixture
def used(monkeypatch):
    """Has gradients of any size late, read in pieces of few elements; the dtypes of those that updates read."""
    roundpipe.RoundPipe(nn.Linear(1, 1), devices=["cpu"]).close()  # torch has the library's hooks from then on
    monkeypatch.setattr(late_gradients, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(late_gradients, "PIECE_ELEMENTS", 16)  # whole vectors: kernels round the rest otherwise
    dtypes, update = [], pieces._update_in_pieces  # the one place that all of them pass
    monkeypatch.setattr(pieces, "_update_in_pieces", lambda *args: (dtypes.append(args[2].dtype), update(*args)))  # it
    return dtypes


@contextmanager
def converted(monkeypatch):
    """While open, no gradient is late."""
    with monkeypatch.context() as patch:
        patch.setattr(late_gradients, "LEAST_ELEMENTS", 10**9)
        yield


def assert_same_converted(monkeypatch, train):
    """What ``train()`` returns is the same, bit by bit, where no gradient is late."""
    found = train()
    with converted(monkeypatch):
        assert_equal_bits(found, train())


def step(optimizer, copies, index):
    optimizer.step()
    optimizer.zero_grad()
