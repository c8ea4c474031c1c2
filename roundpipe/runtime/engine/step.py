"""One call into the pipeline: what is to run (`StepSpec`), and how far it is (`StepState`).

The spec is complete before anything runs, and nobody changes it. The state is shared by the workers, the threads that
add gradients, the caller and the optimizer's thread, who meet on the model's `Board`. The first error cancels the step:
whoever waits gives up, and the caller gets the exception as it was raised.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import operator
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.layers import LayerChain
from roundpipe.core.schedule import Job, Phase, Schedule
from roundpipe.runtime.board import Board
from roundpipe.runtime.device.backend import Event
from roundpipe.runtime.engine.flow import JobFlow
from roundpipe.runtime.engine.recompute import ForwardRecord
from roundpipe.runtime.profiling.layer_times import StepTimes
from roundpipe.runtime.weights.layer_weights import LayerWeights
from roundpipe.runtime.weights.replica import FrozenLayers

LABEL = "the label"
"""What stands for the label among names of carried values, which are identifiers."""
CHECK_INTERVAL_S = 5.0
"""How often a waiting worker looks whether anybody can still make progress."""

LossFunction = Callable[[Any, Any], Any]
Context = Callable[[], contextlib.AbstractContextManager[Any]]
Gradients = list[torch.Tensor | None]
"""One entry per tensor of a carried value."""


class Cancelled(Exception):
    """Another worker failed; unwinds a waiting one."""


@dataclass(slots=True)
class HostValue:
    """A carried value on the host, and the copies that must be done before its use."""

    value: Any
    events: tuple[Event, ...] = ()

    def synchronize(self) -> Any:
        """The value, once its copies are done."""
        for event in self.events:
            event.synchronize()
        self.events = ()
        return self.value


HostValues = list[dict[str, HostValue]]
"""Per microbatch: carried values on the host, by name."""
HostGradients = list[dict[str, list[tuple[Gradients, Event | None]]]]
"""Per microbatch: gradients of carried values on the host, one entry per reader, to be summed in order."""


@dataclass(frozen=True, slots=True)
class InputTensor:
    """A tensor of a microbatch's arguments or label that requires grad."""

    microbatch: int
    name: str
    """Of the carried value that it is in."""
    position: int
    """Among the tensors of that value."""
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepSpec:
    """Everything about one step that is known before it runs."""

    chain: LayerChain
    weights: Sequence[LayerWeights]
    """Per layer; a backward has its forward's."""
    schedule: Schedule
    flows: Sequence[JobFlow]
    """Per job of the schedule."""
    base_seed: int
    """Random numbers of layer L and microbatch m derive from it, L and m."""
    preserve_rng_state: bool
    with_gradient: frozenset[str]
    """Names of carried values whose tensors take part in autograd."""
    plain: Mapping[tuple[int, str], frozenset[int]]
    """By microbatch and name of arguments that gradients flow to, the tensors that take no part."""
    keeps_history: bool
    """Whether a backward will recompute this forward, so that what it saw and saved must be kept."""
    autocast: Context
    """Enters the caller's autocast state."""
    context: contextvars.Context
    """The caller's context variables; a backward has its forward's."""
    arguments: frozenset[str]
    """Names of the carried values that the caller's arguments are in."""
    inputs: Sequence[InputTensor] = ()
    """Those that the step is to leave gradients for."""
    labels: Sequence[Any] = ()
    """Per microbatch, as ``loss_fn`` gets them."""
    loss_fn: LossFunction | None = None
    return_outputs: bool = False
    output_device: torch.device | None = None
    microbatch_context: Context = contextlib.nullcontext
    """Entered around the fused stage of each microbatch."""
    tied_jobs: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Per job: earlier jobs that bring gradients of the same parameters; they are added first."""
    may_outlive_call: bool = False
    """Whether the call returns with the losses."""
    spare_bytes: int | None = None
    """Device memory that the plan leaves over; None: there is no limit."""
    frozen: FrozenLayers | None = None
    """The user's modules as the forward found them, for a backward of its own; None: as they are."""
    times: StepTimes | None = None
    """Where workers note what calls take; None: the step is not measured."""

    def flow_of(self, job: Job) -> JobFlow:
        return self.flows[job.index - self.schedule.first_job]


