"""Ctrl-C at any moment of a step: ``python -m tests.campaigns interrupts``.

Each case interrupts one step of training somewhere, then lets the caller go on. Of a small model, a trace function
raises KeyboardInterrupt in the calling thread at one line of the library. Of one with some tens of megabytes of
weights, a signal does at one moment, most often while weights are copied; not inside ``step_fn``, where an optimizer is
torn in eager mode, too. Afterwards:

    hang        nothing waits for ever
    torn        the weights are those before the update or those after it, all of them
    stale       and a call without a `synchronize` before it sees the one or the other
    next call   the next step gives eager's loss and gradients
    leak        as many bytes of tensors are alive, and as many threads run, as after a clean step
    unexpected  nothing else is raised than the interrupt
"""

from __future__ import annotations

import contextlib
import copy
import linecache
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import roundpipe
from tests.faults.campaign import alive_bytes, leaks

LIBRARY = str(Path(roundpipe.__file__).parent) + os.sep
WIDTH = 6
LARGE_WIDTH = 1000
PARTS = ("step", "synchronize", "all")


@dataclass(frozen=True)
class Case:
    """What is interrupted; ``line`` counts the lines of the library that the calling thread runs."""

    seed: int
    num_workers: int
    is_async: bool
    part: str
    """Of a step, what is interrupted by a signal; empty: any line of all of it."""
    line: int = -1
    place: str = ""

    @property
    def width(self) -> int:
        """Of a layer."""
        return LARGE_WIDTH if self.part else WIDTH


