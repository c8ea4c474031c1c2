"""Plans in which each layer has one worker: stages that don't rotate.

What stays of weights is then on one device instead of all, so that N devices have room for N times as much. Stages
of all workers follow each other, forward stage K on worker K mod N, and backward stages are cut where forward stages
are. At the end of a step a worker waits for those behind it, and at the start of the next for those before it, which
stages that rotate don't: the more stages each worker has, the shorter, but the fewer layers are in the fused one,
which recomputes nothing. Predictions choose.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar, Unpack

from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.layers import LayerCost
from roundpipe.planning.planner import PlanArguments
from roundpipe.planning.residency import may_stay
from roundpipe.planning.stage_costs import StageCosts, ring_peaks, training_stages
from roundpipe.planning.step_times import step_seconds

_MOST_SLOWER_IN_A_ROW = 2
"""Numbers of stages, each predicted to be slower than the best before it, after which no more are looked at."""
_BISECTIONS = 40

Found = TypeVar("Found")


def owned_plans(costs: Sequence[LayerCost], num_workers: int) -> Iterator[ExecutePlan]:
    """One for each number of forward stages per worker, ascending: that whose longest stage is the shortest."""
    for num_stages in range(num_workers, len(costs) + 1, num_workers):
        edges = _edges(costs, num_stages)
        forward = [*pairwise(edges)]
        yield ExecutePlan(forward[:-1], forward[-1], forward[-2::-1], rotates=False)


def best_owned(
    costs: Sequence[LayerCost],
    predict: Callable[[ExecutePlan], float],
    limit_s: float,
    **arguments: Unpack[PlanArguments],
) -> ExecutePlan | None:
    """The plan of these that is predicted to be the fastest.

    None: no such plan fits and takes at most ``limit_s`` per step, or no layer has frozen weights that may stay.
    """
    num_workers, num_microbatches = arguments["num_workers"], arguments["num_microbatches"]
    budget_bytes, grain = arguments.get("memory_budget_bytes"), arguments.get("recompute_grain", "stage")
    ranges = StageCosts(costs, grain, is_alone=num_microbatches == 1)

    def may_be_best(plan: ExecutePlan) -> bool:
        stages, owners = training_stages(plan, ranges), plan.workers("train", num_workers)
        if budget_bytes is not None and max(ring_peaks(stages, plan.rings("train", num_workers))) > budget_bytes:
            return False
        least_s = step_seconds(stages, len(plan.forward), num_workers, num_microbatches, limit_s=limit_s, owners=owners)
        return least_s <= limit_s  # without transfers, which predictions add

    if not any(map(may_stay, costs)):
        return None
    plans = filter(may_be_best, owned_plans(costs, num_workers))
    best = first_best(((predict(plan), plan) for plan in plans), lambda found: found[0])
    return best[1] if best is not None and best[0] <= limit_s else None


def first_best(found: Iterable[Found], seconds: Callable[[Found], Any]) -> Found | None:
    """The fastest of some that come with more stages each; once it gets slower no more are looked at."""
    best: Found | None = None
    num_slower = 0
    for one in found:
        if best is None or seconds(one) < seconds(best):
            best, num_slower = one, 0
        elif (num_slower := num_slower + 1) == _MOST_SLOWER_IN_A_ROW:
            break
    return best


def _edges(costs: Sequence[LayerCost], num_stages: int) -> list[int]:
    """Where so many forward stages begin, and the last layer's end, so that the longest has the least to do.

    A stage that is not the last runs again in the backward.
    """
    again_s = [0.0, *accumulate(2 * cost.forward_s + cost.backward_s for cost in costs)]
    once_s = [0.0, *accumulate(cost.forward_s + cost.backward_s for cost in costs)]
    low_s, high_s = 0.0, again_s[-1]
    for _ in range(_BISECTIONS):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle_s) if _cut(again_s, once_s, num_stages, middle_s) else (middle_s, high_s)
    edges = _cut(again_s, once_s, num_stages, high_s) or _cut(again_s, once_s, num_stages, 2 * again_s[-1])
    assert edges is not None
    return edges


def _cut(again_s: Sequence[float], once_s: Sequence[float], num_stages: int, most_s: float) -> list[int] | None:
    """The edges of stages that are filled from the first layer on; None: they are too short."""
    num_layers = len(again_s) - 1
    edges = [0]
    for left in range(num_stages - 1, 0, -1):  # stages behind this one, which need a layer each
        start = edges[-1]
        stop = bisect_right(again_s, again_s[start] + most_s, lo=start) - 1
        stop = min(stop, num_layers - left)
        if stop <= start:
            return None
        edges.append(stop)
    return [*edges, num_layers] if once_s[-1] - once_s[edges[-1]] <= most_s else None
