"""What stages and plans cost in seconds and device memory: the arithmetic behind plans and predictions.

Times follow the rotation's recurrence (`step_times.py`). Transfers are left out here; the simulator has them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, repeat
from operator import add
from typing import Literal, NamedTuple

from roundpipe.core.errors import ConfigError
from roundpipe.core.execute_plan import ExecutePlan, Ring
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import Phase, Schedule
from roundpipe.planning.backward_peaks import BackwardPeaks, RangeMaximum
from roundpipe.planning.carried import Carried, CarriedValues, RecomputeGrain
from roundpipe.planning.step_times import step_seconds
from roundpipe.planning.value_lives import ValueLives
from roundpipe.reports.memory import DeviceMemory

StagePhase = Literal["F", "U", "B"]
"""Of a range: forward, fused or backward."""
EXCESS: dict[StagePhase, str] = {
    "F": "forward_excess_bytes",
    "U": "fused_excess_bytes",
    "B": "backward_excess_bytes",
}
"""Where a layer's cost has what was measured of such ranges."""
WEIGHTS_SHARE = 0.9
"""Share of a device's budget that weights and gradients may take; the rest is for activations."""


class StageCost(NamedTuple):
    """Cost of one visit: one stage, one microbatch."""

    seconds: float
    early_s: float
    """The part of it that needs nothing from the stage before: recomputation."""
    weight_bytes: int
    gradient_bytes: int
    """0 in a forward stage."""
    working_bytes: int
    """Activations kept or in use, temporaries, carried values, and what was measured beside them."""
    excess_bytes: int = 0
    """What measured peaks showed beside what was computed; negative: less."""
    carried: Carried = Carried(0, 0, 0)
    """Of carried values alone; what its latest runs leave is none of its own bytes."""

    @property
    def own_bytes(self) -> int:
        return self.weight_bytes + self.gradient_bytes + self.working_bytes


