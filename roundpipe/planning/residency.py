"""What stays on the devices: frozen weights of layers, in the memory that a plan leaves over, and trained ones.

Trained weights stay with all that is theirs, on one worker alone; plans are made for the memory beside them.

Of layers whose frozen weights stay each worker that runs them keeps a copy of its own: all workers where stages rotate,
so that no plan gets slower by it, else one. What stays takes no room in the arena; in a plan of at most three stages on
one worker, whose arena holds all weights anyway, it costs no memory at all.
A weight that several such layers have is there once; one that does not stay is uploaded with its own.

Such layers are chosen one by one from the stage whose uploads are the most for the time that it computes: what it
brings is what the stage before it hides the least.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from roundpipe.core.execute_plan import ExecutePlan, Ring
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import Job, Schedule
from roundpipe.core.shared_weights import SharedWeight, counted_again
from roundpipe.planning.stage_costs import (
    StageCost,
    StageCosts,
    arena_bytes,
    num_trained,
    peak_bytes,
    ring_memory,
    ring_peaks,
    training_jobs,
)
from roundpipe.reports.memory import DeviceMemory

DEVICE_BYTES_PER_S = 2e12
"""What an update on an accelerator is taken to read and write of its memory, where that is not known."""
LEAST_SHARE = 1 / 16
"""Layers of which less than this share of the weights is frozen, such as a few buffers, are streamed as a whole."""


class Share(NamedTuple):
    """What stays on one device."""

    num_bytes: int = 0
    optimizer_bytes: int = 0
    """Of them, those of the optimizer's side: copies, their gradients and states."""
    home_bytes: int = 0
    """Of new weights that go to the host behind each update, where nobody has asked for trained ones to stay."""

    def update_s(self, bytes_per_s: float) -> float:
        """Seconds of an update of what stays, by what the device reads and writes of its memory."""
        return 2 * self.optimizer_bytes / bytes_per_s


@dataclass(frozen=True, slots=True)
class Residency:
    """Layers whose weights stay on devices, and the bytes that they take there."""

    layers: frozenset[int] = frozenset()
    """Those whose frozen weights stay, on the devices of all workers that run them."""
    trained: frozenset[int] = frozenset()
    """Those whose trained weights stay, on the one worker's that runs them, with gradients and the optimizer's copies
    and states."""
    shares: tuple[Share, ...] = (Share(),)
    """On the devices of each ring of workers; one: on each device."""

    @property
    def most(self) -> Share:
        """On the device where the most stays."""
        return max(self.shares)

    @property
    def num_bytes(self) -> int:
        """Of the device where the most stays."""
        return self.most.num_bytes

    def on_rings(self, number: int) -> Sequence[Share]:
        """On the devices of each of so many rings of workers."""
        return self.shares * number if len(self.shares) == 1 else self.shares

    def beside(self, frozen: Iterable[int], ring_bytes: Sequence[int]) -> Residency:
        """What stays if some layers' frozen weights do as well, which take so much of the devices of each ring."""
        pairs = zip(self.on_rings(len(ring_bytes)), ring_bytes, strict=True)
        shares = tuple(share._replace(num_bytes=share.num_bytes + more_bytes) for share, more_bytes in pairs)
        return replace(self, layers=self.layers.union(frozen), shares=shares)

    def streamed(self, costs: Sequence[LayerCost]) -> Sequence[LayerCost]:
        """Costs of layers as each visit uploads them."""
        if not (self.layers or self.trained):
            return costs
        return [self._streamed_cost(index, cost) for index, cost in enumerate(costs)]

    def _streamed_cost(self, index: int, cost: LayerCost) -> LayerCost:
        trained_bytes = _streamed_bytes(cost)
        if index in self.trained:
            frozen_bytes = 0 if index in self.layers else cost.weight_bytes - trained_bytes
            return replace(cost, weight_bytes=frozen_bytes, gradient_bytes=0, num_parameters=0)
        if index in self.layers:
            return replace(cost, weight_bytes=trained_bytes, num_parameters=num_trained(cost))
        return cost

    def bytes_of(self, costs: Sequence[LayerCost]) -> dict[int, int]:
        """What stays of each of its layers."""
        streamed, layers = self.streamed(costs), sorted(self.layers | self.trained)
        return {index: costs[index].weight_bytes - streamed[index].weight_bytes for index in layers}

    def weight_bytes(self, costs: Sequence[LayerCost]) -> int:
        """What stays of all its layers, a weight that several have once."""
        again = _again(costs, self.layers, is_trained=False) + _again(costs, self.trained, is_trained=True)
        return sum(self.bytes_of(costs).values()) - again

    def stage_memory(self, plan: ExecutePlan, costs: StageCosts, num_workers: int) -> dict[str, DeviceMemory]:
        """Device memory while the stages F0, .., U, B1, .. of a training plan run."""
        rings = plan.rings("train", num_workers)
        resident_bytes = [share.num_bytes for share in self.on_rings(len(rings))]
        needs = iter(ring_memory(training_jobs(plan, self.rest(costs), num_workers), rings, resident_bytes))
        stages = zip(plan.named_stages(), plan.shares("train", num_workers), strict=True)
        return {name: max(islice(needs, count), key=lambda need: need.total) for (name, _), count in stages}

    def peak_bytes(self, schedule: Schedule, costs: StageCosts) -> int:
        """Device memory that a schedule takes at most, and what stays."""
        peaks = ring_peaks(self.rest(costs).of_jobs(schedule), schedule.rings)
        return max(peak + share.num_bytes for peak, share in zip(peaks, self.on_rings(len(peaks)), strict=True))

    def rest(self, costs: StageCosts) -> StageCosts:
        """Costs of ranges of layers as each visit uploads them."""
        return StageCosts(self.streamed(costs.layers), costs.grain, is_alone=costs.is_alone)