def _takes_lock(frame: FrameType) -> bool:
    """Whether a line takes or gives back a lock: Python runs no signal handler between a lock and its ``with``."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return line.startswith("with ") and "lock" in line


class Interrupter:
    """Counts lines of the library, or of other ``source``, in the calling thread, and interrupts at one of them."""

    def __init__(self, at: int = -1, source: str = LIBRARY) -> None:
        self.count = 0
        self.source = source
        self.place = ""
        self.at = at

    def __enter__(self) -> Interrupter:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.source):
            return None
        if event == "line" and not _takes_lock(frame):
            self.count += 1
            if self.count - 1 == self.at:
                file = frame.f_code.co_filename.removeprefix(self.source)
                self.place = f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace


class Alarm:
    """Interrupts the main thread after some seconds, but not while ``may_interrupt`` says no."""

    def __init__(self, seconds: float, may_interrupt: Callable[[], bool]) -> None:
        self.seconds = seconds
        self.place = ""
        self.at = -1
        self._may_interrupt = may_interrupt

    def __enter__(self) -> Alarm:
        self._before = signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if not self._may_interrupt():
            signal.setitimer(signal.ITIMER_REAL, 1e-4)
            return
        assert frame is not None
        self.place = f"{frame.f_code.co_filename.removeprefix(LIBRARY)}:{frame.f_lineno} {frame.f_code.co_name}"
        signal.raise_signal(signal.SIGINT)


class Run:
    """One model and its eager twin."""

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(case.seed)
        width = case.width
        self.rate = 0.1 / width
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))).double()
        self.twin = copy.deepcopy(self.model)
        self.x, self.label = (torch.randn(6, width, dtype=torch.float64) for _ in range(2))
        self.updating: int | None = None
        """The thread that runs ``step_fn``."""
        config = roundpipe.RoundPipeRunConfig(num_microbatch=2)
        self.pipe = roundpipe.RoundPipe(self.model, devices=["cpu"] * case.num_workers, model_run_config=config)
        self.optimizer = torch.optim.SGD(self.pipe.optim_parameters(), lr=self.rate)

    @staticmethod
    def loss(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Of a microbatch."""
        return (outputs - label).square().sum()

    def step(self, interrupter: Any = None) -> float:
        """One step of training, waited for; returns how long the part took that ``interrupter`` may interrupt."""
        part = self.case.part or "all"
        began_s = time.perf_counter()
        with contextlib.ExitStack() as stack:
            for name in ("forward_backward", "step", "synchronize"):
                if name == ("forward_backward" if part == "all" else part):
                    began_s = time.perf_counter()
                    stack.enter_context(interrupter or contextlib.nullcontext())
                getattr(self, f"_{name}")()
        return time.perf_counter() - began_s

    def _forward_backward(self) -> None:
        self.pipe.forward_backward((self.x,), label=self.label, loss_fn=self.loss)

    def _step(self) -> None:
        self.pipe.step(self._update, is_async=self.case.is_async)

    def _synchronize(self) -> None:
        self.pipe.synchronize()

    def _update(self) -> None:
        self.updating = threading.get_ident()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updating = None

    def interrupter(self, rng: random.Random) -> Any:
        """What interrupts the next step somewhere."""
        if self.case.part:
            return Alarm(rng.random() * self.step(), lambda: self.updating != threading.get_ident())
        with Interrupter() as counter:
            self.step()
        return Interrupter(rng.randrange(counter.count))

    def check_next_call(self) -> list[str]:
        """Whether loss and gradients of a step on the present weights are eager's."""
        self.pipe.zero_grad()
        self.optimizer.zero_grad()
        self.pipe.synchronize()
        self.twin.load_state_dict(self.model.state_dict())
        self.twin.zero_grad()
        expected = self.loss(self.twin(self.x), self.label)
        expected.backward()
        loss = self.pipe.forward_backward((self.x,), label=self.label, loss_fn=self.loss)
        self.pipe.synchronize()
        pairs = list(zip(self.model.parameters(), self.twin.parameters(), strict=True))
        is_same = torch.allclose(loss, expected.detach()) and all(
            one.grad is not None and other.grad is not None and torch.allclose(one.grad, other.grad)
            for one, other in pairs
        )
        return [] if is_same else ["next call: not eager's"]

    def check_weights(self) -> list[str]:
        """Whether the model's weights are those before the step or those after it."""
        with torch.no_grad():
            called = self.pipe(self.x)
            before = self.twin(self.x)
            self.pipe.synchronize()
            is_before = self.equals_twin()
            self.eager_step()
            after = self.twin(self.x)
        problems = []
        if not is_before and not self.equals_twin():
            problems.append("torn: the weights are neither those before the update nor those after it")
        if not torch.allclose(called, before) and not torch.allclose(called, after):
            problems.append("stale: a call saw neither the weights before the update nor those after it")
        return problems

    def eager_step(self) -> None:
        """The twin's update from its present weights."""
        self.twin.zero_grad()
        with torch.enable_grad():
            self.loss(self.twin(self.x), self.label).backward()
        with torch.no_grad():
            for parameter in self.twin.parameters():
                parameter -= self.rate * parameter.grad  # type: ignore[operator]

    def equals_twin(self) -> bool:
        """Whether all weights are the twin's."""
        pairs = zip(self.model.parameters(), self.twin.parameters(), strict=True)
        return all(torch.allclose(one, other, rtol=1e-10, atol=1e-13) for one, other in pairs)


def draw_case(seed: int) -> Case:
    """A random case."""
    rng = random.Random(seed)
    return Case(seed, rng.randint(1, 3), rng.random() < 0.5, rng.choice(("", *PARTS)))


def examine(case: Case) -> tuple[Case, list[str]]:
    """Run a case; its line is drawn from those of a clean step."""
    run = Run(case)
    problems: list[str] = []
    try:
        for _ in range(2 * case.num_workers):  # each of them has run each stage then
            problems += run.check_next_call()
            run.step()
        run.twin.load_state_dict(run.model.state_dict())
        interrupter = run.interrupter(random.Random(case.seed + 1))
        run.eager_step()
        if not run.equals_twin():
            problems.append("unexpected: a clean step is not eager's")
        bytes_before, threads_before = alive_bytes(), threading.active_count()
        try:
            run.step(interrupter)
        except KeyboardInterrupt:
            pass
        case = Case(**{**asdict(case), "line": interrupter.at, "place": interrupter.place})
        problems += run.check_weights()
        problems += run.check_next_call()
        run.step()  # takes the gradients, and makes again what an update needs
        run.twin.zero_grad()
        run.eager_step()
        problems += leaks(bytes_before, threads_before)
    except BaseException as error:
        problems.append(f"unexpected: {type(error).__name__}: {error}")
    finally:
        sys.settrace(None)
        run.pipe.close()
    return case, problems
