"""How far a step is (`StepState`); when steps begin and end is told to `RunningSteps`.

A state is shared by the workers, the threads that add gradients, the caller and the optimizer's thread, who meet on the
model's `Board`. The first error cancels the step: whoever waits gives up, and the caller gets the exception as it was
raised.

Invariant: a step begins with the workers that will run it, and each of them leaves it, whatever is raised. The last one
to leave ends it; steps end in no particular order, but gradients are added in the order in which they began.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from roundpipe.core import trees
from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import DeviceMemoryError
from roundpipe.core.schedule import Job, Phase
from roundpipe.runtime.device.backend import Event, synchronize_streams
from roundpipe.runtime.engine.host_values import HostGradients, HostValue, HostValues, sum_gradients
from roundpipe.runtime.engine.kept_runs import KeptRuns
from roundpipe.runtime.engine.losses import LossWeights
from roundpipe.runtime.engine.recompute import ForwardRecord
from roundpipe.runtime.engine.spec import StepSpec
from roundpipe.runtime.threads import Board
from roundpipe.runtime.weights.download import Download


class Cancelled(Exception):
    """Another worker failed; unwinds a waiting one."""


class Shortage(Protocol):
    """Knows what to do about a step that runs out of memory, in the thread of a later call."""

    def learn(self, reason: str) -> None:
        """Have the next ones need less."""

    def refusal(self, error: BaseException) -> DeviceMemoryError:
        """What the caller gets for an error of a step whose call has returned."""


@dataclass(eq=False)
class StepState:
    """How far a step is; workers write it."""

    spec: StepSpec
    board: Board
    values: HostValues
    """The first carries, or what the forward of a backward left; used up."""
    gradients: HostGradients
    """For the outputs, of a backward; else empty."""
    forward: ForwardRecord
    """What the forwards of this step, or of the step before this backward, leave for recomputation."""
    added: set[int]
    """Layers whose gradients the model has; some may be from an attempt that failed."""
    num_workers: int
    """Those that still have something to do."""
    num_settling: int = 0
    """Jobs whose gradients are on their way; when none and no worker is left, the step is over."""
    begun_s: float = 0.0
    closings: tuple[int, int] = (0, 0)
    """Of the gates for weights and for gradients, when the step began."""
    begun_by: set[int] = field(default_factory=set)
    """Indices of the workers that have taken it up; changed under the board's lock."""
    is_over: bool = False
    is_unattended: bool = False
    """Whether the call has returned."""
    failed: bool = False
    error: BaseException | None = None
    """The first error, until somebody takes it to raise it."""
    when_short: Shortage | None = None
    """What is asked if the step runs out of memory and its own call does not learn of it."""

    def __post_init__(self) -> None:
        spec, schedule = self.spec, self.spec.schedule
        num_jobs = len(schedule.jobs)
        self.losses = [HostValue(None)] * schedule.num_microbatches
        self.outputs = [HostValue(None)] * schedule.num_microbatches
        self.weights = LossWeights(spec.mean, spec.counted)
        self.frozen = spec.frozen
        self.modules_lock = threading.Lock()
        """Held by whoever reads the user's modules, or takes note of how they are."""
        self._first_job = schedule.first_job
        self._runs = [0] * num_jobs
        """Per job, microbatches that are done."""
        self._uploads: list[Event | None] = [None] * num_jobs
        self._settled = [False] * num_jobs
        self.leaves_gradients = schedule.kind == "backward" or (schedule.kind == "train" and spec.first_microbatch > 0)
        """Whether gradients may have been added, by this step or by others of the same call or backward."""
        self._num_losses = self._num_judged = 0
        """Losses that are left on the host; and microbatches whose ``loss_fn`` has returned."""
        stages = [job for job in schedule.jobs if job.phase is not Phase.BACKWARD]
        self._loss_replicas = stages[-1].num_replicas if stages else 1
        self._downloads: dict[int, Download] = {}
        """By job, gradients that wait for those of the jobs that share its stage."""
        self._home = set[int]()
        """Jobs whose gradients were added up on devices, and came home."""
        self._lent = spec.arguments if spec.may_outlive_call else frozenset[str]()
        """Names whose values are the caller's own, which he may change once the call has returned."""
        self._num_reading = 0
        """Uploads of such values that are being issued."""
        self._reads: list[Event] = []
        """When those that were issued are done."""
        self.kept = KeptRuns(spec, self.values, self.forward, self.board)

    # Workers

    def is_done(self, job_index: int | None, microbatch: int) -> bool:
        """Whether a microbatch of its job, if there is one, is done."""
        if job_index is None:
            return True
        position = job_index - self._first_job
        return self._runs[position] > microbatch // self.spec.schedule.jobs[position].num_replicas

    def wait_done(self, job_index: int | None, microbatch: int, who: str) -> None:
        """Return when a microbatch of its job, if there is one, is done. Raises `Cancelled` if the step failed."""
        if not self.is_done(job_index, microbatch):
            what = f"microbatch {microbatch} of job {job_index}"
            self.board.wait(lambda: self.failed or self.is_done(job_index, microbatch), who, what)
        if self.failed:
            raise Cancelled

    @contextmanager
    def loss_turn(self, microbatch: int) -> Iterator[None]:
        """Around a microbatch's ``loss_fn``, where several workers have losses: one at a time, in order.

        Losses then count by the same weights in every run, and code of the user's needs no lock.
        """
        if self._loss_replicas == 1:
            yield
            return
        who, what = f"loss_fn for microbatch {microbatch}", "those before"
        self.board.wait(lambda: self.failed or self._num_judged >= microbatch, who, what)
        if self.failed:
            raise Cancelled
        yield
        with self.board.lock:
            self._num_judged += 1
            self.board.notify()

    def advance(self, job_index: int) -> None:
        """One more microbatch of a job is done."""
        with self.board.lock:
            self._runs[job_index - self._first_job] += 1
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
            job = self.spec.schedule.job(job_index)
            self.added.update(job.layers if job.phase is not Phase.FORWARD else ())
            self.board.notify()

    def hand_in(self, job: Job, download: Download, who: str) -> list[tuple[int, Download]]:
        """What to add when a job's gradients come: those of all jobs that share its stage, once the last one asks.

        Until then none is added: the model has a stage's gradients of all microbatches, or of none.
        """
        if job.phase is Phase.FORWARD:
            return [(job.index, download)]
        with self.board.lock:
            self._downloads[job.index] = download
            self.board.notify()
        if job.replica < job.num_replicas - 1:
            return []
        sharers = range(job.index - job.replica, job.index + 1)
        what = "gradients of other workers"
        self.board.wait(lambda: self.failed or all(index in self._downloads for index in sharers), who, what)
        return [] if self.failed else [(index, self._downloads.pop(index)) for index in sharers]

    def note_home(self, jobs: Iterable[int]) -> None:
        """What these jobs have left on their devices to be added up with each other's is home."""
        with self.board.lock:
            self._home.update(jobs)
            self.board.notify()

    def wait_home(self, job: Job, who: str) -> None:
        """Return when what a job has left there is home, or the step has failed."""
        self.board.wait(lambda: self.failed or job.index in self._home, who, "gradients of other workers")

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

    def begin_read(self, values: Mapping[str, HostValue], name: str) -> tuple[HostValue, bool]:
        """A carried value that is to be uploaded, and whether `end_read` must be told when that is done."""
        if name not in self._lent:
            return values[name], False
        with self.board.lock:
            self._num_reading += 1
            return values[name], True

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
        self.board.wait(lambda: self.failed or self._num_losses >= len(self.losses), "the call", "losses")
        for value in (*self.losses, *self.outputs):
            value.synchronize()

    def wait_runs(self) -> None:
        """Return when the call is needed for no further run of a microbatch, or the step has failed.

        That is once no job will draw random numbers any more: generators are shared with the caller. Accelerators may
        be behind: who draws what is settled when kernels are given to them. And where memory is short, once stages
        with losses are through: if they run out of it, only the call can run them again.
        """
        schedule, drawing = self.spec.schedule, self.spec.drawing
        waits_for_losses = self.spec.runs_again and self.spec.is_tight
        jobs = [
            job
            for job in schedule.jobs
            if not drawing.isdisjoint(job.layers) or (waits_for_losses and job.phase is Phase.FUSED)
        ]
        counts = [(job.index - self._first_job, len(schedule.microbatches(job))) for job in jobs]
        runs = self._runs
        if counts:
            is_done = lambda: all(runs[position] >= count for position, count in counts)  # noqa: E731
            self.board.wait(lambda: self.failed or is_done(), "the call", "random draws and losses")

    @property
    def has_scale(self) -> bool:
        """Whether it is known what gradients are to be multiplied by."""
        return self.spec.mean is None or self._num_losses >= len(self.losses)

    def wait_scale(self, who: str) -> float:
        """What a job's gradients are to be multiplied by; waits for losses, of another worker at most."""
        self.board.wait(lambda: self.failed or self.has_scale, who, "losses")
        return self.weights.gradient_scale

    def wait_over(self) -> None:
        self.board.wait(lambda: self.is_over, "the call", "the end of the step")

    def detach(self) -> None:
        """Copy what the remaining jobs read of the caller's: arguments, modes, attributes, hooks, who is trained.

        The call returns with the losses, and the caller may change all of these while the last backward stages run.
        """
        shared: dict[tuple[str, int], torch.Tensor] = {}

        def cloned(name: str, value: Any) -> Any:
            def one(position: int, tensor: torch.Tensor) -> torch.Tensor:
                if (place := (name, position)) not in self.spec.not_split:
                    return tensor.detach().clone()
                if place not in shared:
                    shared[place] = tensor.detach().clone()
                return shared[place]

            return trees.map_numbered(value, one)

        with self.board.lock:
            originals = {value: name for _, name, value in self._arguments()}
        copies = {value: HostValue(cloned(name, value.value), value.events) for value, name in originals.items()}
        if any(job.phase is Phase.BACKWARD for job in self.spec.schedule.jobs):
            with self.modules_lock:
                self.frozen = self.spec.latest_frozen.of(self.spec.chain)
        with self.board.lock:
            for values, name, value in self._arguments():
                values[name] = copies[value]
            self._lent = frozenset()
        self.board.wait(lambda: self.failed or not self._num_reading, "the call", "uploads of its arguments")
        for event in self._reads:
            event.synchronize()
        self._reads.clear()
        synchronize_streams(tensor for copy in copies.values() for tensor in trees.tensors(copy.value))

    def _arguments(self) -> list[tuple[dict[str, HostValue], str, HostValue]]:
        """Where values of the caller's arguments are held."""
        return [
            (values, name, value)
            for values in (*self.values, *self.kept.values())
            for name in self.spec.arguments
            if (value := values.get(name)) is not None
        ]

    def input_gradients(self) -> list[torch.Tensor | None]:
        """Gradients that the finished step left for the spec's inputs, on the tensors' own devices."""
        result: list[torch.Tensor | None] = []
        scale = self.weights.gradient_scale if self.spec.inputs else 1.0
        for item in self.spec.inputs:
            by_reader = self.gradients[item.microbatch].get(item.name, ())
            total = sum_gradients(gradients.synchronize()[item.position] for gradients in by_reader)
            total = total if total is None or scale == 1 else total * scale
            result.append(None if total is None else total.to(item.tensor.device))
        return result

    # The optimizer's thread, see `ParameterUse`

    @property
    def is_under_way(self) -> bool:
        return self.is_over or self.failed or any(self._runs)

    def turns(self, parameter: torch.Tensor) -> tuple[int, int, int]:
        return self._turns_of.get(id(parameter)) or self._turns((), ())

    @functools.cached_property
    def _turns_of(self) -> dict[int, tuple[int, int, int]]:
        """Per parameter, by its identity; those of a layer have one in common."""
        of_uses = {id(use): self._turns(*use) for use in self._jobs_of.values()}
        return {key: of_uses[id(use)] for key, use in self._jobs_of.items()}

    def _turns(self, uploads: Sequence[int], adds: Sequence[int]) -> tuple[int, int, int]:
        """Of jobs in their order."""
        schedule, first = self.spec.schedule, self._first_job
        # a job's weights come up while the worker's job before it runs
        last_upload = schedule.worker_before(uploads[-1] if uploads else first)
        return uploads[0] if uploads else schedule.next_job, last_upload, adds[-1] if adds else first

    def jobs_of(self, parameters: Iterable[torch.Tensor]) -> tuple[list[int], list[int]]:
        known = self._jobs_of
        uses = {id(use): use for parameter in parameters if (use := known.get(id(parameter))) is not None}.values()
        uploads, adds = ({job for use in uses for job in use[kind]} for kind in (0, 1))
        return sorted(uploads), sorted(adds)

    def uploads(self, jobs: Sequence[int]) -> Sequence[Event] | None:
        if self.is_over:
            return ()
        events = [event for index in jobs if (event := self._uploads[index - self._first_job]) is not None]
        return events if len(events) == len(jobs) else None

    def has_added(self, jobs: Sequence[int]) -> bool:
        return self.is_over or all(self._settled[index - self._first_job] for index in jobs)

    @functools.cached_property
    def _parameters(self) -> list[list[torch.Tensor]]:
        """Of each layer as they are when it is first asked, kept here so that their identities stay theirs."""
        return [
            [tensor for slot in weights.slots if slot.is_parameter and (tensor := slot.current) is not None]
            for weights in self.spec.weights
        ]

    @functools.cached_property
    def _jobs_of(self) -> dict[int, tuple[list[int], list[int]]]:
        """Per parameter, by its identity, the jobs that upload it and those that add to its gradient."""
        of_layers: dict[int, tuple[list[int], list[int]]] = {}
        for job in self.spec.schedule.jobs:
            for index in job.layers:
                uploads, adds = of_layers.setdefault(index, ([], []))
                uploads.append(job.index)
                if job.phase is not Phase.FORWARD:
                    adds.append(job.index)
        jobs_of: dict[int, tuple[list[int], list[int]]] = {}
        for index, use in of_layers.items():
            for tensor in self._parameters[index]:
                if (other := jobs_of.setdefault(id(tensor), use)) is not use:  # tied
                    uploads, adds = (sorted({*one, *two}) for one, two in zip(other, use, strict=True))
                    jobs_of[id(tensor)] = uploads, adds
        return jobs_of
