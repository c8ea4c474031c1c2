"""Plans as the search sees them: the cuts of a chain, moves to neighbouring plans, and packings to start from.

A packing fills ranges of layers against a target time, within a limit of memory that is asked of a range alone: under a
cap for a stage's weights, any two stages may meet on a worker. The greedy plan is made of such ranges, too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add
from typing import Literal, NamedTuple

from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.planning.stage_costs import StageCosts, StagePhase

_REACH_OPS, _PACK_OPS = 25, 40
"""Effort of the reach of ranges per layer, and of packing per range."""

Recut = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""First and last index of the edges around what is cut anew; the edges between, and replicas per range."""

Move = tuple[Literal["forward", "backward"], Recut] | tuple[Literal["start", "replicas"], int]
"""A range is cut otherwise, or the fused tail starts elsewhere or has more or fewer replicas."""


class Cuts(NamedTuple):
    """Ranges that cover the layers before the fused tail, all forward or all backward, ascending."""

    edges: tuple[int, ...]
    """From 0 to the start of the fused tail."""
    replicas: tuple[int, ...]

    @classmethod
    def single(cls, edges: Sequence[int]) -> Cuts:
        return cls(tuple(edges), (1,) * (len(edges) - 1))

    def recuts(self, most_replicas: int) -> Iterator[Recut]:
        """One move each: an edge moves, a range is merged or split, or has a replica more or less."""
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
        cuts = Cuts.single(range(num_layers))
        return cls(cuts, cuts)

    @classmethod
    def split_at(cls, start: int) -> Candidate:
        """The fewest stages for a start of the fused tail."""
        cuts = Cuts.single((0, start) if start else (0,))
        return cls(cuts, cuts)

    @property
    def fused_start(self) -> int:
        return self.forward.edges[-1]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What sets plans apart that are more than a few moved edges from each other."""
        return self.fused_start, len(self.forward.edges), len(self.backward.edges), sum(self.replicas)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Per stage, in the order of the step."""
        return (*self.forward.replicas, self.fused_replicas, *reversed(self.backward.replicas))

    @property
    def num_stages(self) -> int:
        return len(self.replicas)

    def plan(self, num_layers: int) -> ExecutePlan:
        backward = reversed(list(pairwise(self.backward.edges)))
        return ExecutePlan(pairwise(self.forward.edges), (self.fused_start, num_layers), backward, self.replicas)

    def moves(self, num_layers: int, most_replicas: int) -> list[Move]:
        """The moves to other candidates of at most so many replicas per stage."""
        start = self.fused_start
        moves: list[Move] = [
            ("start", moved) for moved in (start - 1, start + 1, start - 2, start + 2) if 0 <= moved < num_layers
        ]
        moves += [("forward", recut) for recut in self.forward.recuts(most_replicas)]
        moves += [("backward", recut) for recut in self.backward.recuts(most_replicas)]
        counts = (self.fused_replicas - 1, self.fused_replicas + 1)
        return moves + [("replicas", count) for count in counts if 1 <= count <= most_replicas]

    def touches(self, move: Move, layers: range, num_layers: int) -> bool:
        """Whether a move changes stages of some consecutive layers, or those beside them."""
        if move[0] == "replicas":
            return True
        if move[0] == "start":
            first, stop = min(self.fused_start, move[1]), num_layers
        else:
            edges = (self.forward if move[0] == "forward" else self.backward).edges
            first, stop = edges[move[1][0]], edges[move[1][1]]
        return first - 1 <= layers.start and layers.stop <= stop + 1

    def after(self, move: Move) -> Candidate:
        """Where a move leads; most moves are never tried."""
        forward, backward, count = self
        if move[0] == "forward":
            forward = forward.recut(move[1])
        elif move[0] == "backward":
            backward = backward.recut(move[1])
        elif move[0] == "start":
            forward, backward = forward.ended_at(move[1]), backward.ended_at(move[1])
        else:
            count = move[1]
        return Candidate(forward, backward, count)


@dataclass(slots=True)
class Effort:
    """What is left of the work that one search may do, counted in operations."""

    ops_left: int


class Reach(NamedTuple):
    """How far ranges go that are within memory."""

    ahead: list[int]
    """Per first layer, the last stop."""
    back: list[int]
    """Per stop, the first start."""


