"""One worker of the rotation: its device, its memory for weights, its copies of layers; executes tasks.

    PREFETCH   weights of a job start coming up; at the end of a round also those of the next round's first job
    RUN (K, m) wait for (K-1, m); values up; stage; values or gradients down
    RELEASE    gradients start down, the weights' memory is given back

Values wait on the host between jobs, by name, each with the event of the copy that made it. Gradients are waited
for, and added to the host's, in a thread of their own, so that the worker can go on with its next job; it has the
gradients of no more than two jobs on their way.

Invariant: a round that is given to a worker is left by it, whatever is raised, so that nobody waits for ever: an error
cancels the round, and one that is raised where none can be fails the rounds that the worker has and all later ones.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.errors import ClosedError, RoundPipeError
from roundpipe.core.layers import Carry
from roundpipe.core.schedule import Job, Phase, Task, TaskKind
from roundpipe.runtime.device.backend import Backend, Event, Lane
from roundpipe.runtime.device.host_memory import bytes_of
from roundpipe.runtime.engine.flow import Segment
from roundpipe.runtime.engine.stage import Gradients, Recorded, Stage, StageLayer
from roundpipe.runtime.engine.step import LABEL, Cancelled, HostValue, Round
from roundpipe.runtime.profiling.meter import Meter
from roundpipe.runtime.profiling.recorder import HostLog, Recorder
from roundpipe.runtime.thread import TaskThread
from roundpipe.runtime.weights.bound_layer import BoundLayer
from roundpipe.runtime.weights.gate import Gates
from roundpipe.runtime.weights.layer_weights import LayerWeights
from roundpipe.runtime.weights.replica import Replica
from roundpipe.runtime.weights.residency import Arena, Download, Visit, visit_bytes

logger = logging.getLogger(__name__)

RUNS_AHEAD = 3
"""Microbatches of stages that are given to an accelerator before the first of them is done: enough to keep it busy, and
few, since the values of each are on the device."""
REST_S = 0.0005
"""How often a worker with nothing to do looks whether device tensors can be let go of."""


@dataclass(slots=True)
class _OpenVisit:
    job: Job
    visit: Visit
    side: int
    stage: Stage | None = None


class Worker:
    """One worker.

    Args:
        index: its place in the rotation.
        backend: its device.
        name: for messages and threads.
        gates: which weights may be read and which gradients added to.
    """

    def __init__(self, index: int, backend: Backend, name: str, gates: Gates) -> None:
        self.index = index
        self.backend = backend
        self.name = name
        self.arena = Arena(backend)
        self.device = f"{backend.device} (worker {index})"
        """Its name in timelines."""
        self.meter = Meter(backend, self.device)
        self._home_log = HostLog(self.device)
        self._gates = gates
        self._thread = TaskThread(f"roundpipe {name}", self._break)
        self._gradients_thread = TaskThread(f"roundpipe {name} gradients", self._break)
        self._broken: BaseException | None = None
        """What was raised where nothing may be; the worker's state is unknown since."""
        self._current: Round | None = None
        self._upcoming: deque[Round] = deque()
        """Rounds that were given to the worker and that it has not begun."""
        self._replicas: dict[int, tuple[LayerWeights, list[Replica]]] = {}
        """By layer, its replicas, and for which layout of the layer they were made."""
        self._open: dict[int, _OpenVisit] = {}
        self._on_the_way: threading.Event | None = None
        """Set once the gradients given to the other thread last are in host memory."""
        self._in_flight: deque[tuple[Event, Any]] = deque()
        self._issued: deque[Event] = deque()
        """After each of the latest runs; stays empty where they are done when they are issued."""
        self._was_idle = True

    # For the engine

    def submit(self, round_: Round) -> None:
        """Execute this worker's tasks of a round, after those of the rounds before."""
        self._upcoming.append(round_)
        self._thread.submit(self._execute_next)

    def forget(self, layer: torch.nn.Module) -> None:
        """Drop a layer's replicas; while no round is running only."""
        self._replicas.pop(id(layer), None)

    def record(self, recorder: Recorder | None) -> None:
        """Tell a recorder what is done from now on; None: nobody any more."""
        self.meter.recorder = self._home_log.recorder = recorder

    @property
    def is_current(self) -> bool:
        """Whether the calling code runs in one of its threads."""
        return self._thread.is_current or self._gradients_thread.is_current

    def close(self) -> None:
        """End the threads and give memory back, after what is running."""
        self._thread.close()
        self._gradients_thread.close()
        self.arena.free()

    # One round

    def _execute_next(self) -> None:
        """Execute this worker's tasks of the next round, and leave it however they end."""
        if not self._upcoming:  # nothing was lost, see `_break`
            return
        round_ = self._current = self._upcoming.popleft()
        try:
            if self._broken is not None:
                raise RoundPipeError(
                    f"{self.name} can't go on since an earlier error ({self._broken!r}), raised where roundpipe "
                    "expects none. Compile the model again"
                ) from self._broken
            round_.around.context.copy().run(self._execute_all, round_)
        except Cancelled:
            self._abandon(round_)
        except BaseException as error:
            round_.progress.cancel(error)
            self._abandon(round_)
        finally:
            round_.progress.leave()
            self._current = None
        del round_
        self._was_idle = not self._upcoming
        while self._in_flight and not self._upcoming:
            self._reap()
            time.sleep(REST_S)

    def _execute_all(self, round_: Round) -> None:
        tasks = round_.schedule.tasks(self.index)
        last_prefetch = max(i for i, task in enumerate(tasks) if task.kind is TaskKind.PREFETCH)
        with self.backend.activate(), torch.no_grad():
            self.meter.begin_step(self._was_idle)
            self.arena.reserve(self._room_for(round_))
            for position, task in enumerate(tasks):
                if position > last_prefetch:
                    self._look_ahead()
                self._execute(round_, task)
            if not round_.may_outlive_call:
                self._reap(wait=True)

    def _abandon(self, round_: Round) -> None:
        """Forget a cancelled round: nothing may be left that counts memory or holds tensors; never raises.

        What goes wrong meanwhile is noted at the round's error.
        """
        undo = (
            self.backend.synchronize,
            *(opened.visit.drop for opened in self._open.values()),
            self._open.clear,
            self.meter.abandon,
            self._in_flight.clear,
            self._issued.clear,
            self.backend.take_uploads,
        )
        for one in undo:
            try:
                one()
            except Exception as problem:
                logger.exception("%s: after the error of a round", self.name)
                self._replicas.clear()  # who knows what they are bound to
                error = round_.progress.error
                if error is not None:
                    error.add_note(f"roundpipe: after it, {self.name} met {type(problem).__name__}: {problem}")

    def _break(self, error: BaseException) -> None:
        """Fail the worker's rounds, and all later ones: something was raised that nothing caught."""
        self._broken = self._broken or error
        current = self._current
        for round_ in (*(() if current is None else (current,)), *self._upcoming):
            round_.progress.cancel(error)
        with contextlib.suppress(ClosedError):
            self._thread.submit(self._execute_next)  # in the place of what may be lost

    def _sizes(self, round_: Round) -> list[int]:
        """Bytes of this worker's visits of a round, in their order."""
        jobs = (
            round_.schedule.job(task.job_index)
            for task in round_.schedule.tasks(self.index)
            if task.kind is TaskKind.PREFETCH
        )
        return [visit_bytes(round_.weights[index] for index in job.layers) for job in jobs]

    def _room_for(self, round_: Round) -> list[int]:
        """The same, and the first once more if a round like this one is likely to follow and memory is plentiful."""
        sizes = self._sizes(round_)
        more = [*sizes, sizes[0]]
        extra_bytes = self.arena.room(more) - self.arena.room(sizes)
        if round_.may_outlive_call and (round_.spare_bytes is None or extra_bytes <= round_.spare_bytes):
            return more
        return sizes

    def _look_ahead(self) -> None:
        """Start the upload of the next round's first job, once its weights may be read and if there is room."""
        if not self._upcoming or len(self._open) != 1:
            return
        following = self._upcoming[0]
        job = following.schedule.job(following.schedule.tasks(self.index)[0].job_index)
        (running,) = self._open.values()
        sizes = self._sizes(following)
        if following.progress.failed or not self.arena.has_room(sizes):
            return
        if not self.arena.has_room([running.visit.num_bytes, sizes[0]]):
            return
        parameters = (tensor for index in job.layers for tensor in following.weights[index].parameters())
        if not self._gates.weights.is_open(parameters, following.closings[0]):
            return
        try:
            self._prefetch(following, job)
        except BaseException as error:
            following.progress.cancel(error)

    def _execute(self, round_: Round, task: Task) -> None:
        job = round_.schedule.job(task.job_index)
        if task.kind is TaskKind.PREFETCH:
            if job.index not in self._open:
                self._prefetch(round_, job)
        elif task.kind is TaskKind.RUN:
            assert task.microbatch is not None
            opened = self._open[job.index]
            self.meter.at(job, task.microbatch)
            self.meter.until("overhead")
            if opened.stage is None:
                opened.stage = self._enter(round_, opened)
            self._keep_pace()
            self._run(round_, opened, task.microbatch)
            self._issued_run()
            round_.progress.advance(job.index)
        else:
            self._release(round_, self._open.pop(job.index))

    def _keep_pace(self) -> None:
        """Wait until the device is no further behind than it should be, and let go of what it has done with."""
        while len(self._issued) > RUNS_AHEAD:
            self._issued.popleft().synchronize()
        self._reap()

    def _issued_run(self) -> None:
        """Keep what came up for the run until the device is past it."""
        if self.backend.device.type == "cpu":
            return
        done = self.backend.record(Lane.COMPUTE)
        self._issued.append(done)
        self._in_flight.append((done, self.backend.take_uploads()))

    def _prefetch(self, round_: Round, job: Job) -> None:
        layers = [self._bound(round_, index) for index in job.layers]
        for layer in layers:
            self._wait_open(layer.weights.parameters(), round_.closings[0])
        visit, side = self.arena.begin(layers)
        self.meter.at(job, None)
        self.meter.moved(Lane.WEIGHTS, "weights of", visit.uploaded_bytes, visit.began, visit.arrived)
        self._open[job.index] = _OpenVisit(job, visit, side)
        round_.progress.uploading(job.index, visit.uploaded)

    def _wait_open(self, parameters: Sequence[torch.Tensor], closings: int) -> None:
        """Until weights may be read."""
        gate = self._gates.weights
        if not gate.is_open(parameters, closings):
            self.meter.until("overhead")
            gate.wait(parameters, self.name, closings)
            self.meter.until("optimizer")

    def _bound(self, round_: Round, index: int) -> BoundLayer:
        """A layer with a replica that no open visit uses."""
        layer, weights = round_.chain[index], round_.weights[index]
        known = self._replicas.get(id(layer))
        if known is None or known[0] is not weights:
            known = self._replicas[id(layer)] = (weights, [])
        busy = {id(bound.replica) for opened in self._open.values() for bound in opened.visit.layers}
        for replica in known[1]:
            if id(replica) not in busy:
                break
        else:
            weights.check_structure()
            replica = Replica(layer, self.backend.device)
            known[1].append(replica)
        return BoundLayer(weights, replica)

    def _enter(self, round_: Round, opened: _OpenVisit) -> Stage:
        job, visit = opened.job, opened.visit
        visit.arrive()
        with round_.binding:
            visit.ready(job.phase is not Phase.FORWARD, round_.frozen)
        self.meter.until("weights", visit.arrived)
        layers = [
            StageLayer(index, round_.chain.specs[index], bound)
            for index, bound in zip(job.layers, visit.layers, strict=True)
        ]
        return Stage(str(job), self.backend, layers, round_.around)

    # Gradients home

    def _release(self, round_: Round, opened: _OpenVisit) -> None:
        job = opened.job
        pending, events, alive = opened.visit.release(keep_buffers=job.phase is not Phase.BACKWARD)
        self.arena.end(opened.side, events)
        if pending.moments is not None:
            self.meter.at(job, None)
            self.meter.moved(Lane.GRADIENTS, "gradients of", pending.num_bytes, *pending.moments)
        if alive:
            self._in_flight.append((events[-1], alive))
        if self._on_the_way is not None and not self._on_the_way.is_set():
            self.meter.until("overhead")
            self._on_the_way.wait()
            self.meter.until("gradients")
        if pending.is_empty:
            round_.progress.settle(job.index)
            return
        arrived = self._on_the_way = threading.Event()
        round_.progress.bring_home()
        self._gradients_thread.submit(lambda: self._settle(round_, job, pending, arrived))

    def _settle(self, round_: Round, job: Job, pending: Download, arrived: threading.Event) -> None:
        """Add what a release brought down to the host's gradients; runs in the other thread, never raises."""
        try:
            if pending.gradients:
                for earlier in round_.before:
                    earlier.wait_over()
                touched = (parameter for parameter, _ in pending.gradients)
                self._gates.gradients.wait(touched, self.name, round_.closings[1])
            round_.progress.wait_settled(round_.tied_after.get(job.index, ()))
            if not round_.progress.failed:
                pending.wait()
                with self._home_log.doing("home", f"add gradients of {job}", bytes=pending.num_bytes, job=job.index):
                    pending.settle()
                round_.progress.settle(job.index)
        except BaseException as error:
            round_.progress.cancel(error)
        finally:
            arrived.set()
            round_.progress.came_home()

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
        if job.phase is Phase.BACKWARD:
            self._run_backward(round_, job, stage, opened.visit, microbatch)
        else:
            self._wait_for(round_, job.index - 1, microbatch)
            if job.phase is Phase.FORWARD:
                self._run_forward(round_, job, stage, microbatch)
            else:
                self._run_fused(round_, job, stage, opened.visit, microbatch)
        for name in round_.flow_of(job).drops:
            round_.values[microbatch].pop(name, None)

    def _wait_for(self, round_: Round, job_index: int, microbatch: int) -> None:
        """Until another worker has given a microbatch of a job to its device."""
        round_.progress.wait_for(job_index, microbatch, self.name)
        self.meter.until("no_work")

    def _run_forward(self, round_: Round, job: Job, stage: Stage, microbatch: int) -> None:
        flow = round_.flow_of(job)
        (segment,) = flow.segments
        carry, held = self._take(round_, segment, microbatch)
        values = round_.values[microbatch]

        def give(made: Carry) -> None:
            for name, value in made.items():
                values[name] = self._bring_down(value)

        with self.backend.hold(num_bytes(held), "carried values"):
            del held
            with self.meter.computing("forward", segment.layers):
                stage.forward(segment, carry, microbatch, flow.gives, give)

    def _run_fused(self, round_: Round, job: Job, stage: Stage, visit: Visit, microbatch: int) -> None:
        (segment,) = round_.flow_of(job).segments
        assert round_.loss_fn is not None
        carry, held = self._take(round_, segment, microbatch)
        label = self._upload_structure(round_.labels[microbatch])
        differentiated = self._as_leaves(round_.labels[microbatch], label)

        def give(loss: Any, outputs: Any) -> None:
            round_.losses[microbatch] = self._bring_down(loss, "loss of")
            if round_.return_outputs:
                detached = trees.map_tensors(outputs, torch.Tensor.detach)
                round_.outputs[microbatch] = self._give_outputs(round_, detached)
            round_.progress.loss_known()

        with (
            self.backend.hold(num_bytes(held), "carried values"),
            self.backend.activations([visit.weights_memory, *held]),
            round_.microbatch_context(),
        ):
            del held
            with self.meter.computing("fused", segment.layers):
                gradients = stage.fused(segment, carry, microbatch, round_.chain.exit, round_.loss_fn, label, give)
        if differentiated:
            gradients = {**gradients, LABEL: [tensor.grad for tensor in trees.tensors(label)]}
        self._give_gradients(round_, gradients, microbatch)

    def _run_backward(self, round_: Round, job: Job, stage: Stage, visit: Visit, microbatch: int) -> None:
        flow = round_.flow_of(job)
        if flow.made_by is not None:  # recomputation waits for its inputs, not for the incoming gradient
            self._wait_for(round_, round_.schedule.first_job + flow.made_by, microbatch)
        arrived = False
        for segment in flow.segments:
            if not stage.has_backward(segment):
                continue
            carry, held = self._take(round_, segment, microbatch)
            with (
                self.backend.hold(num_bytes(held), "carried values"),
                self.backend.activations([visit.weights_memory, *held]),
            ):
                del held
                with self.meter.computing("recompute", segment.layers):
                    recorded = stage.recompute(segment, carry, microbatch)
                carry.clear()
                if not arrived:
                    self._wait_for(round_, job.index - 1, microbatch)
                    arrived = True
                incoming = self._take_gradients(round_, segment, recorded, microbatch)
                with self.meter.computing("backward", segment.layers):
                    gradients = stage.backward(recorded, incoming, microbatch)
                incoming.clear()
            self._give_gradients(round_, gradients, microbatch)
        if not arrived:
            self._wait_for(round_, job.index - 1, microbatch)

    # Values and gradients, up and down

    def _upload_structure(self, value: Any) -> Any:
        """A structure's tensors on the device, ready for COMPUTE."""
        with self.meter.copying(Lane.UPLOAD, "labels of"):
            up = trees.map_tensors(value, self.backend.upload)
        self.backend.wait(Lane.COMPUTE, self.backend.record(Lane.UPLOAD))
        self.backend.check_ready(trees.tensors(up))
        return up

    @staticmethod
    def _as_leaves(given: Any, uploaded: Any) -> bool:
        """Let gradients be collected in uploaded tensors where those that were given require grad; whether any does."""
        found = False
        for one, up in zip(trees.tensors(given), trees.tensors(uploaded), strict=True):
            if one.requires_grad:
                found = True
                up.requires_grad_()
        return found

    def _take(self, round_: Round, segment: Segment, microbatch: int) -> tuple[Carry, list[torch.Tensor]]:
        """The values a segment reads, on the device, ready for COMPUTE; and the tensors in them."""
        backend = self.backend
        carry: Carry = {}
        for name in segment.takes:
            with round_.reading(microbatch, name, backend) as held:
                for event in held.events:
                    backend.wait(Lane.UPLOAD, event)
                with self.meter.copying(Lane.UPLOAD, "values for"):
                    carry[name] = trees.map_tensors(held.value, backend.upload)
        backend.wait(Lane.COMPUTE, backend.record(Lane.UPLOAD))
        tensors = trees.tensors(carry)
        backend.check_ready(tensors)
        return carry, tensors

    def _bring_down(self, value: Any, what: str = "values of") -> HostValue:
        """A device value on the host, with the event of its copy."""
        found = trees.tensors(value)
        if not found:
            return HostValue(value)
        backend = self.backend
        backend.wait(Lane.DOWNLOAD, backend.record(Lane.COMPUTE))
        with self.meter.copying(Lane.DOWNLOAD, what):
            down = trees.map_tensors(value, backend.download)
        copied = backend.record(Lane.DOWNLOAD)
        self._in_flight.append((copied, found))
        return HostValue(down, (copied,))

    def _give_outputs(self, round_: Round, outputs: Any) -> HostValue:
        device = round_.output_device
        if device is None or device.type == "cpu":
            return self._bring_down(outputs)
        moved = trees.map_tensors(outputs, lambda tensor: tensor.to(device))
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
                with self.meter.copying(Lane.UPLOAD, "gradients for"):
                    up = [None if one is None else backend.upload(one) for one in gradients]
                taken.setdefault(name, []).append(up)
        backend.wait(Lane.COMPUTE, backend.record(Lane.UPLOAD))
        backend.check_ready(trees.tensors(taken))
        return {name: [_sum(parts) for parts in zip(*each, strict=True)] for name, each in taken.items()}

    def _give_gradients(self, round_: Round, gradients: dict[str, Gradients], microbatch: int) -> None:
        if not gradients:
            return
        backend = self.backend
        backend.wait(Lane.DOWNLOAD, backend.record(Lane.COMPUTE))
        waiting = round_.gradients[microbatch]
        with self.meter.copying(Lane.DOWNLOAD, "gradients of"):
            down = {
                name: [None if one is None else backend.download(one) for one in each]
                for name, each in gradients.items()
            }
        copied = backend.record(Lane.DOWNLOAD)
        for name, each in down.items():
            waiting.setdefault(name, []).append((each, copied))
        self._in_flight.append((copied, gradients))


def num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of some tensors."""
    return sum(map(bytes_of, tensors))


def _sum(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    total: torch.Tensor | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total
