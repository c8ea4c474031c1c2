"""A wrapper in a forked process: it has none of the threads, says so, and does not hang."""

from __future__ import annotations

import multiprocessing
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import roundpipe
from roundpipe.core.errors import ForkError
from tests.runtime.cases_overlap import build, in_asynchronous_steps, train
from tests.runtime.models import batch, mlp
from tests.wrappers.cases_pipe import train_once

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="the system has no fork"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def in_child(work: Callable[[], Any]) -> str:
    """What a forked process makes of some work: its result, or its error."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        try:
            sender.send(f"result: {work()}")
        except BaseException as error:
            sender.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")

    child = context.Process(target=run)
    child.start()
    try:
        assert receiver.poll(20), "the child hangs"
        text: str = receiver.recv()
        child.join(20)
        assert child.exitcode == 0
        return text
    finally:
        child.kill()


USES: dict[str, Callable[[Any], Any]] = {
    "forward": lambda pipe: pipe(batch()),
    "without gradients": lambda pipe: torch.no_grad()(pipe)(batch()),
    "forward_backward": lambda pipe: train_once(pipe),
    "step": lambda pipe: pipe.step(lambda: None),
    "waited step": lambda pipe: pipe.step(lambda: None, is_async=False),
    "synchronize": lambda pipe: pipe.synchronize(),
    "zero_grad": lambda pipe: pipe.zero_grad(),
    "load_state_dict": lambda pipe: pipe.load_state_dict(pipe.state_dict()),
    "report": lambda pipe: pipe.report(),
}


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore:forward_backward of an AutoRoundPipe")
@pytest.mark.parametrize("kind", ["RoundPipe", "AutoRoundPipe"])
def test_use_in_a_forked_child_says_what_to_do(kind: str) -> None:
    with getattr(roundpipe, kind)(mlp(), devices=["cpu"] * 2) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        train_once(pipe)
        pipe.step(optimizer.step)
        for name, use in USES.items():
            text = in_child(lambda use=use: use(pipe))
            assert text.startswith("ForkError: this process was forked") and "spawn" in text, name
        assert torch.isfinite(train_once(pipe)), "the parent goes on"


def test_a_backward_in_a_forked_child_says_what_to_do() -> None:
    with roundpipe.RoundPipe(mlp(), devices=["cpu"] * 2) as pipe:
        output = pipe(batch()).sum()
        plain = in_child(torch.ones((), requires_grad=True).backward)  # torch refuses it if its threads have run before
        expected = "ForkError" if plain == "result: None" else "RuntimeError: Unable to handle autograd's threading"
        assert in_child(output.backward).startswith(expected)
        output.backward()


def test_what_a_forked_child_may_do() -> None:
    """While a round and an update are running, which the child would wait for for ever."""
    model = build()
    hold = model[2].switch
    with in_asynchronous_steps(model) as pipe:
        hold.may_go.clear()
        train(pipe, batch())
        pipe.step(lambda: None)

        def wrap_again() -> bool:
            with roundpipe.RoundPipe(pipe.model, devices=["cpu"]) as own, torch.no_grad():
                return torch.equal(own(batch(1)), model(batch(1)))

        def load() -> None:
            model.load_state_dict(model.state_dict())

        assert in_child(lambda: len(list(pipe.parameters()))) == "result: 8"
        assert in_child(lambda: len(pipe.state_dict())) == "result: 8"
        assert in_child(lambda: pipe.model(batch()).shape) == "result: torch.Size([7, 6])"
        assert in_child(wrap_again) == "result: True"
        assert in_child(load) == "result: None"
        assert in_child(pipe.close) == "result: None"
        assert "stage" in in_child(lambda: str(pipe))
        hold.may_go.set()
        assert torch.isfinite(train(pipe, batch()))


def test_a_lock_that_is_held_at_the_fork_is_free_in_the_child() -> None:
    with roundpipe.RoundPipe(mlp(), devices=["cpu"]) as pipe:
        train_once(pipe)
        held, done = threading.Event(), threading.Event()
        board = pipe._session.gates.board  # private: other threads hold its lock for moments only

        def hold() -> None:
            with board.lock:
                held.set()
                done.wait(20)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(20)
        try:
            assert in_child(lambda: len(list(pipe.parameters()))).startswith("result")
            assert in_child(lambda: train_once(pipe)).startswith("ForkError")
        finally:
            done.set()
            thread.join()


class Predictions(Dataset[torch.Tensor]):
    """Data that a worker makes with the wrapper, or with the model itself."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = self.model(batch(1))[0]
        return result


def test_a_loader_whose_workers_touch_the_wrapper() -> None:
    with roundpipe.RoundPipe(mlp(), devices=["cpu"] * 2) as pipe:
        expected = pipe(batch(1)).detach()
        loader = DataLoader(Predictions(pipe), num_workers=1, multiprocessing_context="fork", timeout=20)
        with pytest.raises(ForkError, match="multiprocessing_context"):
            next(iter(loader))
        (given,) = DataLoader(
            Predictions(pipe.model), batch_size=2, num_workers=1, multiprocessing_context="fork", timeout=20
        )
        torch.testing.assert_close(given, expected.expand(2, -1))
