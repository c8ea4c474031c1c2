"""The steps of one model that are under way: when they begin and end, and what those raise that nobody waits for."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from statistics import median_low

from roundpipe.core.errors import GRADIENTS_ADDED, add_note, said
from roundpipe.core.execute_plan import ScheduleKind
from roundpipe.runtime.device.backend import OUT_OF_MEMORY
from roundpipe.runtime.engine.step import Shortage, StepState
from roundpipe.runtime.weights.gate import Gates

MEASURED_STEPS = 64
"""Steps whose seconds are kept, for their median."""
TOO_LATE = (
    "roundpipe: the round's call had returned, so that it is not run again: its gradients are not whole, and no update "
    "is made of them. Its worker ran a stage again, layer by layer, as far as that can help. Later rounds have a "
    "smaller plan, if one is known and none was given. Where memory comes and goes, use step(..., is_async=False): "
    "calls can run such rounds again"
)


class RunningSteps:
    """Knows the steps that are not over, and counts those that were."""

    def __init__(self, gates: Gates) -> None:
        self._gates = gates
        self.board = gates.board
        self._running: list[StepState] = []
        self._unseen: list[tuple[StepState, Shortage | None]] = []
        """Those whose call has returned and that failed since; with what knows more if they ran out of memory."""
        self._short: list[Callable[[], None]] = []
        """What is to be learnt from steps that ran out of memory when their calls had returned."""
        self.num_trained = 0
        """Training steps that have begun, since the model was made."""
        self.num_begun = 0
        self.first_begun_s = 0.0
        """Of those since `reset`, by ``time.perf_counter``; 0: none."""
        self.last_over_s = 0.0
        self._seconds: deque[tuple[ScheduleKind, float]] = deque(maxlen=MEASURED_STEPS)

    def begin(self, step: StepState) -> None:
        """A step is about to be given to workers."""
        step.begun_s = time.perf_counter()
        with self.board.lock:
            step.closings = self._gates.weights.closings, self._gates.gradients.closings
            self.num_begun += 1
            self.num_trained += step.spec.schedule.kind == "train"
            self.first_begun_s = self.first_begun_s or step.begun_s
            self._running.append(step)  # last: the caller may be interrupted at any line

    def begin_settling(self, step: StepState) -> None:
        """A job's gradients are on their way; `leave` is told when they are not any more."""
        with self.board.lock:
            step.num_settling += 1

    def leave(self, step: StepState, *, settling: bool = False) -> None:
        """A worker has nothing more to do for a step; or, ``settling``, a job's gradients have come or failed."""
        with self.board.lock:
            step.num_settling -= settling
            step.num_workers -= not settling
            try:
                if not step.num_workers and not step.num_settling:
                    self._end(step)
            finally:
                self.board.notify()

    def _end(self, step: StepState) -> None:
        step.is_over = True
        if step.error is not None and step.leaves_gradients:
            add_note(step.error, GRADIENTS_ADDED)
        if step in self._running:  # an interrupted step may not have come that far
            self._running.remove(step)
        now_s = time.perf_counter()
        seconds = now_s - max(step.begun_s, self.last_over_s)
        reason = step.kept.shortage
        if not step.failed:
            self._seconds.append((step.spec.schedule.kind, seconds))
        elif step.is_unattended:
            is_short = step.spec.runs_again and isinstance(step.error, OUT_OF_MEMORY)
            if is_short and step.error is not None:
                reason = reason or said(step.error).partition("\n")[0]
                add_note(step.error, TOO_LATE)
            self._unseen.append((step, step.when_short if is_short else None))
        shortage, step.when_short = step.when_short, None
        if reason and shortage is not None and (step.is_unattended or not step.failed):
            self._short.append(functools.partial(shortage.learn, reason))
        self.last_over_s = now_s
        is_unusual = step.failed or bool(reason)
        if step.spec.times is not None:
            step.spec.times.end(failed=is_unusual)
        if step.spec.peaks is not None:
            step.spec.peaks.end(failed=is_unusual)
        if step.spec.retries is not None:
            step.spec.retries.end(seconds, failed=is_unusual)

    def leave_alone(self, step: StepState) -> None:
        """The step's call returns, unless the step has failed; if it fails now, the next call says so."""
        with self.board.lock:
            step.is_unattended = not step.failed

    def wait_earlier(self, step: StepState, who: str) -> None:
        """Return when all steps that began before this one are over."""
        running = self._running
        self.board.wait(lambda: running[0] is step, who, "the end of the step before")

    def now(self) -> list[StepState]:
        return list(self._running) if self.board.is_here else []

    def wait_idle(self) -> None:
        """Return when the steps that are running now are over."""
        for step in self.now():
            step.wait_over()

    def raise_pending(self) -> None:
        """Raise, once, what a step raised after its call had returned; does not wait for it."""
        with self.board.lock:
            failed, self._unseen = self._unseen, []
        if failed:
            raise_error(*failed[0])

    def take_short(self) -> list[Callable[[], None]]:
        """What is to be done, in the caller's thread, about steps that ran out of memory since the last time."""
        with self.board.lock:
            short, self._short = self._short, []
        return short

    def reset(self) -> None:
        """Forget what was counted, for a report about what comes."""
        self.num_begun = 0
        self.first_begun_s = 0.0
        self._seconds.clear()

    def seconds_per_step(self, kind: ScheduleKind) -> float | None:
        """Median seconds from the end of the step before, or from the call if that was later; None: there was none."""
        seconds = [seconds for other, seconds in list(self._seconds) if other == kind]
        return median_low(seconds) if seconds else None


def raise_error(step: StepState, shortage: Shortage | None = None) -> None:
    """Raise a failed step's error, and forget it, or the traceback, this frame and the error keep each other alive.

    With a ``shortage``, the error is one that says what to do about it.
    """
    error, step.error = step.error, None
    assert error is not None
    try:
        if shortage is not None:
            raise shortage.refusal(error) from error
        raise error
    finally:
        del error, step
