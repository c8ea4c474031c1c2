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
from typing import Any, Unpack

from roundpipe.core.errors import DeviceMemoryError
from roundpipe.core.execute_plan import ExecutePlan, ScheduleKind
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import Schedule, make_schedule
from roundpipe.core.tiling import UNTILED, Tiles
from roundpipe.planning.owned_plans import best_owned
from roundpipe.planning.planner import LeastNeed, PlanArguments, has_plan, least_need, least_seconds
from roundpipe.planning.planner import plan as choose_plan
from roundpipe.planning.residency import STREAMED, Residency, choose_residency
from roundpipe.planning.stage_costs import StageCosts, plan_peak_bytes, plan_seconds
from roundpipe.reports.tables import format_bytes
from roundpipe.runtime.engine.allocator_room import MOST_LOSS, AllocatorRoom, RetryCounter, RunsBy, StepRetries
from roundpipe.runtime.engine.chain_record import KeptPlan, Room, guess_memory, is_other, times_the_example
from roundpipe.runtime.engine.cost_model import CostModel, MeasuredTimes, MemoryMeasure, Prediction
from roundpipe.runtime.engine.full_plans import FullPlans
from roundpipe.runtime.engine.option_choice import OptionChooser
from roundpipe.runtime.engine.replanning import replanned
from roundpipe.runtime.engine.spec import Call
from roundpipe.runtime.engine.tile_choice import LADDER, choose_for, choose_with_tiles, given_tiles

logger = logging.getLogger(__name__)

FIRST_REPLAN = 2
"""Measured steps before the first look at the plan; then four times as many each time."""
TIGHT_SHARE = 0.1
"""Share of a device's budget: with less left over, what a plan did not count may be too much."""
OWNED_GAIN = 0.03
"""Share of a step's time that layers with one worker each must be predicted to save."""
REPLICAS_GAIN = 0.05
"""Share of a step's time that replicas must be predicted to save: they move more, and gradients depend on how many."""


