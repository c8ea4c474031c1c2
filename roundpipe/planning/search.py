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
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product
from math import ceil, gcd, inf, log
from random import Random
from typing import Literal, NamedTuple

from roundpipe.planning.stage_costs import StageCost, StageCosts, StagePhase, peak_bytes, round_seconds

_SEARCH_OPS = 5_000_000
"""Effort of one search at most; an op takes about 0.1 microseconds."""

_OPS_PER_LAYER_CUBED = 700
"""Effort of one search of a short chain."""

_EXHAUSTIVE_LAYERS = 7
"""Chains up to this long have so few plans (1366) that all of them are looked at."""

_REPLICAS_EFFORT = 2
"""How much more a search with replicas may spend."""

_PACKING_SHARE = 0.4
"""Share of the effort that packing may take."""

_VISIT_OPS, _CANDIDATE_OPS, _BOUND_OPS, _ROUND_OPS, _REPLICAS_OPS = 40, 60, 4, 20, 8
"""Effort of a look at a candidate, of one that is new, of a lower bound and of an evaluation per job, and per
microbatch of a job if there are replicas."""

_STEP_OPS, _REACH_OPS, _PACK_OPS = 3, 25, 40
"""Effort of a step that may be gone, of the reach of ranges per layer, and of packing per range."""

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
"""Replicas of a stage at most, however many workers and microbatches there are."""


def _apart(one_s: float, other_s: float) -> float:
    """How far two times are from being alike: the logarithm of how many times the shorter the longer is."""
    if not one_s or not other_s:
        return 0.0 if one_s == other_s else inf
    return abs(log(one_s) - log(other_s))


