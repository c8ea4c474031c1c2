"""Plans of calls while trained weights live on devices, with gradients and the optimizer's side.

Where there is room all of them do, and only values are moved; else those of some layers (`plans_beside`). On several
workers, each layer lives on the device of one of them (`owned_plans_beside`). With ``residency="full"`` such a plan is
taken, on one worker if it is predicted to be no slower than the one that streams; with ``"auto"``, on an accelerator,
once it is known what updates take on the host, if it is faster by enough and nobody will notice
(`roundpipe.runtime.optimizer.unasked`). Where everything has room by far, that is before the first step. Once a step
has run out of memory fewer layers stay, or none if all had.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.layers import LayerChain
from roundpipe.core.tiling import UNTILED
from roundpipe.planning.residency import DEVICE_BYTES_PER_S, trained_residency
from roundpipe.runtime.engine.chain_record import Room, has_grown
from roundpipe.runtime.engine.cost_model import CostModel
from roundpipe.runtime.engine.owned_plans_beside import OwnedPlansBeside
from roundpipe.runtime.engine.plans_beside import (
    KeptBeside,
    OptimizerFacts,
    PlanBeside,
    PlansBeside,
    Stays,
    described,
    homes_of,
    is_all,
)
from roundpipe.runtime.engine.spec import Call
from roundpipe.runtime.engine.tile_choice import given_tiles

logger = logging.getLogger(__name__)

FULL = "full"
MEASURED_BEFORE = 4
"""Measured steps by such a plan before another look at its stages."""
AUTO_GAIN = 0.03
"""Share of a step's time that such a plan must be predicted to save before it is taken unasked."""
MOST_SLOWER = 0.03
"""Share by which a plan with fewer layers may be slower than the best so far, and still fewer are looked at."""
ROOMY_SHARE = 0.75
"""Of the memory for plans, what is enough for everything before anything was measured."""
LEAST_AT_ONCE_BYTES = 2**28
"""Of gradients of weights that are not to move later; fewer move, with all that is theirs, in a moment."""