STREAMED = Residency()
"""Nothing stays."""


def full_residency(
    costs: Sequence[LayerCost], optimizer_bytes: int, layers: Iterable[int] | None = None, *, adds_up: bool = False
) -> Residency:
    """Everything stays on one device, or all of some layers, ``optimizer_bytes`` of the optimizer's side among it.

    If a round ``adds_up`` its gradients with those of rounds before, they are there twice meanwhile.
    """
    stays = frozenset(range(len(costs)) if layers is None else layers)
    num_bytes = sum(costs[index].weight_bytes + (1 + adds_up) * costs[index].gradient_bytes for index in stays)
    num_bytes += optimizer_bytes - _again(costs, stays, is_trained=False) - _again(costs, stays, is_trained=True)
    return Residency(stays, stays, (Share(num_bytes, optimizer_bytes),))


def trained_residency(
    costs: Sequence[LayerCost], layers: Iterable[int], optimizer_bytes: int, *, adds_up: bool = False
) -> Residency:
    """What is trained of some layers stays on one device, ``optimizer_bytes`` of the optimizer's side among it.

    ``adds_up``: see `full_residency`.
    """
    trained = frozenset(layers)
    num_bytes = sum(_streamed_bytes(costs[index]) + (1 + adds_up) * costs[index].gradient_bytes for index in trained)
    num_bytes += optimizer_bytes - _again(costs, trained, is_trained=True)
    return Residency(frozenset(), trained, (Share(num_bytes, optimizer_bytes),))


def on_several(parts: Sequence[Residency]) -> Residency:
    """What stays on the devices of several rings of workers, of which each has layers of its own."""
    return Residency(
        frozenset().union(*(part.layers for part in parts)),
        frozenset().union(*(part.trained for part in parts)),
        tuple(share for part in parts for share in part.shares),
    )


def with_weights_home(residency: Residency, costs: Sequence[LayerCost]) -> Residency:
    """The same, of one device, where the host's trained weights follow those on the device after each update."""
    home_bytes = sum(_streamed_bytes(costs[index]) for index in residency.trained)
    return replace(residency, shares=(residency.most._replace(home_bytes=home_bytes),))


