"""What a worker's next run takes, given to the link before the layers of the present run (`ValuesAhead`).

A link serves copies in the order in which it gets them, whatever stream they are on. Values that are asked for only
when their run begins are late by their own copy, and by that of the next visit's weights if these were given before. So
a run first gives the link what the run after it takes, as far as that is there: nothing here waits for another worker.

It takes the place of values of earlier runs, which live on for a while (`Pace`): the link writes it when the device is
past these. Where they are smaller, nothing goes ahead.

Invariant: a device never has more at once than without it. What is not taken by its run is dropped, and comes up again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from roundpipe.core import trees
from roundpipe.core.errors import release_frames
from roundpipe.core.schedule import Job, Phase, Schedule
from roundpipe.core.storages import bytes_of
from roundpipe.runtime.device.backend import OUT_OF_MEMORY, Backend, Event, Lane, Moment
from roundpipe.runtime.engine.host_values import Gradients, HostValue
from roundpipe.runtime.engine.pace import Pace
from roundpipe.runtime.engine.spec import LABEL, Segment, StepSpec
from roundpipe.runtime.engine.stage import Stage
from roundpipe.runtime.engine.step import StepState
from roundpipe.runtime.profiling.meter import Meter

Run = tuple[Job, int]
"""A job and a microbatch of it."""


@dataclass(slots=True)
class _Copy:
    """What came up ahead under one name, counted on the device until it is taken."""

    values: list[Any]
    num_bytes: int
    arrived: Event
    moments: tuple[Moment, Moment] | None
    counted: AbstractContextManager[Any]


class _JobTakes(NamedTuple):
    """What is the same for all runs of a job."""

    has_parts: bool
    """Whether values come up for one part of a run after the other, or its layers leave some one after the other."""
    shared: frozenset[str]
    """Names whose values other readers of a visit have, too: they come up with its first run."""
    has_label: bool


class ValuesAhead:
    """Those of one worker: of its present run what was not yet taken, and of the next one what is on its way."""

    def __init__(self, backend: Backend, meter: Meter, pace: Pace) -> None:
        self._backend = backend
        self._meter = meter
        self._pace = pace
        pace.drop_ahead = self.drop
        self._values: dict[str, _Copy] = {}
        """Of the present run."""
        self._gradients: dict[str, _Copy] = {}
        self._next_run: tuple[int, int] | None = None
        """Job and microbatch that the next ones are for."""
        self._next_values: dict[str, _Copy] = {}
        self._next_gradients: dict[str, _Copy] = {}
        self._schedule: Schedule | None = None
        """Of the present step."""
        self._jobs: dict[int, _JobTakes] = {}
        """Its jobs, as far as they are known."""
        self._without: int | None = None
        """First job of the step in which memory was too short for it."""

    def begin_run(self, job: Job, microbatch: int) -> None:
        """What came up for a run that begins is its own."""
        if self._next_run != (job.index, microbatch):
            self.drop()
        self._values, self._gradients = self._next_values, self._next_gradients
        self._next_values, self._next_gradients, self._next_run = {}, {}, None

    def end_run(self) -> None:
        """Let go of what the run did not take."""
        _drop(self._values)
        _drop(self._gradients)

    def drop(self) -> None:
        """Let go of all; what is still needed comes up again."""
        self.end_run()
        self._drop_next()

    def _drop_next(self) -> None:
        _drop(self._next_values)
        _drop(self._next_gradients)
        self._next_run = None

    def take(self, name: str) -> tuple[Any, int] | None:
        """A value or the label of the present run, ready for COMPUTE, and its bytes; None: it did not come up ahead."""
        copy = self._arrived(self._values.pop(name, None))
        return None if copy is None else (copy.values[0], copy.num_bytes)

    def take_gradients(self, name: str) -> list[Gradients] | None:
        """Gradients of a value that the present run's segment made, one per reader, in the same way."""
        copy = self._arrived(self._gradients.pop(name, None))
        return None if copy is None else copy.values

    def _arrived(self, copy: _Copy | None) -> _Copy | None:
        if copy is not None:
            if copy.moments is not None:
                self._meter.arrived(*copy.moments)
            self._backend.wait(Lane.COMPUTE, copy.arrived)
            copy.counted.__exit__(None, None, None)
        return copy

    def give(self, step: StepState, job: Job, stage: Stage, microbatch: int) -> None:
        """Give the link what the worker's run after this one takes, if that is there and there is room for it."""
        spec, pace = step.spec, self._pace
        is_short = step.kept.shortage or self._without == spec.schedule.first_job
        if is_short or not pace.may_give_ahead(has_parts=self._takes(spec, job).has_parts):
            return
        if (following := _next_run(spec.schedule, job, microbatch)) is None:
            return
        other, microbatch = following
        segment = _first_segment(spec, other, stage if other is job else None)
        if segment is None or not _has_values(step, other, microbatch):
            return
        values = self._values_of(step, other, segment, microbatch)
        gradients = _gradients_of(step, other, segment, microbatch)
        each_value = (value for each in (*values.values(), *gradients.values()) for value in each)
        if not all(self._backend.is_own(event) for value in each_value for event in value.events):
            return  # the thread itself would wait for it
        sizes, gradient_sizes = _sizes(values), _sizes(gradients)
        num_bytes, gradient_bytes = sum(sizes.values()), sum(gradient_sizes.values())
        make_room = partial(pace.make_room_ahead, is_same_visit=other is job)
        if not make_room(num_bytes + gradient_bytes):
            if not (gradient_bytes and make_room(num_bytes)):
                return
            gradients = {}
        self._next_run = other.index, microbatch
        try:
            with pace.giving_ahead():
                for name, (value,) in values.items():
                    self._next_values[name] = self._give_value(step, following, name, value, sizes[name])
                for name, each in gradients.items():
                    copy = self._copy(following, each, gradient_sizes[name], "gradients for", "carried gradients")
                    self._next_gradients[name] = copy
        except OUT_OF_MEMORY as error:  # it comes up in its turn
            self._without = spec.schedule.first_job
            self._drop_next()
            release_frames(error)

    def _takes(self, spec: StepSpec, job: Job) -> _JobTakes:
        if self._schedule is not spec.schedule:
            self._schedule, self._jobs = spec.schedule, {}
        if (known := self._jobs.get(job.index)) is None:
            known = self._jobs[job.index] = _job_takes(spec, job)
        return known

    def _values_of(self, step: StepState, job: Job, segment: Segment, microbatch: int) -> dict[str, list[HostValue]]:
        """What a run takes first, but for what it shares with other readers of its visit."""
        takes, there = self._takes(step.spec, job), step.values[microbatch]
        values = {name: [there[name]] for name in segment.takes if name not in takes.shared}
        if takes.has_label:
            values[LABEL] = [HostValue(step.spec.labels[microbatch])]
        return values

    def _give_value(self, step: StepState, run: Run, name: str, value: HostValue, num_bytes: int) -> _Copy:
        if name == LABEL:
            return self._copy(run, [value], num_bytes, "labels of")
        value, is_lent = step.begin_read(step.values[run[1]], name)
        try:
            return self._copy(run, [value], num_bytes, "values for")
        finally:
            if is_lent:
                step.end_read(self._backend.record(Lane.UPLOAD))

    def _copy(
        self, run: Run, values: Sequence[HostValue], num_bytes: int, what: str, purpose: str = "carried values"
    ) -> _Copy:
        backend, counted = self._backend, self._backend.hold(num_bytes, purpose)
        for value in values:
            for event in value.events:
                backend.wait(Lane.UPLOAD, event)
        counted.__enter__()
        try:
            with self._meter.copying_ahead(what, *run) as timed:
                uploaded = trees.map_tensors([value.value for value in values], backend.upload)
        except BaseException:
            counted.__exit__(None, None, None)
            raise
        return _Copy(uploaded, num_bytes, backend.record(Lane.UPLOAD), timed.moments, counted)


