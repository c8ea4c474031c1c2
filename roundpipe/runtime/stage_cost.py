"""What a stage costs, and how long a round of stages takes: the arithmetic behind plans and predictions.

Times follow the rotation's recurrence: op (K, m) waits for (K, m - 1), for (K - 1, m) and for the end of job
K - N; the recomputation in a backward op does not wait for the incoming gradient; a round starts
when the losses of the one before are known. Transfers are left out here; the simulator has them.

Invariant: `round_seconds` is the exact steady state of that recurrence, its maximum cycle mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import Literal, NamedTuple

from roundpipe.layers import LayerCost

RecomputeGrain = Literal["stage", "layer"]

BOUNDARY_BUFFERS = 4
"""Copies of the values at a stage's cuts on a device: in and out, one in use and one on its way."""

_EQUAL = 1e-9
"""Relative difference below which two states of the recurrence count as one."""


class StageCost(NamedTuple):
    """Cost of one visit: one stage, one microbatch."""

    seconds: float
    """Compute of one microbatch."""
    early_s: float
    """The part of it that needs nothing from the stage before: recomputation."""
    weight_bytes: int
    gradient_bytes: int
    """0 in a forward stage."""
    working_bytes: int
    """Activations kept or in use, and the values at the stage's cuts."""

    @property
    def own_bytes(self) -> int:
        """What the stage needs on a device while it runs."""
        return self.weight_bytes + self.gradient_bytes + self.working_bytes


class StageCosts:
    """Costs of all ranges of a chain of layers, each computed once.

    Args:
        costs: of the layers, for one microbatch.
        grain: ``"stage"`` keeps the activations of a whole recomputed stage, ``"layer"`` of one layer.
    """

    def __init__(self, costs: Sequence[LayerCost], grain: RecomputeGrain = "stage") -> None:
        self.layers = tuple(costs)
        self.grain = grain
        self.forward_s = list(accumulate((cost.forward_s for cost in costs), initial=0.0))
        self.backward_s = list(accumulate((cost.backward_s for cost in costs), initial=0.0))
        self._weight_bytes = list(accumulate((cost.weight_bytes for cost in costs), initial=0))
        self._gradient_bytes = list(accumulate((cost.gradient_bytes for cost in costs), initial=0))
        self._activation_bytes = list(accumulate((cost.activation_bytes for cost in costs), initial=0))
        self._known: dict[tuple[str, int, int], StageCost] = {}

    def weight_bytes(self, start: int, stop: int) -> int:
        """Bytes of the weights of a range."""
        return self._weight_bytes[stop] - self._weight_bytes[start]

    def forward(self, start: int, stop: int) -> StageCost:
        """A range as a forward stage."""
        return self._known.get(("F", start, stop)) or self._compute("F", start, stop)

    def fused(self, start: int, stop: int) -> StageCost:
        """A range as the fused tail."""
        return self._known.get(("U", start, stop)) or self._compute("U", start, stop)

    def backward(self, start: int, stop: int) -> StageCost:
        """A range as a backward stage."""
        return self._known.get(("B", start, stop)) or self._compute("B", start, stop)

    def _compute(self, phase: str, start: int, stop: int) -> StageCost:
        layers = self.layers[start:stop]
        forward_s = self.forward_s[stop] - self.forward_s[start]
        backward_s = self.backward_s[stop] - self.backward_s[start]
        gradient_bytes = self._gradient_bytes[stop] - self._gradient_bytes[start]
        carry_in, carry_out = self.layers[max(start - 1, 0)].carry_bytes, self.layers[stop - 1].carry_bytes
        # The fused tail hands on no values, only gradients of those it takes. What the last layer makes is there once:
        # while the loss is computed, and then as its gradients.
        boundary_bytes = BOUNDARY_BUFFERS * (carry_in if phase == "U" else max(carry_in, carry_out))
        if phase == "U":
            boundary_bytes += carry_out
        early_s = 0.0
        if phase == "F":
            backward_s, gradient_bytes = 0.0, 0
            active_bytes = max(layer.workspace_bytes for layer in layers)
        elif phase == "B" and self.grain == "layer":
            active_bytes = max(layer.activation_bytes for layer in layers)
        else:
            active_bytes = self._activation_bytes[stop] - self._activation_bytes[start]
        if phase == "B":
            early_s = forward_s
        cost = StageCost(
            seconds=forward_s + backward_s,
            early_s=early_s,
            weight_bytes=self.weight_bytes(start, stop),
            gradient_bytes=gradient_bytes,
            working_bytes=active_bytes + boundary_bytes,
        )
        self._known[phase, start, stop] = cost
        return cost


def num_trained(cost: LayerCost) -> int:
    """Parameters of a layer that an optimizer updates, from the share of its gradients in its weights."""
    if not cost.weight_bytes:
        return 0
    return round(cost.num_parameters * min(cost.gradient_bytes / cost.weight_bytes, 1.0))


def _arena_bytes(stages: Sequence[StageCost], num_workers: int) -> int:
    """What a worker keeps for weights: room for any two jobs of a round that follow each other on it."""
    weights = [stage.weight_bytes for stage in stages]
    following = [*weights[num_workers:], *[0] * num_workers]
    return max(map(sum, zip(weights, following, strict=False)))


