"""The plan of the simplest method: as few stages as the heaviest allows, to compare with and to choose among.

It minimises max(stages, workers) times the heaviest stage: for each start of the fused tail and each time that some
range of layers takes, ranges are filled from the left.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import combinations
from math import inf

from roundpipe.planning.candidates import Candidate, Cuts
from roundpipe.planning.search import Search

ROUNDING = 1 + 1e-8
"""Factor within which a range keeps a target time."""


def greedy_candidate(search: Search) -> Candidate | None:
    """The best greedy plan; where none fits, that of single layers, if it does."""
    best: tuple[float, Candidate] | None = None
    for cap_bytes in search.packing.caps_bytes():
        best = _best_under(search, cap_bytes, best)
    if best is not None:
        return best[1]
    singles = Candidate.singles(search.num_layers)
    return singles if search.fits(singles, search.stages(singles)) else None


def target_times_s(search: Search) -> list[float]:
    """The times that some range of layers takes, ascending."""
    both_s = search.packing.times_s["B"]
    return sorted({float(f"{stop_s - start_s:.9g}") for start_s, stop_s in combinations(both_s, 2)})


def _filled(search: Search, start: int, target_s: float, cap_bytes: int | None) -> Candidate | None:
    forward = search.packing.fill("F", start, target_s * ROUNDING, cap_bytes)
    backward = search.packing.fill("B", start, target_s * ROUNDING, cap_bytes)
    if forward is None or backward is None:
        return None
    return Candidate(Cuts.single(forward), Cuts.single(backward))


def _best_under(
    search: Search, cap_bytes: int | None, best: tuple[float, Candidate] | None
) -> tuple[float, Candidate] | None:
    """The best greedy plan whose stages keep a limit for their weights, if it is better than one known."""
    packing, num_workers, num_layers = search.packing, search.num_workers, search.num_layers
    targets_s = target_times_s(search)
    for start in reversed(range(num_layers)):
        fused_s = search.costs.fused(start, num_layers).seconds
        if not packing.allows("U", start, num_layers, cap_bytes) or (best and num_workers * fused_s >= best[0]):
            break
        fewest = _filled(search, start, inf, cap_bytes)
        if fewest is None:
            continue
        # The work alone, and as many stages as memory demands, take so much longer the longer the target is.
        work_s = (packing.times_s["F"][start] + packing.times_s["B"][start]) / ROUNDING
        least_slots = max(len(fewest.replicas), num_workers)
        for target_s in targets_s[bisect_left(targets_s, fused_s / ROUNDING) :]:
            if best is not None and max(work_s + target_s, least_slots * target_s) >= best[0]:
                break
            candidate = _filled(search, start, target_s, cap_bytes)
            if candidate is None:
                continue
            value = max(len(candidate.replicas), num_workers) * target_s
            if (best is None or value < best[0]) and search.fits(candidate, search.stages(candidate)):
                best = value, candidate
    return best
