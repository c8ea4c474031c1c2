"""One call into the pipeline while it runs: its values, how far it is, and what it leaves to do when the call returns.

A round is shared by the workers that execute it, the threads that bring its gradients home, the caller that waits
for it and the optimizer's thread that waits for parts of it. They meet on one board, `Progress`: one lock, how far
every job is, and who waits for what. The first error cancels the round: whoever waits gives up, and the caller gets
the exception as it was raised.

A round may outlive its call: once the losses are known the caller goes on while the last backward stages run. What
these still read of the caller's objects is kept as it was then (`Round.freeze`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.errors import DeadlockError
from roundpipe.core.layers import LayerChain
from roundpipe.core.schedule import Job, Phase, Schedule
from roundpipe.runtime.device.backend import Backend, Event, Lane
from roundpipe.runtime.engine.flow import JobFlow
from roundpipe.runtime.engine.stage import LossFunction, Surroundings
from roundpipe.runtime.weights.gate import Question
from roundpipe.runtime.weights.layer_weights import LayerWeights
from roundpipe.runtime.weights.replica import FrozenLayers

LABEL = "the label"
"""What stands for the label among names of carried values, which are identifiers."""
CHECK_INTERVAL_S = 5.0
"""How often a waiting worker looks whether anybody can still make progress."""


class Cancelled(Exception):
    """Another worker failed; unwinds a waiting one."""


@dataclass(slots=True)
class HostValue:
    """A carried value on the host, and the copy that must be done before its use."""

    value: Any
    events: tuple[Event, ...] = ()

    def synchronize(self) -> Any:
        """The value, once its copy is done."""
        for event in self.events:
            event.synchronize()
        self.events = ()
        return self.value


class Progress:
    """The round's board.

    Args:
        first_job: index of its first job.
        num_jobs: their number.
    """

    def __init__(self, first_job: int, num_jobs: int) -> None:
        lock = threading.Lock()
        self._condition = threading.Condition(lock)
        """Workers wait here."""
        self._outside = threading.Condition(lock)
        """Everybody else waits here, so that single microbatches wake none of them."""
        self._first_job = first_job
        self._done = [0] * num_jobs
        self._uploads: list[Event | None] = [None] * num_jobs
        self._settled = [False] * num_jobs
        self._waiting: dict[str, str] = {}
        self._running = 0
        self._losses = 0
        self._homecoming = 0
        """Jobs whose gradients are on their way."""
        self._moves = 0
        self._ending = False
        self.is_over = False
        """Nobody works for the round any more."""
        self.on_over: Callable[[], None] = _nothing
        """Called once, by whoever was the last, before anybody hears of it."""
        self.error: BaseException | None = None
        """The first error, until somebody takes it to raise it."""
        self.failed = False

    # What the round's threads say

    def enter(self, num_workers: int) -> None:
        """So many workers have something to do."""
        self._running = num_workers

    def leave(self) -> None:
        """A worker has nothing more to do."""
        with self._condition:
            self._running -= 1
            self._condition.notify_all()
        self._end()

    def advance(self, job_index: int) -> None:
        """One more microbatch of a job is done."""
        with self._condition:
            self._done[job_index - self._first_job] += 1
            self._moves += 1
            self._condition.notify_all()

    def uploading(self, job_index: int, event: Event) -> None:
        """A job's weights are on their way to the device, and there at the event."""
        self._uploads[job_index - self._first_job] = event

    def loss_known(self) -> None:
        """One more microbatch has its loss, and its outputs if they are wanted."""
        with self._condition:
            self._losses += 1
            self._outside.notify_all()

    def bring_home(self) -> None:
        """A job's gradients are on their way."""
        with self._condition:
            self._homecoming += 1

    def settle(self, job_index: int) -> None:
        """A job's gradients and buffers are in host memory."""
        with self._condition:
            self._settled[job_index - self._first_job] = True
            self._moves += 1
            self._condition.notify_all()
            self._outside.notify_all()

    def came_home(self) -> None:
        """Somebody whom `bring_home` announced is done, well or not."""
        with self._condition:
            self._homecoming -= 1
        self._end()

    def _end(self) -> None:
        with self._condition:
            if self._running or self._homecoming or self._ending:
                return
            self._ending = True
        on_over, self.on_over = self.on_over, _nothing  # it knows the round, which has this board
        try:
            on_over()
        finally:
            with self._condition:
                self.is_over = True
                self._outside.notify_all()

    def cancel(self, error: BaseException) -> None:
        """Stop the round; the first error is kept."""
        with self._condition:
            if not self.failed:
                self.failed, self.error = True, error
            self._condition.notify_all()
            self._outside.notify_all()

    # What workers wait for

    def wait_for(self, job_index: int, microbatch: int, who: str) -> None:
        """Until a microbatch of a job is done; jobs of earlier rounds are."""
        position = job_index - self._first_job
        if position >= 0 and self._done[position] <= microbatch:
            what = f"microbatch {microbatch} of job {job_index}"
            self._wait(lambda: self._done[position] > microbatch, who, what)
        elif self.failed:
            raise Cancelled

    def _wait(self, reached: Callable[[], bool], who: str, what: str) -> None:
        with self._condition:
            self._waiting[who] = what
            moves = self._moves
            try:
                while not reached():
                    if self.failed:
                        raise Cancelled
                    woken = self._condition.wait(CHECK_INTERVAL_S)
                    if not woken and self._moves == moves and len(self._waiting) >= self._running:
                        board = "; ".join(f"{one} waits for {other}" for one, other in self._waiting.items())
                        raise DeadlockError(f"nobody can go on: {board}. This is a bug in roundpipe, please report it")
                    moves = self._moves
                if self.failed:
                    raise Cancelled
            finally:
                del self._waiting[who]

    # What others wait for

    def wait_settled(self, jobs: Iterable[int]) -> None:
        """Until the gradients and buffers of these jobs are in host memory, or the round has failed."""
        positions = [index - self._first_job for index in jobs]
        with self._outside:
            self._outside.wait_for(lambda: self.failed or all(self._settled[one] for one in positions))

    def wait_losses(self, num_microbatches: int) -> None:
        """Until so many microbatches have their loss, or the round has failed."""
        with self._outside:
            self._outside.wait_for(lambda: self.failed or self._losses >= num_microbatches)

    def has_uploaded(self, jobs: Iterable[int]) -> bool:
        """Whether the weights of these jobs are on their devices, or the round is over."""
        if self.is_over:
            return True
        events = [self._uploads[index - self._first_job] for index in jobs]
        return all(event is not None and event.is_done() for event in events)

    def has_settled(self, jobs: Iterable[int]) -> bool:
        """Whether the gradients and buffers of these jobs are in host memory, or the round is over."""
        return self.is_over or all(self._settled[index - self._first_job] for index in jobs)

    def wait_over(self) -> None:
        """Until nobody works for the round any more."""
        with self._outside:
            self._outside.wait_for(lambda: self.is_over)