class FullPlans:
    """Chooses them for a model.

    Args:
        accelerators: whether workers are on some; else ``"auto"`` streams: a CPU worker has the host's memory.
    """

    def __init__(self, costs: CostModel, accelerators: bool = False) -> None:
        self._costs = costs
        self.device_bytes: int | None = None
        """Memory that there is for plans; None: no limit."""
        self._accelerators = accelerators
        self._optimizer: OptimizerFacts | None = None
        self._may: Callable[[Call], bool] = lambda call: False
        self._kept: weakref.WeakKeyDictionary[LayerChain, dict[Any, KeptBeside]] = weakref.WeakKeyDictionary()
        self._budget_bytes: int | None = None
        self._has_all = False
        """Whether, where trained weights live on the device, all do."""
        self._most_layers: int | None = None
        """That may stay, since a step with more ran out of memory; None: all."""
        self._latest_plan: ExecutePlan | None = None
        self._told = ""
        self.is_over = False
        """Whether there was too little memory."""
        self.may_look_again = False
        """Whether an update has begun since the latest plan, so that the next one may be another."""

    def allow(self, may: Callable[[Call], bool], optimizer: OptimizerFacts) -> None:
        """``may``: whether a call's weights may live on the device."""
        self._may, self._optimizer = may, optimizer

    def wants(self, call: Call) -> bool:
        """Whether a call's plan is one of these, or is to be chosen among them now."""
        if self.is_over or self._optimizer is None or call.config.residency == "off" or not self._may(call):
            return False
        return call.config.residency == FULL or self._is_due(call, self._optimizer)

    def _is_due(self, call: Call, optimizer: OptimizerFacts) -> bool:
        """Whether with ``"auto"`` weights live on the device, or it is known what speaks for it."""
        if optimizer.has_twins:
            return optimizer.may_stay_unasked or not optimizer.is_unasked
        if (kept := self._of(call)) is not None:
            return kept.found is not None and not optimizer.is_over
        if not (self._accelerators and self._costs.is_measured(call.chain, call.tiles)):
            return False
        costs = self._costs.of(call.chain, self._costs.elements(call), call.tiles)
        least_bytes = min((trained_residency(costs, [index], 0).num_bytes for index in call.trained), default=0)
        if least_bytes > (self._budget_bytes or 0):
            self._keep(call, KeptBeside())
            return False
        return optimizer.on_host_s() is not None

    def instead(
        self, call: Call, streamed: ExecutePlan, streamed_s: Callable[[], float], budget_bytes: int | None
    ) -> ExecutePlan:
        """The plan for a call, if it may take the place of the one that streams; sets `Call.has_twins`."""
        call.has_twins, self._budget_bytes = False, budget_bytes
        record = self._costs.record(call.chain)
        if not (self.wants(call) or self._begins_at_once(call, streamed, streamed_s, budget_bytes)):
            return streamed
        if budget_bytes is None or not (call.chain.example_elements or record.memory()):
            self.is_over |= call.config.residency != FULL  # or it would be asked at each call
            return streamed
        there = self._there(call)
        if (kept := self._of(call)) is None or (there and not self._has_homes(call, kept.found, there)):
            kept = self._choose(call, streamed, streamed_s, budget_bytes, there)
            self._keep(call, kept)
            if kept.found is None and self._optimizer is not None and not self._optimizer.has_twins:
                self._optimizer.end_measuring()
        if kept.found is None:
            return streamed
        self._look_again(call, kept, streamed, budget_bytes, there)
        call.has_twins, self._has_all = True, len(kept.layers) == len(call.chain)
        self._latest_plan = kept.found.plan
        if not there and not call.is_evaluation:
            self._costs.measure_anew(call.chain)
        return kept.found.plan

    def goes_on(self, call: Call, budget_bytes: int | None) -> ExecutePlan | None:
        """The plan for a call while everything lives on the device, if it has room there; sets `Call.has_twins`.

        What streaming would take is not asked, which is looked for longer. None: it is to be asked.
        """
        optimizer, config = self._optimizer, call.config
        is_free = config.execute_plan is None and not given_tiles(config)
        if optimizer is None or budget_bytes is None or not (is_free and self._has_all and optimizer.has_twins):
            return None
        call.tiles = UNTILED
        if self._most_layers is not None or not self.wants(call) or not call.chain.example_elements:
            return None
        kept, there = self._of(call), self._there(call)
        if kept is None or kept.found is None or not self._has_homes(call, kept.found, there):
            is_unasked = config.residency != FULL and not call.is_evaluation
            if is_unasked and not optimizer.suits():
                return None
            found = self._plans(call, None, budget_bytes, is_unasked=is_unasked).of_all()
            if found is None or not self._has_homes(call, found, there):
                return None
            self._keep(call, kept := KeptBeside(found))
            self._costs.record(call.chain).add_size(self._costs.elements(call))
        assert kept.found is not None
        call.has_twins = True
        return kept.found.plan

    def _plans(
        self,
        call: Call,
        streamed: ExecutePlan | None,
        budget_bytes: int,
        *,
        is_unasked: bool,
        may_win: Callable[[Stays], bool] | None = None,
    ) -> PlansBeside:
        optimizer = self._optimizer
        assert optimizer is not None
        kind = PlansBeside if self._costs.num_workers == 1 else OwnedPlansBeside
        plans = kind(self._costs, call, streamed, budget_bytes, optimizer, is_unasked=is_unasked, may_win=may_win)
        plans.keep_homes(self._latest_plan if optimizer.has_twins else None)
        return plans

    def _begins_at_once(
        self, call: Call, streamed: ExecutePlan, streamed_s: Callable[[], float], budget_bytes: int | None
    ) -> bool:
        """Whether everything is to live on the device from the first step on; keeps the plan.

        Where it has room by far, nothing that is measured meanwhile would change that. What the optimizer makes is made
        there, where it was made on the host, in memory that is touched for the first time, and moved some steps later.
        """
        optimizer, config = self._optimizer, call.config
        is_free = config.residency == "auto" and config.execute_plan is None and not call.is_evaluation
        if optimizer is None or budget_bytes is None or self.is_over or not (is_free and self._accelerators):
            return False
        costs = self._costs.of(call.chain, self._costs.elements(call), call.tiles)
        is_large = sum(cost.gradient_bytes for cost in costs) >= LEAST_AT_ONCE_BYTES
        knows_memory = call.chain.example_elements or self._costs.record(call.chain).memory()
        if not (is_large and knows_memory and self._of(call) is None and optimizer.foresees() and self._may(call)):
            return False
        plans = self._plans(call, streamed, int(ROOMY_SHARE * budget_bytes), is_unasked=True)
        if (found := plans.of_all()) is None or found.seconds > (1 + MOST_SLOWER) * streamed_s():
            return False
        self._tell(f"{described(call, found)} live on the device from the first step on")
        self._keep(call, KeptBeside(found))
        return True

    def _look_again(
        self, call: Call, kept: KeptBeside, streamed: ExecutePlan, budget_bytes: int, there: frozenset[int]
    ) -> None:
        """Once its steps were measured, take other stages beside the same layers, if they are faster by enough."""
        num_steps = self._costs.num_steps(call.chain, call.tiles)
        is_free = not call.is_evaluation and call.config.execute_plan is None and len(kept.layers) < len(call.chain)
        is_due = self.may_look_again and not kept.is_final and num_steps >= kept.looked_at + MEASURED_BEFORE
        found = kept.found
        if not (is_free and is_due and there and kept.is_proven) or found is None or self._optimizer is None:
            return
        kept.is_final = True
        is_unasked = call.config.residency != FULL
        plans = self._plans(call, streamed, budget_bytes, is_unasked=is_unasked)
        again, present_s = plans.of_those(there), plans.seconds(found)
        if again is None or again.plan == found.plan or again.seconds > (1 - AUTO_GAIN) * present_s:
            return
        logger.info(
            "new plan beside what lives on the device: %d stages instead of %d, predicted %.3g s per step instead of "
            "%.3g s",
            again.plan.num_stages,
            found.plan.num_stages,
            again.seconds,
            present_s,
        )
        kept.found, kept.is_proven = again, False

    def _there(self, call: Call) -> frozenset[int]:
        """The parameters of a call's layers that live on the device, by their identities."""
        if self._optimizer is None or not self._optimizer.has_twins:
            return frozenset()
        return frozenset(self._optimizer.homes.keys() & map(id, itertools.chain.from_iterable(call.parameters)))

    def _has_homes(self, call: Call, found: PlanBeside | None, there: frozenset[int]) -> bool:
        """Whether by a plan, if there is one, what lives on devices now would, and where it does."""
        if found is None or self._optimizer is None:
            return True
        homes = homes_of(call, found.residency, found.plan, self._costs.num_workers)
        known = self._optimizer.homes
        return homes.keys() == there and all(known[key] == worker for key, worker in homes.items())

    def _key(self, call: Call) -> tuple[Any, ...]:
        return (
            call.num_microbatches,
            self._costs.size_of(call),
            call.config.recompute_grain,
            call.tiles,
            call.config.execute_plan,
            call.config.residency,
            call.is_evaluation,
            call.is_evaluation and self._optimizer is not None and self._optimizer.has_twins,
            self._optimizer is not None and self._optimizer.adds_up,
        )

    def _of(self, call: Call) -> KeptBeside | None:
        return self._kept.get(call.chain, {}).get(self._key(call))

    def _keep(self, call: Call, kept: KeptBeside) -> None:
        kept.looked_at, kept.device_bytes = self._costs.num_steps(call.chain, call.tiles), self.device_bytes
        self._kept.setdefault(call.chain, {})[self._key(call)] = kept

    def _choose(
        self,
        call: Call,
        streamed: ExecutePlan,
        streamed_s: Callable[[], float],
        budget_bytes: int,
        there: frozenset[int],
    ) -> KeptBeside:
        """The plan for a call; with the parameters that are ``there``, by their identities, if that is some layers'."""
        assert self._optimizer is not None
        is_unasked = call.config.residency != FULL
        is_trained_unasked = is_unasked and not call.is_evaluation
        if is_trained_unasked and not self._optimizer.suits():
            return KeptBeside()
        before_s, weighs = functools.cache(streamed_s), is_unasked and not self._optimizer.has_twins
        least_gain = AUTO_GAIN if weighs else 0.0
        best: tuple[float, PlanBeside] | None = None

        def is_better(limit_s: float, seconds: float) -> bool:
            return seconds <= (1 - least_gain) * limit_s and (best is None or seconds < best[0])

        def may_win(stays: Stays) -> bool:
            limit_s, seconds = self._compared(call, stays, before_s())
            if is_better(limit_s, seconds):
                return True
            if weighs:
                self._tell_step(call, stays, f"takes at least {seconds:.3g} s", limit_s)
            return False

        plans = self._plans(call, streamed, budget_bytes, is_unasked=is_trained_unasked, may_win=may_win)
        if there and not self._has_all and (found := plans.of_those(there)) is not None:
            return KeptBeside(found)
        for found in self._candidates(call, plans, there):
            limit_s, seconds = self._compared(call, found, before_s())
            if weighs:
                self._tell_step(call, found, f"is predicted to take {seconds:.3g} s", limit_s)
            if is_better(limit_s, seconds):
                best = seconds, found
            is_slower = best is not None and seconds > (1 + MOST_SLOWER) * best[0]  # and so are fewer layers
            if best is not None and (not weighs or is_all(call, found) or is_slower):
                break
        if best is None:
            self._tell("weights, gradients and the optimizer's side are streamed, or stay on the host")
            return KeptBeside()
        self._tell(f"{described(call, best[1])} live on the device")
        return KeptBeside(best[1])

    def _tell(self, outcome: str) -> None:
        """Log where things are, unless that is what was said last: sizes of batches that alternate come to the same."""
        if outcome != self._told:
            logger.info(outcome)
            self._told = outcome

    def _tell_step(self, call: Call, stays: Stays, takes: str, limit_s: float) -> None:
        logger.info("with %s on the device a step %s instead of %.3g s", described(call, stays), takes, limit_s)

    def _candidates(self, call: Call, plans: PlansBeside, there: frozenset[int]) -> Iterator[PlanBeside]:
        """All stays, if it may and that is not too much; else some layers, the most first."""
        if self._most_layers is None and (self._has_all or not there) and (found := plans.of_all()) is not None:
            yield found
        if not call.is_evaluation:  # for which fewer layers would have to stay in training, too
            yield from plans.of_some(self._most_layers)

    def _compared(self, call: Call, found: Stays, before_s: float) -> tuple[float, float]:
        """Seconds per step of which such a plan must not take more, and those that it takes."""
        assert self._optimizer is not None
        if call.config.residency == FULL or self._optimizer.has_twins:
            is_free = call.config.execute_plan is None and self._costs.num_workers == 1  # several others may rotate
            return (before_s * (1 + 1e-9) if is_free else inf), found.seconds
        return self._with_updates(call, before_s, found)

    def _with_updates(self, call: Call, streamed_s: float, found: Stays) -> tuple[float, float]:
        """Seconds per step with updates: on the host, beside the next round or alone, and on the device.

        Where nothing is streamed any more, what steps have taken counts if it is more than predicted: streaming keeps
        the host busy.
        """
        assert self._optimizer is not None
        costs, layers = call.chain.costs, found.residency.trained
        update_s, step_s = self._optimizer.on_host_s() or (0.0, 0.0)
        if found.has_updates:  # and so has what streams
            return max(streamed_s, step_s) if is_all(call, found) else streamed_s, found.seconds
        of_all, there = (sum(costs[i].gradient_bytes for i in each) for each in (range(len(costs)), layers))
        rest_s, found_s = update_s * (1 - there / max(of_all, 1)), found.seconds
        if self._optimizer.is_async:
            streamed_s, found_s = max(streamed_s, update_s), max(found_s, rest_s)
        else:
            _, down_bytes_per_s = self._costs.links(call.chain, call.tiles)
            streamed_s += update_s
            found_s += rest_s + there / down_bytes_per_s  # new weights, home
        if is_all(call, found):
            streamed_s = max(streamed_s, step_s)
        return streamed_s, found_s + found.residency.most.update_s(DEVICE_BYTES_PER_S)

    def budget_changed(self, device_bytes: int) -> None:
        """Keep what still fits in what there is now, if that is no more than when it was chosen, or all stays."""
        more_bytes, self.device_bytes = device_bytes - (self.device_bytes or 0), device_bytes
        for chain, plans in self._kept.items():
            for key, kept in list(plans.items()):
                has_all = len(kept.layers) == len(chain)
                if (has_grown(kept.device_bytes, device_bytes) and not has_all) or not kept.take(more_bytes):
                    del plans[key]

    def shrink(self, call: Call) -> None:
        """A step of a call's plan ran out of memory: fewer layers stay."""
        kept = self._of(call)
        layers = call.trained.keys() & (kept.layers if kept is not None else ())
        had_all = kept is not None and len(kept.layers) == len(call.chain)
        self._most_layers = 0 if had_all else len(layers) // 2
        self.is_over |= not self._most_layers
        self._kept.clear()
        if self._optimizer is not None:
            self._optimizer.end_measuring()

    def room(self, call: Call) -> Room:
        """What stays in a step of a call's plan."""
        kept = self._of(call)
        assert kept is not None and kept.found is not None
        return kept.found.room

    def plan_of(self, call: Call) -> ExecutePlan:
        """A call's plan, which it has."""
        kept = self._of(call)
        assert kept is not None and kept.found is not None
        return kept.found.plan

    def has_plan(self, call: Call) -> bool:
        """Whether a call has such a plan."""
        kept = self._of(call)
        return kept is not None and kept.found is not None

    def is_proven(self, call: Call) -> bool:
        """Whether a step has run by a call's plan, or there is none."""
        kept = self._of(call)
        return kept is not None and (kept.is_proven or kept.found is None)

    def prove(self, call: Call) -> None:
        if (kept := self._of(call)) is not None:
            kept.is_proven = True