def _drop(copies: dict[str, _Copy]) -> None:
    for copy in copies.values():
        copy.counted.__exit__(None, None, None)
    copies.clear()


def _next_run(schedule: Schedule, job: Job, microbatch: int) -> Run | None:
    """The run of a worker behind one, in its step."""
    if microbatch + job.num_replicas < schedule.num_microbatches:
        return job, microbatch + job.num_replicas
    following = schedule.worker_next(job.index)
    return None if following is None else (following, schedule.microbatches(following)[0])


def _job_takes(spec: StepSpec, job: Job) -> _JobTakes:
    flow = spec.flow_of(job)
    num_giving = sum(not flow.gives.isdisjoint(spec.chain.specs[index].makes) for index in job.layers)
    shared = flow.read_again.union(name for name, _ in spec.not_split)
    has_loss = job.phase is Phase.FUSED or (job.phase is Phase.FORWARD and spec.schedule.is_of_last_stage(job))
    has_label = has_loss and spec.loss_fn is not None and LABEL not in shared
    return _JobTakes(len(flow.segments) > 1 or num_giving > 1, shared, has_label)


def _first_segment(spec: StepSpec, job: Job, stage: Stage | None) -> Segment | None:
    """The first of a job's segments that runs, as far as can be told before its stage is there; None: none does."""
    segments = spec.flow_of(job).segments
    if job.phase is not Phase.BACKWARD:
        return segments[0]
    if stage is not None:
        return next(filter(stage.has_backward, segments), None)
    trained = (each for index in segments[0].layers for each in spec.weights[index].parameters() if each.requires_grad)
    runs = not spec.with_gradient.isdisjoint(segments[0].takes) or any(True for _ in trained)
    return segments[0] if runs else None


def _has_values(step: StepState, job: Job, microbatch: int) -> bool:
    """Whether other workers have left what a run takes, but for gradients."""
    schedule = step.spec.schedule
    if job.phase is not Phase.BACKWARD:
        return step.is_done(schedule.before(job, microbatch), microbatch)
    source = step.spec.flow_of(job).last_source
    return source is None or step.is_done(schedule.sharer(source, microbatch), microbatch)


def _gradients_of(step: StepState, job: Job, segment: Segment, microbatch: int) -> dict[str, list[HostValue]]:
    """Gradients that come up for a run's first segment, if they are there."""
    before = step.spec.schedule.before(job, microbatch)
    if job.phase is not Phase.BACKWARD or not step.is_done(before, microbatch):
        return {}
    there = step.gradients[microbatch]
    return {name: [*there[name]] for name in segment.makes if there.get(name)}


def _sizes(values: Mapping[str, Sequence[HostValue]]) -> dict[str, int]:
    return {
        name: sum(bytes_of(tensor) for value in each for tensor in trees.tensors(value.value))
        for name, each in values.items()
    }