class StepState:
    """How far a step is; workers write it.

    Args:
        values: the first carries, or what the forward of a backward left; used up.
        gradients: for the outputs, of a backward; else empty.
        forward: what the forwards of this step, or of the step before this backward, leave for recomputation.
        num_workers: those that have tasks, and later those that still have something to do.
    """

    def __init__(
        self,
        spec: StepSpec,
        board: Board,
        values: HostValues,
        gradients: HostGradients,
        forward: ForwardRecord,
        num_workers: int,
    ) -> None:
        num_jobs, num_microbatches = len(spec.schedule.jobs), spec.schedule.num_microbatches
        self.spec = spec
        self.board = board
        self.values = values
        self.gradients = gradients
        self.forward = forward
        self.closings = (0, 0)
        """Of the gates for weights and for gradients, when the step began."""
        self.losses: list[HostValue | None] = [None] * num_microbatches
        self.outputs: list[HostValue | None] = [None] * num_microbatches
        self.num_workers = num_workers
        self.begun_by: set[int] = set()
        """Indices of the workers that have taken it up; changed under the board's lock."""
        self.num_settling = 0
        """Jobs whose gradients are on their way; when none and no worker is left, the step is over."""
        self.is_over = False
        self.is_unattended = False
        """Whether the call has returned."""
        self.failed = False
        self.error: BaseException | None = None
        """The first error, until somebody takes it to raise it."""
        self.frozen = spec.frozen
        self.modules_lock = threading.Lock()
        """Held by whoever reads the user's modules, or takes note of how they are."""
        self._first_job = spec.schedule.first_job
        self._runs = [0] * num_jobs
        """Per job, microbatches that are done."""
        self._uploads: list[Event | None] = [None] * num_jobs
        self._settled = [False] * num_jobs
        self._num_losses = 0
        self._num_waiting = 0
        self._changed_s = time.monotonic()
        """When the latest microbatch or job was done."""
        self._lent = spec.arguments if spec.may_outlive_call else frozenset[str]()
        """Names whose values are the caller's own, which he may change once the call has returned."""
        self._num_reading = 0
        """Uploads of such values that are being issued."""
        self._reads: list[Event] = []
        """When those that were issued are done."""
        self._jobs_of: dict[torch.Tensor, tuple[list[int], list[int]]] | None = None

    # Workers

    def wait_done(self, job_index: int, microbatch: int, who: str) -> None:
        """Return when a microbatch of a job is done; those of earlier steps are. Raises `Cancelled` if it failed."""
        position, runs = job_index - self._first_job, self._runs
        if position >= 0 and runs[position] <= microbatch:
            what = f"microbatch {microbatch} of job {job_index}"
            with self.board.lock:
                self._num_waiting += 1
            try:
                self.board.wait(
                    lambda: self.failed or runs[position] > microbatch, who, what, CHECK_INTERVAL_S, self._is_stuck
                )
            finally:
                with self.board.lock:
                    self._num_waiting -= 1
        if self.failed:
            raise Cancelled

    def _is_stuck(self) -> bool:
        return self._num_waiting >= self.num_workers and time.monotonic() - self._changed_s >= CHECK_INTERVAL_S

    def advance(self, job_index: int) -> None:
        """One more microbatch of a job is done."""
        with self.board.lock:
            self._runs[job_index - self._first_job] += 1
            self._changed_s = time.monotonic()
            self.board.notify()

    def begin_upload(self, job_index: int, event: Event) -> None:
        """A job's weights are on their way to the device, and there at the event."""
        with self.board.lock:
            self._uploads[job_index - self._first_job] = event
            self.board.notify()

    def add_loss(self) -> None:
        """One more microbatch has its loss, and its outputs if they are wanted."""
        with self.board.lock:
            self._num_losses += 1
            self.board.notify()

    def settle(self, job_index: int) -> None:
        """A job's gradients and buffers are in host memory."""
        with self.board.lock:
            self._settled[job_index - self._first_job] = True
            self._changed_s = time.monotonic()
            self.board.notify()

    def wait_settled(self, jobs: Iterable[int], who: str) -> None:
        """Return when the gradients and buffers of these jobs are in host memory, or the step has failed."""
        positions = [index - self._first_job for index in jobs]
        if positions:
            settled = self._settled
            self.board.wait(lambda: self.failed or all(settled[i] for i in positions), who, "gradients and buffers")

    def cancel(self, error: BaseException) -> None:
        """Stop the step; the first error is kept."""
        with self.board.lock:
            if not self.failed:
                self.failed, self.error = True, error
            self.board.notify()

    def begin_read(self, microbatch: int, name: str) -> tuple[HostValue, bool]:
        """A carried value that is to be uploaded, and whether `end_read` must be told when that is done."""
        if name not in self._lent:
            return self.values[microbatch][name], False
        with self.board.lock:
            self._num_reading += 1
            return self.values[microbatch][name], True

    def end_read(self, event: Event) -> None:
        """Values of `begin_read` are uploaded at the event."""
        with self.board.lock:
            self._num_reading -= 1
            self._reads.append(event)
            self.board.notify()

    # The caller

    def wait_losses(self) -> None:
        """Return when every loss is known and what forward changes in the model is changed, or the step has failed."""
        spec = self.spec
        if any(weights.may_have_side_effects() for weights in spec.weights):
            jobs = spec.schedule.jobs
            last = max((i for i, job in enumerate(jobs) if job.phase is not Phase.BACKWARD), default=len(jobs) - 1)
            self.wait_settled([job.index for job in jobs[: last + 1]], "the call")
            return
        number = spec.schedule.num_microbatches
        self.board.wait(lambda: self.failed or self._num_losses >= number, "the call", "losses")
        for value in (*self.losses, *self.outputs):
            if value is not None:
                value.synchronize()

    def wait_over(self) -> None:
        self.board.wait(lambda: self.is_over, "the call", "the end of the step")

    def detach(self) -> None:
        """Copy what the remaining jobs read of the caller's objects: arguments, modes, attributes, who is trained.

        The call returns with the losses, and the caller may change all of these while the last backward stages run.
        """
        backward = {i for job in self.spec.schedule.jobs if job.phase is Phase.BACKWARD for i in job.layers}
        devices = set()
        copies = []
        for values in self.values:
            for name in self.spec.arguments:
                if (original := values.get(name)) is not None:
                    copy = HostValue(trees.map_tensors(original.value, _clone), original.events)
                    copies.append((values, name, copy))
                    devices |= {tensor.device for tensor in trees.tensors(original.value)}
        with self.modules_lock:
            self.frozen = FrozenLayers.of(self.spec.weights[index].layer for index in sorted(backward))
        with self.board.lock:
            for values, name, copy in copies:
                if name in values:
                    values[name] = copy
            self._lent = frozenset()
        self.board.wait(lambda: self.failed or not self._num_reading, "the call", "uploads of its arguments")
        for event in self._reads:
            event.synchronize()
        self._reads.clear()
        for device in devices:
            if device.type not in ("cpu", "meta"):
                torch.accelerator.current_stream(device).synchronize()

    def take_losses(self) -> list[Any]:
        """Per microbatch, once the copy is done."""
        return [None if value is None else value.synchronize() for value in self.losses]

    def take_outputs(self) -> list[Any]:
        """Per microbatch, once the copy is done; None where they are not wanted."""
        return [None if value is None else value.synchronize() for value in self.outputs]

    def input_gradients(self) -> list[torch.Tensor | None]:
        """Gradients that the finished step left for the spec's inputs, on the tensors' own devices."""
        result: list[torch.Tensor | None] = []
        for item in self.spec.inputs:
            by_reader = self.gradients[item.microbatch].get(item.name, ())
            for _, event in by_reader:
                if event is not None:
                    event.synchronize()
            total = sum_gradients(gradients[item.position] for gradients, _ in by_reader)
            result.append(None if total is None else total.to(item.tensor.device))
        return result

    # The optimizer's thread, see `ParameterUse`

    def turns(self, parameter: torch.Tensor) -> tuple[int, int]:
        uploads, adds = self._uses().get(parameter, ((), ()))
        # a job's weights come up while the worker's job before it runs
        last_upload = max(uploads, default=self._first_job) - self.spec.schedule.num_workers
        return last_upload, max(adds, default=self._first_job)

    def jobs_of(self, parameters: Iterable[torch.Tensor]) -> tuple[list[int], list[int]]:
        jobs_of = self._uses()
        uses = [jobs_of[parameter] for parameter in parameters if parameter in jobs_of]
        uploads, adds = ({job for use in uses for job in use[kind]} for kind in (0, 1))
        return sorted(uploads), sorted(adds)

    def uploads(self, jobs: Sequence[int]) -> Sequence[Event] | None:
        if self.is_over:
            return ()
        events = [event for index in jobs if (event := self._uploads[index - self._first_job]) is not None]
        return events if len(events) == len(jobs) else None

    def has_added(self, jobs: Sequence[int]) -> bool:
        return self.is_over or all(self._settled[index - self._first_job] for index in jobs)

    def _uses(self) -> dict[torch.Tensor, tuple[list[int], list[int]]]:
        """Per parameter, the jobs that upload it and those that add to its gradient."""
        if self._jobs_of is None:
            jobs_of: dict[torch.Tensor, tuple[list[int], list[int]]] = {}
            for job in self.spec.schedule.jobs:
                for index in job.layers:
                    for tensor in self.spec.weights[index].parameters():
                        uploads, adds = jobs_of.setdefault(tensor, ([], []))
                        uploads.append(job.index)
                        if job.phase is not Phase.FORWARD:
                            adds.append(job.index)
            self._jobs_of = jobs_of
        return self._jobs_of


def sum_gradients(parts: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """The sum of those that are there, in their order; None if none is."""
    present = [part for part in parts if part is not None]
    return functools.reduce(operator.add, present) if present else None


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()
