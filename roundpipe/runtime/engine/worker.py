"""One worker of the rotation: its device, its memory for weights, its replicas of layers; executes tasks.

Gradients of weights go home in threads of their own (`GradientsHome`), so that the worker can go on with its next job;
it has the gradients of no more than two jobs on their way.

Invariant: a worker leaves each step that it was given, whatever is raised, so that nobody waits for ever: an error
cancels the step, and one that is raised where none can be fails the steps that the worker has and all later ones.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Container, Sequence
from functools import partial

import torch

from roundpipe.core.errors import ClosedError, RoundPipeError, add_note, said
from roundpipe.core.schedule import Job, Phase, Task, TaskKind
from roundpipe.runtime.device.backend import OUT_OF_MEMORY, Backend, Lane, are_peers
from roundpipe.runtime.engine.arrivals import Arrivals, OpenVisit
from roundpipe.runtime.engine.attempts import Attempts
from roundpipe.runtime.engine.gradients_home import GradientsHome
from roundpipe.runtime.engine.pace import InFlight, Pace
from roundpipe.runtime.engine.runner import MicrobatchRunner
from roundpipe.runtime.engine.running import RunningSteps
from roundpipe.runtime.engine.shared_values import SharedValues
from roundpipe.runtime.engine.spec import StepSpec
from roundpipe.runtime.engine.stage import Stage
from roundpipe.runtime.engine.stage_layers import StageLayers
from roundpipe.runtime.engine.step import Cancelled, StepState
from roundpipe.runtime.engine.visit_peaks import most_room
from roundpipe.runtime.profiling.meter import Meter, Recorder
from roundpipe.runtime.threads import TaskThread
from roundpipe.runtime.weights.gate import Gates
from roundpipe.runtime.weights.layer_weights import LayerWeights
from roundpipe.runtime.weights.replica import BoundLayer, Replica
from roundpipe.runtime.weights.residency import Arena
from roundpipe.runtime.weights.twins import Twins

logger = logging.getLogger(__name__)


class Worker:
    """One worker, at a place in the rotation; tells the model's running steps when it leaves one."""

    def __init__(
        self,
        index: int,
        backends: Sequence[Backend],
        name: str,
        gates: Gates,
        steps: RunningSteps,
        twins: Twins,
        begin_host_work: Callable[[], None],
        has_attention: bool,
    ) -> None:
        self.index, self.name = index, name
        self.backend = backend = backends[index]
        self._backends = backends
        self.arena = Arena(backend, twins)
        self.device = f"{backend.device} (worker {index})"
        """Its name in timelines."""
        self.meter = Meter(backend, self.device)
        self._gates, self._steps = gates, steps
        warm_up = partial(backend.warm_up, has_attention=has_attention)
        self.thread = TaskThread(f"roundpipe {name}", self._break, gates.board, warm_up)
        self._home = GradientsHome(name, self.device, gates, steps, self._break, begin_host_work)
        self._broken: BaseException | None = None
        """What was raised where nothing may be; the worker's state is unknown since."""
        self._current: StepState | None = None
        self._upcoming: deque[StepState] = deque()
        """Steps that were given to the worker and that it has not begun."""
        self._replicas: dict[int, tuple[LayerWeights, list[Replica]]] = {}
        """By layer, its replicas, and for which layout of the layer they were made."""
        self._open: dict[int, OpenVisit] = {}
        self._in_flight = InFlight()
        """Values of microbatches."""
        self._leaving = InFlight()
        """Gradients of weights, which no microbatch waits for."""
        self.pace = Pace(backend, self._in_flight, self._leaving)
        self._runner = MicrobatchRunner(backend, name, self.meter, self._in_flight, self.pace)
        self._arrivals = Arrivals(gates.weights, self.meter, name)
        visits = self._open.values()
        self._attempts = Attempts(backend, self.meter, self.pace, self.arena, lambda: [each.visit for each in visits])
        self._was_idle = True

    # The engine

    @property
    def home_s(self) -> float:
        """Seconds in which gradients were added to the host's, and converted for the optimizer."""
        return self._home.seconds

    def submit(self, step: StepState) -> None:
        """Execute this worker's tasks of a step, after those of the steps before."""
        self._upcoming.append(step)
        self.thread.submit(self._execute_next)

    def withdraw(self, step: StepState) -> None:
        """See to it that a cancelled step is left: its call was interrupted, maybe in `submit`."""
        with contextlib.suppress(ClosedError, RuntimeError, MemoryError):  # the thread may not have started
            self.thread.submit(self._execute_next)  # in the place of what may be lost
            if step in self._upcoming:
                return
        with self._gates.board.lock:
            if step.is_over or self.index in step.begun_by:
                return
            step.begun_by.add(self.index)
            if step in self._upcoming:
                self._upcoming.remove(step)
        self._steps.leave(step)

    def forget(self, layer: torch.nn.Module) -> None:
        """Drop a layer's replicas and what stays of it on the device; while no step is running only."""
        self._replicas.pop(id(layer), None)
        self.arena.forget(layer)

    def record(self, recorder: Recorder | None) -> None:
        """Tell a recorder what is done from now on; None: nobody any more."""
        self.meter.recorder = recorder
        self._home.record(recorder)

    @property
    def is_current(self) -> bool:
        return self.thread.is_current or self._home.is_current

    def close(self) -> None:
        """End the threads and give memory back, after what is running."""
        self.thread.close()
        self._home.close()
        self.arena.free()

    # One step

    def _execute_next(self) -> None:
        """Execute this worker's tasks of the next step, and leave it however they end."""
        with self._gates.board.lock:
            if not self._upcoming:  # nothing was lost, see `_break`; or it was withdrawn
                return
            step = self._current = self._upcoming.popleft()
            step.begun_by.add(self.index)
        try:
            if self._broken is not None:
                raise RoundPipeError(
                    f"{self.name} can't go on since an earlier error ({self._broken!r}), raised where roundpipe "
                    "expects none. Compile the model again"
                ) from self._broken
            step.spec.context.copy().run(self._execute_all, step)
        except Cancelled:
            self._abandon(step)
        except BaseException as error:
            step.cancel(error)
            self._abandon(step)
        finally:
            self._steps.leave(step)
            self._current = None
        del step
        self._was_idle = not self._upcoming
        for rest in self.pace.leave() if self._was_idle else ():
            with contextlib.suppress(ClosedError):  # then nobody is left to wait for it
                self._home.submit(rest.wait)

    def _execute_all(self, step: StepState) -> None:
        tasks = step.spec.schedule.tasks(self.index)
        last_prefetch = max(i for i, task in enumerate(tasks) if task.kind is TaskKind.PREFETCH)
        with self.backend.activate(), torch.no_grad():
            self.backend.begin_step(step.spec.chain.operator_flops)
            self.meter.begin_step(self._was_idle)
            self.pace.begin_step()
            if self._was_idle and not (self.pace.has_left or self._home.is_bringing):
                self.backend.note_others(self.arena.num_bytes + self.arena.residents.twins.gradient_bytes)
            self._make_room(step.spec)
            behind: Task | None = None
            for position, task in enumerate(tasks):
                if task.kind is TaskKind.PREFETCH and self._goes_first(step, tasks[position + 1], task):
                    behind = task
                    continue
                self._bring_more(step)
                if position > last_prefetch and behind is None:
                    self._look_ahead()
                self._execute(step, task)
                if behind is not None and not self._goes_first(step, tasks[position + 1], behind):
                    self._execute(step, behind)
                    behind = None
            if not step.spec.may_outlive_call:
                self._in_flight.wait()
                self._leaving.wait()

    def _abandon(self, step: StepState) -> None:
        """Let go of a cancelled step's memory and tensors; never raises: what goes wrong is noted at its error."""
        is_out_of_memory = isinstance(step.error, torch.OutOfMemoryError)
        undo = (
            *([self.backend.note_failure] if is_out_of_memory else []),
            self.backend.synchronize,
            *(opened.visit.drop for opened in self._open.values()),
            *(opened.stage.shared.end for opened in self._open.values() if opened.stage is not None),
            self._open.clear,
            self.arena.forget_visits,
            self.meter.abandon,
            self.pace.abandon,
        )
        for action in undo:
            try:
                action()
            except Exception as problem:
                logger.exception("%s: after the error of a step", self.name)
                self._replicas.clear()  # who knows what they are bound to
                if (error := step.error) is not None:
                    add_note(error, f"roundpipe: after it, {self.name} met {type(problem).__name__}: {said(problem)}")

    def _break(self, error: BaseException) -> None:
        """Fail the worker's steps, and all later ones: something was raised that nothing caught."""
        self._broken = self._broken or error
        for step in (self._current, *self._upcoming):
            if step is not None:
                step.cancel(error)
        with contextlib.suppress(ClosedError):
            self.thread.submit(self._execute_next)  # in the place of what may be lost

    def _make_room(self, spec: StepSpec) -> None:
        """Let memory for weights be as large as a step needs.

        There is room for its first visit once more, if a step like it is likely to follow and memory is plentiful.
        """
        arena, sizes, spare_bytes = self.arena, spec.streamed_sizes(self.index), spec.spare_bytes
        own = spec.layers_of(self.index)
        other_bytes = arena.residents.make_room([(spec.weights[i], spec.stays[i]) for i in own], spec.others_bytes)
        if spare_bytes is not None:
            spare_bytes -= other_bytes
        more = [*sizes, sizes[0]]
        fits = spare_bytes is None or arena.room(more) - arena.room(sizes) <= spare_bytes
        arena.reserve(more if spec.may_outlive_call and fits else sizes, spare_bytes)

    def _look_ahead(self) -> None:
        """Start the upload of the next step's first job, once its first weights may be read and if there is room."""
        if not self._upcoming or len(self._open) != 1:
            return
        following = self._upcoming[0]
        schedule, weights, stays = following.spec.schedule, following.spec.weights, following.spec.stays
        job = schedule.job(schedule.tasks(self.index)[0].job_index)
        (running,) = self._open.values()
        sizes = following.spec.streamed_sizes(self.index)
        has_room = self.arena.has_room(sizes) and self.arena.has_room([running.visit.num_bytes, sizes[0]])
        is_there = all(self.arena.residents.has_all(weights[index], stays[index]) for index in job.layers)
        if following.failed or following.kept.shortage or not has_room or not is_there:
            return
        if not self._arrivals.may_begin(following, job):
            return
        self._do_ahead(following, partial(self._prefetch, following, job))

    def _do_ahead(self, following: StepState, act: Callable[[], None]) -> None:
        """Do something for a step that follows."""
        try:
            act()
        except OUT_OF_MEMORY as error:  # it is done in its turn, when there is more room
            self._attempts.note(following, error)
        except BaseException as error:
            following.cancel(error)

    def _bring_more(self, step: StepState) -> None:
        """Upload what the optimizer's thread has given back meanwhile of visits that have begun."""
        for opened in self._open.values():
            if opened.visit.is_whole:
                continue
            bring = partial(self._arrivals.bring, opened.step, opened.job, opened.visit)
            if opened.step is step:
                bring()
            else:
                self._do_ahead(opened.step, bring)

    # One task

    def _execute(self, step: StepState, task: Task) -> None:
        job = step.spec.schedule.job(task.job_index)
        if task.kind is TaskKind.PREFETCH:
            if job.index not in self._open:
                self._attempts.do(step, task, lambda: self._prefetch(step, job))
        elif task.kind is TaskKind.RUN:
            assert task.microbatch is not None
            opened, microbatch = self._open[job.index], task.microbatch
            run, again = (partial(each, step, opened, microbatch) for each in (self._run, self._run_again))
            self._attempts.do(step, task, run, again)
            step.advance(job.index)
        else:
            self._release(step, task, self._open[job.index])

    def _run(self, step: StepState, opened: OpenVisit, microbatch: int) -> None:
        self.meter.at(opened.job, microbatch)
        self.meter.until("overhead")
        if opened.stage is None:
            self.pace.begin_visit()
        self.pace.begin_run(step.spec.schedule.num_microbatches)
        if opened.stage is None:
            opened.stage = self._enter(step, opened)
        self._runner.run(step, opened.job, opened.stage, opened.visit, microbatch)
        self.pace.end_run()

    def _run_again(self, step: StepState, opened: OpenVisit, microbatch: int) -> None:
        """Run a stage from its first microbatch to this one, with gradients of weights from zero."""
        if opened.stage is not None:
            opened.stage.shared.end()
        opened.visit.unbind()
        opened.stage = self._enter(step, opened)
        self._runner.run_again(step, opened.job, opened.stage, opened.visit, microbatch)

    def _goes_first(self, step: StepState, task: Task, prefetch: Task) -> bool:
        """Whether a task of an open visit goes before the next one's weights come up.

        It does while the optimizer's thread has the first of these. So does a run that a device beside its worker can
        begin with, until the device has enough to do: its values would wait on the link until the weights are there.
        """
        opened, schedule = self._open.get(task.job_index), step.spec.schedule
        if opened is None or task.kind is TaskKind.PREFETCH:
            return False
        if task.microbatch is not None:
            if not step.is_done(schedule.before(opened.job, task.microbatch), task.microbatch):
                return False  # it waits for another worker
            if self.pace.has_lanes and (opened.stage is None or not self.pace.is_filled):
                return True
        return not self._arrivals.may_begin(step, schedule.job(prefetch.job_index))

    def _prefetch(self, step: StepState, job: Job) -> None:
        busy = {id(layer.replica) for opened in self._open.values() for layer in opened.visit.layers}
        layers = [self._bound(step, index, busy) for index in job.layers]
        may_take = self._arrivals.has_all(step, job)
        visit, side = self.arena.begin(layers, step.spec.schedule.first_job, may_take=may_take)
        self._arrivals.bring(step, job, visit)
        self._open[job.index] = OpenVisit(step, job, visit, side)

    def _bound(self, step: StepState, index: int, busy: Container[int]) -> BoundLayer:
        """A layer with a replica that is not ``busy``, by identity: that no open visit uses."""
        layer, weights = step.spec.chain[index], step.spec.weights[index]
        known = self._replicas.get(id(layer))
        if known is None or known[0] is not weights:
            known = self._replicas[id(layer)] = (weights, [])
        replica = next((replica for replica in known[1] if id(replica) not in busy), None)
        if replica is None:
            weights.check_structure()
            known[1].append(replica := Replica(layer, self.backend.device))
        return BoundLayer(weights, replica, step.spec.stays[index])

    def _enter(self, step: StepState, opened: OpenVisit) -> Stage:
        job, visit = opened.job, opened.visit
        if (peaks := step.spec.peaks) is not None:
            peaks.begin(job.index - step.spec.schedule.first_job, has_rest=self.pace.has_rest)
            self.backend.begin_visit()
        if job.phase is not Phase.FORWARD and (there := visit.twins()):
            # those of the round before are taken first, or they would be there beside this one's
            self._gates.gradients.wait(there, self.name, step.closings[1])
        arrive = partial(self._arrivals.arrive, step, job, visit)
        if visit.is_whole:
            arrive(len(job.layers) - 1)
        shared = SharedValues(self.backend, step.spec.not_split, step.spec.flow_of(job).read_again)
        layers = StageLayers(step, job, visit, arrive)
        return Stage(str(job), self.backend, layers, step.spec, step.forward, step.weights, step.loss_turn, shared)

    # Gradients of weights

    def _release(self, step: StepState, task: Task, opened: OpenVisit) -> None:
        job, keeps_buffers = opened.job, opened.job.phase is not Phase.BACKWARD
        step.kept.end(job)
        if (peaks := step.spec.peaks) is not None:
            sizes = [weights.num_bytes for weights in step.spec.weights]  # as if nothing stayed
            surplus_bytes = self.arena.num_bytes - most_room(step.spec.schedule, self.index, sizes)
            peaks.add(job.index - step.spec.schedule.first_job, self.backend.visit_peak_bytes(), surplus_bytes)
        added = [position for position, index in enumerate(job.layers) if index in step.added]
        sharers = [self._backends[worker] for worker in step.spec.schedule.sharers(job)]
        may_sum = len(sharers) > 1 and job.phase is not Phase.FORWARD and are_peers(sharers)
        note_sums = partial(self.meter.moved, Lane.GRADIENTS, "gradients of", job=job) if may_sum else None
        was_whole, release = opened.visit.is_whole, partial(opened.visit.release, keeps_buffers, added, note_sums)
        pending, events, alive = self._attempts.do(step, task, release)
        if opened.stage is not None and (shared := opened.stage.shared.end()):
            self._in_flight.add(events[0], shared)
        if not was_whole:  # nobody reads the rest
            step.begin_upload(job.index, events[0])
        del self._open[job.index]  # before, an error drops it
        self.arena.end(opened.side, events)
        if pending.moments is not None:
            self.meter.moved(Lane.GRADIENTS, "gradients of", pending.num_bytes, *pending.moments, job)
        if alive:
            self._leaving.add(events[-1], alive)
        if self._home.is_bringing:
            self.meter.until("overhead")
            self._home.wait()
            self.meter.until("gradients")
        if pending.buffers and job.num_replicas > 1:
            logger.warning(
                "%s wrote buffers while %d devices shared its microbatches, after rounds in which it wrote none: the "
                "model has those of the last device. From now on one device runs it",
                job,
                job.num_replicas,
            )
        is_shared = job.num_replicas > 1 and job.phase is not Phase.FORWARD
        if pending.is_empty and not is_shared:
            step.settle(job.index)
            return
        self._home.bring(step, job, pending)
