"""Where no plan fits the layers that a model was cut into for its devices: layers within other limits.

These limits are the same for every device. So what an error proposes holds on the device that it names, too, for which
the model is cut otherwise at first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from roundpipe.core.layers import ChainSource
from roundpipe.runtime.engine.plan_choice import PlanChooser
from roundpipe.runtime.engine.spec import Call

logger = logging.getLogger(__name__)


def cut_to_fit(
    source: ChainSource,
    calls: list[Call],
    plans: PlanChooser,
    has_plan: Callable[[Call], bool],
    calls_by: Callable[[ChainSource], list[Call] | None],
) -> tuple[ChainSource, list[Call]]:
    """A source and its calls, if plans fit these; else the first other source for whose calls they do.

    If there is none, the source stays, with the calls of another one that lack the least memory.

    Args:
        has_plan: whether a plan fits a call, for which it is kept.
        calls_by: the calls by the chains of a source; None if it has none for them.
    """
    if all(map(has_plan, calls)):
        return source, calls
    least: tuple[int, list[Call]] | None = None
    for other in source.others():
        if (others := calls_by(other)) is None:
            continue
        lack_bytes = max(_lack_bytes(plans, call) for call in others)
        if lack_bytes <= 0 and all(map(has_plan, others)):
            number, before = len(others[-1].chain), len(calls[-1].chain)
            logger.info(
                "no plan fits %d layers, and one fits %d: the model is cut into these from now on", before, number
            )
            return other, others
        if least is None or lack_bytes < least[0]:
            least = lack_bytes, others
    return source, calls if least is None else least[1]


def _lack_bytes(plans: PlanChooser, call: Call) -> int:
    """What a device lacks for the least that a call needs, by what is predicted."""
    budget_bytes = plans.options.budget_bytes
    assert budget_bytes is not None, "without a budget every plan fits"
    call.has_own_plan = call.is_evaluation
    needed_bytes = plans.least_need(call).memory.total
    call.has_own_plan = False
    return needed_bytes - budget_bytes
