"""Walks a schedule: every worker executes its tasks, hands carried values on, and brings gradients home.

    caller                      worker K mod N
    Engine.run(round) --task lists--> PREFETCH: weights of the next job start coming up
          |                           RUN (K, m): wait for (K-1, m); values up; stage; values or gradients down
          |                           RELEASE: gradients down, memory given back
          <--- all done, or the first error ---

Values wait on the host between jobs, by name, each with the event of the copy that made it. The only
hand-off between workers is the round's progress board: one condition, how far every job is, and who
waits for what. The first error cancels the round: whoever waits gives up, what was held is freed, and
the caller gets the exception as it was raised.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roundpipe import structure
from roundpipe.errors import ClosedError, DeadlockError
from roundpipe.layers import Carry, LayerChain
from roundpipe.runtime.backend import Backend, Event, Lane
from roundpipe.runtime.flow import JobFlow, Segment
from roundpipe.runtime.gate import WeightGate
from roundpipe.runtime.replica import Replica
from roundpipe.runtime.residency import Arena, BoundLayer, HostWeights, LayerWeights, Pending, Visit, visit_bytes
from roundpipe.runtime.schedule import Job, Phase, Schedule, Task, TaskKind
from roundpipe.runtime.stage import (
    Gradients,
    LossFunction,
    Recorded,
    Stage,
    StageLayer,
    Surroundings,
)
from roundpipe.runtime.worker import Worker

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 5.0
"""How often a waiting worker looks whether anybody can still make progress."""


class _Cancelled(Exception):
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
    """The round's board: how many microbatches of each job are done, and who waits for what."""

    def __init__(self, first_job: int, num_jobs: int) -> None:
        lock = threading.Lock()
        self._condition = threading.Condition(lock)
        """Workers wait here."""
        self._finished = threading.Condition(lock)
        """The caller waits here, so that progress does not wake it."""
        self._first_job = first_job
        self._done = [0] * num_jobs
        self._settled = [False] * num_jobs
        self._waiting: dict[str, str] = {}
        self._running = 0
        self._moves = 0
        self.error: BaseException | None = None

    def enter(self, num_workers: int) -> None:
        self._running = num_workers

    def leave(self) -> None:
        """A worker has nothing more to do."""
        with self._condition:
            self._running -= 1
            self._condition.notify_all()
            self._finished.notify_all()

    def wait_done(self) -> None:
        """Block the caller until every worker left."""
        with self._finished:
            while self._running:
                self._finished.wait()

    def advance(self, job_index: int) -> None:
        """One more microbatch of a job is done."""
        with self._condition:
            self._done[job_index - self._first_job] += 1
            self._moves += 1
            self._condition.notify_all()

    def settle(self, job_index: int) -> None:
        """A job's gradients are in host memory."""
        with self._condition:
            self._settled[job_index - self._first_job] = True
            self._moves += 1
            self._condition.notify_all()

    def cancel(self, error: BaseException) -> None:
        """Stop the round; the first error is kept."""
        with self._condition:
            if self.error is None:
                self.error = error
            self._condition.notify_all()

    def wait_for(self, job_index: int, microbatch: int, who: str) -> None:
        """Until a microbatch of a job is done; jobs of earlier rounds are."""
        position = job_index - self._first_job
        if position >= 0 and self._done[position] <= microbatch:
            what = f"microbatch {microbatch} of job {job_index}"
            self._wait(lambda: self._done[position] > microbatch, who, what)
        elif self.error is not None:
            raise _Cancelled

    def wait_settled(self, job_index: int, who: str) -> None:
        """Until a job's gradients are in host memory."""
        position = job_index - self._first_job
        self._wait(lambda: self._settled[position], who, f"the gradients of job {job_index}")

    def _wait(self, reached: Callable[[], bool], who: str, what: str) -> None:
        with self._condition:
            self._waiting[who] = what
            moves = self._moves
            try:
                while not reached():
                    if self.error is not None:
                        raise _Cancelled
                    woken = self._condition.wait(CHECK_INTERVAL_S)
                    if not woken and self._moves == moves and len(self._waiting) >= self._running:
                        board = "; ".join(f"{one} waits for {other}" for one, other in self._waiting.items())
                        raise DeadlockError(f"nobody can go on: {board}. This is a bug in roundpipe, please report it")
                    moves = self._moves
                if self.error is not None:
                    raise _Cancelled
            finally:
                del self._waiting[who]


