"""The search behind the planner: packings, climbs and kicks, bounded from below.

    pack     for each start of the fused tail: ranges filled left, right and evenly against target times
    climb    one move at a time, each faster: an edge moves, a range is split or merged, the tail grows
    kick     a few random moves from one of the best, then another climb, while there is work left to spend

A lower bound from work and latency spares most evaluations of the recurrence. Short chains need no search: all
of their plans are looked at.

Invariant: the result depends on nothing but the arguments (the random moves have a fixed seed, the effort is
counted in operations instead of time), and every plan found is within the budget of device memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product
from math import ceil, gcd, inf, log
from random import Random

from roundpipe.core.errors import ConfigError
from roundpipe.core.layers import LayerCost
from roundpipe.planning.candidates import Candidate, Cuts, Effort, Move, Packing
from roundpipe.planning.stage_costs import (
    RecomputeGrain,
    StageCost,
    StageCosts,
    StagePhase,
    device_memory,
    peak_bytes,
)
from roundpipe.planning.step_times import step_seconds

_SEARCH_OPS = 5_000_000
"""Effort of one search at most; an op takes about 0.15 to 0.3 microseconds."""
_OPS_PER_LAYER_CUBED = 700
"""Effort of one search of a short chain."""
_EXHAUSTIVE_LAYERS = 7
"""Chains up to this long have so few plans (1366) that all of them are looked at."""
_REPLICAS_EFFORT = 2
"""How much more a search with replicas may spend."""
_PACKING_SHARE = 0.4
"""Share of the effort that packing may take."""
_VISIT_OPS, _CANDIDATE_OPS, _BOUND_OPS, _STAGE_OPS, _REPLICAS_OPS, _MOVE_OPS = 40, 60, 4, 20, 8, 3
"""Effort of a look at a candidate, of one that is new, of a lower bound and of an evaluation per job, per microbatch
of a job if there are replicas, and of a move that may be made."""
_MOST_TOUCHED = 4
"""Layers that one move from single layers may cut anew, at most."""
_NUM_STARTS = 12
"""Starts of the fused tail that are packed for."""
_NUM_TARGETS = 24
"""Target times tried for each start of the fused tail, and starts tried with few stages."""
_FEW_PARTS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Parts of the budget that stages' weights may take where stages are few."""
_PHASES: tuple[StagePhase, StagePhase] = ("F", "B")
_NUM_LEADERS = 6
"""Plans of different shape that climbs start from and kicks choose among."""
_MAX_KICK = 3
"""Most random moves before a climb."""
_PACKING_WITHIN = 1.1
"""Packings whose bound is this much above the best so far are still evaluated: a climb may start there."""
_KICK_WITHIN = 1.3
"""How much slower a kicked plan may be."""
_MOST_IN_VAIN = 250
"""Kicks in a row that led to no new leader, after which there are no more: plans of few stages have few neighbours."""
_AS_FAST = 1 + 1e-9
"""Factor within which two times count as one."""
_MAX_REPLICAS = 4
"""Replicas of a stage at most, however many workers and microbatches there are."""


