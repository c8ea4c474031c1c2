"""How a wrapper ends: closed, left, dropped, or with the program. Nothing is kept, and no error is lost."""

from __future__ import annotations

import gc
import itertools
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.runtime.optimizer.update import Update
from tests.repeats import repeats
from tests.runtime.cases_overlap import build, in_asynchronous_steps, train
from tests.runtime.models import batch, mlp
from tests.wrappers.cases_pipe import threads, train_once

pytestmark = pytest.mark.timeout(60)


class Mine(Exception):
    """Of the user's code."""


def fail() -> None:
    raise Mine("in step_fn")


class Fails(nn.Module):
    """Its backward fails, once it may."""

    may_go = threading.Event()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.may_go.clear()
        result: torch.Tensor = _Fails.apply(value)
        return result


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Fails.may_go.wait(20)
        raise ZeroDivisionError("in the backward")


def in_step_fn() -> Any:
    """A wrapper whose last asynchronous step fails."""
    pipe = roundpipe.RoundPipe(mlp(), devices=["cpu"] * 2)
    list(pipe.optim_parameters())
    train_once(pipe)
    pipe.step(fail)
    return pipe


def in_backward() -> Any:
    """A wrapper whose last round fails after its call has returned, so that its step is not made."""
    model = build()
    model[2] = Fails()
    pipe = in_asynchronous_steps(model)
    train(pipe, batch())
    pipe.step(lambda: None)
    Fails.may_go.set()
    return pipe


FAILURES = {"step_fn": (in_step_fn, Mine), "backward": (in_backward, ZeroDivisionError)}
failures = pytest.mark.parametrize("make, kind", FAILURES.values(), ids=FAILURES)


@failures
def test_close_raises_the_error_of_the_last_round(make: Callable[[], Any], kind: type[Exception]) -> None:
    before = threads()
    pipe = make()
    with pytest.raises(kind):
        pipe.close()
    assert threads() <= before, "and has closed everything"
    pipe.close()


