"""Plans as the search sees them: the cuts of a chain, and the moves that lead from one plan to its neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from roundpipe.core.schedule import ExecutePlan

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
    def shape(self) -> tuple[int, int, int]:
        """What sets plans apart that are more than a few moved edges from each other."""
        return self.fused_start, len(self.forward.edges), len(self.backward.edges)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Per job, in the order of the step."""
        return (*self.forward.replicas, self.fused_replicas, *reversed(self.backward.replicas))

    def plan(self, num_layers: int) -> ExecutePlan:
        backward = reversed(list(pairwise(self.backward.edges)))
        return ExecutePlan(pairwise(self.forward.edges), (self.fused_start, num_layers), backward)

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
