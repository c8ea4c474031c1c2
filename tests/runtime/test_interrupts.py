"""Ctrl-C, and threads that the system refuses, at any moment of a step: nothing hangs and the next call works."""

from __future__ import annotations

import _thread
import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.runtime.engine.worker import Worker
from roundpipe.runtime.weights.parameter_pair import ParameterPair

pytestmark = pytest.mark.timeout(60)


def _pipe() -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double()
    pipe = RoundPipe(model, devices=["cpu"] * 3, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    return pipe, torch.randn(4, 4, dtype=torch.float64)


def _train(pipe: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = pipe.forward_backward((x,), loss_fn=lambda outputs, label: outputs.square().sum())
    return loss


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("is_late", [False, True])
def test_an_interrupt_between_two_workers(number: int, is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step was given to some of its workers; or, late, the last of them did not return from taking it."""
    pipe, x = _pipe()
    with pipe:
        expected = _train(pipe, x)
        submit, calls = Worker.submit, []

        def interrupted(worker: Worker, step: Any) -> None:
            calls.append(worker)
            if len(calls) == number and not is_late:
                raise KeyboardInterrupt
            submit(worker, step)
            if len(calls) == number:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Worker, "submit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                _train(pipe, x)
        pipe.synchronize()
        assert torch.equal(_train(pipe, x), expected)


@pytest.mark.parametrize("number", range(1, 7))
def test_a_thread_that_can_not_be_started_raises(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, x = _pipe()
    start, calls = threading.Thread.start, []

    def refused(thread: threading.Thread) -> None:
        calls.append(thread)
        if len(calls) == number:
            raise RuntimeError("can't start new thread")
        start(thread)

    with pipe:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                _train(pipe, x)
        assert torch.isfinite(_train(pipe, x))
        pipe.synchronize()


@pytest.mark.parametrize("number", [1, 3, 6])
@pytest.mark.parametrize(
    "where, what",
    [
        ("waited step", "write_weights"),
        ("waited step", "take_gradient"),
        ("synchronize", "write_weights"),
        ("synchronize", "take_gradient"),
        ("synchronize", "show_gradient"),
    ],
)
def test_an_interrupt_between_two_parameters(
    number: int, where: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and gradients go over as a whole, whenever Ctrl-C comes."""
    pipe, x = _pipe()
    twin = copy.deepcopy(pipe.model)
    optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    copies, calls = getattr(ParameterPair, what), []

    def interrupted(pair: ParameterPair, *together: Any, **options: Any) -> None:
        calls.append(pair)
        if len(calls) == number:
            _thread.interrupt_main()  # as the handler of SIGINT does
        copies(pair, *together, **options)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def eager() -> torch.Tensor:
        loss = twin(x).square().sum()
        loss.backward()
        return loss.detach()

    with pipe:
        for _ in range(2):
            torch.testing.assert_close(_train(pipe, x), eager())
            pipe.step(update, is_async=False)
            other.step()
            other.zero_grad()
        _train(pipe, x)
        eager()
        if where == "synchronize":
            pipe.step(update)
            other.step()
            other.zero_grad()
            pipe.zero_grad()  # waits for the update, which is not in the model yet
            _train(pipe, x)
        with monkeypatch.context() as patch:
            patch.setattr(ParameterPair, what, interrupted)
            with pytest.raises(KeyboardInterrupt):
                pipe.synchronize() if where == "synchronize" else pipe.step(update, is_async=False)
        with torch.no_grad():
            seen = pipe(x)  # all of the new weights, without a `synchronize`
        pipe.synchronize()
        copied = list(pipe.optim_parameters())
        assert all(torch.equal(one, new) for one, new in zip(pipe.model.parameters(), copied, strict=True))
        if where == "waited step" and what == "write_weights":
            other.step()  # the update was made
            other.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(seen, twin(x))
        if where == "waited step":
            for one, expected in zip(pipe.model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(one.grad, expected.grad)


def test_an_interrupted_step_that_was_not_made_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, x = _pipe()
    optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
    with pipe:
        _train(pipe, x)
        take = ParameterPair.take_gradient

        def interrupted(pair: ParameterPair, together: Any, **options: Any) -> None:
            _thread.interrupt_main()
            take(pair, together, **options)

        with monkeypatch.context() as patch:
            patch.setattr(ParameterPair, "take_gradient", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pipe.step(optimizer.step, is_async=False)
        assert pipe.report().num_steps == 0
        before = [one.detach().clone() for one in pipe.optim_parameters()]
        pipe.step(optimizer.step, is_async=False)
        assert pipe.report().num_steps == 1
        assert not any(torch.equal(one, now) for one, now in zip(before, pipe.optim_parameters(), strict=True))