class PlanChooser:
    """Chooses plans for the calls of one model.

    Args:
        budgets_bytes: per worker, what may be used of its device; None: no limit.
        link_speeds, accelerators, measure, chain, visit_s: see `CostModel`; memory is computed where there is a budget.
    """

    def __init__(
        self,
        num_workers: int,
        budgets_bytes: Iterable[int | None],
        link_speeds: Callable[[], tuple[float, float]] = lambda: (inf, inf),
        accelerators: bool = False,
        measure: MemoryMeasure | None = None,
        **measured: Unpack[MeasuredTimes],
    ) -> None:
        self._num_workers = num_workers
        self._budget_bytes = _least(budgets_bytes)
        self.costs = CostModel(num_workers, link_speeds, accelerators, measure if self.has_budget else None, **measured)
        self.options = OptionChooser(self.costs, self._budget_bytes)
        self.full = FullPlans(self.costs, accelerators)
        self.full.device_bytes = self._budget_bytes
        self._may_replan = False

    def set_budgets(self, budgets_bytes: Iterable[int | None]) -> None:
        """Plan for what there is now, if that is otherwise; plans that fit are kept, unless they were made for less."""
        budget_bytes, before_bytes = _least(budgets_bytes), self._budget_bytes
        if budget_bytes is None or before_bytes is None or not is_other(before_bytes, budget_bytes):
            return
        logger.info("devices have %s for plans now, and had %s", *map(format_bytes, (budget_bytes, before_bytes)))
        self._budget_bytes = self.options.budget_bytes = budget_bytes
        self.costs.budget_changed()
        self.full.budget_changed(budget_bytes)

    @property
    def has_budget(self) -> bool:
        return self._budget_bytes is not None

    def plan(self, call: Call) -> ExecutePlan:
        """The plan of a call: the user's, or the planner's for microbatches of this size."""
        self.full.may_look_again = self._may_replan
        if self._kept(call) is None and (plan := self.full.goes_on(call, self._budget_of(call))) is not None:
            return plan
        return self.in_place_of(call, self.streaming(call))

    def in_place_of(self, call: Call, streamed: ExecutePlan) -> ExecutePlan:
        """The plan with trained weights on the device, if it may take the place of one; sets `Call.has_twins`."""

        def streamed_s() -> float:  # by the costs that are known when it is asked, which others are compared with
            return self.seconds(call, call.tiles)(streamed)

        return self.full.instead(call, streamed, streamed_s, self._budget_of(call))

    def streaming(self, call: Call) -> ExecutePlan:
        """The plan of a call whose trained weights are streamed."""
        chain, config = call.chain, call.config
        if config.execute_plan is not None:
            config.execute_plan.validate(len(chain))
            call.tiles = next(iter(given_tiles(config)), UNTILED)
            return config.execute_plan
        record, kept = self.costs.record(chain), self._kept(call)
        call.config = replace(config, recompute_grain=self.key(call)[1])
        if kept is None or (kept.is_of_less(self._budget_bytes) and not self._is_unused(call, kept)):
            kept = self._new(call)
        elif self._may_replan and not self._is_unused(call, kept):
            self._leave_room(call, kept)
            num_steps = self.costs.num_steps(chain, kept.tiles)
            if kept.has_other_updates(sum(self.costs.chain_of(call) or ())) or num_steps >= max(
                FIRST_REPLAN, 4 * kept.looked_at
            ):
                plan, kept.looked_at = replanned(self, call, kept), num_steps
                kept.plan, kept.is_proven = plan, kept.is_proven and plan == kept.plan
        if kept.num_corrections != record.num_corrections:
            self._check(call, kept)
        self._may_replan = False
        call.tiles = kept.tiles
        return kept.plan

    def _new(self, call: Call) -> KeptPlan:
        """A plan for a call without one, kept from now on."""
        chain = call.chain
        record, elements = self.costs.record(chain), self.costs.elements(call)
        try:
            plan, call.tiles = choose_for(self, call)
        except DeviceMemoryError:
            if elements == call.elements():
                raise
            record.add_size(call.elements())  # what it was to be planned as does not fit
            return self._new(call)
        kept = KeptPlan(plan, self.costs.num_steps(chain, call.tiles), call.tiles, self._budget_bytes)
        kept.updates_s = sum(self.costs.chain_of(call) or ())
        record.plans[self.key(call)] = kept
        record.add_size(elements)
        return kept

    def has_plan(self, call: Call) -> bool:
        """Whether a call has a plan, or one fits it, which it then has."""
        if self._budget_bytes is None or call.config.execute_plan is not None:
            return True
        if self._kept(call) is not None or self.full.goes_on(call, self._budget_of(call)) is not None:
            return True
        may_replan = self._may_replan
        with contextlib.suppress(DeviceMemoryError):
            self.streaming(call)
        self._may_replan = may_replan  # the call itself comes later
        return self._kept(call) is not None

    def _kept(self, call: Call) -> KeptPlan | None:
        """The plan that calls like one have."""
        plans = self.costs.record(call.chain).plans
        if (kept := plans.get(self.key(call))) is None and call.is_evaluation:
            call.has_own_plan = True
            kept = plans.get(self.key(call))
            call.has_own_plan = kept is not None
        return kept

    def _is_unused(self, call: Call, kept: KeptPlan) -> bool:
        """Whether a call has a plan with weights on the device instead: another look would only hold the caller up."""
        call.tiles = kept.tiles
        return self.full.wants(call) and self.full.has_plan(call)

    def retries_of(self, call: Call, counter: RetryCounter) -> StepRetries | None:
        """Where to note how often allocators are at their limit in a training step; None: its plan stays anyway."""
        record, key = self.costs.record(call.chain), self.key(call)
        is_free = self._budget_bytes is not None and call.config.execute_plan is None and not call.has_twins
        if not is_free or (kept := record.plans.get(key)) is None:
            return None
        room = record.allocators.setdefault(key, AllocatorRoom())
        return room.begin(RunsBy(kept.plan, kept.tiles, room.share), counter)

    def _leave_room(self, call: Call, kept: KeptPlan) -> None:
        """Leave allocators more if that may make steps faster, or what they had before if it did not."""
        record = self.costs.record(call.chain)
        if (room := record.allocators.get(self.key(call))) is None:
            return
        present = RunsBy(kept.plan, kept.tiles, room.share)
        choose = functools.partial(self._choose_with_share, call, present, room)
        if (following := room.following(present, choose)) is not None:
            is_same = following[:2] == present[:2]
            kept.plan, kept.tiles, room.share = following
            kept.is_proven = kept.is_proven and is_same
            record.rooms.clear()

    def _choose_with_share(self, call: Call, present: RunsBy, room: AllocatorRoom, share: float) -> RunsBy | None:
        """The best plan that leaves allocators a share of the budget; None if none fits, or it is much slower."""
        present_s = self.seconds(call, present.tiles)(present.plan)
        room.share = share
        try:
            plan, tiles = choose_with_tiles(self, call)
            return (
                RunsBy(plan, tiles, share) if self.seconds(call, tiles)(plan) <= (1 + MOST_LOSS) * present_s else None
            )
        except DeviceMemoryError:
            return None
        finally:
            room.share = present.share

    def _check(self, call: Call, kept: KeptPlan) -> None:
        """Another plan, if one that has run turns out to need more than there is, and one is known to need less.

        After a step ran out of memory what has run since is the measure: what was predicted then was too little.
        """
        record = self.costs.record(call.chain)
        kept.num_corrections = record.num_corrections
        if self._budget_bytes is None:
            return
        call.tiles = kept.tiles
        needed_bytes = self.needed_bytes(call, kept.plan)
        if (limit := record.limits.get(place := self.place(call))) is not None:
            record.limits[place] = replace(limit, budget_bytes=max(limit.budget_bytes, needed_bytes))
        elif needed_bytes > self._budget_bytes:
            with contextlib.suppress(DeviceMemoryError):
                plan, tiles = choose_with_tiles(self, call)
                kept.is_proven = kept.is_proven and (plan, tiles) == (kept.plan, kept.tiles)
                kept.plan, kept.tiles, kept.budget_bytes = plan, tiles, self._budget_bytes

    def _size(self, call: Call) -> float:
        """What tells calls apart that may need other plans."""
        if self._budget_bytes is None:
            return round(times_the_example(call.chain, call.elements()), 1)
        return self.costs.size_of(call)

    def key(self, call: Call) -> tuple[Any, ...]:
        """Calls that are equal here have one plan; those made before memory was computed have another."""
        record, number, size = self.costs.record(call.chain), call.num_microbatches, self._size(call)
        limit = record.limits.get((number, size))
        loss = record.loss if record.memory() and (call.loss_fn or not call.has_own_plan) else None
        grain = call.config.recompute_grain if limit is None else limit.grain
        return number, grain, size, loss, call.config.tiles, call.may_replicate, call.has_own_plan

    def is_proven(self, call: Call) -> bool:
        """Whether a step like a call's has run by its plan, or can't get another one."""
        if self.full.wants(call):
            if not self.full.is_proven(call):
                return False
            if self.full.has_plan(call):  # which has run; the one that streams may never do
                return True
        kept = self.costs.record(call.chain).plans.get(self.key(call))
        is_free = self._budget_bytes is not None and call.config.execute_plan is None
        return not is_free or (kept is not None and kept.is_proven)

    def prove(self, call: Call) -> None:
        """A call's step has run."""
        if call.has_twins:
            self.full.prove(call)
        elif (kept := self.costs.record(call.chain).plans.get(self.key(call))) is not None:
            kept.is_proven = True

    def room(self, call: Call, plan: ExecutePlan) -> Room:
        """What to do with the device memory that a plan leaves over, as predicted."""
        rooms = self.costs.record(call.chain).rooms
        if call.has_twins:
            return self.full.room(call)
        if (key := (*self.key(call), call.config.residency, call.is_evaluation, call.tiles, plan)) not in rooms:
            rooms[key] = self._room(call, plan)
        return rooms[key]

    def is_tight(self, spare_bytes: int | None) -> bool:
        """Whether a plan that leaves so much memory over may run out of it."""
        return spare_bytes is not None and spare_bytes < TIGHT_SHARE * (self._budget_bytes or 0)

    def _room(self, call: Call, plan: ExecutePlan) -> Room:
        of_layers = self.costs.of_call(call, call.tiles)
        if call.is_evaluation:
            of_layers = [replace(cost, gradient_bytes=0) for cost in of_layers]
        costs = StageCosts(of_layers, call.config.recompute_grain, is_alone=call.num_microbatches == 1)
        kind: ScheduleKind = "forward" if call.is_evaluation or plan.fused is None else "train"
        schedule = make_schedule(plan, self._num_workers, call.num_microbatches, kind=kind)
        residency = self._residency(call, schedule, costs)
        if self._budget_bytes is None:
            return Room(residency, None, None if self._may_stay(call) else 0)
        allocator_bytes = self._allocator_bytes(call)
        left_bytes = max(self._budget_bytes - allocator_bytes - residency.peak_bytes(schedule, costs), 0)
        left_bytes *= self._knows_memory(call)
        return Room(residency, left_bytes, left_bytes if self._may_stay(call) else 0, allocator_bytes)

    def _residency(self, call: Call, schedule: Schedule, costs: StageCosts) -> Residency:
        """What stays on devices in a call's steps."""
        if not self._may_stay(call) or not self._knows_memory(call):
            return STREAMED
        return choose_residency(schedule, costs, self._budget_of(call))

    def _budget_of(self, call: Call) -> int | None:
        """What a call's plan, and what stays beside it, may take of a device; None: there is no limit."""
        limit = self.costs.record(call.chain).limits.get(self.place(call))
        budget_bytes = self._budget_bytes if limit is None else limit.budget_bytes
        return None if budget_bytes is None else budget_bytes - self._allocator_bytes(call)

    def _allocator_bytes(self, call: Call) -> int:
        room = self.costs.record(call.chain).allocators.get(self.key(call))
        return 0 if room is None else int(room.share * (self._budget_bytes or 0))

    def _may_stay(self, call: Call) -> bool:
        return call.config.residency != "off" and self.place(call) not in self.costs.record(call.chain).streaming

    def _knows_memory(self, call: Call) -> bool:
        """Whether it is known what layers take, where that matters."""
        return self._budget_bytes is None or bool(call.chain.example_elements or self.costs.record(call.chain).memory())

    def place(self, call: Call) -> tuple[int, float]:
        """What tells calls apart that ran out of memory."""
        return call.num_microbatches, self._size(call)

    def update_begun(self) -> None:
        """The optimizer was given an update: the next step may have another plan."""
        self._may_replan = True

    def needed_bytes(self, call: Call, plan: ExecutePlan) -> int:
        costs, grain = self.costs.of_call(call, call.tiles), call.config.recompute_grain
        number, is_alone = self._num_workers, call.num_microbatches == 1
        return plan_peak_bytes(plan, costs, num_workers=number, recompute_grain=grain, is_alone=is_alone)

    def choose(self, call: Call, tiles: Tiles, free: Iterable[int] = ()) -> ExecutePlan:
        """The best plan in tiles; ``free``: see `fits`.

        Raises:
            DeviceMemoryError: none fits.
        """
        costs, arguments = self._problem(call, tiles, free)
        links = self.costs.links(call.chain, tiles)
        predict = self._prediction(call, costs, links)
        choose = functools.partial(choose_plan, **arguments, predict=predict, link_bytes_per_s=min(links))
        plan = None
        if arguments["memory_budget_bytes"] is not None and not self.costs.record(call.chain).memory():
            with contextlib.suppress(DeviceMemoryError):  # a guess must not refuse what may fit
                guessed = guess_memory(costs, call)
                plan, costs = choose(guessed), guessed
        plan = plan or choose(costs)
        if self._num_workers == 1:
            return plan
        if predict is not None and self._may_stay(call):
            limit_s = (1 - OWNED_GAIN) * predict(plan)
            if least_seconds(costs, **arguments) <= limit_s:
                plan = best_owned(costs, predict, limit_s, **arguments) or plan
        if not call.may_replicate or call.num_microbatches == 1:
            return plan
        seconds = self.seconds(call, tiles)
        limit_s = (1 - REPLICAS_GAIN) * seconds(plan)
        if least_seconds(costs, replicate=True, **arguments) > limit_s:
            return plan
        shared = choose(costs, replicate=True)
        return shared if seconds(shared) <= limit_s else plan

    def fits(self, call: Call, tiles: Tiles, free: Iterable[int] = ()) -> bool:
        """Whether a plan fits in tiles, as if what runs in ``free`` layers took no memory; quicker than a plan."""
        costs, arguments = self._problem(call, tiles, free)
        return has_plan(costs, **arguments)

    def least_need(self, call: Call, tiles: Tiles | None = None) -> LeastNeed:
        """The least device memory that a call can do with in tiles; None: in the finest that it may have."""
        costs, arguments = self._problem(call, tiles or (given_tiles(call.config) or LADDER)[-1])
        return least_need(costs, **arguments)

    def _problem(self, call: Call, tiles: Tiles, free: Iterable[int] = ()) -> tuple[list[LayerCost], PlanArguments]:
        """What the planner is asked: the layers' costs, some as if what runs in them took no memory, and the limits."""
        self.costs.measure_memory(call, tiles)
        costs = self.costs.of_call(call, tiles)
        for index in free:
            costs[index] = replace(costs[index], activation_bytes=0, workspace_bytes=0, temporary_bytes=0)
        return costs, PlanArguments(
            num_workers=self._num_workers,
            num_microbatches=call.num_microbatches,
            memory_budget_bytes=self._budget_of(call),
            recompute_grain=call.config.recompute_grain,
            names=[spec.name for spec in call.chain.specs],
        )

    def seconds(self, call: Call, tiles: Tiles) -> Prediction:
        """Seconds per step of a plan in tiles; where transfers take time, as the simulator has them."""
        costs = self.costs.of_call(call, tiles)
        return self.prediction(call, tiles) or functools.partial(
            plan_seconds, costs=costs, num_workers=self._num_workers, num_microbatches=call.num_microbatches
        )

    def prediction(self, call: Call, tiles: Tiles) -> Prediction | None:
        """The simulator's seconds per step of a plan in tiles, if it is asked."""
        costs, links = self.costs.of_call(call, tiles), self.costs.links(call.chain, tiles)
        return self._prediction(call, costs, links)

    def least_seconds(self, call: Call, tiles: Tiles, free: Iterable[int] = ()) -> float:
        """Seconds per step that no plan in tiles goes below; ``free``: see `fits`."""
        costs, arguments = self._problem(call, tiles, free)
        return least_seconds(costs, replicate=call.may_replicate, **arguments)

    def _prediction(self, call: Call, costs: list[LayerCost], links: tuple[float, float]) -> Prediction | None:
        return self.costs.prediction(call, costs, links, functools.partial(self._residency, call))


def _least(budgets_bytes: Iterable[int | None]) -> int | None:
    return min((budget for budget in budgets_bytes if budget is not None), default=None)
