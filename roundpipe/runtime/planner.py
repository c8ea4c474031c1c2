"""Chooses the forward, fused and backward ranges of a model.

The planner minimises the seconds per round in steady state (`stage_cost.round_seconds`) under a budget of
device memory. A longer fused tail lowers the total work, because it recomputes nothing, until memory or
the balance of the rotation forbids it. The search: for every start of the fused tail, pack the layers
before it left, right and evenly against a sweep of target times; then climb from the best of these by
moving, splitting and merging ranges. A lower bound from work and latency spares most evaluations.

Invariant: the result depends on nothing but the arguments, and its peak is within the budget.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import ceil, gcd, inf

from roundpipe.errors import ConfigError, DeviceMemoryError
from roundpipe.layers import LayerCost
from roundpipe.runtime import stage_cost
from roundpipe.runtime.schedule import ExecutePlan
from roundpipe.runtime.stage_cost import RecomputeGrain, StageCost, StageCosts

_SEARCH_OPS = 6_000_000
"""Work of one search, in ops of the recurrence: it bounds the time and, unlike a clock, is repeatable."""

_OPS_FACTOR = 8
"""Rounds that the recurrence usually needs to reach its steady state."""

_NUM_CLIMBS = 6
"""Starting points of the climb."""

_NUM_TARGETS = 24
"""Target times tried for each start of the fused tail."""

_MAX_REPLICAS = 4

_KEEP_WITHIN = 1.05
"""Packings this much slower than the best so far are still evaluated: a climb may start there."""


@dataclass(frozen=True, slots=True)
class ReplicatedPlan:
    """A plan whose stages may take several consecutive slots of the rotation."""

    plan: ExecutePlan
    replicas: tuple[int, ...]
    """Per job of a training round; microbatch m runs on replica m mod r."""


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Ranges that cover the layers before the fused tail, all forward or all backward, ascending."""

    edges: tuple[int, ...]
    """From 0 to the start of the fused tail."""
    replicas: tuple[int, ...]
    """Per range."""

    @classmethod
    def single(cls, edges: Sequence[int]) -> _Cuts:
        return cls(tuple(edges), (1,) * (len(edges) - 1))

    def neighbours(self, replicate: bool) -> Iterator[_Cuts]:
        """The cuts that one step leads to: a moved edge, a merged or split range, a replica more or less."""
        edges, replicas = self.edges, self.replicas
        for index in range(1, len(edges) - 1):
            before, edge, behind = edges[index - 1 : index + 2]
            for moved in (edge - 1, edge + 1, (before + edge) // 2, (edge + behind + 1) // 2):
                if before < moved < behind and moved != edge:
                    yield _Cuts((*edges[:index], moved, *edges[index + 1 :]), replicas)
            yield _Cuts((*edges[:index], *edges[index + 1 :]), (*replicas[: index - 1], 1, *replicas[index + 1 :]))
        for index, (start, stop) in enumerate(pairwise(edges)):
            for middle in {start + 1, (start + stop) // 2, stop - 1}:
                if start < middle < stop:
                    split = (*replicas[:index], 1, 1, *replicas[index + 1 :])
                    yield _Cuts((*edges[: index + 1], middle, *edges[index + 1 :]), split)
            for count in (replicas[index] - 1, replicas[index] + 1):
                if replicate and 1 <= count <= _MAX_REPLICAS:
                    yield _Cuts(edges, (*replicas[:index], count, *replicas[index + 1 :]))

    def ended_at(self, stop: int) -> _Cuts:
        """The same cuts with another start of the fused tail: the deepest range grows or shrinks."""
        if stop == 0:
            return _Cuts((0,), ())
        edges = tuple(edge for edge in self.edges[:-1] if edge < stop) or (0,)
        return _Cuts((*edges, stop), (*self.replicas, 1)[: len(edges)])


@dataclass(frozen=True, slots=True)
class _Candidate:
    forward: _Cuts
    backward: _Cuts
    fused_replicas: int = 1

    @property
    def fused_start(self) -> int:
        return self.forward.edges[-1]

    @property
    def replicas(self) -> tuple[int, ...]:
        """Per job, in the order of the round."""
        return (*self.forward.replicas, self.fused_replicas, *reversed(self.backward.replicas))

    def to_plan(self, num_layers: int) -> ExecutePlan:
        forward, backward = pairwise(self.forward.edges), reversed(list(pairwise(self.backward.edges)))
        return ExecutePlan(forward, (self.fused_start, num_layers), backward)


class _Search:
    """One run of the planner."""

    def __init__(
        self,
        costs: StageCosts,
        num_workers: int,
        num_microbatches: int,
        budget_bytes: int | None,
        replicate: bool,
    ) -> None:
        self.costs = costs
        self.num_layers = len(costs.layers)
        self.num_workers = num_workers
        self.num_microbatches = num_microbatches
        self.budget_bytes = budget_bytes
        self.replicate = replicate
        self.values: dict[_Candidate, float] = {}
        self.best_s = inf
        self.num_ops_left = _SEARCH_OPS

    # ------------------------------------------------------------------------------- evaluation

    def stages(self, candidate: _Candidate) -> list[StageCost]:
        """The costs of a candidate's jobs, in the order of the round."""
        stages = [self.costs.forward(start, stop) for start, stop in pairwise(candidate.forward.edges)]
        stages.append(self.costs.fused(candidate.fused_start, self.num_layers))
        stages += [self.costs.backward(start, stop) for start, stop in pairwise(candidate.backward.edges)][::-1]
        return stages

    def lower_bound_s(self, candidate: _Candidate, stages: list[StageCost]) -> float:
        """A round takes no less: the work of the busiest workers, and the way to the losses."""
        num_microbatches, work = self.num_microbatches, []
        latency_s, repeated_s = 0.0, 0.0
        for position, (stage, count) in enumerate(zip(stages, candidate.replicas, strict=True)):
            shares = [(num_microbatches - replica + count - 1) // count for replica in range(count)]
            work += [share * stage.seconds for share in shares]
            if position < len(candidate.forward.edges):
                latency_s += stage.seconds
                repeated_s = max(repeated_s, (shares[0] - 1) * stage.seconds)
        num_classes = gcd(len(work), self.num_workers)
        busiest_s = max(sum(work[first::num_classes]) for first in range(num_classes))
        return max(busiest_s * num_classes / self.num_workers, latency_s + repeated_s)

    def fits(self, candidate: _Candidate, stages: list[StageCost]) -> bool:
        if self.budget_bytes is None:
            return True
        slots = [stage for stage, count in zip(stages, candidate.replicas, strict=True) for _ in range(count)]
        return stage_cost.peak_job(slots, self.num_workers)[0] <= self.budget_bytes

    def evaluate(self, candidate: _Candidate, limit_s: float) -> float:
        """Seconds per round; infinite if it does not fit or can't be below the limit."""
        known = self.values.get(candidate)
        if known is not None:
            return known
        stages = self.stages(candidate)
        if self.lower_bound_s(candidate, stages) > limit_s or not self.fits(candidate, stages):
            return inf
        replicas = candidate.replicas
        self.num_ops_left -= _OPS_FACTOR * len(stages) * self.num_microbatches
        value = stage_cost.round_seconds(
            stages,
            len(candidate.forward.replicas),
            self.num_workers,
            self.num_microbatches,
            replicas if max(replicas) > 1 else None,
        )
        self.values[candidate] = value
        self.best_s = min(self.best_s, value)
        return value

    # ---------------------------------------------------------------------------------- packing

    def stop_of(self, phase: str, start: int, target_s: float, cap_bytes: int | None, limit: int) -> int:
        """The deepest stop of a range from a start that is within a target time and memory; 0: none."""
        return _last(start + 1, limit, lambda stop: self.allowed(phase, start, stop, target_s, cap_bytes))

    def start_of(self, phase: str, stop: int, target_s: float, cap_bytes: int | None) -> int:
        """The shallowest start of a range to a stop that is within a target time and memory; -1: none."""
        length = _last(1, stop, lambda length: self.allowed(phase, stop - length, stop, target_s, cap_bytes))
        return stop - length if length else -1

    def allowed(self, phase: str, start: int, stop: int, target_s: float, cap_bytes: int | None) -> bool:
        stage = self.costs.forward(start, stop) if phase == "F" else self.costs.backward(start, stop)
        if stage.seconds > target_s and stop - start > 1:
            return False
        if cap_bytes is None or self.budget_bytes is None:
            return True
        return stage.weight_bytes <= cap_bytes and stage.own_bytes + cap_bytes <= self.budget_bytes

    def pack(self, phase: str, layers: int, target_s: float, cap_bytes: int | None) -> set[tuple[int, ...]]:
        """Edges of ranges over the first layers: filled from the left, from the right, and evenly."""
        if layers == 0:
            return {(0,)}
        left = [0]
        while left[-1] < layers:
            stop = self.stop_of(phase, left[-1], target_s, cap_bytes, layers)
            if not stop:
                return set()
            left.append(stop)
        right = [layers]
        while right[-1] > 0:
            start = self.start_of(phase, right[-1], target_s, cap_bytes)
            if start < 0:
                return set()
            right.append(start)
        packed = {tuple(left), tuple(reversed(right))}
        for count in (len(left) - 1, len(left)):
            even = self.even(phase, layers, count)
            if all(self.allowed(phase, start, stop, inf, cap_bytes) for start, stop in pairwise(even)):
                packed.add(even)
        return packed

    def even(self, phase: str, layers: int, count: int) -> tuple[int, ...]:
        """Edges of at most ``count`` ranges, each cut nearest to where equal times would end."""
        forward_s, backward_s = self.costs.forward_s, self.costs.backward_s
        times = [f + (b if phase == "B" else 0.0) for f, b in zip(forward_s, backward_s, strict=True)]
        edges = [0]
        for part in range(1, min(count, layers)):
            wanted_s = times[layers] * part / count
            edge = bisect_left(times, wanted_s, 0, layers)
            if edge > 0 and wanted_s - times[edge - 1] < times[edge] - wanted_s:
                edge -= 1
            if edges[-1] < edge < layers:
                edges.append(edge)
        return (*edges, layers)

    # ----------------------------------------------------------------------------------- search

    def caps(self) -> list[int | None]:
        """Weights that a stage may have so that any two stages can meet on a worker."""
        if self.budget_bytes is None:
            return [None]
        heaviest = max((layer.weight_bytes for layer in self.costs.layers), default=0)
        total = self.costs.weight_bytes(0, self.num_layers)
        caps: list[int | None] = []
        while heaviest < self.budget_bytes:
            caps.append(heaviest)
            if heaviest >= total or heaviest == 0:
                break
            heaviest *= 2
        return caps

    def fused_starts(self) -> list[tuple[int, float]]:
        """Starts of the fused tail that can fit, the most promising first."""
        bounds = []
        forward_s, backward_s = self.costs.forward_s, self.costs.backward_s
        for start in range(self.num_layers):
            stage = self.costs.fused(start, self.num_layers)
            if self.budget_bytes is not None and stage.own_bytes > self.budget_bytes:
                continue
            work_s = 2 * forward_s[start] + backward_s[start] + stage.seconds
            copies = min(_MAX_REPLICAS, self.num_workers, self.num_microbatches) if self.replicate else 1
            latency_s = forward_s[start] + stage.seconds * ceil(self.num_microbatches / copies)
            bounds.append((max(work_s * self.num_microbatches / self.num_workers, latency_s), -start))
        return [(-start, bound_s) for bound_s, start in sorted(bounds)]

    def targets(self, phase: str, start: int) -> list[float]:
        """Times to pack against: those of evenly cut stages, and that of the fused tail."""
        before_s = self.costs.forward_s[start] + (self.costs.backward_s[start] if phase == "B" else 0.0)
        counts: Iterable[int] = range(1, start + 1)
        if start > _NUM_TARGETS:
            counts = sorted({round(start ** (step / _NUM_TARGETS)) for step in range(_NUM_TARGETS + 1)})
        fused_s = self.costs.fused(start, self.num_layers).seconds
        return [fused_s, *(before_s / count * 1.0001 for count in counts)]

    def pack_all(self) -> None:
        """Evaluates the packings of every start of the fused tail, the most promising first."""
        fused_counts = range(1, _MAX_REPLICAS + 1) if self.replicate else (1,)
        caps = self.caps()
        for start, bound_s in self.fused_starts():
            if bound_s > self.best_s or self.num_ops_left < _SEARCH_OPS // 2:
                break
            packings = []
            for phase in ("F", "B"):
                packed: set[tuple[int, ...]] = set()
                for target_s, cap_bytes in product(self.targets(phase, start), caps):
                    packed.update(self.pack(phase, start, target_s, cap_bytes))
                packings.append(sorted(packed))
            candidates = (
                _Candidate(_Cuts.single(forward), _Cuts.single(backward), count)
                for forward, backward in product(*packings)
                for count in fused_counts
            )
            bounded = ((self.lower_bound_s(one, self.stages(one)), one) for one in candidates)
            for _, candidate in sorted(bounded, key=lambda entry: entry[0]):
                self.evaluate(candidate, self.best_s * _KEEP_WITHIN)

    def climb(self, candidate: _Candidate) -> _Candidate:
        """The end of a climb: no single step leads to a faster plan."""
        value = self.values[candidate]
        improved = True
        while improved and self.num_ops_left > 0:
            improved = False
            for step in self.steps(candidate):
                step_value = self.evaluate(step, value)
                if self.rank(step, step_value) < self.rank(candidate, value):
                    candidate, value, improved = step, step_value, True
                    break
        return candidate

    def rank(self, candidate: _Candidate, value: float) -> tuple[float, int]:
        """What the search minimises: time, then slots."""
        return float(f"{value:.9g}"), sum(candidate.replicas)

    def steps(self, candidate: _Candidate) -> Iterator[_Candidate]:
        """The candidates one step away."""
        start = candidate.fused_start
        for moved in (start - 1, start + 1, start - 2, start + 2):
            if 0 <= moved < self.num_layers:
                forward, backward = candidate.forward.ended_at(moved), candidate.backward.ended_at(moved)
                yield _Candidate(forward, backward, candidate.fused_replicas)
        for forward in candidate.forward.neighbours(self.replicate):
            yield replace(candidate, forward=forward)
        for backward in candidate.backward.neighbours(self.replicate):
            yield replace(candidate, backward=backward)
        for count in (candidate.fused_replicas - 1, candidate.fused_replicas + 1):
            if self.replicate and 1 <= count <= _MAX_REPLICAS:
                yield replace(candidate, fused_replicas=count)

    def run(self) -> list[_Candidate]:
        """The best plans found, the best first; none if nothing fits."""
        self.pack_all()
        if not self.values:
            self.one_layer_each()
        leaders: dict[tuple[int, int, int], _Candidate] = {}
        for candidate in self.ranked():
            shape = (candidate.fused_start, len(candidate.forward.edges), len(candidate.backward.edges))
            leaders.setdefault(shape, candidate)
            if len(leaders) == _NUM_CLIMBS:
                break
        for leader in leaders.values():
            self.climb(leader)
        return self.ranked()

    def ranked(self) -> list[_Candidate]:
        return sorted(self.values, key=lambda one: (*self.rank(one, self.values[one]), one.forward.edges))

    def one_layer_each(self) -> None:
        """Evaluates the plans with the least memory: one layer per stage, and two of them merged."""
        start = self.num_layers - 1
        singles = _Cuts.single(range(start + 1))
        candidate = _Candidate(singles, singles)
        for step in (candidate, *self.steps(candidate)):
            self.evaluate(step, inf)


def _last(low: int, high: int, allowed: Callable[[int], bool]) -> int:
    """The last number that is allowed, where all up to some number are; 0: not even the first."""
    if low > high or not allowed(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if allowed(middle) else (low, middle - 1)
    return low


def plan(
    costs: Sequence[LayerCost],
    *,
    num_workers: int,
    num_microbatches: int,
    memory_budget_bytes: int | None = None,
    recompute_grain: RecomputeGrain = "stage",
    names: Sequence[str] | None = None,
    predict: Callable[[ExecutePlan], float] | None = None,
) -> ExecutePlan:
    """The fastest plan found for a chain of layers.
    """
    search = _Search(StageCosts(costs, recompute_grain), num_workers, num_microbatches, memory_budget_bytes, False)
    found = search.run()
    return found[0].to_plan(len(costs))
def plan_replicated(
    costs: Sequence[LayerCost],
    *,
    num_workers: int,
    num_microbatches: int,
    memory_budget_bytes: int | None = None,
    recompute_grain: RecomputeGrain = "stage",
    names: Sequence[str] | None = None,
    predict: Callable[[ExecutePlan], float] | None = None,
) -> ExecutePlan:
    """The fastest plan found for a chain of layers.
    """
    search = _Search(StageCosts(costs, recompute_grain), num_workers, num_microbatches, memory_budget_bytes, True)
    found = search.run()
    return found[0].to_plan(len(costs)), found[0].replicas