class StageCosts:
    """Costs of all ranges of a chain of layers, each computed once, for one microbatch.

    With the grain ``"stage"``, a recomputed stage keeps the activations of all its layers, with ``"layer"`` of one. If
    the microbatch ``is_alone``, values of no other one are on their way beside it.
    """

    def __init__(self, costs: Sequence[LayerCost], grain: RecomputeGrain = "stage", *, is_alone: bool = False) -> None:
        self.layers = tuple(costs)
        self.grain = grain
        self.is_alone = is_alone
        self.forward_s = list(accumulate((cost.forward_s for cost in costs), initial=0.0))
        self.backward_s = list(accumulate((cost.backward_s for cost in costs), initial=0.0))
        self._weight_bytes = list(accumulate((cost.weight_bytes for cost in costs), initial=0))
        self._gradient_bytes = list(accumulate((cost.gradient_bytes for cost in costs), initial=0))
        self._lives = ValueLives(costs)
        self._values = CarriedValues(self._lives, costs[-1].label_bytes, is_alone=is_alone)
        self._backward = BackwardPeaks(costs, self._lives, is_alone=is_alone)
        self._maxima: dict[str, RangeMaximum] = {}
        self._known: dict[tuple[str, int, int, tuple[int, ...]], StageCost] = {}

    def weight_bytes(self, start: int, stop: int) -> int:
        return self._weight_bytes[stop] - self._weight_bytes[start]

    def gradient_bytes(self, phase: StagePhase, start: int, stop: int) -> int:
        return 0 if phase == "F" else self._gradient_bytes[stop] - self._gradient_bytes[start]

    def excess_bytes(self, phase: StagePhase, start: int, stop: int) -> int:
        """Beside what was computed: that of the layer with the most, since a peak is of one layer."""
        return self._most(EXCESS[phase], start, stop)

    def working_bytes(self, phase: StagePhase, start: int, stop: int) -> int:
        """Of a range, where no stage of another phase begins inside."""
        cost_of = {"F": self.forward, "U": self.fused, "B": self.backward}[phase]
        return cost_of(start, stop).working_bytes

    def _layers_bytes(self, phase: StagePhase, start: int, stop: int, cuts: Sequence[int]) -> int:
        """What the layers keep and need, less those gradients of their own that are not there by then."""
        if phase == "F":
            return self._lives.forward_peak(start, start, stop)
        if phase == "U":
            return self._backward.fused(start)
        if not self._lives.runs_backward(start, stop):
            return 0
        if self.grain == "layer":
            return self._backward.largest(start, stop)
        return self._backward.recomputed(start, stop, self._lives.incoming(start, stop, cuts))

    def _carried(self, phase: StagePhase, start: int, stop: int, cuts: Sequence[int]) -> Carried:
        if phase == "U":
            return self._values.fused(start)
        if phase == "F":
            return self._values.forward(start, stop, cuts if self.grain == "stage" else range(start + 1, stop))
        if not self._lives.runs_backward(start, stop):
            return Carried(0, 0, 0)
        if self.grain == "stage":
            return self._values.backward(start, stop, self._lives.incoming(start, stop, cuts))
        return self._values.by_layer(start, stop, cuts[-1] if cuts else stop, self._backward.needs)

    def _most(self, name: str, start: int, stop: int) -> int:
        """What the layer needs that needs the most, where only one is active at a time."""
        maximum = self._maxima.get(name)
        if maximum is None:
            maximum = self._maxima[name] = RangeMaximum([getattr(layer, name) for layer in self.layers])
        return maximum.of(start, stop)

    def of_jobs(self, schedule: Schedule) -> list[StageCost]:
        """Of a schedule's jobs, in order."""
        cuts = sorted({job.start for job in schedule.jobs if job.phase is not Phase.FORWARD})
        cost_of = {Phase.FORWARD: self.forward, Phase.FUSED: self.fused, Phase.BACKWARD: self.backward}
        return [cost_of[job.phase](job.start, job.stop, cuts) for job in schedule.jobs]

    def forward(self, start: int, stop: int, cuts: Sequence[int] = ()) -> StageCost:
        """Of a forward stage; the cuts are where backward stages begin, ascending."""
        inside = tuple(cuts[bisect_right(cuts, start) : bisect_left(cuts, stop)])
        return self._known.get(("F", start, stop, inside)) or self._compute("F", start, stop, inside)

    def fused(self, start: int, stop: int, cuts: Sequence[int] = ()) -> StageCost:
        """Of the fused stage, wherever others begin."""
        return self._known.get(("U", start, stop, ())) or self._compute("U", start, stop)

    def backward(self, start: int, stop: int, cuts: Sequence[int] = ()) -> StageCost:
        """Of a backward stage; the cuts are where others and the fused one begin, ascending; none: all are one."""
        behind = self._behind(start, stop, cuts)
        return self._known.get(("B", start, stop, behind)) or self._compute("B", start, stop, behind)

    def _behind(self, start: int, stop: int, cuts: Sequence[int]) -> tuple[int, ...]:
        """Those cuts behind a backward stage that matter to it."""
        if self.grain == "layer":
            return tuple(cuts[-1:])
        return self._lives.telling_cuts(start, stop, cuts)

    def _compute(self, phase: StagePhase, start: int, stop: int, cuts: tuple[int, ...] = ()) -> StageCost:
        forward_s = self.forward_s[stop] - self.forward_s[start]
        backward_s = 0.0 if phase == "F" else self.backward_s[stop] - self.backward_s[start]
        carried, excess_bytes = self._carried(phase, start, stop, cuts), self.excess_bytes(phase, start, stop)
        layers_bytes = self._layers_bytes(phase, start, stop, cuts)
        cost = self._known[phase, start, stop, cuts] = StageCost(
            seconds=forward_s + backward_s,
            early_s=forward_s if phase == "B" else 0.0,
            weight_bytes=self.weight_bytes(start, stop),
            gradient_bytes=self.gradient_bytes(phase, start, stop),
            working_bytes=layers_bytes + carried.present + carried.held + excess_bytes,
            excess_bytes=excess_bytes,
            carried=carried,
        )
        return cost


def without_backward(costs: Sequence[LayerCost]) -> list[LayerCost]:
    """The same layers as evaluation has them: in any phase they take what their forward does, and no gradients."""
    before_bytes = [0, *(cost.carry_bytes for cost in costs)]  # what comes up for a stage's first layer twice
    return [
        replace(
            cost,
            gradient_bytes=0,
            activation_bytes=0,
            temporary_bytes=cost.workspace_bytes + value_bytes,
            fused_excess_bytes=0,
            backward_excess_bytes=0,
            values=tuple(replace(value, gradient_bytes=0, own_bytes=0, savers=()) for value in cost.values),
        )
        for cost, value_bytes in zip(costs, before_bytes, strict=False)
    ]


def largest_layer_bytes(budget_bytes: int) -> int:
    """The most bytes of weights and gradients a layer should have: as a stage it shares the device with another's."""
    return int(budget_bytes * WEIGHTS_SHARE / 2)


def num_trained(cost: LayerCost) -> int:
    """Parameters of a layer that an optimizer updates, from the share of its gradients in its weights."""
    if not cost.weight_bytes:
        return 0
    return round(cost.num_parameters * min(cost.gradient_bytes / cost.weight_bytes, 1.0))


def arena_bytes(weights: Sequence[int], num_workers: int) -> int:
    """What a worker keeps for weights: room for any two jobs of a step that follow each other on it."""
    return max(map(add, weights, (*weights[num_workers:], *repeat(0, min(num_workers, len(weights))))))


