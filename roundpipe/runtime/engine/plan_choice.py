"""Which plan a call gets: the user's, or the planner's, by what the cost model knows.

Plans are kept per chain, number of microbatches and size. The next step behind an update gets another plan, if that is
predicted to be faster by enough.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf
from typing import Any

from roundpipe.core.errors import DeviceMemoryError
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import ExecutePlan
from roundpipe.planning.planner import plan as choose_plan
from roundpipe.planning.stage_costs import plan_peak_bytes, plan_seconds
from roundpipe.runtime.config import RECOMPUTE_GRAINS
from roundpipe.runtime.engine.chain_record import KeptPlan, Limit, guess_memory, times_the_example
from roundpipe.runtime.engine.cost_model import CostModel, MemoryMeasure
from roundpipe.runtime.engine.option_choice import OptionChooser
from roundpipe.runtime.engine.spec import Call

logger = logging.getLogger(__name__)

REPLAN_GAIN = 0.03
"""Share of a step's time that another plan must be predicted to save before it takes the place of the present one."""
SHORTEST_STEP_S = 0.02
"""Steps shorter than this keep their plan: what is measured of them is mostly noise."""
FIRST_REPLAN = 2
"""Measured steps before the first look at the plan; then four times as many each time."""
SHRINK = 0.85
"""Share of what a plan was predicted to need that the next one may, after a step ran out of memory."""
MOST_TRIES = 16


