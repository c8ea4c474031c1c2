"""What updates make besides, measured operator by operator, is no more than plans leave for it."""

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.allocations import Allocations
from roundpipe.runtime.optimizer import pieces, temporaries
from roundpipe.runtime.optimizer.pieces import PiecewiseUpdates
from tests.runtime.models import assert_equal_bits
from tests.runtime.test_pieces import flat

SHAPES = ((30, 20), (50,), (40, 20), (50, 30), (10,), (7, 30), (1,))
KINDS = {
    "AdamW": lambda given, **how: torch.optim.AdamW(given, 0.01, **how),
    "AdamW maximize": lambda given, **how: torch.optim.AdamW(given, 0.01, maximize=True, **how),
    "AdamW amsgrad": lambda given, **how: torch.optim.AdamW(given, 0.01, amsgrad=True, **how),
    "Adam": lambda given, **how: torch.optim.Adam(given, 0.01, weight_decay=0.1, **how),
    "Adam maximize": lambda given, **how: torch.optim.Adam(given, 0.01, weight_decay=0.1, maximize=True, **how),
    "SGD": lambda given, **how: torch.optim.SGD(given, 0.01, momentum=0.9, **how),
    "SGD nesterov": lambda given, **how: torch.optim.SGD(given, 0.01, momentum=0.9, nesterov=True, **how),
    "SGD decay": lambda given, **how: torch.optim.SGD(
        given, 0.01, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True, **how
    ),
}
OTHERS = {
    "Adagrad": lambda given, **how: torch.optim.Adagrad(given, 0.01, weight_decay=0.1, **how),
    "Adadelta": lambda given, **how: torch.optim.Adadelta(given, 0.01, weight_decay=0.1, **how),
    "Adamax": lambda given, **how: torch.optim.Adamax(given, 0.01, weight_decay=0.1, **how),
    "ASGD": lambda given, **how: torch.optim.ASGD(given, 0.01, weight_decay=0.1, **how),
    "NAdam": lambda given, **how: torch.optim.NAdam(given, 0.01, weight_decay=0.1, **how),
    "RAdam": lambda given, **how: torch.optim.RAdam(given, 0.01, weight_decay=0.1, **how),
    "RMSprop": lambda given, **how: torch.optim.RMSprop(given, 0.01, weight_decay=0.1, momentum=0.9, **how),
    "centered": lambda given, **how: torch.optim.RMSprop(given, 0.01, centered=True, maximize=True, **how),
    "Rprop": lambda given, **how: torch.optim.Rprop(given, 0.01, **how),
}


def same_parameters(step=0):
    torch.manual_seed(step)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def with_gradients(parameters, step):
    torch.manual_seed(100 + step)
    for each in parameters:
        each.grad = torch.randn(each.shape)


def measured(act):
    """Bytes that are allocated at once in a call."""
    with Allocations() as memory:
        act()
    return memory.peak_bytes


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_torchs_own_steps_make_no_more(kind, foreach):
    parameters = same_parameters()
    optimizer = (KINDS | OTHERS)[kind](parameters, foreach=foreach)
    with_gradients(parameters, 0)
    optimizer.step()  # makes the states
    with_gradients(parameters, 1)
    found = temporaries.temporary_bytes(optimizer, parameters)
    small_bytes = 64 * len(SHAPES)  # counts and factors, of one element each
    assert measured(optimizer.step) <= found + small_bytes
    whole_bytes = sum(each.nbytes for each in parameters)
    assert found <= temporaries.OF_ALL * whole_bytes
    if kind == "SGD":
        assert found == 0
    if kind == "AdamW":
        assert found <= whole_bytes or not foreach


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of 1,000 elements, in updates on a device."""
    roundpipe.RoundPipe(nn.Linear(1, 1), devices=["cpu"]).close()  # torch has the library's hooks from then on
    monkeypatch.setattr(temporaries, "PIECE_ELEMENTS", 1_000)


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_in_pieces_on_a_device_they_make_those_of_a_piece_and_the_same_values(kind, foreach, small_pieces):
    ours, plain = same_parameters(), same_parameters()
    optimizers = [KINDS[kind]([{"params": each[:3]}, {"params": each[3:]}], foreach=foreach) for each in (ours, plain)]
    updates = PiecewiseUpdates()
    updates.away = {id(each) for each in ours}
    for step in range(4):
        for each in (ours, plain):
            with_gradients(each, step)
        gradients = [each.grad for each in ours]
        found = temporaries.temporary_bytes(optimizers[0], ours, in_pieces=updates.suit(optimizers[0]))

        def in_pieces():
            updates.before_step(optimizers[0], False)
            optimizers[0].step()
            updates.after_step()

        num_bytes = measured(in_pieces)
        optimizers[1].step()
        assert all(one.grad is gradient for one, gradient in zip(ours, gradients, strict=True))
        assert_equal_bits(dict(enumerate(ours)), dict(enumerate(plain)))
        assert_equal_bits(*(flat(optimizer.state_dict()) for optimizer in optimizers))
        if step:
            assert num_bytes <= found + 64 * len(SHAPES)
    assert found <= temporaries.OF_ONE * 1_000 * 4


def test_a_closure_an_own_class_and_fused_ones(small_pieces):
    parameters = same_parameters()
    updates, adamw = PiecewiseUpdates(), torch.optim.AdamW(parameters)
    whole_bytes, largest_bytes = sum(each.nbytes for each in parameters), max(each.nbytes for each in parameters)
    assert updates.suit(adamw)
    with_gradients(parameters, 0)
    updates.away = {id(each) for each in parameters}
    updates.before_step(adamw, True)
    assert not updates.suit(adamw)  # it may be given one again
    fused = torch.optim.AdamW(parameters, fused=True)
    assert temporaries.temporary_bytes(fused, parameters, in_pieces=pieces.PiecewiseUpdates().suit(fused)) == 0
    adafactor = torch.optim.Adafactor(parameters)
    assert temporaries.temporary_bytes(adafactor, parameters) >= whole_bytes
    own = type("Own", (torch.optim.Optimizer,), {})(parameters, {})
    assert temporaries.temporary_bytes(own, parameters) == whole_bytes + temporaries.OF_ONE * largest_bytes
    assert temporaries.temporary_bytes(own, parameters[:1]) == (1 + temporaries.OF_ONE) * parameters[0].nbytes
    assert temporaries.temporary_bytes(own, []) == 0
