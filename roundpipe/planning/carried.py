"""Carried values on a device: those that live there at a visit's peak.

A run, one microbatch through one stage, brings values up and leaves values or gradients to go down. They live until the
run is done and for as many runs more as the device may be behind its worker: some where values are small, one where
they are large (`num_ahead`). So at a visit's peak there are those of the run itself and those of the runs before it,
which may be of the worker's visit before.

A device that falls behind by one run alone would wait for its worker at each stage: values come up by the link that
brings the next stage's weights, and if they are not there by then, they wait for these. What the next run takes comes
up before the layers of the present one, in the place of values of earlier runs: it is nothing more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

from roundpipe.core.layers import CarriedValue
from roundpipe.planning.value_lives import Gradients, ValueLives

LARGE_BYTES = 64 * 1024**2
"""Of values of one run that several layers bring up or leave: with more, the worker waits between them."""
SMALL_BYTES = 4 * 1024**2
"""Of values of one run: with no more, plans count one run ahead, whose few MB are lost in what they leave."""
RUNS_AHEAD = 3
"""Runs given to an accelerator before the first of them is done: they keep it busy, and take its memory."""
AHEAD_BYTES = 128 * 1024**2
"""Of values of these runs: fewer are ahead where they have more, but one."""


def num_ahead(run_bytes: int) -> int:
    """Runs given to an accelerator before the first of them is done, from the bytes of one that come and go."""
    return max(min(AHEAD_BYTES // max(run_bytes, 1), RUNS_AHEAD), 1)


RecomputeGrain = Literal["stage", "layer"]


class Carried(NamedTuple):
    """Bytes of carried values and their gradients of one visit."""

    present: int
    """Of the run at its peak, beside what is counted with its layers."""
    held: int
    """Of the visit's runs before it, at that peak."""
    left: int
    """Of its last runs, which the worker's next visit finds."""