class PlanChooser:
    """Chooses plans for the calls of one model.

    Args:
        budgets_bytes: per worker, what may be used of its device; None: no limit.
        link_speeds, accelerators, measure: see `CostModel`; memory is computed where there is a budget.
    """

    def __init__(
        self,
        num_workers: int,
        budgets_bytes: Iterable[int | None],
        link_speeds: Callable[[], tuple[float, float]] = lambda: (inf, inf),
        accelerators: bool = False,
        measure: MemoryMeasure | None = None,
    ) -> None:
        limits = [limit for limit in budgets_bytes if limit is not None]
        self._num_workers = num_workers
        self._budget_bytes = min(limits) if limits else None
        self.costs = CostModel(num_workers, link_speeds, accelerators, measure if limits else None)
        self.options = OptionChooser(self.costs, self._budget_bytes)
        self._may_replan = False

    @property
    def has_budget(self) -> bool:
        return self._budget_bytes is not None

    def plan(self, call: Call) -> ExecutePlan:
        """The plan of a call: the user's, or the planner's for microbatches of this size."""
        chain, config = call.chain, call.config
        if config.execute_plan is not None:
            config.execute_plan.validate(len(chain))
            return config.execute_plan
        record, key = self.costs.record(chain), self._key(call)
        call.config = replace(config, recompute_grain=key[1])
        num_steps, kept = record.times.num_steps, record.plans.get(key)
        if kept is None:
            plan = self._choose(call, self.costs.of(chain, call.elements()), self.costs.links(chain))
            kept = record.plans[key] = KeptPlan(plan, num_steps)
        elif self._may_replan and num_steps >= max(FIRST_REPLAN, 4 * kept.looked_at):
            plan, kept.looked_at = self._replanned(call, kept.plan), num_steps
            kept.plan, kept.is_proven = plan, kept.is_proven and plan == kept.plan
        self._may_replan = False
        return kept.plan

    def _size(self, call: Call) -> float:
        """What tells calls apart that may need other plans."""
        if self._budget_bytes is None:
            return round(times_the_example(call.chain, call.elements()), 1)
        return call.elements() if call.chain.example_elements else call.argument_bytes()

    def _key(self, call: Call) -> tuple[Any, ...]:
        """Calls that are equal here have one plan; those made before memory was computed have another."""
        record, number, size = self.costs.record(call.chain), call.num_microbatches, self._size(call)
        limit = record.limits.get((number, size))
        loss = record.loss if record.memory else None
        return number, call.config.recompute_grain if limit is None else limit.grain, size, loss

    def is_proven(self, call: Call) -> bool:
        """Whether a step like a call's has run by its plan, or can't get another one."""
        kept = self.costs.record(call.chain).plans.get(self._key(call))
        is_free = self._budget_bytes is not None and call.config.execute_plan is None
        return not is_free or (kept is not None and kept.is_proven)

    def prove(self, call: Call) -> None:
        """A call's step has run."""
        if (kept := self.costs.record(call.chain).plans.get(self._key(call))) is not None:
            kept.is_proven = True

    def shrink(self, call: Call, plan: ExecutePlan) -> bool:
        """Take in that a step ran out of memory: the next plan needs less. False if none is known that does."""
        if call.config.execute_plan is not None:
            return False
        record, costs, before = self.costs.record(call.chain), self.costs.of(call.chain, call.elements()), call.config
        place = call.num_microbatches, self._size(call)
        limit = record.limits.get(place)
        needed_bytes = plan_peak_bytes(
            plan, costs, num_workers=self._num_workers, recompute_grain=before.recompute_grain
        )
        for grain in RECOMPUTE_GRAINS[RECOMPUTE_GRAINS.index(before.recompute_grain) :]:
            call.config = replace(before, recompute_grain=grain)
            budget_bytes = float(needed_bytes)
            for _ in range(MOST_TRIES):
                budget_bytes *= SHRINK
                record.limits[place] = Limit(int(budget_bytes), grain)
                try:
                    smaller = self._choose(call, costs, self.costs.links(call.chain))
                except DeviceMemoryError:
                    break
                if smaller != plan or grain != before.recompute_grain:
                    record.plans[self._key(call)] = KeptPlan(smaller, record.times.num_steps)
                    return True
        call.config = before
        if limit is None:
            del record.limits[place]
        else:
            record.limits[place] = limit
        return False

    def spare_bytes(self, call: Call, plan: ExecutePlan) -> int | None:
        """Device memory that a training plan leaves over, as predicted; None: there is no limit."""
        if self._budget_bytes is None:
            return None
        if not call.chain.example_elements and not self.costs.record(call.chain).memory:
            return 0  # nobody knows
        spare = self.costs.record(call.chain).spare_bytes
        if (key := (*self._key(call), plan)) not in spare:
            costs, grain = self.costs.of(call.chain, call.elements()), call.config.recompute_grain
            needed = plan_peak_bytes(plan, costs, num_workers=self._num_workers, recompute_grain=grain)
            spare[key] = max(self._budget_bytes - needed, 0)
        return spare[key]

    def update_begun(self) -> None:
        """The optimizer was given an update: the next step may have another plan."""
        self._may_replan = True

    def _choose(self, call: Call, costs: list[LayerCost], links: tuple[float, float]) -> ExecutePlan:
        choose = functools.partial(
            choose_plan,
            num_workers=self._num_workers,
            num_microbatches=call.num_microbatches,
            recompute_grain=call.config.recompute_grain,
            names=[spec.name for spec in call.chain.specs],
            predict=self.costs.prediction(call, costs, links),
            link_bytes_per_s=min(links),
        )
        limit = self.costs.record(call.chain).limits.get((call.num_microbatches, self._size(call)))
        budget_bytes = self._budget_bytes if limit is None else limit.budget_bytes
        if budget_bytes is None:
            return choose(costs)
        if not self.costs.record(call.chain).memory:
            with contextlib.suppress(DeviceMemoryError):  # a guess must not refuse what may fit
                return choose(guess_memory(costs, call), memory_budget_bytes=budget_bytes)
        return choose(costs, memory_budget_bytes=budget_bytes)

    def _replanned(self, call: Call, present: ExecutePlan) -> ExecutePlan:
        """The best plan by what was measured, if it is better by enough; else the present one."""
        if not self.costs.is_measured(call.chain) or present.fused is None:
            return present
        costs, links = self.costs.of(call.chain, call.elements()), self.costs.links(call.chain)
        seconds = self.costs.prediction(call, costs, links) or functools.partial(  # the latter leaves transfers out
            plan_seconds, costs=costs, num_workers=self._num_workers, num_microbatches=call.num_microbatches
        )
        present_s = seconds(present)
        if present_s < SHORTEST_STEP_S:
            return present
        plan = self._choose(call, costs, links)
        plan_s = seconds(plan)
        if plan_s > (1 - REPLAN_GAIN) * present_s:
            return present
        logger.info(
            "new plan from measured layer times: %d stages instead of %d, predicted %.3g s per step instead of %.3g s",
            plan.num_stages,
            present.num_stages,
            plan_s,
            present_s,
        )
        return plan
