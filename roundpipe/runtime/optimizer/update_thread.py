"""The optimizer's thread: hand-overs and updates, one after the other, and whoever waits for them.

Invariant: parameters that the thread was given are behind closed gates until it is done with them. An update that was
submitted is either made to its end or, if it was taken back in time, never begun.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from roundpipe.core.errors import ConfigError, DeadlockError
from roundpipe.runtime.optimizer.update import Update, UpdateRunner
from roundpipe.runtime.threads import DEADLINE_S, TaskThread
from roundpipe.runtime.weights.gate import Gates
from roundpipe.runtime.weights.parameter_pair import ParameterPair


class UpdateThread:
    """The thread of one model; ``runner`` runs its ``step_fn``, and ``begin`` is called in it first."""

    def __init__(
        self,
        name: str,
        gates: Gates,
        runner: UpdateRunner,
        deadline_s: float = DEADLINE_S,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._gates = gates
        self._runner = runner
        self._deadline_s = deadline_s
        self._thread = TaskThread(f"roundpipe-optimizer-{name}", board=gates.board, begin=begin)
        self._latest: Update | None = None
        self._failed: Update | None = None
        """Raised something that was not raised again yet."""

    def submit(self, task: Update, work: Callable[..., Any], pairs: Sequence[ParameterPair], *args: Any) -> None:
        """Have the thread do something with parameters that no later step touches meanwhile; returns are the result.

        If this is interrupted, it is either done none the less, or never begun.
        """
        parameters = [pair.parameter for pair in pairs]
        try:
            self._gates.close(parameters)
            self._latest = task
            self._thread.submit(self._do, task, parameters, functools.partial(work, pairs, *args))
        except BaseException:
            if task.take_back():
                self._end(task, parameters)
            raise

    def run(self, pairs: Sequence[ParameterPair], work: Callable[..., None], *args: Any) -> None:
        """Have the thread do something with these, and wait until it is done."""
        if pairs:
            task = Update("a hand-over", is_update=False)
            self.submit(task, work, pairs, *args)
            self._gates.board.wait(lambda: task.is_done, "the caller", task.name)
            self.raise_pending()

    def _do(self, task: Update, parameters: Sequence[torch.Tensor], work: Callable[[], Any]) -> None:
        if not task.claim.acquire(blocking=False):
            return
        try:
            task.result = work()
        except BaseException as error:  # raised again in the training thread
            task.error, self._failed = error, task
        finally:
            self._end(task, parameters)
            del task  # this frame is in the error's traceback

    def _end(self, task: Update, parameters: Sequence[torch.Tensor]) -> None:
        with self._gates.board.lock:
            task.is_closed = True
        while task.then:
            task.then.pop()()
        self._gates.open(parameters)
        with self._gates.board.lock:
            task.is_done = True
            self._gates.board.notify()

    def after_update(self, what: Callable[[], None]) -> bool:
        """Have something done at the end of the update that is not over; False: there is none."""
        task = self._latest
        if task is None or not task.is_update:
            return False
        with self._gates.board.lock:
            if not task.is_closed:
                task.then.append(what)
            return not task.is_closed

    @property
    def is_idle(self) -> bool:
        """Whether the thread has nothing to do."""
        return self._latest is None or self._latest.is_done

    @property
    def is_current(self) -> bool:
        """Whether the calling code runs in it."""
        return self._thread.is_current

    def wait_over(self, waiter: str) -> bool:
        """Return when no update is running, at once inside one; False: it took too long."""
        task = self._latest
        if task is None or task.is_done or self._runner.is_inside:
            return True
        return self._gates.board.wait(lambda: task.is_done, waiter, task.name, self._deadline_s)

    def wait(self, waiter: str = "wait()") -> None:
        """Return when no update is running, or raise a `DeadlockError` after the deadline."""
        task = self._latest
        if task is None:
            return
        if self._runner.is_inside and not task.is_done:
            raise ConfigError(f"{waiter} was called inside an asynchronous step_fn; use step(..., is_async=False)")
        if not self.wait_over(waiter):
            running_s = time.monotonic() - task.began_s
            raise DeadlockError(
                f"{waiter} of {self._name} waits for {task.name} in thread {self._thread.name}, which has "
                f"been running for {running_s:.0f} s (deadline {self._deadline_s:.0f} s)"
            )
        self._latest = None

    def wait_interrupted(self) -> None:
        """Return when nothing is left of a hand-over whose caller was interrupted."""
        if self._latest is not None and not self._latest.is_update:
            self.wait("a call")

    def raise_pending(self) -> None:
        """Raise, once, what the latest update raised that nobody has seen; does not wait for it."""
        task, self._failed = self._failed, None
        if task is not None and task is self._latest and task.is_done:
            self._latest = None
        if task is not None and task.error is not None and not task.is_seen:
            raise task.error

    def close(self) -> None:
        """End the thread, after all that was submitted."""
        self._thread.close()
