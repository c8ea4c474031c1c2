"""Another plan in the place of one that steps have run by, for what was measured of them."""

from __future__ import annotations

import logging

from roundpipe.core.errors import DeviceMemoryError
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.runtime.engine.chain_record import SHORTEST_STEP_S, KeptPlan
from roundpipe.runtime.engine.spec import Call
from roundpipe.runtime.engine.tile_choice import PlansInTiles

logger = logging.getLogger(__name__)

REPLAN_GAIN = 0.03
"""Share of a step's time that another plan must be predicted to save before it takes the place of the present one."""


def replanned(plans: PlansInTiles, call: Call, kept: KeptPlan) -> ExecutePlan:
    """The best plan by what was measured, if it is better by enough; else the present one."""
    present = kept.plan
    if not plans.costs.is_measured(call.chain, kept.tiles) or present.fused is None:
        return present
    seconds = plans.seconds(call, kept.tiles)
    present_s = seconds(present)
    most_s = (1 - REPLAN_GAIN) * present_s
    if present_s < SHORTEST_STEP_S or plans.least_seconds(call, kept.tiles) > most_s:
        return present
    try:
        plan = plans.choose(call, kept.tiles)
    except DeviceMemoryError:  # by what was measured, and the present one has run
        return present
    plan_s = seconds(plan)
    if plan_s > most_s:
        return present
    logger.info(
        "new plan from measured layer times: %d stages instead of %d, predicted %.3g s per step instead of %.3g s",
        plan.num_stages,
        present.num_stages,
        plan_s,
        present_s,
    )
    return plan