def device_memory(stages: Sequence[StageCost], num_workers: int, resident_bytes: int = 0) -> list[DeviceMemory]:
    """Device memory in use while each job of a rotation's step runs, with what stays there of weights.

    While job K runs, the weights of job K + N come up and the gradients of job K - N, which may be of the step
    before, go down. In its first microbatches, the values of the latest ones of job K - N are still there.
    """
    return ring_memory(stages, [Ring(range(len(stages)), range(num_workers))], [resident_bytes])


def ring_memory(
    stages: Sequence[StageCost], rings: Sequence[Ring], resident_bytes: Sequence[int]
) -> list[DeviceMemory]:
    """The same for rings of workers; ``resident_bytes``: what stays on the devices of each."""
    memory: dict[int, DeviceMemory] = {}
    for ring, resident in zip(rings, resident_bytes, strict=True):
        room_bytes = arena_bytes([stage.weight_bytes for stage in ring.of(stages)], len(ring.workers))
        for number, position in enumerate(ring.positions):
            stage, before = stages[position], stages[ring.before(number)]
            memory[position] = DeviceMemory(
                stage.weight_bytes,
                room_bytes - stage.weight_bytes,
                stage.gradient_bytes,
                before.gradient_bytes,
                stage.working_bytes - stage.carried.present - stage.carried.held - stage.excess_bytes,
                stage.carried.present,
                max(stage.carried.held, before.carried.left),
                stage.excess_bytes,
                resident,
            )
    return [memory[position] for position in range(len(stages))]


def beside_bytes(stage: StageCost, before: StageCost) -> int:
    """What is there of the worker's visit before, beside a visit's own bytes: gradients, and values of its runs."""
    return before.gradient_bytes + max(before.carried.left - stage.carried.held, 0)


def peak_bytes(stages: Sequence[StageCost], num_workers: int, replicas: Sequence[int] | None = None) -> int:
    """The largest total of `device_memory`, which the search asks for thousands of times; for replicas as well."""
    if replicas is not None:
        stages = [stage for stage, count in zip(stages, replicas, strict=True) for _ in range(count)]
    _, _, weights, gradients, working, *_ = zip(*stages, strict=True)
    turn = len(stages) - num_workers % len(stages)
    beside = map(beside_bytes, stages, (*stages[turn:], *stages[:turn]))
    return arena_bytes(weights, num_workers) + max(map(add, map(add, gradients, beside), working))


def ring_peaks(stages: Sequence[StageCost], rings: Sequence[Ring]) -> list[int]:
    """`peak_bytes` of each ring's workers."""
    return [peak_bytes(ring.of(stages), len(ring.workers)) for ring in rings]


def training_jobs(plan: ExecutePlan, costs: StageCosts, most_replicas: int) -> list[StageCost]:
    """Costs of the jobs of a training step, in order; of at most so many per stage."""
    counts = plan.shares("train", most_replicas)
    stages = zip(training_stages(plan, costs), counts, strict=True)
    return [stage for stage, count in stages for _ in range(count)]


def training_stages(plan: ExecutePlan, costs: StageCosts) -> list[StageCost]:
    """Costs of the stages of a training step, in order."""
    plan.validate(len(costs.layers))
    if plan.fused is None:
        raise ConfigError("the plan has no fused range: only plans that train in one call have a round")
    cuts = [*(start for start, _ in reversed(plan.backward)), plan.fused[0]]
    return [
        *(costs.forward(*layers, cuts) for layers in plan.forward),
        costs.fused(*plan.fused),
        *(costs.backward(*layers, cuts) for layers in plan.backward),
    ]


def plan_seconds(
    plan: ExecutePlan,
    costs: Sequence[LayerCost],
    *,
    num_workers: int,
    num_microbatches: int,
) -> float:
    """Seconds per step of a training plan in steady state, transfers left out."""
    stages = training_stages(plan, StageCosts(costs))
    replicas = plan.shares("train", min(num_workers, num_microbatches)) if plan.replicas else None
    owners = plan.workers("train", num_workers)
    return step_seconds(stages, len(plan.forward), num_workers, num_microbatches, replicas, owners=owners)


def plan_peak_bytes(
    plan: ExecutePlan,
    costs: Sequence[LayerCost],
    *,
    num_workers: int,
    recompute_grain: RecomputeGrain = "stage",
    is_alone: bool = False,
) -> int:
    """Peak of device memory of a training plan: that of the job that needs the most; ``is_alone``: see `StageCosts`."""
    stage_costs = StageCosts(costs, recompute_grain, is_alone=is_alone)
    return max(ring_peaks(training_jobs(plan, stage_costs, num_workers), plan.rings("train", num_workers)))
