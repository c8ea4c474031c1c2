"""Cuts a weighted chain into contiguous parts: nodes into layers, layers into stages. No torch.

How light the heaviest of ``k`` parts can be, and which parts a limit allows, is found exactly, by prefix sums and
bisection. Invariant: parts are ``(start, stop)`` pairs, not empty, in order, and together they cover the chain.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from roundpipe.core.errors import PartitionError

Part = tuple[int, int]


def cut_into(weights: Sequence[float], num_parts: int, cuts: Sequence[int] | None = None) -> list[Part]:
    """The contiguous parts whose heaviest is as light as possible; fewer where there are fewer items or cuts.

    ``cuts`` are positions where a cut is allowed (one at ``i`` is before item ``i``); None: anywhere. A
    `PartitionError` if ``num_parts`` is below 1, a weight is negative or a cut is out of range.
    """
    if num_parts < 1:
        raise PartitionError(f"num_parts is {num_parts}; a chain needs at least one part")
    prefix, stops = _prepare(weights, cuts)
    if not stops:
        return []
    num_parts = min(num_parts, len(stops))
    limits = sorted({prefix[stop] - prefix[start] for start, stop in _candidate_parts(stops, prefix, num_parts)})
    low, high = 0, len(limits) - 1
    while low < high:  # lightest limit that num_parts parts can keep
        middle = (low + high) // 2
        if _num_greedy(prefix, stops, limits[middle], num_parts) <= num_parts:
            high = middle
        else:
            low = middle + 1
    return _exactly(prefix, stops, limits[low], num_parts)


def cut_under(weights: Sequence[float], limit: float, cuts: Sequence[int] | None = None) -> list[Part]:
    """The fewest contiguous parts of at most ``limit`` each, the heaviest of them as light as possible.

    Raises:
        PartitionError: naming the first stretch without an allowed cut that is heavier than ``limit``.
    """
    prefix, stops = _prepare(weights, cuts)
    start = 0
    for stop in stops:
        if prefix[stop] - prefix[start] > limit + _slack(prefix):
            raise PartitionError(
                f"items {start} to {stop - 1} can't be cut and weigh {prefix[stop] - prefix[start]:g}, "
                f"more than the limit of {limit:g}; raise the limit or allow a cut between them"
            )
        start = stop
    if not stops:
        return []
    return cut_into(weights, _num_greedy(prefix, stops, limit, len(weights)), cuts)


def _prepare(weights: Sequence[float], cuts: Sequence[int] | None) -> tuple[list[float], list[int]]:
    """Prefix sums, and the allowed ends of parts in order, the end of the chain last."""
    for index, weight in enumerate(weights):
        if not weight >= 0:
            raise PartitionError(f"weight {index} is {weight}; weights must be numbers that are not negative")
    inner = range(1, len(weights)) if cuts is None else sorted(set(cuts))
    if inner and not 0 < inner[0] <= inner[-1] < len(weights):
        raise PartitionError(f"cuts {list(inner)} must lie between 1 and {len(weights) - 1}")
    return [0, *accumulate(weights)], [*inner, len(weights)] if len(weights) else []


def _candidate_parts(stops: list[int], prefix: list[float], num_parts: int) -> list[Part]:
    """Parts among which the heaviest of the best cut is: those between the lower and upper bound."""
    starts = [0, *stops[:-1]]
    atom = max(prefix[stop] - prefix[start] for start, stop in zip(starts, stops, strict=True))
    low, high = max(prefix[-1] / num_parts, atom), prefix[-1] / num_parts + atom
    parts = []
    for index, start in enumerate(starts):
        for stop in stops[index:]:
            weight = prefix[stop] - prefix[start]
            if weight >= low - _slack(prefix):
                parts.append((start, stop))
            if weight > high:
                break
    return parts


def _num_greedy(prefix: list[float], stops: list[int], limit: float, at_most: int) -> int:
    """How many parts filling up to ``limit`` takes; more than ``at_most`` when it can't be kept."""
    count, position = 0, 0
    while position < len(prefix) - 1:
        stop = _furthest(prefix, stops, position, limit)
        if stop == position or count == at_most:
            return at_most + 1
        count, position = count + 1, stop
    return count


def _slack(prefix: list[float]) -> float:
    """What differences of prefix sums may be off by."""
    return 1e-12 * prefix[-1]


def _furthest(prefix: list[float], stops: list[int], start: int, limit: float) -> int:
    """The last allowed stop of a part from ``start`` within ``limit``; ``start`` if there is none."""
    reach = bisect_right(prefix, prefix[start] + limit + _slack(prefix)) - 1
    index = bisect_right(stops, reach)
    return max(stops[index - 1], start) if index else start


def _exactly(prefix: list[float], stops: list[int], limit: float, num_parts: int) -> list[Part]:
    """``num_parts`` parts within ``limit``, each filled towards the mean of what is left."""
    parts: list[Part] = []
    start, end = 0, len(prefix) - 1
    latest = _latest_starts(prefix, stops, limit, num_parts)
    for remaining in range(num_parts, 1, -1):
        last = _furthest(prefix, stops, start, limit)
        index = bisect_right(stops, start)
        allowed = [
            stop
            for position, stop in enumerate(stops[index:], index)
            if stop <= last and stop >= latest[remaining - 1] and len(stops) - position > remaining - 1
        ]
        target = prefix[start] + (prefix[end] - prefix[start]) / remaining
        stop = min(allowed, key=lambda stop: abs(prefix[stop] - target))
        parts.append((start, stop))
        start = stop
    return [*parts, (start, end)]


def _latest_starts(prefix: list[float], stops: list[int], limit: float, num_parts: int) -> list[int]:
    """Item ``k``: the earliest position from which ``k`` parts within ``limit`` reach the end."""
    end = len(prefix) - 1
    positions, starts = [0, *stops], [end]
    for _ in range(num_parts):
        threshold = prefix[starts[-1]] - limit - _slack(prefix)
        starts.append(next(position for position in positions if prefix[position] >= threshold))
    return starts
