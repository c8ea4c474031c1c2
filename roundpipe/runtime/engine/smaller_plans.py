"""After a step ran out of device memory: what the next attempt does without.

    trained weights that live there   half as many layers, or none if all had stayed
    weights that stay on the device   go next, the plan is the same
    a smaller plan                    a share less than the one before was predicted to need: smaller stages, then layer
                                      by layer, then more tiles
    the smallest plan                 of all these, if none needs so much less

Each needs less than the one before by what is predicted, so that there is an end.
"""

from __future__ import annotations

import functools
import itertools
import operator
from dataclasses import replace

from roundpipe.core.errors import DeviceMemoryError
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.tiling import Tiles
from roundpipe.runtime.config import RECOMPUTE_GRAINS, RecomputeGrain
from roundpipe.runtime.engine.chain_record import SHRINK, KeptPlan, Limit
from roundpipe.runtime.engine.plan_choice import PlanChooser
from roundpipe.runtime.engine.spec import Call
from roundpipe.runtime.engine.tile_choice import tiles_to_try

MOST_TRIES = 16


def shrink(plans: PlanChooser, call: Call, plan: ExecutePlan) -> bool:
    """Take in that a step ran out of memory: the next one needs less. False if nothing is known that does."""
    record, place = plans.costs.record(call.chain), plans.place(call)
    record.allocators.clear()  # what is tried for them goes back to plans that may be too large
    if call.has_twins:
        plans.full.shrink(call)
        return True
    if plans.room(call, plan).residency.layers:
        record.streaming.add(place)
        record.rooms.clear()
        return True
    if call.config.execute_plan is not None:
        return False
    config, tiles, limit = call.config, call.tiles, record.limits.get(place)
    if _has_smaller(plans, call, plan):
        return True
    call.config, call.tiles = config, tiles
    record.limits.pop(place, None)
    if limit is not None:
        record.limits[place] = limit
    return False


def proposal(plans: PlanChooser, call: Call, plan: ExecutePlan) -> str:
    """What to do about a call for which `shrink` knows of nothing any more, for a message."""
    is_known = bool(plans.costs.record(call.chain).memory(call.tiles))
    return plans.options.proposal(call, int(SHRINK * plans.needed_bytes(call, plan)) if is_known else None)


def _has_smaller(plans: PlanChooser, call: Call, plan: ExecutePlan) -> bool:
    config, tiles_before, needed_bytes = call.config, call.tiles, plans.needed_bytes(call, plan)
    grains = RECOMPUTE_GRAINS[RECOMPUTE_GRAINS.index(config.recompute_grain) :]
    rungs = itertools.chain([tiles_before], itertools.chain.from_iterable(tiles_to_try(plans, call, tiles_before)))
    limits_bytes = [int(needed_bytes * SHRINK**power) for power in range(1, MOST_TRIES + 1)]
    least: list[tuple[int, Tiles, RecomputeGrain]] = []
    for tiles, grain in itertools.product(rungs, grains):
        call.config, call.tiles = replace(config, recompute_grain=grain), tiles
        present = plan if (tiles, grain) == (tiles_before, config.recompute_grain) else None
        least.append((plans.least_need(call, tiles).memory.total, tiles, grain))
        possible = itertools.takewhile(functools.partial(operator.le, least[-1][0]), limits_bytes)
        if any(_takes_plan(plans, call, limit_bytes, present) for limit_bytes in possible):
            return True
    least_bytes, tiles, grain = min(least, key=operator.itemgetter(0))
    call.config, call.tiles = replace(config, recompute_grain=grain), tiles
    return least_bytes < needed_bytes and _takes_plan(plans, call, least_bytes, None)


def _takes_plan(plans: PlanChooser, call: Call, limit_bytes: int, present: ExecutePlan | None) -> bool:
    """Whether there is a plan within a limit, other than the present one: the call has it from now on."""
    record = plans.costs.record(call.chain)
    record.limits[plans.place(call)] = Limit(limit_bytes, call.config.recompute_grain)
    try:
        plan = plans.choose(call, call.tiles)
    except DeviceMemoryError:
        return False
    if plan == present:
        return False
    num_steps = plans.costs.num_steps(call.chain, call.tiles)
    record.plans[plans.key(call)] = KeptPlan(plan, num_steps, call.tiles, plans.options.budget_bytes)
    return True
