"""What stages really took on their devices, and how that corrects what was computed.

Kernels take memory by themselves, and transfers overlap more or less with what runs: the difference between a visit's
measured peak and the computed one is learned per kind of layer, for forward, fused and backward stages by themselves.
Layers for which the same memory was computed are of one kind; what a visit takes beyond its kinds is its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import Schedule
from roundpipe.planning.stage_costs import (
    EXCESS,
    StageCosts,
    StagePhase,
    beside_bytes,
    ring_memory,
    training_jobs,
)
from roundpipe.runtime.config import RecomputeGrain
from roundpipe.runtime.weights.residency import Arena

Kind = tuple[int, ...]


class MeasuredVisit(NamedTuple):
    """The most that was in use during a visit, and what was predicted, room for weights included."""

    phase: StagePhase
    layers: range
    predicted_bytes: int
    measured_bytes: int

    @property
    def missing_bytes(self) -> int:
        """By how much the prediction is too low; negative: too high."""
        return self.measured_bytes - self.predicted_bytes


@dataclass(slots=True, eq=False)
class VisitPeaks:
    """The most that was in use during each visit of one training step; its workers add to it."""

    plan: ExecutePlan
    grain: RecomputeGrain
    num_workers: int
    costs: list[LayerCost]
    """What was computed for microbatches of the step's size; `correct` changes the list."""
    is_alone: bool = False
    """Whether the step has one microbatch."""
    is_over: bool = False
    failed: bool = False
    _bytes: dict[int, int] = field(default_factory=dict)
    _with_rest: set[int] = field(default_factory=set)

    def begin(self, position: int, *, has_rest: bool) -> None:
        """A visit begins, by its position in the step; ``has_rest``: what the one before has left is still there."""
        if has_rest:
            self._with_rest.add(position)

    def add(self, position: int, peak_bytes: int | None, surplus_bytes: int = 0) -> None:
        """A visit's peak, by its position in the step; the surplus is room for weights beyond `most_room`."""
        if peak_bytes is not None:
            self._bytes[position] = peak_bytes - surplus_bytes

    def end(self, *, failed: bool) -> None:
        self.is_over, self.failed = True, failed

    def compared(self) -> list[MeasuredVisit]:
        """The visits, as predicted by the costs as they are and as measured."""
        stages = training_jobs(self.plan, StageCosts(self.costs, self.grain, is_alone=self.is_alone), self.num_workers)
        rings = self.plan.rings("train", self.num_workers)
        predicted = ring_memory(stages, rings, [0] * len(rings))
        of_visits = {at: (ring, number) for ring in rings for number, at in enumerate(ring.positions)}
        found = []
        for position, (phase, layers) in enumerate(_visits(self.plan, self.num_workers)):
            (ring, number), turn = of_visits[position], len(of_visits[position][0].workers)
            if (peak_bytes := self._bytes.get(position)) is None:
                continue
            # plans count with what the step before has left, and this one may have begun without
            before = stages[ring.before(number)]
            is_without = number < turn and position not in self._with_rest
            before_bytes = beside_bytes(stages[position], before) if is_without else 0
            found.append(MeasuredVisit(phase, layers, predicted[position].total - before_bytes, peak_bytes))
        return found

    def correct(self) -> None:
        """Take into the costs what they lack, so that no visit of the step is predicted to take less than it did.

        At first a difference counts in either direction, later only upward: what is on its way varies over steps.
        """
        kinds = [_kind(cost) for cost in self.costs]
        visits = self.compared()
        least: dict[tuple[StagePhase, Kind], int] = {}
        for visit in visits:
            for kind in {kinds[index] for index in visit.layers}:  # one of them made the peak: which, others tell
                key = visit.phase, kind
                least[key] = min(least.get(key, visit.missing_bytes), visit.missing_bytes)
        for (phase, kind), num_bytes in least.items():
            for index, other in enumerate(kinds):
                if other == kind:
                    self._add(phase, index, num_bytes)
        for visit in self.compared():
            if visit.missing_bytes > 0:
                excess = [getattr(self.costs[index], EXCESS[visit.phase]) for index in visit.layers]
                self._add(visit.phase, visit.layers[excess.index(max(excess))], visit.missing_bytes)

    def _add(self, phase: StagePhase, index: int, num_bytes: int) -> None:
        present = getattr(self.costs[index], EXCESS[phase])
        if num_bytes > 0 or not present:
            self.costs[index] = replace(self.costs[index], **{EXCESS[phase]: present + num_bytes})


def most_room(schedule: Schedule, worker: int, layer_sizes: Sequence[int]) -> int:
    """What the largest weights take of all workers that take turns with this one, as they lie in memory.

    Predictions are of these, in whichever worker's visit a peak is measured.
    """
    ring = next(ring for ring in schedule.rings if worker in ring.workers)
    return max(Arena.room(schedule.visit_sizes(each, layer_sizes)) for each in ring.workers)


def _visits(plan: ExecutePlan, num_workers: int) -> Iterator[tuple[StagePhase, range]]:
    """The visits of a training step, in order."""
    assert plan.fused is not None
    stages: list[tuple[StagePhase, range]] = [("F", range(*layers)) for layers in plan.forward]
    stages.append(("U", range(*plan.fused)))
    stages += [("B", range(*layers)) for layers in plan.backward]
    for stage, count in zip(stages, plan.shares("train", num_workers), strict=True):
        yield from [stage] * count


def _kind(cost: LayerCost) -> Kind:
    return (
        cost.activation_bytes,
        cost.workspace_bytes,
        cost.temporary_bytes,
        cost.carry_bytes,
        cost.weight_bytes,
        cost.gradient_bytes,
    )