def choose_residency(
    schedule: Schedule, costs: StageCosts, budget_bytes: int | None, trained: Residency = STREAMED
) -> Residency:
    """What may stay beside the peak of a schedule within a budget per device; None: no limit.

    ``trained`` are trained weights that stay in any case.
    """
    frozen = {
        index: cost.weight_bytes - _streamed_bytes(cost)
        for index, cost in enumerate(costs.layers)
        if index not in trained.layers and may_stay(cost)
    }
    stages, rings = trained.rest(costs).of_jobs(schedule), schedule.rings
    chosen: set[int] = set()
    ring_bytes: list[int] = []
    for ring, share in zip(rings, trained.on_rings(len(rings)), strict=True):
        jobs = _RingJobs(ring, ring.of(schedule.jobs), ring.of(stages))
        own = {index: num_bytes for index, num_bytes in frozen.items() if any(index in job.layers for job in jobs.jobs)}
        left_bytes = None if budget_bytes is None else budget_bytes - share.num_bytes
        stays, num_bytes = jobs.stays(own, costs.layers, left_bytes)
        ring_bytes.append(num_bytes)
        chosen |= stays
    return trained.beside(chosen, ring_bytes)


@dataclass(frozen=True, slots=True)
class _RingJobs:
    """The jobs of a ring of workers in a step, of which each worker's device has to hold what it runs."""

    ring: Ring
    jobs: Sequence[Job]
    stages: Sequence[StageCost]

    def stays(
        self, frozen: Mapping[int, int], layers: Sequence[LayerCost], budget_bytes: int | None
    ) -> tuple[set[int], int]:
        """Of layers with so many bytes of frozen weights those that stay within a budget, and the bytes."""
        turn, left, rest = len(self.ring.workers), dict(frozen), {}
        weights = [stage.weight_bytes for stage in self.stages]
        beside_bytes = peak_bytes(self.stages, turn) - arena_bytes(weights, turn)
        all_bytes = sum(frozen.values()) - _again(layers, frozen, is_trained=False)
        none_left = [size - sum(frozen.get(each, 0) for each in job.layers) for size, job in self._visits(weights)]
        if budget_bytes is None or beside_bytes + all_bytes + arena_bytes(none_left, turn) <= budget_bytes:
            return set(frozen), all_bytes
        stays: set[int] = set()
        there: set[SharedWeight] = set()
        stays_bytes = 0
        while (index := self._next(weights, left)) is not None:
            its_bytes = left.pop(index)
            lighter = [size - its_bytes * (index in job.layers) for size, job in self._visits(weights)]
            shared = _shared(layers[index], is_trained=False)
            num_bytes = its_bytes - sum(each.num_bytes for each in shared & there)
            if beside_bytes + stays_bytes + num_bytes + arena_bytes(lighter, turn) > budget_bytes:
                rest[index] = its_bytes
                continue
            weights, stays_bytes = lighter, stays_bytes + num_bytes
            stays.add(index)
            there |= shared
            left |= rest  # beside what stays now there may be room for them
            rest.clear()
        return stays, stays_bytes

    def _visits(self, weights: Sequence[int]) -> Iterable[tuple[int, Job]]:
        return zip(weights, self.jobs, strict=True)

    def _next(self, weights: Sequence[int], layers: Collection[int]) -> int | None:
        """The first of these layers in the stage that brings the most for the time that it computes."""
        jobs = [
            (weights[position] / max(self.stages[position].seconds, 1e-12), -position, job)
            for position, job in enumerate(self.jobs)
            if any(index in layers for index in job.layers)
        ]
        return next(index for index in max(jobs)[2].layers if index in layers) if jobs else None


def may_stay(cost: LayerCost) -> bool:
    """Whether a layer has frozen weights that are worth keeping on a device."""
    return cost.weight_bytes - _streamed_bytes(cost) > LEAST_SHARE * cost.weight_bytes


def _streamed_bytes(cost: LayerCost) -> int:
    """Bytes of a layer's weights that are trained."""
    return min(cost.gradient_bytes, cost.weight_bytes)


def _shared(cost: LayerCost, *, is_trained: bool) -> frozenset[SharedWeight]:
    """What a layer has in common with others, of its trained or of its frozen weights."""
    return frozenset(each for each in cost.shared if (each.is_trained and cost.gradient_bytes > 0) is is_trained)


def _again(costs: Sequence[LayerCost], layers: Iterable[int], *, is_trained: bool) -> int:
    """What a sum over layers counts more than once, of their trained or of their frozen weights."""
    return counted_again(each for index in layers for each in _shared(costs[index], is_trained=is_trained))