class Packing:
    """Packs the layers of one chain under a budget per device (None: no limit), and spends effort."""

    def __init__(self, costs: StageCosts, budget_bytes: int | None, effort: Effort) -> None:
        self.costs = costs
        self.budget_bytes = budget_bytes
        self.effort = effort
        both_s = list(map(add, costs.forward_s, costs.backward_s))
        self.times_s: dict[StagePhase, list[float]] = {"F": costs.forward_s, "B": both_s}
        """Of the layers up to each edge, per phase; a backward stage recomputes."""
        self._reaches: dict[tuple[str, int | None], Reach] = {}

    def caps_bytes(self) -> list[int | None]:
        """Limits for a stage's weights under which any two stages may meet on a worker, the widest first."""
        if self.budget_bytes is None:
            return [None]
        caps_bytes = [max(layer.weight_bytes for layer in self.costs.layers)]
        most_bytes = min(self.costs.weight_bytes(0, len(self.costs.layers)), self.budget_bytes)
        while 0 < caps_bytes[0] < most_bytes:
            caps_bytes.insert(0, 2 * caps_bytes[0])
        return [*caps_bytes]

    def allows(self, phase: StagePhase, start: int, stop: int, cap_bytes: int | None) -> bool:
        if cap_bytes is None or self.budget_bytes is None:
            return True
        costs = self.costs
        if costs.weight_bytes(start, stop) > cap_bytes:
            return False
        gradient_bytes = 2 * costs.gradient_bytes(phase, start, stop)  # the visit before brings about as many down
        return 2 * cap_bytes + gradient_bytes + costs.working_bytes(phase, start, stop) <= self.budget_bytes

    def reach(self, phase: StagePhase, cap_bytes: int | None) -> Reach:
        """How far ranges go within memory; as a wider range needs no less, two edges move along the layers."""
        reach = self._reaches.get((phase, cap_bytes))
        if reach is not None:
            return reach
        num_layers = len(self.costs.layers)
        if cap_bytes is None:
            reach = Reach([num_layers] * num_layers, [0] * (num_layers + 1))
        else:
            ahead, back, stop, start = [], [0], 0, 0
            for edge in range(num_layers):
                stop = max(stop, edge)
                while stop < num_layers and self.allows(phase, edge, stop + 1, cap_bytes):
                    stop += 1
                ahead.append(stop)
            for edge in range(1, num_layers + 1):
                while start < edge and not self.allows(phase, start, edge, cap_bytes):
                    start += 1
                back.append(start)
            reach = Reach(ahead, back)
            self.effort.ops_left -= _REACH_OPS * num_layers
        self._reaches[phase, cap_bytes] = reach
        return reach

    def fill(
        self, phase: StagePhase, layers: int, target_s: float, cap_bytes: int | None, *, overlong: bool = False
    ) -> list[int] | None:
        """Edges of ranges over the first layers, filled from the left; None if a layer does not fit.

        A range ends before it takes longer than the target or outgrows memory. With ``overlong``, one layer may take
        longer.
        """
        times_s, ahead, edges = self.times_s[phase], self.reach(phase, cap_bytes).ahead, [0]
        while edges[-1] < layers:
            start = edges[-1]
            in_time = bisect_right(times_s, times_s[start] + target_s, start, layers + 1) - 1
            stop = min(max(in_time, start + overlong), ahead[start])
            while stop > start and not self.allows(phase, start, stop, cap_bytes):
                stop -= 1
            if stop == start:
                return None
            edges.append(stop)
        return edges

    def _fill_from_right(
        self, phase: StagePhase, layers: int, target_s: float, cap_bytes: int | None
    ) -> list[int] | None:
        times_s, back, edges = self.times_s[phase], self.reach(phase, cap_bytes).back, [layers]
        while edges[-1] > 0:
            stop = edges[-1]
            in_time = bisect_left(times_s, times_s[stop] - target_s, 0, stop)
            start = max(min(in_time, stop - 1), back[stop])
            while start < stop and not self.allows(phase, start, stop, cap_bytes):
                start += 1
            if start == stop:
                return None
            edges.append(start)
        return edges[::-1]

    def pack(self, phase: StagePhase, layers: int, target_s: float, cap_bytes: int | None) -> list[tuple[int, ...]]:
        """Edges of ranges over the first layers: filled from the left, from the right, and evenly."""
        if layers == 0:
            return [(0,)]
        left = self.fill(phase, layers, target_s, cap_bytes, overlong=True)
        right = left and self._fill_from_right(phase, layers, target_s, cap_bytes)
        if not left or not right:
            return []
        packed = {tuple(left): None, tuple(right): None}
        for count in (len(left), len(left) - 1):
            even = self._even(phase, layers, count)
            if all(self.allows(phase, start, stop, cap_bytes) for start, stop in pairwise(even)):
                packed[even] = None
        self.effort.ops_left -= _PACK_OPS * len(left)
        return list(packed)

    def _even(self, phase: StagePhase, layers: int, count: int) -> tuple[int, ...]:
        """Edges of at most ``count`` ranges, each cut nearest to where equal times would end."""
        times_s, edges = self.times_s[phase], [0]
        for part in range(1, min(count, layers)):
            target_s = times_s[layers] * part / count
            edge = bisect_left(times_s, target_s, 0, layers)
            if edge > 0 and target_s - times_s[edge - 1] < times_s[edge] - target_s:
                edge -= 1
            if edges[-1] < edge < layers:
                edges.append(edge)
        return (*edges, layers)