@dataclass(slots=True)
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
    labels: Sequence[Any] = ()
    loss_fn: LossFunction | None = None
    return_outputs: bool = False
    output_device: torch.device | None = None
    losses: list[HostValue | None] = field(default_factory=list)
    outputs: list[HostValue | None] = field(default_factory=list)
    microbatch_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    progress: Progress = field(init=False)
    tied_after: dict[int, list[int]] = field(default_factory=dict)
    """Per job: earlier jobs that bring gradients of the same parameters; they are added first."""

    def __post_init__(self) -> None:
        self.progress = Progress(self.schedule.first_job, len(self.schedule.jobs))

    def flow_of(self, job: Job) -> JobFlow:
        """The values of a job."""
        return self.flows[job.index - self.schedule.first_job]


@dataclass(slots=True)
class _OpenVisit:
    job: Job
    visit: Visit
    side: int
    stage: Stage | None = None


class _Rotor:
    """One worker: its device, its arena, its replicas; executes the tasks of one worker entry."""

    def __init__(self, backend: Backend, name: str, gate: WeightGate) -> None:
        self.backend = backend
        self._gate = gate
        self.name = name
        self.arena = Arena(backend)
        self._replicas: dict[int, tuple[torch.nn.Module, list[Replica]]] = {}
        self._open: dict[int, _OpenVisit] = {}
        self._pending: deque[tuple[int, Pending]] = deque()
        self._in_flight: deque[tuple[Event, Any]] = deque()

    # One round

    def execute(self, round_: Round, host: HostWeights, tasks: Sequence[Task]) -> None:
        """Execute this worker's tasks of a round; never raises."""
        try:
            with self.backend.activate(), torch.no_grad():
                self._reserve(round_, host, tasks)
                for task in tasks:
                    self._execute(round_, host, task)
                self._settle(round_)
                self._reap(wait=True)
        except _Cancelled:
            self._abandon()
        except BaseException as error:
            round_.progress.cancel(error)
            self._abandon()
        finally:
            round_.progress.leave()

    def _abandon(self) -> None:
        """Forget a cancelled round: nothing may be left that counts memory or holds tensors."""
        try:
            self.backend.synchronize()
        except Exception:
            logger.exception("%s could not be synchronised after an error", self.name)
        for opened in self._open.values():
            opened.visit.drop()
        self._open.clear()
        self._pending.clear()
        self._in_flight.clear()

    def _reserve(self, round_: Round, host: HostWeights, tasks: Sequence[Task]) -> None:
        sizes = []
        for task in tasks:
            if task.kind is TaskKind.PREFETCH:
                job = round_.schedule.job(task.job_index)
                sizes.append(visit_bytes(self._weights(round_, host, index) for index in job.layers))
        self.arena.reserve(sizes)

    def _weights(self, round_: Round, host: HostWeights, index: int) -> LayerWeights:
        return host.layer(round_.chain.specs[index].name, round_.chain[index])

    def _execute(self, round_: Round, host: HostWeights, task: Task) -> None:
        job = round_.schedule.job(task.job_index)
        if task.kind is TaskKind.PREFETCH:
            layers = [self._bound(round_, host, index) for index in job.layers]
            for layer in layers:
                self._gate.wait((entry.tensor for entry in layer.weights.entries), self.name)
            visit, side = self.arena.begin(layers)
            self._open[job.index] = _OpenVisit(job, visit, side)
        elif task.kind is TaskKind.RUN:
            assert task.microbatch is not None
            opened = self._open[job.index]
            if opened.stage is None:
                opened.stage = self._enter(round_, opened)
            self._run(round_, opened, task.microbatch)
            round_.progress.advance(job.index)
        else:
            self._release(round_, self._open.pop(job.index))

    def _bound(self, round_: Round, host: HostWeights, index: int) -> BoundLayer:
        """A layer with a replica that no open visit uses."""
        layer = round_.chain[index]
        known = self._replicas.get(id(layer))
        if known is None or known[0] is not layer:
            known = self._replicas[id(layer)] = (layer, [])
        busy = {id(bound.replica) for opened in self._open.values() for bound in opened.visit.layers}
        for replica in known[1]:
            if id(replica) not in busy:
                break
        else:
            replica = Replica(layer, self.backend.device)
            known[1].append(replica)
        return BoundLayer(self._weights(round_, host, index), replica)

    def forget(self, layer: torch.nn.Module) -> None:
        """Drop a layer's replicas; between rounds only."""
        self._replicas.pop(id(layer), None)

    def _enter(self, round_: Round, opened: _OpenVisit) -> Stage:
        job, visit = opened.job, opened.visit
        visit.ready(with_gradients=job.phase is not Phase.FORWARD)
        layers = [
            StageLayer(index, round_.chain.specs[index], bound)
            for index, bound in zip(job.layers, visit.layers, strict=True)
        ]
        return Stage(str(job), self.backend, layers, round_.around)

    def _release(self, round_: Round, opened: _OpenVisit) -> None:
        pending, events, alive = opened.visit.release(keep_buffers=opened.job.phase is not Phase.BACKWARD)
        self.arena.released(opened.side, events)
        if alive:
            self._in_flight.append((events[-1], alive))
        self._settle(round_)
        self._pending.append((opened.job.index, pending))

    def _settle(self, round_: Round) -> None:
        """Add what earlier releases brought down to the host's gradients."""
        while self._pending:
            job_index, pending = self._pending.popleft()
            for earlier in round_.tied_after.get(job_index, ()):
                round_.progress.wait_settled(earlier, self.name)
            pending.settle()
            round_.progress.settle(job_index)

    def _reap(self, wait: bool = False) -> None:
        """Let go of device tensors whose last copy or reader is done."""
        while self._in_flight:
            event, _ = self._in_flight[0]
            if wait:
                event.synchronize()
            elif not event.is_done():
                return
            self._in_flight.popleft()

    # One task

    def _run(self, round_: Round, opened: _OpenVisit, microbatch: int) -> None:
        assert opened.stage is not None
        job, stage = opened.job, opened.stage
        self._reap()
        if job.phase is Phase.BACKWARD:
            self._run_backward(round_, job, stage, opened.visit, microbatch)
        else:
            round_.progress.wait_for(job.index - 1, microbatch, self.name)
            if job.phase is Phase.FORWARD:
                self._run_forward(round_, job, stage, microbatch)
            else:
                self._run_fused(round_, job, stage, opened.visit, microbatch)
        for name in round_.flow_of(job).drops:
            round_.values[microbatch].pop(name, None)

    def _run_forward(self, round_: Round, job: Job, stage: Stage, microbatch: int) -> None:
        flow = round_.flow_of(job)
        (segment,) = flow.segments
        carry, held = self._take(round_, segment, microbatch)
        values = round_.values[microbatch]

        def give(made: Carry) -> None:
            for name, value in made.items():
                values[name] = self._bring_down(value)

        with self.backend.hold(num_bytes(held), "carried values"):
            self._retain(held)
            del held
            stage.forward(segment, carry, microbatch, flow.gives, give)

    def _run_fused(self, round_: Round, job: Job, stage: Stage, visit: Visit, microbatch: int) -> None:
        (segment,) = round_.flow_of(job).segments
        assert round_.loss_fn is not None
        carry, held = self._take(round_, segment, microbatch)
        label = self._upload_structure(round_.labels[microbatch])
        with (
            self.backend.hold(num_bytes(held), "carried values"),
            self.backend.activations([visit.weights_memory, *held]),
            round_.microbatch_context(),
        ):
            self._retain(held)
            del held
            loss, outputs, gradients = stage.fused(
                segment, carry, microbatch, round_.chain.exit, round_.loss_fn, label, round_.return_outputs
            )
        round_.losses[microbatch] = self._bring_down(loss)
        if round_.return_outputs:
            round_.outputs[microbatch] = self._give_outputs(round_, outputs)
        self._give_gradients(round_, gradients, microbatch)

    def _run_backward(self, round_: Round, job: Job, stage: Stage, visit: Visit, microbatch: int) -> None:
        flow = round_.flow_of(job)
        if flow.made_by is not None:  # recomputation waits for its inputs, not for the incoming gradient
            round_.progress.wait_for(round_.schedule.first_job + flow.made_by, microbatch, self.name)
        arrived = False
        for segment in flow.segments:
            if not stage.has_backward(segment):
                continue
            carry, held = self._take(round_, segment, microbatch)
            with (
                self.backend.hold(num_bytes(held), "carried values"),
                self.backend.activations([visit.weights_memory, *held]),
            ):
                self._retain(held)
                del held
                recorded = stage.recompute(segment, carry, microbatch)
                carry.clear()
                if not arrived:
                    round_.progress.wait_for(job.index - 1, microbatch, self.name)
                    arrived = True
                incoming = self._take_gradients(round_, segment, recorded, microbatch)
                gradients = stage.backward(recorded, incoming, microbatch)
                incoming.clear()
            self._give_gradients(round_, gradients, microbatch)
        if not arrived:
            round_.progress.wait_for(job.index - 1, microbatch, self.name)

    # Values and gradients, up and down

    def _upload_structure(self, value: Any) -> Any:
        """A structure's tensors on the device, ready for COMPUTE."""
        up = structure.map_tensors(value, self.backend.upload)
        self.backend.wait(Lane.COMPUTE, self.backend.record(Lane.UPLOAD))
        self.backend.check_ready(structure.tensors(up))
        return up

    def _take(self, round_: Round, segment: Segment, microbatch: int) -> tuple[Carry, list[torch.Tensor]]:
        """The values a segment reads, on the device, ready for COMPUTE; and the tensors in them."""
        backend = self.backend
        values = round_.values[microbatch]
        carry: Carry = {}
        for name in segment.takes:
            held = values[name]
            for event in held.events:
                backend.wait(Lane.UPLOAD, event)
            carry[name] = structure.map_tensors(held.value, backend.upload)
        backend.wait(Lane.COMPUTE, backend.record(Lane.UPLOAD))
        tensors = structure.tensors(carry)
        backend.check_ready(tensors)
        return carry, tensors

    def _bring_down(self, value: Any) -> HostValue:
        """A device value on the host, with the event of its copy."""
        found = structure.tensors(value)
        if not found:
            return HostValue(value)
        backend = self.backend
        backend.wait(Lane.DOWNLOAD, backend.record(Lane.COMPUTE))
        down = structure.map_tensors(value, backend.download)
        copied = backend.record(Lane.DOWNLOAD)
        self._in_flight.append((copied, found))
        return HostValue(down, (copied,))

    def _give_outputs(self, round_: Round, outputs: Any) -> HostValue:
        device = round_.output_device
        if device is None or device.type == "cpu":
            return self._bring_down(outputs)
        moved = structure.map_tensors(outputs, lambda tensor: tensor.to(device))
        return HostValue(moved, (self.backend.record(Lane.COMPUTE),))

    def _take_gradients(
        self, round_: Round, segment: Segment, recorded: Recorded, microbatch: int
    ) -> dict[str, Gradients]:
        """Gradients of the values a segment made, summed over their readers, on the device."""
        backend = self.backend
        waiting = round_.gradients[microbatch]
        taken: dict[str, list[list[torch.Tensor | None]]] = {}
        for name in segment.makes:
            for gradients, event in waiting.pop(name, ()):
                if event is not None:
                    backend.wait(Lane.UPLOAD, event)
                up = [None if one is None else backend.upload(one) for one in gradients]
                taken.setdefault(name, []).append(up)
        backend.wait(Lane.COMPUTE, backend.record(Lane.UPLOAD))
        backend.check_ready(structure.tensors(taken))
        self._retain(taken)
        return {name: [_sum(parts) for parts in zip(*each, strict=True)] for name, each in taken.items()}

    def _give_gradients(self, round_: Round, gradients: dict[str, Gradients], microbatch: int) -> None:
        if not gradients:
            return
        backend = self.backend
        backend.wait(Lane.DOWNLOAD, backend.record(Lane.COMPUTE))
        waiting = round_.gradients[microbatch]
        down = {
            name: [None if one is None else backend.download(one) for one in each] for name, each in gradients.items()
        }
        copied = backend.record(Lane.DOWNLOAD)
        for name, each in down.items():
            waiting.setdefault(name, []).append((each, copied))
        self._in_flight.append((copied, gradients))

    def _retain(self, tensors: Any) -> None:
        """Keep uploaded tensors until COMPUTE is past what is given to it next (see `_reap`)."""
        if self.backend.device.type != "cpu":
            self._in_flight.append((_After(self.backend), tensors))