class Search:
    """One search; what a planner is asked for is checked here.

    With ``replicate``, stages may take several slots. With ``keep_slower``, plans are kept, too, that are
    slower than the best; transfers and whatever else is left out here may make up for it.
    """

    def __init__(
        self,
        costs: Sequence[LayerCost],
        *,
        num_workers: int,
        num_microbatches: int,
        memory_budget_bytes: int | None = None,
        recompute_grain: RecomputeGrain = "stage",
        names: Sequence[str] | None = None,
        replicate: bool = False,
        keep_slower: bool = False,
    ) -> None:
        if not costs:
            raise ConfigError("there are no layers to plan for; give the cost of at least one")
        if num_workers < 1 or num_microbatches < 1:
            raise ConfigError(
                f"num_workers={num_workers}, num_microbatches={num_microbatches}: both must be at least 1"
            )
        if recompute_grain not in ("stage", "layer"):
            raise ConfigError(f"recompute_grain is {recompute_grain!r}; allowed are 'stage' and 'layer'")
        if names is not None and len(names) != len(costs):
            raise ConfigError(f"{len(names)} names for {len(costs)} layers; give one per layer or none")
        self.costs = StageCosts(costs, recompute_grain, is_alone=num_microbatches == 1)
        self.num_layers = len(costs)
        self.num_workers = num_workers
        self.num_microbatches = num_microbatches
        self.budget_bytes = memory_budget_bytes
        self.names = names
        self.replicate = replicate
        self.values: dict[Candidate, float] = {}
        """Seconds per step of the candidates that were evaluated."""
        self.best_s = inf
        self.floor_s = 0.0
        num_ops = min(_SEARCH_OPS, _OPS_PER_LAYER_CUBED * self.num_layers**3)
        self.effort = Effort(num_ops * (_REPLICAS_EFFORT if replicate else 1))
        self.packing = Packing(self.costs, memory_budget_bytes, self.effort)
        self._keeps_slower = keep_slower
        self._most_replicas = min(_MAX_REPLICAS, num_workers, num_microbatches) if replicate else 1
        self.fused_counts = range(1, self._most_replicas + 1)
        self._refuted: dict[Candidate, float] = {}
        self._forward: tuple[tuple[int, ...] | None, tuple[int, ...], list[StageCost]] = (None, (), [])
        self._backward: tuple[tuple[int, ...] | None, list[StageCost]] = (None, [])
        """Of the latest candidate: its edges and stages; those of the forward, with the cuts inside."""

    def run(self) -> list[Candidate]:
        if self.num_layers <= _EXHAUSTIVE_LAYERS and not self.replicate:
            self._evaluate_all()
        else:
            least_start = self._least_start()
            self._pack_all(least_start)
            if not self.values:
                self._evaluate_smallest()
            if self._keeps_slower:
                self._evaluate_few(least_start)
            self._kick(sorted({self._climb(leader) for leader in self._leaders()}, key=self.rank))
        return sorted(self.values, key=self.rank)

    def is_feasible(self) -> bool:
        """Whether `run` would find a candidate; takes a small part of its time."""
        self._evaluate_smallest()
        if not self.values:
            self.run()
        return bool(self.values)

    def rank(self, candidate: Candidate) -> tuple[float, int, tuple[int, ...], tuple[int, ...]]:
        """What the search minimises: time, then slots; the edges make the order total."""
        value, slots = float(f"{self.values[candidate]:.9g}"), sum(candidate.replicas)
        return value, slots, candidate.forward.edges, candidate.backward.edges

    def stages(self, candidate: Candidate) -> list[StageCost]:
        forward, backward = candidate.forward.edges, candidate.backward.edges
        cuts = () if self.budget_bytes is None else backward  # they matter to memory alone
        if self._forward[0] is not forward or self._forward[1] is not cuts:  # most moves leave one side as it was
            stages = [self.costs.forward(start, stop, cuts) for start, stop in pairwise(forward)]
            self._forward = forward, cuts, stages
        if self._backward[0] is not backward:
            stages = [self.costs.backward(start, stop, cuts) for start, stop in pairwise(backward)]
            self._backward = backward, stages[::-1]
        return [*self._forward[2], self.costs.fused(forward[-1], self.num_layers), *self._backward[1]]

    def lower_bound_s(self, candidate: Candidate, stages: list[StageCost]) -> float:
        """A step takes no less: the work of the busiest workers, and the way to the losses."""
        num_microbatches, num_workers = self.num_microbatches, self.num_workers
        replicas = candidate.replicas
        num_to_loss = len(candidate.forward.edges)
        seconds = [stage.seconds for stage in stages]
        if max(replicas) == 1:
            work_s = seconds
            repeated_s = (num_microbatches - 1) * max(seconds[:num_to_loss])
        else:
            work_s, repeated_s = [], 0.0
            for position, (stage_s, count) in enumerate(zip(seconds, replicas, strict=True)):
                shares = [(num_microbatches - replica + count - 1) // count for replica in range(count)]
                work_s += [share * stage_s / num_microbatches for share in shares]
                if position < num_to_loss:
                    repeated_s = max(repeated_s, (shares[0] - 1) * stage_s)
        num_classes = gcd(len(work_s), num_workers)
        busiest_s = max(sum(work_s[first::num_classes]) for first in range(num_classes)) * num_microbatches
        return max(busiest_s * num_classes / num_workers, sum(seconds[:num_to_loss]) + repeated_s)

    def with_transfers_s(self, candidate: Candidate, link_bytes_per_s: float) -> float:
        """A guess at the seconds per step of an evaluated candidate whose weights and gradients take time to move.

        While a job runs, the weights of its worker's next job come up and the gradients of the one before go down.
        """
        pairs, total_s = zip(self.stages(candidate), candidate.replicas, strict=True), 0.0
        jobs = [(stage, stage.seconds * self.num_microbatches / count) for stage, count in pairs for _ in range(count)]
        turn = self.num_workers % len(jobs)
        for position, (_, seconds) in enumerate(jobs):
            following, before = jobs[position - len(jobs) + turn][0], jobs[position - turn][0]
            total_s += max(seconds, max(following.weight_bytes, before.gradient_bytes) / link_bytes_per_s)
        return max(total_s / self.num_workers, self.values[candidate])

    def fits(self, candidate: Candidate, stages: list[StageCost]) -> bool:
        if self.budget_bytes is None:
            return True
        return peak_bytes(stages, self.num_workers, candidate.replicas) <= self.budget_bytes

    def evaluate(self, candidate: Candidate, limit_s: float = inf) -> float:
        """Seconds per step; infinite if the plan does not fit or its bound is above the limit."""
        effort = self.effort
        effort.ops_left -= _VISIT_OPS
        known = self.values.get(candidate)
        if known is not None:
            return known
        if self._refuted.get(candidate, 0.0) > limit_s:
            return inf
        stages = self.stages(candidate)
        effort.ops_left -= _CANDIDATE_OPS + _BOUND_OPS * len(stages)
        if self.lower_bound_s(candidate, stages) > limit_s or not self.fits(candidate, stages):
            return inf
        replicas = candidate.replicas if max(candidate.replicas) > 1 else None
        per_job = _STAGE_OPS if replicas is None else _REPLICAS_OPS * self.num_microbatches
        effort.ops_left -= _VISIT_OPS + _CANDIDATE_OPS + per_job * len(stages)
        num_forward = len(candidate.forward.replicas)
        value = step_seconds(stages, num_forward, self.num_workers, self.num_microbatches, replicas, limit_s)
        if value > limit_s:
            self._refuted[candidate] = value
            return inf
        self.values[candidate] = value
        self.best_s = min(self.best_s, value)
        return value

    def _evaluate_all(self) -> None:
        """Evaluates every plan of a short chain whose bound is not above the best so far, or every one of them."""
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
        within = inf if self._keeps_slower else _AS_FAST
        for _, candidate in sorted(bounded, key=lambda entry: entry[0]):
            self.evaluate(candidate, self.best_s * within if self.best_s else inf)

    def _evaluate_smallest(self) -> None:
        """Evaluates the plans with the least memory: one layer per stage, and those one move from it.

        Where some of these stages need too much, a move can only help that cuts all of them anew.
        """
        candidate = Candidate.singles(self.num_layers)
        if self.evaluate(candidate) < inf or self.budget_bytes is None:
            too_large = range(0)
        else:
            needs = device_memory(self.stages(candidate), self.num_workers)
            layers = [*range(self.num_layers), *reversed(range(self.num_layers - 1))]
            over = [layer for layer, need in zip(layers, needs, strict=True) if need.total > self.budget_bytes]
            too_large = range(min(over, default=0), max(over, default=0) + 1)
        if len(too_large) > _MOST_TOUCHED:
            return
        for move in candidate.moves(self.num_layers, self._most_replicas):
            if not too_large or candidate.touches(move, too_large, self.num_layers):
                self.evaluate(candidate.after(move))

    def _evaluate_few(self, least_start: int) -> None:
        """Evaluates plans of as few stages as memory allows, for starts of the fused tail all over the chain."""
        budget_bytes, starts = self.budget_bytes, range(least_start, self.num_layers)
        caps_bytes = [None] if budget_bytes is None else [budget_bytes // part for part in _FEW_PARTS]
        for start, cap_bytes in product(starts[:: -(-len(starts) // _NUM_TARGETS)], caps_bytes):
            forward, backward = (self.packing.fill(phase, start, inf, cap_bytes) for phase in _PHASES)
            if forward is not None and backward is not None and self.effort.ops_left > 0:
                self.evaluate(Candidate(Cuts.single(forward), Cuts.single(backward)))

    def _pack_all(self, least_start: int) -> None:
        """Evaluates packings for each start of the fused tail, the most promising start first."""
        share = int(self.effort.ops_left * _PACKING_SHARE / _NUM_STARTS)
        starts = [(start, bound_s) for start, bound_s in self.fused_starts() if start >= least_start]
        self.floor_s = starts[0][1] if starts else 0.0
        for start, bound_s in starts[:_NUM_STARTS]:
            if bound_s > self.best_s:
                break
            ops_after = self.effort.ops_left - share
            for forward, backward in self._packings(start):
                for count in self.fused_counts:
                    candidate = Candidate(Cuts.single(forward), Cuts.single(backward), count)
                    self.evaluate(candidate, self.best_s * _PACKING_WITHIN)
                if self.effort.ops_left < ops_after:
                    break

    def _least_start(self) -> int:
        """The first start of the fused tail with which single layers before it fit: no plan needs much less memory.

        Climbs look at the starts right before it. 0 if none fits.
        """

        def fits(start: int) -> bool:
            cuts = Cuts.single(range(start + 1))
            candidate = Candidate(cuts, cuts)
            return self.fits(candidate, self.stages(candidate))

        least_start = bisect_left(range(self.num_layers), True, key=fits)
        return least_start if least_start < self.num_layers else 0

    def _packings(self, start: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Forward and backward edges for a start of the fused tail, against one target time at a time."""
        even: dict[StagePhase, dict[int, tuple[int, ...]]] = {"F": {}, "B": {}}
        seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for target_s, cap_bytes in product(self._targets_s(start), self.packing.caps_bytes()):
            forward = self.packing.pack("F", start, target_s, cap_bytes)
            backward = forward and self.packing.pack("B", start, target_s, cap_bytes)
            yield from (pair for pair in product(forward, backward) if pair not in seen)
            seen.update(product(forward, backward))
            even["F"].update((len(edges), edges) for edges in forward[-1:])
            even["B"].update((len(edges), edges) for edges in backward[-1:])
        yield from product(even["F"].values(), even["B"].values())

    def fused_starts(self, most_replicas: int | None = None) -> list[tuple[int, float]]:
        """Starts of the fused tail that may fit, and a lower bound for each, the lowest first.

        The bound is for as many replicas of the tail as the search tries, if no other number is given.
        """
        bounds = []
        most, times_s = most_replicas or max(self.fused_counts), self.packing.times_s
        for start in range(self.num_layers):
            stage = self.costs.fused(start, self.num_layers)
            if self.budget_bytes is not None and stage.own_bytes > self.budget_bytes:
                continue
            work_s = times_s["F"][start] + times_s["B"][start] + stage.seconds
            latency_s = times_s["F"][start] + stage.seconds * ceil(self.num_microbatches / most)
            bounds.append((max(work_s * self.num_microbatches / self.num_workers, latency_s), start))
        return [(start, bound_s) for bound_s, start in sorted(bounds)]

    def _targets_s(self, start: int) -> list[float]:
        """Times to pack against: that of the fused tail, and those of evenly cut stages, the alike first."""
        counts: Sequence[int] = range(1, start + 1)
        if start > _NUM_TARGETS:
            counts = sorted({round(start ** (step / _NUM_TARGETS)) for step in range(_NUM_TARGETS + 1)})
        fused_s = self.costs.fused(start, self.num_layers).seconds
        even_s = [self.packing.times_s["B"][start] / count * 1.0001 for count in counts]
        alike_s = [fused_s / count for count in self.fused_counts]
        return sorted([*alike_s, *even_s], key=lambda target_s: min(_distance(target_s, time_s) for time_s in alike_s))

    def _leaders(self) -> list[Candidate]:
        """The best plan of each of the best shapes."""
        leaders: dict[tuple[int, int, int, int], Candidate] = {}
        for candidate in sorted(self.values, key=self.rank):
            leaders.setdefault(candidate.shape, candidate)
            if len(leaders) == _NUM_LEADERS:
                break
        return list(leaders.values())

    def _climb(self, candidate: Candidate) -> Candidate:
        """Where a climb ends: no single move leads to a better plan."""
        moves, position, num_refuted = self._moves(candidate), 0, 0
        while num_refuted < len(moves) and self.effort.ops_left > 0:
            neighbour = candidate.after(moves[position % len(moves)])
            position, num_refuted = position + 1, num_refuted + 1
            limit_s = self.values[candidate] * _AS_FAST
            if self.evaluate(neighbour, limit_s) < inf and self.rank(neighbour) < self.rank(candidate):
                candidate, moves, num_refuted = neighbour, self._moves(neighbour), 0
        return candidate

    def _moves(self, candidate: Candidate) -> list[Move]:
        moves = candidate.moves(self.num_layers, self._most_replicas)
        self.effort.ops_left -= _MOVE_OPS * len(moves)
        return moves

    def _kick(self, leaders: list[Candidate]) -> None:
        """Leaves the ends of the climbs by random moves and climbs again."""
        random, num_in_vain = Random(0), 0
        least_s = self.floor_s * _AS_FAST
        while leaders and self.effort.ops_left > 0 and num_in_vain < _MOST_IN_VAIN and self.best_s > least_s:
            num_in_vain += 1
            leader = min(random.sample(leaders, min(2, len(leaders))), key=self.rank)
            candidate = leader
            for _ in range(random.randint(1, _MAX_KICK)):
                moves = self._moves(candidate)
                if not moves:
                    return
                candidate = candidate.after(random.choice(moves))
            if self.evaluate(candidate, self.values[leader] * _KICK_WITHIN) < inf:
                end = self._climb(candidate)
                if end not in leaders:
                    leaders = sorted([*leaders, end], key=self.rank)[:_NUM_LEADERS]
                    if end in leaders:
                        num_in_vain = 0


def _distance(time_s: float, other_s: float) -> float:
    """How far two times are from being alike: the logarithm of how many times the shorter the longer is."""
    if not time_s or not other_s:
        return 0.0 if time_s == other_s else inf
    return abs(log(time_s) - log(other_s))