class CarriedValues:
    """The carried values of ranges of a chain's layers; if a run ``is_alone``, a visit is one run."""

    def __init__(self, lives: ValueLives, label_bytes: int, *, is_alone: bool) -> None:
        self._lives = lives
        self._label_bytes = label_bytes
        self._is_alone = is_alone

    def _taken_bytes(self, start: int, stop: int) -> int:
        """What comes up for a range, but for gradients."""
        label_bytes = self._label_bytes if stop == self._lives.num_layers else 0
        return sum(value.num_bytes for value in self._lives.taken(start, stop)) + label_bytes

    def _gradient_bytes(self, start: int, stop: int) -> int:
        """What goes down of a backward."""
        return sum(value.gradient_bytes for value in self._lives.taken(start, stop))

    def forward(self, start: int, stop: int, cuts: Sequence[int]) -> Carried:
        """Values go down that are read behind one of the cuts inside, where backward stages begin, or behind the end.

        They live until that is done, and those that are read further on anyway.
        """
        lives, up_bytes = self._lives, self._taken_bytes(start, stop)
        if stop == start + 1:
            return self._of_runs(up_bytes, sum(value.num_bytes for value in lives.given(start, stop)))
        given = {id(value): value for cut in (*cuts, stop) for value in lives.given(start, cut)}
        copies, waits = _copied(sorted(given.values(), key=lambda value: value.maker))
        changes: Counter[int] = Counter()
        """By layer, how much more is there from it on than values that are read later."""
        for value in given.values():
            until = waits.get(value.maker, stop)
            if value.last_reader >= stop:  # read later, but not here: it is gone once it has gone down
                inside = bisect_left(value.readers, stop)
                changes[max(until, value.readers[inside - 1] + 1 if inside else 0)] -= value.num_bytes
            elif value.last_reader + 1 < until:
                changes[value.last_reader + 1] += value.num_bytes
                changes[until] -= value.num_bytes
        first_wait = min(waits.values(), default=stop)
        found = self._of_runs(up_bytes, copies, up_bytes + sum(value.num_bytes for value in given.values()))
        edges = sorted({start, stop, min(first_wait, stop), *(layer for layer in changes if start < layer < stop)})
        beside_bytes, parts = 0, []
        for first, last in pairwise(edges):
            beside_bytes += changes[first]
            held_bytes = 0 if first >= first_wait else found.held  # what was waited for is gone, and all that was held
            peak_bytes = lives.forward_peak(start, first, last) + beside_bytes
            parts.append((peak_bytes, peak_bytes + held_bytes))
        present_bytes, most_bytes = (max(numbers) for numbers in zip(*parts, strict=True))
        return found._replace(
            present=up_bytes + present_bytes - lives.forward_peak(start, start, stop),
            held=most_bytes - present_bytes,
        )

    def fused(self, start: int) -> Carried:
        stop = self._lives.num_layers
        return self._of_runs(self._taken_bytes(start, stop), self._gradient_bytes(start, stop))

    def backward(self, start: int, stop: int, incoming: Gradients) -> Carried:
        """Of layers that are recomputed together; gradients that come up are counted with them."""
        up_bytes = self._taken_bytes(start, stop)
        found = self._of_runs(up_bytes + incoming.up, self._gradient_bytes(start, stop))
        return found._replace(present=up_bytes)

    def by_layer(self, start: int, stop: int, fused_start: int, needs: Sequence[int]) -> Carried:
        """Of a backward whose layers are recomputed one by one, and that need so much.

        Each takes and leaves values by itself, and those of the layers behind it are still there, unless they are so
        many that the worker has waited. What several take comes up once.
        """
        lives, cuts = self._lives, range(stop, fused_start + 1)
        up = down = since_wait = since_part = run_bytes = shared = 0
        seen: set[int] = set()
        parts: list[tuple[int, bool]] = []
        has_waited = False
        for layer in reversed(range(start, stop)):
            if not lives.runs_backward(layer, layer + 1):
                continue
            since_wait, since_part = since_wait + since_part, 0
            if since_wait > LARGE_BYTES:
                up, down, since_wait, has_waited = shared, 0, 0, True
            for value in lives.reads(layer):
                if id(value) not in seen:
                    seen.add(id(value))
                    since_part += value.num_bytes
                    shared += value.num_bytes if value.is_read(start, layer) else 0
            incoming = lives.incoming(layer, layer + 1, (*range(layer + 1, stop), *cuts))
            since_part += incoming.up
            up, run_bytes = up + since_part, run_bytes + since_part
            parts.append((needs[layer] + up + down + incoming.sums - incoming.last, has_waited))
            left_bytes = self._gradient_bytes(layer, layer + 1)
            down, run_bytes = down + left_bytes, run_bytes + left_bytes
        if not parts:
            return Carried(0, 0, 0)
        found = self._of_runs(up, down, run_bytes)
        present_bytes = max(num_bytes for num_bytes, _ in parts)
        most_bytes = max(num_bytes + (0 if is_over else found.held) for num_bytes, is_over in parts)
        return found._replace(present=present_bytes - max(needs[start:stop]), held=most_bytes - present_bytes)

    def _of_runs(self, up_bytes: int, down_bytes: int, run_bytes: int | None = None) -> Carried:
        """Of runs that have so much on the device when they end, of all that came and went."""
        if self._is_alone:  # the device is done with it; what goes down may still do so in the next visit
            return Carried(up_bytes, 0, down_bytes)
        left_bytes = up_bytes + down_bytes
        run_bytes = left_bytes if run_bytes is None else run_bytes
        held_bytes = left_bytes if run_bytes <= SMALL_BYTES else num_ahead(run_bytes) * left_bytes
        return Carried(up_bytes, held_bytes, held_bytes)


def _copied(given: Sequence[CarriedValue]) -> tuple[int, dict[int, int]]:
    """What of values that a forward gives is still on its way down at the end.

    And by layer whose values were waited for, the one that began behind the wait.
    """
    pending: list[tuple[int, int]] = []
    waits: dict[int, int] = {}
    for maker, values in groupby(given, key=lambda value: value.maker):
        pending.append((maker, sum(value.num_bytes for value in values)))
        if len(pending) > 1 and sum(num_bytes for _, num_bytes in pending) > LARGE_BYTES:
            waits.update((earlier, maker + 1) for earlier, _ in pending[:-1])
            del pending[:-1]
    return sum(num_bytes for _, num_bytes in pending), waits
