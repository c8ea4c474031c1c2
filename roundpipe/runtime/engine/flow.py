"""Which carried values each job takes and gives: liveness of names over a schedule.

A name is given once, so a job brings to the device what its layers read and don't make, and to the host what it makes
and a later job reads. With layer recomputation each layer of a backward job takes its inputs by itself.

Invariant: a name is dropped from the host right after its last reader, and never before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from roundpipe.core.layers import LayerSpec
from roundpipe.core.schedule import Job, Phase, Schedule

RecomputeGrain = Literal["stage", "layer"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive layers of a job that autograd sees as one."""

    layers: tuple[int, ...]
    takes: tuple[str, ...]
    """Names it reads and does not make."""
    makes: tuple[str, ...]
    last_reader: Mapping[str, int] = field(compare=False, default_factory=dict)
    """By name, the last of its layers that reads it; a layer beyond for what the model's outputs need."""


@dataclass(frozen=True, slots=True)
class JobFlow:
    """The values of one job, the same for every microbatch; its segments in the order in which they run."""

    segments: tuple[Segment, ...]
    gives: frozenset[str]
    """Names that it makes and others read: brought to the host."""
    drops: tuple[str, ...]
    """Names that nobody reads after it."""
    last_source: int | None
    """Position in the step of the last job that makes a value it takes, or that ran one of its layers forward
    and so left the buffers for its recomputation; None: all were there before."""


def _segment(specs: Sequence[LayerSpec], layers: Iterable[int], extra_reads: Iterable[str] = ()) -> Segment:
    layers, extra_reads = tuple(layers), tuple(extra_reads)
    makes: dict[str, None] = {}
    takes: dict[str, None] = {}
    for index in layers:
        takes.update((name, None) for name in specs[index].reads if name not in makes)
        makes.update((name, None) for name in specs[index].makes)
    takes.update((name, None) for name in extra_reads if name not in makes)
    last_reader = {name: index for index in layers for name in specs[index].reads}
    last_reader.update((name, layers[-1] + 1) for name in extra_reads)
    return Segment(layers, tuple(takes), tuple(makes), last_reader)


def segments_of(
    job: Job, specs: Sequence[LayerSpec], grain: RecomputeGrain, exit_reads: Sequence[str]
) -> tuple[Segment, ...]:
    """The segments of a job, in the order in which they run."""
    if job.phase is Phase.BACKWARD and grain == "layer":
        return tuple(_segment(specs, (index,)) for index in reversed(job.layers))
    return (_segment(specs, job.layers, exit_reads if job.phase is Phase.FUSED else ()),)


def flow(
    schedule: Schedule,
    specs: Sequence[LayerSpec],
    *,
    grain: RecomputeGrain,
    exit_reads: Sequence[str],
    stay: Iterable[str] = (),
) -> tuple[JobFlow, ...]:
    """The flow of each job of a schedule.

    The model's outputs need the names in ``exit_reads``; those in ``stay`` stay on the host after the step.
    """
    segments = [segments_of(job, specs, grain, exit_reads) for job in schedule.jobs]
    last_reader: dict[str, int] = {}
    for position, parts in enumerate(segments):
        for part in parts:
            last_reader.update((name, position) for name in part.takes)
    stays = set(stay)
    if schedule.kind == "forward":
        stays.update(exit_reads)
    flows = []
    maker: dict[str, int] = {}
    forward_job: dict[int, int] = {}
    for position, (job, parts) in enumerate(zip(schedule.jobs, segments, strict=True)):
        gives: frozenset[str] = frozenset()
        drops = tuple(name for name, last in last_reader.items() if last == position and name not in stays)
        earlier = [maker[name] for part in parts for name in part.takes if name in maker]
        if job.phase is Phase.FORWARD:
            names = (name for part in parts for name in part.makes)
            gives = frozenset(name for name in names if name in stays or last_reader.get(name, -1) > position)
            forward_job.update((index, position) for index in job.layers)
        else:
            earlier += [forward_job[index] for index in job.layers if index in forward_job]
        flows.append(JobFlow(parts, gives, drops, max(earlier, default=None)))
        maker.update((name, position) for name in gives)
    return tuple(flows)


def reads_of_backward(schedule: Schedule, specs: Sequence[LayerSpec], grain: RecomputeGrain) -> frozenset[str]:
    """Names that the jobs of a backward schedule take: what a forward before it must keep."""
    return frozenset(
        name for job in schedule.jobs for part in segments_of(job, specs, grain, ()) for name in part.takes
    )


def names_with_gradient(specs: Sequence[LayerSpec], trainable: Sequence[bool], inputs: Iterable[str]) -> frozenset[str]:
    """Names through which a gradient flows: from ``inputs`` that require grad, and from ``trainable`` layers."""
    flowing = set(inputs)
    for spec, has_trainable in zip(specs, trainable, strict=True):
        if has_trainable or any(name in flowing for name in spec.reads):
            flowing.update(spec.makes if spec.differentiable is None else spec.differentiable)
    return frozenset(flowing)