class JobNeed(NamedTuple):
    """Bytes of device memory in use while a job runs."""

    weights: int
    """Of the worker's two visits that are largest together: it keeps one piece of memory for both."""
    gradients: int
    """Of the visit, and of the worker's visit before, which are still on their way down."""
    working: int
    """Activations kept or in use, and the values at the stage's cuts."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.working


def job_needs(stages: Sequence[StageCost], num_workers: int) -> list[JobNeed]:
    """Device memory in use while each job of a round runs.

    While job K runs, the weights of job K + N come up and the gradients of job K - N, which may be of the round
    before, go down.
    """
    arena_bytes = _arena_bytes(stages, num_workers)
    return [
        JobNeed(
            arena_bytes,
            stage.gradient_bytes + stages[(position - num_workers) % len(stages)].gradient_bytes,
            stage.working_bytes,
        )
        for position, stage in enumerate(stages)
    ]


def peak_bytes(stages: Sequence[StageCost], num_workers: int) -> int:
    """The largest of `job_needs`."""
    arena_bytes = _arena_bytes(stages, num_workers)
    turn = num_workers % len(stages)
    before = [*stages[len(stages) - turn :], *stages[: len(stages) - turn]]
    return arena_bytes + max(
        stage.gradient_bytes + earlier.gradient_bytes + stage.working_bytes
        for stage, earlier in zip(stages, before, strict=True)
    )


def round_seconds(
    stages: Sequence[StageCost],
    num_forward: int,
    num_workers: int,
    num_microbatches: int,
    replicas: Sequence[int] | None = None,
    limit_s: float = inf,
) -> float:
    """Seconds per round in steady state, transfers left out.

    The workers are alike, so with their free times listed from the next job's worker on, every round is the
    same map of those times, and a monotone one: when all of them gained the same over some rounds, that is
    the steady state, and the least gain is a lower bound before.

    Args:
        stages: of the jobs of a round, in order.
        num_forward: how many of them are forward stages; the fused one is next.
        num_workers: workers in the rotation.
        num_microbatches: microbatches of every job.
        replicas: per stage, how many consecutive slots share its microbatches (microbatch m on
            replica m mod r); None = one each.
        limit_s: what is of interest; above it the result may be any lower bound that is also above it.
    """
    free = [0.0] * num_workers
    states: list[list[float]] = []
    slot, start = 0, 0.0
    for _ in range(max(24, 3 * num_workers)):
        if replicas is None:
            start = _run_round(stages, num_forward, num_microbatches, free, slot, start)
            slot = (slot + len(stages)) % num_workers
        else:
            start = _run_replicated_round(stages, replicas, num_forward, num_microbatches, free, slot, start)
            slot = (slot + sum(replicas)) % num_workers
        state = [start, *free[slot:], *free[:slot]]
        for age, old in enumerate(reversed(states), 1):
            gains = [now - then for now, then in zip(state, old, strict=True)]
            slowest, fastest = min(gains), max(gains)
            if fastest - slowest <= _EQUAL * fastest:
                return fastest / age
            if slowest > limit_s * age:
                return slowest / age
        states.append(state)
    return (max(states[-1]) - max(states[-1 - num_workers])) / num_workers


def _run_round(
    stages: Sequence[StageCost],
    num_forward: int,
    num_microbatches: int,
    free: list[float],
    slot: int,
    start: float,
) -> float:
    """Runs one round: updates when each worker is free and returns when the losses are known.

    The end of op (K, m) is the largest of a few lines in m: a stage takes over the lines steeper than its own
    time and makes one line of the others. So a job costs the same however many microbatches there are. The
    lines are a stack, the least steep on top: where each begins, how steep it is, and the end of the last
    microbatch by it and those below; all less ``shift``.
    """
    repeats, num_workers = num_microbatches - 1, len(free)
    heads, slopes, ends = [start], [0.0], [start]
    shift, losses_known = 0.0, start
    for position, (seconds, early_s, *_) in enumerate(stages):
        head = free[slot] + early_s - shift
        while slopes and slopes[-1] <= seconds:
            slopes.pop()
            ends.pop()
            head = max(head, heads.pop())
        end = head + repeats * seconds
        if ends and ends[-1] > end:
            end = ends[-1]
        heads.append(head)
        slopes.append(seconds)
        ends.append(end)
        shift += seconds - early_s
        free[slot] = end + shift
        slot = (slot + 1) % num_workers
        if position == num_forward:
            losses_known = end + shift
    return losses_known


def _run_replicated_round(
    stages: Sequence[StageCost],
    replicas: Sequence[int],
    num_forward: int,
    num_microbatches: int,
    free: list[float],
    slot: int,
    start: float,
) -> float:
    """The same, op by op, where stages have replicas."""
    previous, losses_known = [start] * num_microbatches, start
    for position, (stage, count) in enumerate(zip(stages, replicas, strict=True)):
        late_s = stage.seconds - stage.early_s
        done = [0.0] * num_microbatches
        for replica in range(count):
            end = free[slot]
            for microbatch in range(replica, num_microbatches, count):
                end = max(end + stage.early_s, previous[microbatch]) + late_s
                done[microbatch] = end
            free[slot] = end
            slot = (slot + 1) % len(free)
        if position == num_forward:
            losses_known = max(done)
        previous = done
    return losses_known
