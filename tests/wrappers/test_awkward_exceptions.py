"""Exceptions that have no text or refuse notes, and handlers of the log that fail: the caller gets what was raised."""

import logging
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipeRunConfig
from roundpipe.wrappers.checkpoint_files import SummedFile

pytestmark = pytest.mark.timeout(60)
WIDTH = 4


class WithoutText(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


class WithoutNotes(Exception):
    def add_note(self, note):
        raise ValueError("no notes")

    @property
    def __notes__(self):
        raise ValueError("no notes")


@dataclass(frozen=True)
class Frozen(Exception):
    number: int = 3


AWKWARD = (WithoutText, WithoutNotes, Frozen, lambda: StopIteration(3), GeneratorExit, StopAsyncIteration)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fault = None

    def forward(self, x):
        if self.fault is not None:
            raise self.fault
        return self.linear(x).tanh()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Decides(Net):
    def forward(self, x):
        x = super().forward(x)
        return x if x.sum() < 1e9 else -x


def by_hand():
    return roundpipe.RoundPipe(nn.Sequential(*Net().layers), devices=["cpu"] * 2)


def traced():
    return roundpipe.compile(Net(), devices=["cpu"] * 2)


def with_a_budget():
    return roundpipe.compile(Net(), devices=[roundpipe.Device("cpu", memory_bytes=2**20)])


def fallback():
    return roundpipe.compile(Decides(), devices=["cpu"] * 2, lower_threshold=1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [by_hand, traced, with_a_budget, fallback])
@pytest.mark.parametrize("place", ["forward", "loss_fn", "step_fn", "split_input"])
def test_they_arrive_as_they_were_raised(make, place):
    x = torch.randn(4, WIDTH)
    faults = {}

    def visit(here):
        if here in faults:
            raise faults.pop(here)

    def loss_fn(outputs, label):
        visit("loss_fn")
        return outputs.square().sum()

    def split(args, kwargs, number):
        visit("split_input")
        return [(piece,) for piece in args[0].tensor_split(number)], [{}] * number

    def update():
        visit("step_fn")
        optimizer.step()

    def train():
        pipe.forward_backward((x,), loss_fn=loss_fn, run_config=RoundPipeRunConfig(split_input=split))
        pipe.step(update)
        pipe.synchronize()

    with make() as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        layer = next(each for each in pipe.model.modules() if isinstance(each, Layer))
        for make_fault in AWKWARD:
            fault = make_fault()
            if place == "forward":
                layer.fault = fault
            else:
                faults[place] = fault
            caught = None
            try:
                train()
            except BaseException as error:
                caught = error
            assert caught is fault
            layer.fault = caught = None
            train()


def test_closing_after_one_that_refuses_notes():
    def fails():
        raise RuntimeError("in the update")

    with pytest.raises(Frozen), by_hand() as pipe:  # and what close() raises is no part of it
        pipe.forward_backward((torch.randn(4, WIDTH),), loss_fn=lambda outputs, label: outputs.sum())
        pipe.step(fails)
        raise Frozen


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_write_whose_error_can_not_be_logged_ends_all_the_same(tmp_path, monkeypatch):
    class Fails(logging.Handler):
        def emit(self, record):
            if record.levelno >= logging.ERROR:
                raise ValueError("the disk is full here, too")

    def full(*given):
        raise OSError(28, "no room")

    logger, handler = logging.getLogger("roundpipe"), Fails()
    logger.addHandler(handler)
    try:
        with by_hand() as pipe:
            with monkeypatch.context() as patch:
                patch.setattr(SummedFile, "write", full)  # as a full disk does
                pipe.save_checkpoint(tmp_path / "c", is_async=True)
                with pytest.raises(roundpipe.RoundPipeError, match="no room"):
                    pipe.synchronize()
            pipe.save_checkpoint(tmp_path / "c")
    finally:
        logger.removeHandler(handler)
    for thread in threading.enumerate():  # what it raises belongs to this test
        if thread.name == "roundpipe-checkpoint":
            thread.join(20)