Recut = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Ranges from one to before another, and what takes their place: the edges between, and replicas per range."""

Step = tuple[Literal["forward", "backward"], Recut] | tuple[Literal["start", "copies"], int]
"""A range is cut otherwise, or the fused tail starts elsewhere or has more or fewer replicas."""


class Cuts(NamedTuple):
    """Ranges that cover the layers before the fused tail, all forward or all backward, ascending."""

    edges: tuple[int, ...]
    """From 0 to the start of the fused tail."""
    replicas: tuple[int, ...]
    """Per range."""

    @classmethod
    def single(cls, edges: Sequence[int]) -> Cuts:
        """Cuts without replicas."""
        return cls(tuple(edges), (1,) * (len(edges) - 1))

    def recuts(self, most_replicas: int) -> Iterator[Recut]:
        """The ways to the cuts one step away: a moved edge, a merged or split range, a replica more or less."""
        edges, replicas = self.edges, self.replicas
        for index in range(1, len(edges) - 1):
            before, edge, behind = edges[index - 1 : index + 2]
            for moved in sorted({edge - 1, edge + 1, (before + edge) // 2, (edge + behind + 1) // 2}):
                if before < moved < behind and moved != edge:
                    yield index - 1, index + 1, (moved,), replicas[index - 1 : index + 1]
            yield index - 1, index + 1, (), (1,)
        for index, (start, stop) in enumerate(pairwise(edges)):
            if stop - start > 1:
                for middle in sorted({start + 1, (start + stop) // 2, stop - 1}):
                    yield index, index + 1, (middle,), (1, 1)
            if most_replicas > 1:
                for count in (replicas[index] - 1, replicas[index] + 1):
                    if 1 <= count <= most_replicas:
                        yield index, index + 1, (), (count,)

    def recut(self, recut: Recut) -> Cuts:
        """The cuts at the end of such a way."""
        first, last, inner, counts = recut
        return Cuts(
            (*self.edges[: first + 1], *inner, *self.edges[last:]),
            (*self.replicas[:first], *counts, *self.replicas[last:]),
        )

    def ended_at(self, stop: int) -> Cuts:
        """The same cuts with another start of the fused tail: the deepest range grows or shrinks."""
        if stop == 0:
            return Cuts((0,), ())
        edges = tuple(edge for edge in self.edges[:-1] if edge < stop) or (0,)
        return Cuts((*edges, stop), (*self.replicas, 1)[: len(edges)])


class Candidate(NamedTuple):
    """A plan as cuts; both end at the start of the fused tail."""

    forward: Cuts
    backward: Cuts
    fused_replicas: int = 1

    @classmethod
    def singles(cls, num_layers: int) -> Candidate:
        """One layer per stage."""
        cuts = Cuts.single(range(num_layers))
        return cls(cuts, cuts)

    @classmethod
    def split_at(cls, start: int) -> Candidate:
        """The fewest stages for a start of the fused tail."""
        cuts = Cuts.single((0, start) if start else (0,))
        return cls(cuts, cuts)

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

    def steps(self, num_layers: int, most_replicas: int) -> list[Step]:
        """The ways to the candidates one step away, none of more replicas than given; most are never gone."""
        start = self.fused_start
        steps: list[Step] = [
            ("start", moved) for moved in (start - 1, start + 1, start - 2, start + 2) if 0 <= moved < num_layers
        ]
        steps += [("forward", recut) for recut in self.forward.recuts(most_replicas)]
        steps += [("backward", recut) for recut in self.backward.recuts(most_replicas)]
        counts = (self.fused_replicas - 1, self.fused_replicas + 1)
        steps += [("copies", count) for count in counts if 1 <= count <= most_replicas]
        return steps

    def after(self, step: Step) -> Candidate:
        """The candidate at the end of a step."""
        forward, backward, count = self.forward, self.backward, self.fused_replicas
        if step[0] == "forward":
            forward = forward.recut(step[1])
        elif step[0] == "backward":
            backward = backward.recut(step[1])
        elif step[0] == "start":
            forward, backward = forward.ended_at(step[1]), backward.ended_at(step[1])
        else:
            count = step[1]
        return Candidate(forward, backward, count)


class Reach(NamedTuple):
    """How far ranges go that are within memory."""

    ahead: list[int]
    """Per first layer, the last stop."""
    back: list[int]
    """Per stop, the first start."""


class Search:
    """One search.

    Args:
        costs: of the chain.
        num_workers: workers in the rotation.
        num_microbatches: microbatches of every job.
        budget_bytes: memory of each device, or None for no limit.
        replicate: whether stages may take several slots.
        keep_slower: whether plans of short chains are kept that are slower than the best; transfers, which are left
            out here, may make up for it.
    """

    def __init__(
        self,
        costs: StageCosts,
        num_workers: int,
        num_microbatches: int,
        budget_bytes: int | None = None,
        replicate: bool = False,
        keep_slower: bool = False,
    ) -> None:
        self.costs = costs
        self.num_layers = len(costs.layers)
        self.num_workers = num_workers
        self.num_microbatches = num_microbatches
        self.budget_bytes = budget_bytes
        self.replicate = replicate
        self._short_within = inf if keep_slower else _AS_FAST
        self.values: dict[Candidate, float] = {}
        self._most_replicas = min(_MAX_REPLICAS, num_workers, num_microbatches) if replicate else 1
        self._fused_counts = range(1, self._most_replicas + 1)
        self._refuted: dict[Candidate, float] = {}
        self.best_s = inf
        self.floor_s = 0.0
        self.num_ops_left = min(_SEARCH_OPS, _OPS_PER_LAYER_CUBED * self.num_layers**3)
        self.num_ops_left *= _REPLICAS_EFFORT if replicate else 1
        both = zip(costs.forward_s, costs.backward_s, strict=True)
        self._forward: tuple[tuple[int, ...] | None, list[StageCost]] = (None, [])
        self._backward: tuple[tuple[int, ...] | None, list[StageCost]] = (None, [])
        """Of the latest candidate: its edges and stages."""
        self._reaches: dict[tuple[str, int | None], Reach] = {}
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
        forward, backward = candidate.forward.edges, candidate.backward.edges
        if self._forward[0] is not forward:  # most steps leave one side as it was
            self._forward = forward, [*map(self.costs.forward, forward, forward[1:])]
        if self._backward[0] is not backward:
            self._backward = backward, [*map(self.costs.backward, backward, backward[1:])][::-1]
        return [*self._forward[1], self.costs.fused(forward[-1], self.num_layers), *self._backward[1]]

    def lower_bound_s(self, candidate: Candidate, stages: list[StageCost]) -> float:
        """A round takes no less: the work of the busiest workers, and the way to the losses."""
        num_microbatches, num_workers = self.num_microbatches, self.num_workers
        replicas = candidate.replicas
        num_to_loss = len(candidate.forward.edges)
        seconds = [stage.seconds for stage in stages]
        if max(replicas) == 1:
            num_slots, work_s = len(seconds), seconds
            repeated_s = (num_microbatches - 1) * max(seconds[:num_to_loss])
        else:
            work, repeated_s = [], 0.0
            for position, (one_s, count) in enumerate(zip(seconds, replicas, strict=True)):
                shares = [(num_microbatches - replica + count - 1) // count for replica in range(count)]
                work += [share * one_s / num_microbatches for share in shares]
                if position < num_to_loss:
                    repeated_s = max(repeated_s, (shares[0] - 1) * one_s)
            num_slots, work_s = len(work), work
        num_classes = gcd(num_slots, num_workers)
        busiest_s = max(sum(work_s[first::num_classes]) for first in range(num_classes)) * num_microbatches
        return max(busiest_s * num_classes / num_workers, sum(seconds[:num_to_loss]) + repeated_s)

    def with_transfers_s(self, candidate: Candidate, link_bytes_per_s: float) -> float:
        """A guess at the seconds per round of an evaluated candidate whose weights and gradients take time to move.

        While a job runs, the weights of its worker's next job come up and the gradients of the one before go down.
        """
        stages, num_workers = self.stages(candidate), self.num_workers
        turn = num_workers % len(stages)
        total_s = 0.0
        for position, stage in enumerate(stages):
            following, before = stages[position - len(stages) + turn], stages[position - turn]
            moved_bytes = max(following.weight_bytes, before.gradient_bytes)
            total_s += max(self.num_microbatches * stage.seconds, moved_bytes / link_bytes_per_s)
        return max(total_s / num_workers, self.values[candidate])

    def fits(self, candidate: Candidate, stages: list[StageCost]) -> bool:
        """Whether the peak is within the budget."""
        if self.budget_bytes is None:
            return True
        slots = [stage for stage, count in zip(stages, candidate.replicas, strict=True) for _ in range(count)]
        return peak_bytes(slots, self.num_workers) <= self.budget_bytes

    def evaluate(self, candidate: Candidate, limit_s: float = inf) -> float:
        """Seconds per round; infinite if the plan does not fit or its bound is above the limit."""
        self.num_ops_left -= _VISIT_OPS
        known = self.values.get(candidate)
        if known is not None:
            return known
        if self._refuted.get(candidate, 0.0) > limit_s:
            return inf
        stages = self.stages(candidate)
        self.num_ops_left -= _CANDIDATE_OPS + _BOUND_OPS * len(stages)
        if self.lower_bound_s(candidate, stages) > limit_s or not self.fits(candidate, stages):
            return inf
        replicas = candidate.replicas
        per_job = _REPLICAS_OPS * self.num_microbatches if max(replicas) > 1 else _ROUND_OPS
        self.num_ops_left -= _VISIT_OPS + _CANDIDATE_OPS + per_job * len(stages)
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
        starts = self.fused_starts()
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

    def fused_starts(self) -> list[tuple[int, float]]:
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
            key=lambda target_s: min(_apart(target_s, one_s) for one_s in alike_s),
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

    def allowed(self, phase: StagePhase, start: int, stop: int, cap_bytes: int | None) -> bool:
        """Whether a range is within memory."""
        if cap_bytes is None or self.budget_bytes is None:
            return True
        costs = self.costs
        if costs.weight_bytes(start, stop) > cap_bytes:
            return False
        gradient_bytes = 2 * costs.gradient_bytes(phase, start, stop)  # the visit before brings about as many down
        return 2 * cap_bytes + gradient_bytes + costs.working_bytes(phase, start, stop) <= self.budget_bytes

    def reach(self, phase: StagePhase, cap_bytes: int | None) -> Reach:
        """How far ranges go within memory; as a wider range needs no less, two edges move along the layers."""
        known = self._reaches.get((phase, cap_bytes))
        if known is not None:
            return known
        num_layers = self.num_layers
        if cap_bytes is None:
            found = Reach([num_layers] * num_layers, [0] * (num_layers + 1))
        else:
            ahead, back, stop, start = [], [0], 0, 0
            for edge in range(num_layers):
                stop = max(stop, edge)
                while stop < num_layers and self.allowed(phase, edge, stop + 1, cap_bytes):
                    stop += 1
                ahead.append(stop)
            for edge in range(1, num_layers + 1):
                while start < edge and not self.allowed(phase, start, edge, cap_bytes):
                    start += 1
                back.append(start)
            found = Reach(ahead, back)
            self.num_ops_left -= _REACH_OPS * num_layers
        self._reaches[phase, cap_bytes] = found
        return found

    def _pack(self, phase: StagePhase, layers: int, target_s: float, cap_bytes: int | None) -> list[tuple[int, ...]]:
        """Edges of ranges over the first layers: filled from the left, from the right, and evenly.

        A range ends before it takes longer than the target or outgrows memory; one layer may take longer.
        """
        if layers == 0:
            return [(0,)]
        times, reach, left, right = self._times[phase], self.reach(phase, cap_bytes), [0], [layers]
        edge = 0
        while edge < layers:
            in_time = bisect_right(times, times[edge] + target_s, edge + 1, layers + 1) - 1
            stop = min(max(in_time, edge + 1), reach.ahead[edge])
            while stop > edge and not self.allowed(phase, edge, stop, cap_bytes):
                stop -= 1
            if stop == edge:
                return []
            left.append(stop)
            edge = stop
        while edge > 0:
            in_time = bisect_left(times, times[edge] - target_s, 0, edge)
            start = max(min(in_time, edge - 1), reach.back[edge])
            while start < edge and not self.allowed(phase, start, edge, cap_bytes):
                start += 1
            if start == edge:
                return []
            right.append(start)
            edge = start
        packed = {tuple(left): None, tuple(reversed(right)): None}
        for count in (len(left), len(left) - 1):
            even = self._even(phase, layers, count)
            if all(self.allowed(phase, start, stop, cap_bytes) for start, stop in pairwise(even)):
                packed[even] = None
        self.num_ops_left -= _PACK_OPS * len(left)
        return list(packed)

    def _even(self, phase: StagePhase, layers: int, count: int) -> tuple[int, ...]:
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
        for _, candidate in sorted(bounded, key=lambda entry: entry[0]):
            self.evaluate(candidate, self.best_s * self._short_within if self.best_s else inf)

    def _evaluate_smallest(self) -> None:
        """Evaluates the plans with the least memory: one layer per stage, and those one step from it."""
        candidate = Candidate.singles(self.num_layers)
        self.evaluate(candidate)
        for step in candidate.steps(self.num_layers, self._most_replicas):
            self.evaluate(candidate.after(step))

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
        steps = self._steps(candidate)
        position, num_refuted = 0, 0
        while num_refuted < len(steps) and self.num_ops_left > 0:
            step = candidate.after(steps[position % len(steps)])
            position, num_refuted = position + 1, num_refuted + 1
            limit_s = self.values[candidate] * _AS_FAST
            if self.evaluate(step, limit_s) < inf and self.rank(step) < self.rank(candidate):
                candidate, num_refuted = step, 0
                steps = self._steps(candidate)
        return candidate

    def _steps(self, candidate: Candidate) -> list[Step]:
        steps = candidate.steps(self.num_layers, self._most_replicas)
        self.num_ops_left -= _STEP_OPS * len(steps)
        return steps

    def _kick(self, leaders: list[Candidate]) -> None:
        """Leaves the ends of the climbs by random steps and climbs again."""
        random = Random(0)
        while leaders and self.num_ops_left > 0 and self.best_s > self.floor_s * _AS_FAST:
            chosen = min(random.sample(leaders, min(2, len(leaders))), key=self.rank)
            kicked = chosen
            for _ in range(random.randint(1, _MAX_KICK)):
                steps = self._steps(kicked)
                if not steps:
                    return
                kicked = kicked.after(random.choice(steps))
            if self.evaluate(kicked, self.values[chosen] * _KICK_WITHIN) < inf:
                end = self._climb(kicked)
                if end not in leaders:
                    leaders = sorted([*leaders, end], key=self.rank)[:_NUM_LEADERS]