class _After:
    """The event after the work that follows: recorded at the first question, which comes behind that work."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._event: Event | None = None

    def _recorded(self) -> Event:
        if self._event is None:
            self._event = self._backend.record(Lane.COMPUTE)
        return self._event

    def synchronize(self) -> None:
        self._recorded().synchronize()

    def is_done(self) -> bool:
        return self._recorded().is_done()


def num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of some tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def _sum(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    total: torch.Tensor | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total


class Engine:
    """The workers of one model, one thread per device entry.

    Args:
        backends: one per entry of ``devices=``.
        name: the model's name, for threads.
        gate: which host weights may be read.
    """

    def __init__(self, backends: Sequence[Backend], name: str, gate: WeightGate) -> None:
        self.backends = tuple(backends)
        self._rotors = [_Rotor(backend, f"{name} worker {i}", gate) for i, backend in enumerate(backends)]
        self._workers = [Worker(f"roundpipe {name} worker {i}") for i in range(len(backends))]
        self._chains: list[tuple[weakref.ref[LayerChain], list[torch.nn.Module]]] = []
        """Chains that ran here, and their layers, which the workers and the host's side know something about."""
        self._closed = False
        self.next_job = 0

    @property
    def num_workers(self) -> int:
        """Workers in the rotation."""
        return len(self._workers)

    def run(self, round_: Round, host: HostWeights) -> None:
        """Run a round to its end.

        Args:
            round_: what to run; its values, gradients, losses and outputs are filled in.
            host: the weights.

        Raises:
            Exception: the first error of a worker, as it was raised; the engine can run the next round.
        """
        if self._closed:
            raise ClosedError("the model was closed; compile it again to go on")
        progress = round_.progress
        schedule = round_.schedule
        self._forget_ended_chains(host)
        self._remember(round_.chain)
        for index in range(schedule.num_layers):  # packing moves the user's tensors: not from several threads
            host.prepare(round_.chain.specs[index].name, round_.chain[index])
        busy = [worker for worker in range(self.num_workers) if schedule.tasks(worker)]
        progress.enter(len(busy))
        for worker in busy:
            rotor = self._rotors[worker]
            tasks = schedule.tasks(worker)
            self._workers[worker].submit(
                lambda rotor=rotor, tasks=tasks: rotor.execute(round_, host, tasks)  # type: ignore[misc]
            )
        self.next_job = schedule.next_job
        try:
            progress.wait_done()
        except BaseException as interrupt:
            progress.cancel(interrupt)
            progress.wait_done()
            raise
        if progress.error is not None:
            try:
                raise progress.error
            finally:
                progress.error = None  # or the traceback, this frame and the error keep each other alive

    def _remember(self, chain: LayerChain) -> None:
        if not any(known() is chain for known, _ in self._chains):
            self._chains.append((weakref.ref(chain), list(chain)))

    def _forget_ended_chains(self, host: HostWeights) -> None:
        """Drop what is kept per layer of chains that are gone, such as traces that newer ones replaced."""
        ended = [layers for known, layers in self._chains if known() is None]
        if not ended:
            return
        self._chains = [one for one in self._chains if one[0]() is not None]
        alive = {id(layer) for _, layers in self._chains for layer in layers}
        for layer in (layer for layers in ended for layer in layers if id(layer) not in alive):
            host.forget(layer)
            for rotor in self._rotors:
                rotor.forget(layer)

    def peak_bytes(self, reset: bool = False) -> list[int]:
        """Per worker, the largest number of bytes in use on its device at once."""
        return [backend.peak_bytes(reset) for backend in self.backends]

    def close(self) -> None:
        """End the threads and give the devices' memory back; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            worker.close()
        for rotor in self._rotors:
            rotor.arena.free()


def finalize(owner: Any, engine: Engine) -> weakref.finalize[..., Any]:
    """Close an engine when its owner is garbage collected."""
    return weakref.finalize(owner, engine.close)