def _nothing() -> None:
    pass


@dataclass(slots=True, eq=False)
class Round:
    """Everything of one call into the pipeline."""

    chain: LayerChain
    schedule: Schedule
    flows: Sequence[JobFlow]
    around: Surroundings
    values: list[dict[str, HostValue]]
    """Per microbatch: carried values on the host, by name."""
    gradients: list[dict[str, list[tuple[list[torch.Tensor | None], Event | None]]]]
    """Per microbatch: gradients of carried values on the host, one entry per reader, to be summed in order."""
    given: frozenset[str] = frozenset()
    """Names of the values that the caller's arguments are in."""
    labels: Sequence[Any] = ()
    loss_fn: LossFunction | None = None
    return_outputs: bool = False
    output_device: torch.device | None = None
    losses: list[HostValue | None] = field(default_factory=list)
    outputs: list[HostValue | None] = field(default_factory=list)
    microbatch_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    tied_after: dict[int, list[int]] = field(default_factory=dict)
    """Per job: earlier jobs that bring gradients of the same parameters; they are added first."""
    may_outlive_call: bool = False
    """Whether the call returns with the losses."""
    spare_bytes: int | None = None
    """Device memory that the plan leaves over; None: there is no limit."""
    weights: Sequence[LayerWeights] = ()
    """Per layer; from here on, set by the engine. A backward's are its forward's until then."""
    closings: tuple[int, int] = (0, 0)
    """Of the gates for weights and for gradients, when the round was made."""
    before: Sequence[Progress] = ()
    """Rounds that were running then; their gradients are added first."""
    frozen: FrozenLayers | None = None
    binding: threading.Lock = field(default_factory=threading.Lock)
    """Held by whoever reads the user's modules, or freezes what will be read of them."""
    unattended: bool = False
    """Whether the call has returned."""
    progress: Progress = field(init=False)
    _jobs_of: dict[torch.Tensor, tuple[list[int], list[int]]] | None = None
    _num_reading: int = 0
    """Workers that are giving one of the caller's own values to UPLOAD."""
    _reads: list[Event] = field(default_factory=list)
    """When such uploads are done."""
    _was_read: threading.Condition = field(init=False)

    def __post_init__(self) -> None:
        self._was_read = threading.Condition(self.binding)
        self.progress = Progress(self.schedule.first_job, len(self.schedule.jobs))

    def flow_of(self, job: Job) -> JobFlow:
        """The values of a job."""
        return self.flows[job.index - self.schedule.first_job]

    def wait_losses(self) -> None:
        """Until every loss is known and what forward changes in the model is changed, or an error ended the round."""
        jobs = self.schedule.jobs
        if not any(weights.may_have_side_effects() for weights in self.weights):
            self.progress.wait_losses(self.schedule.num_microbatches)
            for held in (*self.losses, *self.outputs):
                if held is not None:
                    held.synchronize()
            return
        last = max((i for i, job in enumerate(jobs) if job.phase is not Phase.BACKWARD), default=len(jobs) - 1)
        self.progress.wait_settled([job.index for job in jobs[: last + 1]])

    @contextlib.contextmanager
    def reading(self, microbatch: int, name: str, backend: Backend) -> Iterator[HostValue]:
        """A carried value, to be given to UPLOAD inside; the caller's own is his to change only after that."""
        if self.frozen is not None or not self.may_outlive_call or name not in self.given:
            yield self.values[microbatch][name]
            return
        with self.binding:
            held = self.values[microbatch][name]
            self._num_reading += 1
        try:
            yield held
        finally:
            event = backend.record(Lane.UPLOAD)
            with self.binding:
                self._num_reading -= 1
                self._reads.append(event)
                self._was_read.notify_all()

    def freeze(self) -> None:
        """Keep what the remaining jobs read of the caller's objects: arguments, modes, attributes, who is trained.

        The caller may change all of these as soon as the call returns.
        """
        remaining = {i for job in self.schedule.jobs if job.phase is Phase.BACKWARD for i in job.layers}
        devices = set()
        copies = []
        for values in self.values:
            for name in self.given:
                held = values.get(name)
                if held is not None:
                    copy = HostValue(trees.map_tensors(held.value, _copied), held.events)
                    copies.append((values, name, copy))
                    devices |= {tensor.device for tensor in trees.tensors(held.value)}
        with self.binding:
            for values, name, copy in copies:
                if name in values:
                    values[name] = copy
            self.frozen = FrozenLayers.of(self.weights[index].layer for index in sorted(remaining))
            self._was_read.wait_for(lambda: self._num_reading == 0)
        for event in self._reads:
            event.synchronize()
        self._reads.clear()
        for device in devices:
            if device.type not in ("cpu", "meta"):
                torch.accelerator.current_stream(device).synchronize()

    # For the optimizer's thread

    @property
    def failed(self) -> bool:
        """Whether an error ended the round, so that its gradients are not whole."""
        return self.progress.failed

    def turns(self, parameter: torch.Tensor) -> tuple[int, int]:
        """When the round is done with a parameter's weights and with its gradient, in jobs."""
        uploads, adds = self._uses().get(parameter, ((), ()))
        first = self.schedule.first_job
        # a job's weights come up while the worker's job before it runs
        return max(uploads, default=first) - self.schedule.num_workers, max(adds, default=first)

    def ask_uploaded(self, parameters: Iterable[torch.Tensor]) -> Question:
        """Asks whether the round has uploaded these for the last time, or is over."""
        jobs = self._jobs_with(parameters, 0)
        return lambda: self.progress.has_uploaded(jobs)

    def ask_added(self, parameters: Iterable[torch.Tensor]) -> Question:
        """Asks whether the round has added all it will to the gradients of these, or is over."""
        jobs = self._jobs_with(parameters, 1)
        return lambda: self.progress.has_settled(jobs)

    def _jobs_with(self, parameters: Iterable[torch.Tensor], use: int) -> list[int]:
        uses = self._uses()
        return sorted({job for one in parameters if one in uses for job in uses[one][use]})

    def _uses(self) -> dict[torch.Tensor, tuple[list[int], list[int]]]:
        """Per parameter, the jobs that upload it and those that add to its gradient."""
        if self._jobs_of is None:
            found: dict[torch.Tensor, tuple[list[int], list[int]]] = {}
            for job in self.schedule.jobs:
                for index in job.layers:
                    for tensor in self.weights[index].parameters():
                        uploads, adds = found.setdefault(tensor, ([], []))
                        uploads.append(job.index)
                        if job.phase is not Phase.FORWARD:
                            adds.append(job.index)
            self._jobs_of = found
        return self._jobs_of


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()
