"""Random timing at every hand-off, by patches of the library's few places where threads and streams meet.

    `TaskThread.submit`  a thread is handed work: slept before, and in the thread before the work
    `Board.lock`         whatever threads wait for changes or is looked at: slept before it is taken, and after
    `LateBackend`        copies of the lanes: made later, by a thread per lane, over a poison for those who do not wait

Of each seed some threads are slow and others quick, and each thread's delays are drawn from the seed and its name.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from roundpipe.runtime import threads
from roundpipe.runtime.device import cpu, resolve
from roundpipe.runtime.device.backend import Event, Lane

DEADLINE_S = 20.0
SLOWNESS = (0.0, 0.0, 0.02, 0.1, 0.3)
"""Chances of a sleep at a hand-off of a thread."""
SLEEPS_S = (0.0, 1e-4, 5e-4, 2e-3)
SWITCH_S = 1e-5
"""How often Python may go from one thread to another, at least."""


class Timing(threading.local):
    """Sleeps of one thread."""

    def __init__(self, seed: int) -> None:
        choose = random.Random(f"{seed} {threading.current_thread().name}")
        self._slowness = choose.choice(SLOWNESS)
        self._choose = choose

    def sleep(self) -> None:
        """Maybe."""
        if self._choose.random() < self._slowness:
            time.sleep(self._choose.choice(SLEEPS_S))


class ShakenLock:
    """A board's lock."""

    def __init__(self, lock: threading.Lock, timing: Timing) -> None:
        self._lock, self._timing = lock, timing

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As of a lock."""
        if blocking:
            self._timing.sleep()
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        """As of a lock."""
        self._lock.release()
        self._timing.sleep()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


class LateEvent(cpu.CpuEvent):
    """An event of a lane whose work is done by a thread."""

    __slots__ = ("arrived",)

    def __init__(self, event: Any, arrived: threading.Event) -> None:
        self.seen, self.ready_at, self.arrived = event.seen, event.ready_at, arrived

    def synchronize(self) -> None:
        if not self.arrived.wait(DEADLINE_S):
            raise TimeoutError("a lane does not go on")
        super().synchronize()

    def is_done(self) -> bool:
        return self.arrived.is_set() and super().is_done()


class LateBackend(cpu.CpuBackend):
    """A CPU worker whose copies are made in the order of their lane, but later than they are given."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lanes = {lane: threads.TaskThread(f"{self.name} {lane}") for lane in Lane if lane is not Lane.COMPUTE}

    def _copy(self, lane: Lane, source: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
        copied = super()._copy(lane, source, None)  # private, since every copy of a CPU worker passes here
        if target is None:
            target = copied
            _poison(target)
        else:
            # private, since the stamp is how a CPU worker knows who waited
            setattr(target, cpu._STAMP, getattr(copied, cpu._STAMP))
        self._lanes[lane].submit(_arrive, target, source.detach())
        return target

    def record(self, lane: Lane) -> Event:
        event = super().record(lane)
        if lane is Lane.COMPUTE:
            return event
        arrived = threading.Event()
        self._lanes[lane].submit(arrived.set)
        return LateEvent(event, arrived)

    def wait(self, lane: Lane, event: Event) -> None:
        super().wait(lane, event)
        if isinstance(event, LateEvent):
            if lane is Lane.COMPUTE:
                event.synchronize()
            else:
                self._lanes[lane].submit(event.synchronize)

    def synchronize(self) -> None:
        for lane in self._lanes:
            self.record(lane).synchronize()
        super().synchronize()


def _poison(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 99)


def _arrive(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


@contextlib.contextmanager
def shaken(seed: int) -> Iterator[None]:
    """Models that are made inside run with random timing."""
    timing = Timing(seed)
    submit, make_board = threads.TaskThread.submit, threads.Board.__init__

    def submit_later(thread: threads.TaskThread, work: Callable[..., object], *args: Any) -> None:
        def work_later() -> None:
            timing.sleep()
            work(*args)

        timing.sleep()
        submit(thread, work_later)

    def make_shaken(board: threads.Board) -> None:
        make_board(board)
        board.lock = ShakenLock(board.lock, timing)  # type: ignore[assignment]

    interval_s = sys.getswitchinterval()
    with (
        patch.object(threads.TaskThread, "submit", submit_later),
        patch.object(threads.Board, "__init__", make_shaken),
        patch.object(resolve, "CpuBackend", LateBackend),
    ):
        sys.setswitchinterval(SWITCH_S)
        try:
            yield
        finally:
            sys.setswitchinterval(interval_s)
