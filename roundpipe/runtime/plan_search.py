"""The search behind the planner: packings, climbs and kicks, bounded from below.

    pack     for each start of the fused tail: ranges filled left, right and evenly against target times
    climb    one step at a time, each faster: an edge moves, a range is split or merged, the tail grows
    kick     a few random steps from one of the best, then another climb, while there is work left to spend

A lower bound from work and latency spares most evaluations of the recurrence. Short chains need no search: all
of their plans are looked at.

Invariant: the result depends on nothing but the arguments (the random steps have a fixed seed, the effort is
counted in operations instead of time), and every plan found is within the budget of device memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from math import ceil, gcd, inf, log
from random import Random

from roundpipe.runtime.stage_cost import StageCost, StageCosts, peak_bytes, round_seconds

_SEARCH_OPS = 3_500_000
"""Effort of one search at most; an op takes 0.1 to 0.2 microseconds."""

_OPS_PER_LAYER_CUBED = 400
"""Effort of one search of a short chain."""

_EXHAUSTIVE_LAYERS = 7
"""Chains up to this long have so few plans (1366) that all of them are looked at."""

_REPLICAS_EFFORT = 2
"""How much more a search with replicas may spend."""

_PACKING_SHARE = 0.4
"""Share of the effort that packing may take."""

_BOUND_OPS, _ROUND_OPS, _STEP_OPS, _FIT_OPS = 3, 16, 15, 3
"""Effort of a lower bound and of an evaluation per job, of making a step, and of asking if a range fits."""

_NUM_STARTS = 12
"""Starts of the fused tail that are packed for."""

_NUM_TARGETS = 24
"""Target times tried for each start of the fused tail."""

_NUM_LEADERS = 6
"""Plans of different shape that climbs start from and kicks choose among."""

_MAX_KICK = 3
"""Most random steps before a climb."""

_PACKING_WITHIN = 1.1
"""Packings whose bound is this much above the best so far are still evaluated: a climb may start there."""

_KICK_WITHIN = 1.3
"""How much slower a kicked plan may be."""

_AS_FAST = 1 + 1e-9
"""Factor within which two times count as one."""

_MAX_REPLICAS = 4


@dataclass(frozen=True, slots=True)
class Cuts:
    """Ranges that cover the layers before the fused tail, all forward or all backward, ascending."""

    edges: tuple[int, ...]
    """From 0 to the start of the fused tail."""
    replicas: tuple[int, ...]
    """Per range."""

    @classmethod
    def single(cls, edges: Sequence[int]) -> Cuts:
        """Cuts without replicas."""
        return cls(tuple(edges), (1,) * (len(edges) - 1))

    def neighbours(self, replicate: bool) -> Iterator[Cuts]:
        """The cuts one step away: a moved edge, a merged or split range, a replica more or less."""
        edges, replicas = self.edges, self.replicas
        for index in range(1, len(edges) - 1):
            before, edge, behind = edges[index - 1 : index + 2]
            for moved in sorted({edge - 1, edge + 1, (before + edge) // 2, (edge + behind + 1) // 2}):
                if before < moved < behind and moved != edge:
                    yield Cuts((*edges[:index], moved, *edges[index + 1 :]), replicas)
            merged = (*replicas[: index - 1], 1, *replicas[index + 1 :])
            yield Cuts((*edges[:index], *edges[index + 1 :]), merged)
        for index, (start, stop) in enumerate(pairwise(edges)):
            for middle in sorted({start + 1, (start + stop) // 2, stop - 1}):
                if start < middle < stop:
                    split = (*replicas[:index], 1, 1, *replicas[index + 1 :])
                    yield Cuts((*edges[: index + 1], middle, *edges[index + 1 :]), split)
            for count in (replicas[index] - 1, replicas[index] + 1):
                if replicate and 1 <= count <= _MAX_REPLICAS:
                    yield Cuts(edges, (*replicas[:index], count, *replicas[index + 1 :]))

    def ended_at(self, stop: int) -> Cuts:
        """The same cuts with another start of the fused tail: the deepest range grows or shrinks."""
        if stop == 0:
            return Cuts((0,), ())
        edges = tuple(edge for edge in self.edges[:-1] if edge < stop) or (0,)
        return Cuts((*edges, stop), (*self.replicas, 1)[: len(edges)])


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan as cuts; both end at the start of the fused tail."""

    forward: Cuts
    backward: Cuts
    fused_replicas: int = 1

    @property
    def fused_start(self) -> int:
        """First layer of the fused tail."""
        return self.forward.edges[-1]

    @property
    def shape(self) -> tuple[int, int, int]:
        """What sets plans apart that are more than a few moved edges from each other."""
        return self.fused_start, len(self.forward.edges), len(self.backward.edges)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Per job, in the order of the round."""
        return (*self.forward.replicas, self.fused_replicas, *reversed(self.backward.replicas))

    def steps(self, num_layers: int, replicate: bool) -> Iterator[Candidate]:
        """The candidates one step away."""
        start = self.fused_start
        for moved in (start - 1, start + 1, start - 2, start + 2):
            if 0 <= moved < num_layers:
                yield replace(self, forward=self.forward.ended_at(moved), backward=self.backward.ended_at(moved))
        for forward in self.forward.neighbours(replicate):
            yield replace(self, forward=forward)
        for backward in self.backward.neighbours(replicate):
            yield replace(self, backward=backward)
        for count in (self.fused_replicas - 1, self.fused_replicas + 1):
            if replicate and 1 <= count <= _MAX_REPLICAS:
                yield replace(self, fused_replicas=count)


class Search:
    """One search.

    Args:
        costs: of the chain.
        num_workers: workers in the rotation.
        num_microbatches: microbatches of every job.
        budget_bytes: memory of each device, or None for no limit.
        replicate: whether stages may take several slots.
    """

    def __init__(
        self,
        costs: StageCosts,
        num_workers: int,
        num_microbatches: int,
        budget_bytes: int | None = None,
        replicate: bool = False,
    ) -> None:
        self.costs = costs
        self.num_layers = len(costs.layers)
        self.num_workers = num_workers
        self.num_microbatches = num_microbatches
        self.budget_bytes = budget_bytes
        self.replicate = replicate
        self.values: dict[Candidate, float] = {}
        self._fused_counts = range(1, min(_MAX_REPLICAS, num_workers, num_microbatches) + 1 if replicate else 2)
        self._refuted: dict[Candidate, float] = {}
        self.best_s = inf
        self.floor_s = 0.0
        self.num_ops_left = min(_SEARCH_OPS, _OPS_PER_LAYER_CUBED * self.num_layers**3)
        self.num_ops_left *= _REPLICAS_EFFORT if replicate else 1
        both = zip(costs.forward_s, costs.backward_s, strict=True)
        self._times = {"F": costs.forward_s, "B": [forward_s + backward_s for forward_s, backward_s in both]}

    def run(self) -> list[Candidate]:
        """The plans found, the best first; none if none fits."""
        if self.num_layers <= _EXHAUSTIVE_LAYERS and not self.replicate:
            self._evaluate_all()
            return sorted(self.values, key=self.rank)
        self._pack_all()
        if not self.values:
            self._evaluate_smallest()
        leaders = sorted({self._climb(leader) for leader in self._leaders()}, key=self.rank)
        self._kick(leaders)
        return sorted(self.values, key=self.rank)

    def rank(self, candidate: Candidate) -> tuple[float, int, tuple[int, ...], tuple[int, ...]]:
        """What the search minimises: time, then slots; the edges make the order total."""
        value, slots = float(f"{self.values[candidate]:.9g}"), sum(candidate.replicas)
        return value, slots, candidate.forward.edges, candidate.backward.edges

    # ------------------------------------------------------------------------------- evaluation

    def stages(self, candidate: Candidate) -> list[StageCost]:
        """The costs of a candidate's jobs, in the order of the round."""
        stages = [self.costs.forward(start, stop) for start, stop in pairwise(candidate.forward.edges)]
        stages.append(self.costs.fused(candidate.fused_start, self.num_layers))
        backward = [self.costs.backward(start, stop) for start, stop in pairwise(candidate.backward.edges)]
        return stages + backward[::-1]

    def lower_bound_s(self, candidate: Candidate, stages: list[StageCost]) -> float:
        """A round takes no less: the work of the busiest workers, and the way to the losses."""
        num_microbatches = self.num_microbatches
        replicas = candidate.replicas
        num_to_loss = len(candidate.forward.edges)
        if max(replicas) == 1:
            work = [num_microbatches * stage.seconds for stage in stages]
            repeated_s = (num_microbatches - 1) * max(stage.seconds for stage in stages[:num_to_loss])
        else:
            work, repeated_s = [], 0.0
            for position, (stage, count) in enumerate(zip(stages, replicas, strict=True)):
                shares = [(num_microbatches - replica + count - 1) // count for replica in range(count)]
                work += [share * stage.seconds for share in shares]
                if position < num_to_loss:
                    repeated_s = max(repeated_s, (shares[0] - 1) * stage.seconds)
        num_classes = gcd(len(work), self.num_workers)
        busiest_s = max(sum(work[first::num_classes]) for first in range(num_classes))
        to_loss_s = sum(stage.seconds for stage in stages[:num_to_loss])
        return max(busiest_s * num_classes / self.num_workers, to_loss_s + repeated_s)

    def fits(self, candidate: Candidate, stages: list[StageCost]) -> bool:
        """Whether the peak is within the budget."""
        if self.budget_bytes is None:
            return True
        slots = [stage for stage, count in zip(stages, candidate.replicas, strict=True) for _ in range(count)]
        return peak_bytes(slots, self.num_workers) <= self.budget_bytes

    def evaluate(self, candidate: Candidate, limit_s: float = inf) -> float:
        """Seconds per round; infinite if the plan does not fit or its bound is above the limit."""
        known = self.values.get(candidate)
        if known is not None:
            return known
        if self._refuted.get(candidate, 0.0) > limit_s:
            return inf
        stages = self.stages(candidate)
        self.num_ops_left -= _BOUND_OPS * len(stages)
        if self.lower_bound_s(candidate, stages) > limit_s or not self.fits(candidate, stages):
            return inf
        replicas = candidate.replicas
        by_op = max(self.num_microbatches // 3, 1) if max(replicas) > 1 else 1
        self.num_ops_left -= _ROUND_OPS * len(stages) * by_op
        value = round_seconds(
            stages,
            len(candidate.forward.replicas),
            self.num_workers,
            self.num_microbatches,
            replicas if max(replicas) > 1 else None,
            limit_s,
        )
        if value > limit_s:
            self._refuted[candidate] = value
            return inf
        self.values[candidate] = value
        self.best_s = min(self.best_s, value)
        return value

    # ---------------------------------------------------------------------------------- packing

    def _pack_all(self) -> None:
        """Evaluates packings for each start of the fused tail, the most promising start first."""
        share = int(self.num_ops_left * _PACKING_SHARE / _NUM_STARTS)
        starts = self._fused_starts()
        self.floor_s = starts[0][1] if starts else 0.0
        for start, bound_s in starts[:_NUM_STARTS]:
            if bound_s > self.best_s:
                break
            ops_after = self.num_ops_left - share
            for forward, backward in self._packings(start):
                for count in self._fused_counts:
                    candidate = Candidate(Cuts.single(forward), Cuts.single(backward), count)
                    self.evaluate(candidate, self.best_s * _PACKING_WITHIN)
                if self.num_ops_left < ops_after:
                    break

    def _packings(self, start: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Forward and backward edges for a start of the fused tail, against one target time at a time."""
        even: dict[str, dict[int, tuple[int, ...]]] = {"F": {}, "B": {}}
        seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for target_s, cap_bytes in product(self._targets_s(start), self.caps_bytes()):
            forward = self._pack("F", start, target_s, cap_bytes)
            backward = forward and self._pack("B", start, target_s, cap_bytes)
            yield from (pair for pair in product(forward, backward) if pair not in seen)
            seen.update(product(forward, backward))
            for phase, packed in (("F", forward), ("B", backward)):
                even[phase].update((len(edges), edges) for edges in packed[-1:])
        yield from product(even["F"].values(), even["B"].values())

    def _fused_starts(self) -> list[tuple[int, float]]:
        """Starts of the fused tail that may fit, and a lower bound for each, the lowest first."""
        bounds = []
        copies = max(self._fused_counts)
        for start in range(self.num_layers):
            stage = self.costs.fused(start, self.num_layers)
            if self.budget_bytes is not None and stage.own_bytes > self.budget_bytes:
                continue
            work_s = self._times["F"][start] + self._times["B"][start] + stage.seconds
            latency_s = self._times["F"][start] + stage.seconds * ceil(self.num_microbatches / copies)
            bounds.append((max(work_s * self.num_microbatches / self.num_workers, latency_s), start))
        return [(start, bound_s) for bound_s, start in sorted(bounds)]

    def _targets_s(self, start: int) -> list[float]:
        """Times to pack against: that of the fused tail, and those of evenly cut stages, the alike first."""
        counts: Sequence[int] = range(1, start + 1)
        if start > _NUM_TARGETS:
            counts = sorted({round(start ** (step / _NUM_TARGETS)) for step in range(_NUM_TARGETS + 1)})
        fused_s = self.costs.fused(start, self.num_layers).seconds
        even_s = [self._times["B"][start] / count * 1.0001 for count in counts]
        alike_s = [fused_s / count for count in self._fused_counts]
        return sorted(
            [*alike_s, *even_s],
            key=lambda target_s: min(abs(log(target_s / one_s)) for one_s in alike_s),
        )

    def caps_bytes(self) -> list[int | None]:
        """Limits for a stage's weights under which any two stages may meet on a worker, the widest first."""
        if self.budget_bytes is None:
            return [None]
        cap_bytes = max(layer.weight_bytes for layer in self.costs.layers)
        total_bytes = self.costs.weight_bytes(0, self.num_layers)
        caps_bytes: list[int | None] = [cap_bytes]
        while 0 < cap_bytes < min(total_bytes, self.budget_bytes):
            cap_bytes *= 2
            caps_bytes.append(cap_bytes)
        return caps_bytes[::-1]

    def allowed(self, phase: str, start: int, stop: int, cap_bytes: int | None) -> bool:
        """Whether a range is within memory."""
        if cap_bytes is None or self.budget_bytes is None:
            return True
        self.num_ops_left -= _FIT_OPS
        phases = {"F": self.costs.forward, "U": self.costs.fused, "B": self.costs.backward}
        stage = phases[phase](start, stop)
        own_bytes = 2 * stage.gradient_bytes + stage.working_bytes  # the visit before brings about as many down
        return stage.weight_bytes <= cap_bytes and 2 * cap_bytes + own_bytes <= self.budget_bytes

    def _longest(self, phase: str, edge: int, direction: int, in_time: int, cap_bytes: int | None) -> int:
        """Length of the longest range from an edge, ahead or back, that is within time and memory; 0: none."""

        def allowed(length: int) -> bool:
            other = edge + direction * length
            return self.allowed(phase, min(edge, other), max(edge, other), cap_bytes)

        return _largest(in_time, allowed)

    def _pack(self, phase: str, layers: int, target_s: float, cap_bytes: int | None) -> list[tuple[int, ...]]:
        """Edges of ranges over the first layers: filled from the left, from the right, and evenly.

        A range ends before it takes longer than the target or outgrows memory; one layer may take longer.
        """
        if layers == 0:
            return [(0,)]
        times, left, right = self._times[phase], [0], [layers]
        while left[-1] < layers:
            start = left[-1]
            in_time = max(bisect_right(times, times[start] + target_s, 0, layers + 1) - 1 - start, 1)
            length = self._longest(phase, start, 1, in_time, cap_bytes)
            if length == 0:
                return []
            left.append(start + length)
        while right[-1] > 0:
            stop = right[-1]
            in_time = max(stop - bisect_left(times, times[stop] - target_s, 0, stop), 1)
            length = self._longest(phase, stop, -1, in_time, cap_bytes)
            if length == 0:
                return []
            right.append(stop - length)
        self.num_ops_left -= _STEP_OPS * len(left)
        packed = {tuple(left): None, tuple(reversed(right)): None}
        for count in (len(left), len(left) - 1):
            even = self._even(phase, layers, count)
            if all(self.allowed(phase, start, stop, cap_bytes) for start, stop in pairwise(even)):
                packed[even] = None
        return list(packed)

    def _even(self, phase: str, layers: int, count: int) -> tuple[int, ...]:
        """Edges of at most ``count`` ranges, each cut nearest to where equal times would end."""
        times, edges = self._times[phase], [0]
        for part in range(1, min(count, layers)):
            wanted_s = times[layers] * part / count
            edge = bisect_left(times, wanted_s, 0, layers)
            if edge > 0 and wanted_s - times[edge - 1] < times[edge] - wanted_s:
                edge -= 1
            if edges[-1] < edge < layers:
                edges.append(edge)
        return (*edges, layers)

    def _evaluate_all(self) -> None:
        """Evaluates every plan of a short chain whose bound is not above the best so far."""
        bounded = []
        for start in range(self.num_layers):
            edges = [
                (0, *inner, start) if start else (0,)
                for count in range(max(start, 1))
                for inner in combinations(range(1, start), count)
            ]
            for forward, backward in product(edges, edges):
                candidate = Candidate(Cuts.single(forward), Cuts.single(backward))
                bounded.append((self.lower_bound_s(candidate, self.stages(candidate)), candidate))
        for _, candidate in sorted(bounded, key=lambda entry: entry[0]):
            self.evaluate(candidate, self.best_s * _AS_FAST)

    def _evaluate_smallest(self) -> None:
        """Evaluates the plans with the least memory: one layer per stage, and those one step from it."""
        singles = Cuts.single(range(self.num_layers))
        candidate = Candidate(singles, singles)
        for step in (candidate, *candidate.steps(self.num_layers, self.replicate)):
            self.evaluate(step)

    # --------------------------------------------------------------------------------- climbing

    def _leaders(self) -> list[Candidate]:
        """The best plan of each of the best shapes."""
        leaders: dict[tuple[int, int, int], Candidate] = {}
        for candidate in sorted(self.values, key=self.rank):
            leaders.setdefault(candidate.shape, candidate)
            if len(leaders) == _NUM_LEADERS:
                break
        return list(leaders.values())

    def _climb(self, candidate: Candidate) -> Candidate:
        """Where a climb ends: no single step leads to a better plan."""
        steps = list(candidate.steps(self.num_layers, self.replicate))
        position, num_refuted = 0, 0
        while num_refuted < len(steps) and self.num_ops_left > 0:
            step = steps[position % len(steps)]
            position, num_refuted = position + 1, num_refuted + 1
            limit_s = self.values[candidate] * _AS_FAST
            if self.evaluate(step, limit_s) < inf and self.rank(step) < self.rank(candidate):
                candidate, num_refuted = step, 0
                steps = list(candidate.steps(self.num_layers, self.replicate))
                self.num_ops_left -= _STEP_OPS * len(steps)
        return candidate

    def _kick(self, leaders: list[Candidate]) -> None:
        """Leaves the ends of the climbs by random steps and climbs again."""
        random = Random(0)
        while leaders and self.num_ops_left > 0 and self.best_s > self.floor_s * _AS_FAST:
            chosen = min(random.sample(leaders, min(2, len(leaders))), key=self.rank)
            kicked = chosen
            for _ in range(random.randint(1, _MAX_KICK)):
                steps = list(kicked.steps(self.num_layers, self.replicate))
                self.num_ops_left -= _STEP_OPS * len(steps)
                if not steps:
                    return
                kicked = random.choice(steps)
            if self.evaluate(kicked, self.values[chosen] * _KICK_WITHIN) < inf:
                end = self._climb(kicked)
                if end not in leaders:
                    leaders = sorted([*leaders, end], key=self.rank)[:_NUM_LEADERS]


def _largest(high: int, allowed: Callable[[int], bool]) -> int:
    """The largest number up to ``high`` that is allowed, where all below an allowed one are; 0: none."""
    if allowed(high):
        return high
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low
