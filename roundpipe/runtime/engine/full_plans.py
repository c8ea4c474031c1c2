"""Plans of calls while trained weights live on the device, with ``residency="full"``: then only values are moved.

A plan is chosen for the memory that is left beside weights, gradients and the optimizer's side, and taken if it is
predicted to be no slower than the one that streams. Once a step of such a plan has run out of memory, all stream.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roundpipe.core.errors import DeviceMemoryError
from roundpipe.core.layers import LayerChain
from roundpipe.core.schedule import ExecutePlan
from roundpipe.planning.planner import plan as choose_plan
from roundpipe.planning.residency import Residency, full_residency
from roundpipe.planning.stage_costs import plan_peak_bytes, plan_seconds
from roundpipe.reports.tables import format_bytes
from roundpipe.runtime.engine.chain_record import Room
from roundpipe.runtime.engine.cost_model import CostModel
from roundpipe.runtime.engine.spec import Call

logger = logging.getLogger(__name__)

FULL = "full"


@dataclass(slots=True)
class _FullPlan:
    residency: Residency
    plan: ExecutePlan | None
    """None: it does not fit, or is slower."""
    is_proven: bool = False


class FullPlans:
    """Chooses them, for a model on one worker.

    Args:
        may: whether a call's weights may live on the device.
        device_bytes: what the optimizer's side takes there, or would.
    """

    def __init__(
        self,
        costs: CostModel,
        may: Callable[[Call], bool] = lambda call: False,
        device_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._costs = costs
        self._may = may
        self._device_bytes = device_bytes
        self._kept: weakref.WeakKeyDictionary[LayerChain, dict[Any, _FullPlan]] = weakref.WeakKeyDictionary()
        self.is_over = False
        """Whether there was too little memory."""

    def allow(self, may: Callable[[Call], bool], device_bytes: Callable[[], int]) -> None:
        self._may, self._device_bytes = may, device_bytes

    def wants(self, call: Call) -> bool:
        return call.config.residency == FULL and not self.is_over and self._may(call)

    def instead(
        self, call: Call, streamed: ExecutePlan, streamed_s: Callable[[], float], budget_bytes: int | None
    ) -> ExecutePlan:
        """The plan for a call, if it may take the place of the one that streams; sets `Call.is_full`."""
        call.is_full = False
        record = self._costs.record(call.chain)
        if budget_bytes is None or not (call.chain.example_elements or record.memory()) or not self.wants(call):
            return streamed
        if (kept := self._of(call)) is None:
            kept = self._choose(call, streamed, streamed_s, budget_bytes)
            self._kept.setdefault(call.chain, {})[self._key(call)] = kept
        call.is_full = kept.plan is not None
        return kept.plan or streamed

    def _key(self, call: Call) -> tuple[Any, ...]:
        return (
            call.num_microbatches,
            call.elements() if call.chain.example_elements else call.argument_bytes(),
            call.config.recompute_grain,
            call.tiles,
            call.config.execute_plan,
            call.is_evaluation,
        )

    def _of(self, call: Call) -> _FullPlan | None:
        return self._kept.get(call.chain, {}).get(self._key(call))

    def _choose(
        self, call: Call, streamed: ExecutePlan, streamed_s: Callable[[], float], budget_bytes: int
    ) -> _FullPlan:
        costs, grain = self._costs.of(call.chain, call.elements(), call.tiles), call.config.recompute_grain
        residency = full_residency(costs, self._device_bytes())
        left_bytes, there = budget_bytes - residency.num_bytes, residency.streamed(costs)
        number, links = call.num_microbatches, self._costs.links(call.chain, call.tiles)
        predict = self._costs.prediction(call, there, links)
        plan: ExecutePlan | None = None
        if call.config.execute_plan is not None:
            needed_bytes = plan_peak_bytes(streamed, there, num_workers=1, recompute_grain=grain, is_alone=number == 1)
            plan = streamed if needed_bytes <= left_bytes else None
        elif left_bytes > 0:
            try:
                plan = choose_plan(
                    there,
                    num_workers=1,
                    num_microbatches=number,
                    memory_budget_bytes=left_bytes,
                    recompute_grain=grain,
                    names=[spec.name for spec in call.chain.specs],
                    predict=predict,
                    link_bytes_per_s=min(links),
                )
            except DeviceMemoryError:
                plan = None
        if plan is None:
            logger.info(
                "weights, gradients and the optimizer's side would take %s; they are streamed",
                format_bytes(residency.num_bytes),
            )
            return _FullPlan(residency, None)
        if predict is not None:
            seconds = predict(plan)
        else:
            seconds = plan_seconds(plan, costs=there, num_workers=1, num_microbatches=number)
        if call.config.execute_plan is None and seconds > streamed_s() * (1 + 1e-9):
            return _FullPlan(residency, None)
        logger.info(
            "weights live on the device, %s with gradients and the optimizer's side", format_bytes(residency.num_bytes)
        )
        return _FullPlan(residency, plan)

    def room(self, call: Call) -> Room:
        """What stays in a step of a call's plan: everything."""
        kept = self._of(call)
        assert kept is not None
        return Room(kept.residency, None, 0)

    def is_proven(self, call: Call) -> bool:
        """Whether a step has run by a call's plan, or there is none."""
        kept = self._of(call)
        return kept is not None and (kept.is_proven or kept.plan is None)

    def prove(self, call: Call) -> None:
        if (kept := self._of(call)) is not None:
            kept.is_proven = True
