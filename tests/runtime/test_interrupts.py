"""Ctrl-C, and threads that the system refuses, at any moment of a step: nothing hangs and the next call works."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.runtime.engine.worker import Worker

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