@failures
def test_the_end_of_a_context_raises_the_error_of_the_last_round(
    make: Callable[[], Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind), make():
        pass


@failures
def test_another_error_that_ends_a_context_has_a_note_of_it(make: Callable[[], Any], kind: type[Exception]) -> None:
    before = threads()
    with pytest.raises(KeyError) as caught, make():
        raise KeyError("the user's")
    (note,) = caught.value.__notes__
    assert kind.__name__ in note and "close() raised" in note
    assert threads() <= before


def test_two_errors_are_both_raised() -> None:
    pipe = in_backward()
    # private, since no run has one of each for certain
    updates = pipe._session.optimizer._updates
    updates._failed = Update("of this test", error=Mine("of an update"))
    with pytest.raises((Mine, ZeroDivisionError)) as caught:
        pipe.close()
    errors = {type(caught.value), type(caught.value.__context__)}
    assert errors == {Mine, ZeroDivisionError}


@failures
@pytest.mark.parametrize("in_cycle", [False, True])
def test_a_dropped_wrapper_reports_the_error_of_the_last_round(
    make: Callable[[], Any], kind: type[Exception], in_cycle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda given: seen.append(given.exc_type))
    monkeypatch.setattr(threading, "excepthook", lambda given: seen.append(given.exc_type))
    before = threads()
    pipe = make()
    if in_cycle:
        pipe.model.__dict__["trainer"] = pipe
    del pipe
    assert wait_for(lambda: seen == [kind]), seen
    assert wait_for(lambda: threads() <= before)


def test_a_round_that_is_running_ends_before_close_returns() -> None:
    model = build()
    with in_asynchronous_steps(model) as pipe:
        hold = model[2].switch
        hold.may_go.clear()
        train(pipe, batch())
        threading.Timer(0.1, hold.may_go.set).start()
    assert all(parameter.grad is not None for parameter in model.parameters()), "its gradients have come home"


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return condition()


class Decides(nn.Module):
    """Can't be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(2)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.layers(value) if value.sum() < 1e9 else value


def _wrapped(kind: str) -> Any:
    if kind == "RoundPipe":
        return roundpipe.RoundPipe(mlp(2), devices=["cpu"] * 2)
    model = mlp(2) if kind == "compile" else Decides()
    return roundpipe.compile(model, example_args=(batch(),), devices=["cpu"] * 2, lower_threshold=1)


@pytest.mark.filterwarnings("ignore:forward_backward of an AutoRoundPipe", "ignore:.*can't be traced")
@pytest.mark.parametrize(
    "reference, end",
    repeats(
        itertools.product(["attribute", "hook", "gradient hook"], ["dropped", "closed"]),
        ["attribute-closed", "hook-dropped", "gradient hook-dropped"],
    ),
)
@pytest.mark.parametrize("kind", repeats(["RoundPipe", "compile", "fallback"], ["RoundPipe", "fallback"]))
def test_a_model_that_refers_to_its_wrapper_is_collected(kind: str, reference: str, end: str) -> None:
    before = threads()
    pipe = _wrapped(kind)
    model = pipe.model
    optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
    for is_async in (True, False, True):
        train_once(pipe)
        pipe.step(optimizer.step, is_async=is_async)
    pipe.synchronize()
    if reference == "attribute":
        model.__dict__["trainer"] = pipe
    elif reference == "hook":
        next(iter(model.children())).register_forward_hook(lambda *given, pipe=pipe: None)
    else:
        next(iter(model.parameters())).register_hook(lambda gradient, pipe=pipe: None)
    train_once(pipe)
    if end == "closed":
        pipe.close()
        assert threads() <= before, "close() waits for no collection"
    gone = weakref.ref(pipe), weakref.ref(model), weakref.ref(next(iter(model.parameters())))
    del pipe, model, optimizer
    assert wait_for(lambda: all(each() is None for each in gone))
    assert wait_for(lambda: threads() <= before)


def test_a_wrapper_may_be_collected_in_one_of_its_threads() -> None:
    """Which can't wait for the others, since they wait for it."""
    before = threads()
    collected: list[bool] = []

    class Collects(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return _Collect.apply(value)

    class _Collect(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            may_go.wait(20)
            gc.collect()
            collected.append(gone() is None)
            return gradient

    model = build()
    model[1] = Collects()
    may_go = threading.Event()
    pipe = in_asynchronous_steps(model)
    model.__dict__["trainer"] = pipe
    gone = weakref.ref(pipe)
    train(pipe, batch())
    del pipe, model
    may_go.set()
    assert wait_for(lambda: gone() is None) and wait_for(lambda: threads() <= before)
    assert collected


def test_a_wrapper_that_could_not_be_made_leaves_nothing_on_the_model() -> None:
    model = mlp()
    with pytest.raises(roundpipe.ConfigError):
        roundpipe.RoundPipe(model, devices=["cpu"], pin_model="register")
    gc.collect()
    assert not any(module._load_state_dict_post_hooks for module in model.modules())


@pytest.mark.long
@pytest.mark.timeout(180)
def test_models_come_and_go() -> None:
    from tests.faults.lives import live  # the long run is a command

    figures = live(num_models=8, kinds=("RoundPipe", "compile"))
    assert figures[-1].threads == figures[0].threads and figures[-1].files == figures[0].files


PROGRAM = """
import sys
from tests.wrappers.test_ends import FAILURES
pipe = FAILURES[sys.argv[1]][0]()
if sys.argv[2] == "exits":
    sys.exit(0)
if sys.argv[2] == "raises":
    raise KeyError("the user's")
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "failure, end",
    repeats([("step_fn", "runs out"), ("backward", "exits"), ("backward", "raises")], ["step_fn-runs out"]),
)
def test_the_end_of_the_program_reports_the_error_of_the_last_round(failure: str, end: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, failure, end], capture_output=True, text=True, timeout=150)
    assert FAILURES[failure][1].__name__ in done.stderr, done.stderr
    assert "the last round or update failed" in done.stderr
    assert done.returncode == (end == "raises"), "Python gives no way to change it any more"


def test_no_report_where_nothing_failed(caplog: pytest.LogCaptureFixture) -> None:
    from roundpipe.wrappers.session import _release_all  # private: Python calls it at the end of a program

    pipe = roundpipe.RoundPipe(mlp(), devices=["cpu"])
    train_once(pipe)
    with caplog.at_level(logging.WARNING):
        _release_all()
    assert not caplog.records
    pipe.close()
