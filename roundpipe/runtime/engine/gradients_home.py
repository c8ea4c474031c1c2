"""How the gradients of one worker's jobs get to the host's parameters, and on to the optimizer.

In two threads. One waits for a job's downloads and adds them to the host's gradients; the worker waits for that before
it lets the next ones go. What has come is converted to the optimizer's dtype in the other, for which only the update
waits; so weights that steps wait for are written before.

Invariant: whatever is raised, a job that is given to `GradientsHome.bring` leaves its step.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from roundpipe.core.schedule import Job
from roundpipe.core.storages import bytes_of
from roundpipe.core.together import in_groups
from roundpipe.runtime.engine.running import RunningSteps
from roundpipe.runtime.engine.step import StepState
from roundpipe.runtime.profiling.host_log import HostLog
from roundpipe.runtime.profiling.meter import Recorder
from roundpipe.runtime.threads import TaskThread
from roundpipe.runtime.weights.download import Download
from roundpipe.runtime.weights.gate import Gates
from roundpipe.runtime.weights.replica_sums import bring_sums

CONVERTED_BYTES = 512 * 1024**2
"""Of gradients that are converted at once, at most, but for one that has more: weights that are written go before the
rest.
"""


class GradientsHome:
    """Of one worker; ``on_error``, a method, is told of what is raised where nothing may be.

    ``begin`` is called in threads that compute, before they do.
    """

    def __init__(
        self,
        name: str,
        device: str,
        gates: Gates,
        steps: RunningSteps,
        on_error: Callable[[BaseException], None],
        begin: Callable[[], None],
    ) -> None:
        self._name = name
        self._gates = gates
        self._steps = steps
        self._log, self._conversions_log = HostLog(device), HostLog(device)
        self._thread = TaskThread(f"roundpipe {name} gradients", on_error, gates.board, begin)
        self._conversions = TaskThread(f"roundpipe {name} conversions", on_error, gates.board, begin)
        self.is_bringing = False
        """Whether the gradients of a job are on their way; changed under the board's lock."""

    @property
    def seconds(self) -> float:
        """In which gradients were added to the host's, and converted for the optimizer."""
        return self._log.seconds["home"] + self._conversions_log.seconds["converted"]

    @property
    def is_current(self) -> bool:
        """Whether the calling code runs in one of the threads."""
        return self._thread.is_current or self._conversions.is_current

    def record(self, recorder: Recorder | None) -> None:
        """Tell a recorder what is done from now on; None: nobody any more."""
        self._log.recorder = self._conversions_log.recorder = recorder

    def submit(self, work: Callable[..., object], *args: Any) -> None:
        """Run ``work(*args)`` in the first thread, behind the gradients that were given to it."""
        self._thread.submit(work, *args)

    def close(self) -> None:
        """End the threads, after what was given to them."""
        self._thread.close()
        self._conversions.close()

    def wait(self) -> None:
        """Return when no gradients are on their way to the host's."""
        self._gates.board.wait(lambda: not self.is_bringing, self._name, "gradients of the job before")

    def bring(self, step: StepState, job: Job, pending: Download) -> None:
        """Have what a job's release downloads added to the host's gradients; `wait` comes before the next one.

        What stays on the device is added here and now, if nothing has to be waited for: it is in the device's order.
        """
        self.is_bringing = True
        self._steps.begin_settling(step)
        if pending.stays_there and self._is_next(step, job, pending):
            self._add(step, job, pending)
            return
        try:
            self._thread.submit(self._add, step, job, pending)
        except BaseException:  # such as a thread that can't be started
            with self._gates.board.lock:
                self.is_bringing = False
            self._steps.leave(step, settling=True)
            raise

    def _is_next(self, step: StepState, job: Job, pending: Download) -> bool:
        """Whether `_add` would wait for nothing."""
        waits = job.num_replicas > 1 or job.index in step.spec.tied_jobs or not step.has_scale
        touched = {*pending.parameters}
        is_first = self._steps.now()[:1] == [step]
        return not waits and is_first and self._gates.gradients.is_open(touched, step.closings[1])

    def _add(self, step: StepState, job: Job, pending: Download) -> None:
        """Add what a release brought down to the host's gradients; never raises."""
        is_passed_on, group = False, list[tuple[int, Download]]()
        try:
            who = f"{self._name} gradients"
            group = step.hand_in(job, pending, who)
            if pending.addends is not None and not group:
                step.wait_home(job, who)
            bring_sums([each for _, each in group])
            touched = [*dict.fromkeys(parameter for _, each in group for parameter in each.parameters)]
            if touched:
                self._steps.wait_earlier(step, who)
                self._gates.gradients.wait(touched, self._name, step.closings[1])
            if group:
                step.wait_settled(step.spec.tied_jobs.get(job.index, ()), who)
            # forward stages are before the losses
            scale = step.wait_scale(who) if touched else 1.0
            if not step.failed:
                step.leaves_gradients = step.leaves_gradients or bool(touched)
                stays_there = all(each.stays_there for _, each in group)
                self._settle(step, job, group, scale, converts=not stays_there)
                indexes = [index for index, _ in group]
                if touched and not stays_there:
                    self._conversions.submit(self._end, step, indexes)
                    is_passed_on = True
                else:
                    self._gates.came(touched)
                    _note_settled(step, indexes)
        except BaseException as error:
            step.cancel(error)
        finally:
            summed = [(index, each) for index, each in group if each.addends is not None]
            for _, each in summed:
                with contextlib.suppress(RuntimeError):  # the device is lost, and so is the step
                    each.drop_addends()
            if summed:
                step.note_home(index for index, _ in summed)
            with self._gates.board.lock:
                self.is_bringing = False
                self._gates.board.notify()
            if not is_passed_on:
                self._steps.leave(step, settling=True)

    def _settle(
        self, step: StepState, job: Job, group: Sequence[tuple[int, Download]], scale: float, *, converts: bool
    ) -> None:
        """Add what has come, piece by piece, and have that converted of which all has come."""
        numbered = [(number, index, piece) for index, each in group for number, piece in enumerate(each.pieces)]
        left = Counter(host for _, _, piece in numbered for host, _, _ in piece.gradients)
        for _, index, piece in sorted(numbered, key=itemgetter(0)):  # devices bring them at the same time
            piece.wait()
            num_bytes = 0 if piece.event is None else sum(bytes_of(gradient) for _, _, gradient in piece.gradients)
            with self._log.doing("home", f"add gradients of {job}", bytes=num_bytes, job=index):
                piece.settle(scale)
            hosts = [host for host, _, _ in piece.gradients]
            left.subtract(hosts)
            whole = [host for host in dict.fromkeys(hosts) if not left[host]]
            if converts and whole:
                self._conversions.submit(self._convert, step, job, whole)

    def _convert(self, step: StepState, job: Job, touched: Sequence[torch.Tensor]) -> None:
        """Convert what a job has added to the host's gradients, if it is all; never raises."""
        try:
            for parameters in in_groups(touched, lambda parameter: parameter.nbytes, CONVERTED_BYTES):
                self._gates.wait_written(f"{self._name} conversions")
                with self._conversions_log.doing("converted", f"convert gradients of {job}", job=job.index):
                    self._gates.came(parameters)
        except BaseException as error:
            step.cancel(error)

    def _end(self, step: StepState, indexes: Sequence[int]) -> None:
        """What jobs have brought is converted."""
        _note_settled(step, indexes)
        self._steps.leave(step, settling=True)


def _note_settled(step: StepState, indexes: Sequence[int]) -> None:
    for index in indexes:
        step.settle(index)
