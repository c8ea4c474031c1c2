"""What a worker's next run takes, given to the link before the layers of the present run (`ValuesAhead`).

A link serves copies in the order in which it gets them, whatever stream they are on. Values that are asked for only
when their run begins are late by their own copy, and by that of the next visit's weights if these were given before. So
a run first gives the link what the run after it takes, as far as that is there: nothing here waits for another worker.

It takes the place of values of earlier runs, which live on for a while (`Pace`): the link writes it when the device is
past these. Where they are smaller, nothing goes ahead.

Invariant: a device never has more at once than without it. What is not taken by its run is dropped, and comes up again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    counted: ExitStack


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
            copy.counted.close()
        return copy

    def give(self, step: StepState, job: Job, stage: Stage, microbatch: int) -> None:
        """Give the link what the worker's run after this one takes, if that is there and there is room for it."""
        spec, pace = step.spec, self._pace
        is_short = step.kept.shortage or self._without == spec.schedule.first_job
        if is_short or not pace.may_give_ahead(has_parts=_has_parts(spec, job)):
            return
        if (following := _next_run(spec.schedule, job, microbatch)) is None:
            return
        other, microbatch = following
        segment = _first_segment(spec, other, stage if other is job else None)
        if segment is None or not _has_values(step, other, microbatch):
            return
        values, gradients = (
            _values_of(step, other, segment, microbatch),
            _gradients_of(step, other, segment, microbatch),
        )
        events = [event for value in (*values.values(), *_flat(gradients)) for event in value.events]
        if not all(map(self._backend.is_own, events)):  # the thread itself would wait for them
            return
        num_bytes, gradient_bytes = _bytes_of(values.values()), _bytes_of(_flat(gradients))
        make_room = partial(pace.make_room_ahead, is_same_visit=other is job)
        if not make_room(num_bytes + gradient_bytes):
            if not (gradient_bytes and make_room(num_bytes)):
                return
            gradients = {}
        self._next_run = other.index, microbatch
        try:
            with pace.giving_ahead():
                for name, value in values.items():
                    self._next_values[name] = self._give_value(step, following, name, value)
                for name, each in gradients.items():
                    purpose = "carried gradients"
                    self._next_gradients[name] = self._copy(following, each, "gradients for", purpose)
        except OUT_OF_MEMORY as error:  # it comes up in its turn
            self._without = spec.schedule.first_job
            self._drop_next()
            release_frames(error)

    def _give_value(self, step: StepState, run: Run, name: str, value: HostValue) -> _Copy:
        if name == LABEL:
            return self._copy(run, [value], "labels of")
        value, is_lent = step.begin_read(step.values[run[1]], name)
        try:
            return self._copy(run, [value], "values for")
        finally:
            if is_lent:
                step.end_read(self._backend.record(Lane.UPLOAD))

    def _copy(self, run: Run, values: Sequence[HostValue], what: str, purpose: str = "carried values") -> _Copy:
        backend, counted, num_bytes = self._backend, ExitStack(), _bytes_of(values)
        counted.enter_context(backend.hold(num_bytes, purpose))
        for event in (event for value in values for event in value.events):
            backend.wait(Lane.UPLOAD, event)
        try:
            with self._meter.copying_ahead(what, *run) as timed:
                uploaded = trees.map_tensors([value.value for value in values], backend.upload)
        except BaseException:
            counted.close()
            raise
        return _Copy(uploaded, num_bytes, backend.record(Lane.UPLOAD), timed.moments, counted)


def _drop(copies: dict[str, _Copy]) -> None:
    for copy in copies.values():
        copy.counted.close()
    copies.clear()


def _next_run(schedule: Schedule, job: Job, microbatch: int) -> Run | None:
    """The run of a worker behind one, in its step."""
    if microbatch + job.num_replicas < schedule.num_microbatches:
        return job, microbatch + job.num_replicas
    following = job.index + schedule.num_workers
    if not schedule.has_job(following):
        return None
    job = schedule.job(following)
    return job, schedule.microbatches(job)[0]


def _has_parts(spec: StepSpec, job: Job) -> bool:
    """Whether a run of a job has parts that values come up for, or layers that leave some, one after the other."""
    flow = spec.flow_of(job)
    makes = (spec.chain.specs[index].makes for index in job.layers)
    return len(flow.segments) > 1 or sum(not flow.gives.isdisjoint(names) for names in makes) > 1


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


def _values_of(step: StepState, job: Job, segment: Segment, microbatch: int) -> dict[str, HostValue]:
    """What a run takes first, but for what it shares with other readers of its visit."""
    spec = step.spec
    shared = spec.flow_of(job).read_again.union(name for name, _ in spec.not_split)
    values = {name: step.values[microbatch][name] for name in segment.takes if name not in shared}
    is_last = job.phase is Phase.FORWARD and spec.schedule.is_of_last_stage(job)
    if spec.loss_fn is not None and LABEL not in shared and (job.phase is Phase.FUSED or is_last):
        values[LABEL] = HostValue(spec.labels[microbatch])
    return values


def _gradients_of(step: StepState, job: Job, segment: Segment, microbatch: int) -> dict[str, list[HostValue]]:
    """Gradients that come up for a run's first segment, if they are there."""
    before = step.spec.schedule.before(job, microbatch)
    if job.phase is not Phase.BACKWARD or not step.is_done(before, microbatch):
        return {}
    there = step.gradients[microbatch]
    return {name: [*there[name]] for name in segment.makes if there.get(name)}


def _flat(gradients: Mapping[str, Sequence[HostValue]]) -> Iterator[HostValue]:
    return (value for each in gradients.values() for value in each)


def _bytes_of(values: Iterable[HostValue]) -> int:
    return sum(bytes_of(tensor) for value in values for tensor in trees.tensors(value.value))
