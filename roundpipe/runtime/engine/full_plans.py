"""Plans of calls while trained weights live on the device: then only values are moved.

A plan is chosen for the memory that is left beside weights, gradients and the optimizer's side. With
``residency="full"`` it is taken if it is predicted to be no slower than the one that streams; with ``"auto"``, on an
accelerator, once it is known what updates take on the host, if it is faster by enough and nobody will notice
(`roundpipe.runtime.optimizer.unasked`). Once a step of such a plan has run out of memory, all stream.
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
from roundpipe.runtime.optimizer.optimizer import OptimizerSide

logger = logging.getLogger(__name__)

FULL = "full"
AUTO_GAIN = 0.03
"""Share of a step's time that such a plan must be predicted to save before it is taken unasked."""
DEVICE_BYTES_PER_S = 2e12
"""What an update on an accelerator is taken to read and write of its memory."""


@dataclass(slots=True)
class _FullPlan:
    residency: Residency
    plan: ExecutePlan | None
    """None: it does not fit, or is slower."""
    is_proven: bool = False


class FullPlans:
    """Chooses them, for a model on one worker.

    Args:
        accelerators: whether the worker is on one; else ``"auto"`` streams: a CPU worker has the host's memory.
    """

    def __init__(self, costs: CostModel, accelerators: bool = False) -> None:
        self._costs = costs
        self._accelerators = accelerators
        self._optimizer: OptimizerSide | None = None
        self._may: Callable[[Call], bool] = lambda call: False
        self._kept: weakref.WeakKeyDictionary[LayerChain, dict[Any, _FullPlan]] = weakref.WeakKeyDictionary()
        self._budget_bytes: int | None = None
        self.is_over = False
        """Whether there was too little memory."""

    def allow(self, may: Callable[[Call], bool], optimizer: OptimizerSide) -> None:
        """``may``: whether a call's weights may live on the device."""
        self._may, self._optimizer = may, optimizer

    def wants(self, call: Call) -> bool:
        """Whether a call's plan is one of these, or is to be chosen among them now."""
        if self.is_over or self._optimizer is None or call.config.residency == "off" or not self._may(call):
            return False
        return call.config.residency == FULL or self._is_due(call, self._optimizer)

    def _is_due(self, call: Call, optimizer: OptimizerSide) -> bool:
        """Whether with ``"auto"`` weights live on the device, or it is known what speaks for it."""
        if optimizer.has_twins:
            return optimizer.may_stay_unasked or not optimizer.is_unasked
        if (kept := self._of(call)) is not None:
            return kept.plan is not None and not optimizer.is_over
        if not (self._accelerators and self._costs.is_measured(call.chain, call.tiles)):
            return False
        costs = self._costs.of(call.chain, call.elements(), call.tiles)
        if (residency := full_residency(costs, 0)).num_bytes > (self._budget_bytes or 0):
            self._keep(call, _FullPlan(residency, None))
            return False
        return optimizer.on_host_s() is not None

    def instead(
        self, call: Call, streamed: ExecutePlan, streamed_s: Callable[[], float], budget_bytes: int | None
    ) -> ExecutePlan:
        """The plan for a call, if it may take the place of the one that streams; sets `Call.is_full`."""
        call.is_full, self._budget_bytes = False, budget_bytes
        record = self._costs.record(call.chain)
        if not self.wants(call):
            return streamed
        if budget_bytes is None or not (call.chain.example_elements or record.memory()):
            self.is_over |= call.config.residency != FULL  # or it would be asked at each call
            return streamed
        if (kept := self._of(call)) is None:
            kept = self._choose(call, streamed, streamed_s, budget_bytes)
            self._keep(call, kept)
            if kept.plan is None and self._optimizer is not None and not self._optimizer.has_twins:
                self._optimizer.end_measuring()
        call.is_full = kept.plan is not None
        return kept.plan or streamed

    def _key(self, call: Call) -> tuple[Any, ...]:
        return (
            call.num_microbatches,
            call.elements() if call.chain.example_elements else call.argument_bytes(),
            call.config.recompute_grain,
            call.tiles,
            call.config.execute_plan,
            call.config.residency,
            call.is_evaluation,
        )

    def _of(self, call: Call) -> _FullPlan | None:
        return self._kept.get(call.chain, {}).get(self._key(call))

    def _keep(self, call: Call, kept: _FullPlan) -> None:
        self._kept.setdefault(call.chain, {})[self._key(call)] = kept

    def _choose(
        self, call: Call, streamed: ExecutePlan, streamed_s: Callable[[], float], budget_bytes: int
    ) -> _FullPlan:
        costs, grain = self._costs.of(call.chain, call.elements(), call.tiles), call.config.recompute_grain
        assert self._optimizer is not None
        device_bytes, is_unasked = self._optimizer.device_bytes(), call.config.residency != FULL
        residency = full_residency(costs, device_bytes)
        left_bytes, there = budget_bytes - residency.num_bytes, residency.streamed(costs)
        if is_unasked and not call.is_evaluation:
            if not self._optimizer.suits():
                return _FullPlan(residency, None)
            left_bytes -= sum(2 * cost.gradient_bytes for cost in costs)  # an update may take twice what it should
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
        before_s = streamed_s()
        if is_unasked and not self._optimizer.has_twins:
            before_s, seconds = self._with_updates(call, before_s, seconds, device_bytes)
            is_faster = seconds <= (1 - AUTO_GAIN) * before_s
            logger.info("on the device a step is predicted to take %.3g s instead of %.3g s", seconds, before_s)
        else:
            is_faster = call.config.execute_plan is not None or seconds <= before_s * (1 + 1e-9)
        if not is_faster:
            return _FullPlan(residency, None)
        logger.info(
            "weights live on the device, %s with gradients and the optimizer's side", format_bytes(residency.num_bytes)
        )
        return _FullPlan(residency, plan)

    def _with_updates(self, call: Call, streamed_s: float, full_s: float, device_bytes: int) -> tuple[float, float]:
        """Seconds per step with updates: on the host, beside the next round or alone, and on the device.

        What steps have taken counts if it is more than predicted: streaming keeps the host busy.
        """
        assert self._optimizer is not None
        update_s, step_s = self._optimizer.on_host_s() or (0.0, 0.0)
        if self._optimizer.is_async:
            streamed_s = max(streamed_s, update_s)
        else:
            streamed_s += update_s
            _, down_bytes_per_s = self._costs.links(call.chain, call.tiles)
            full_s += sum(cost.gradient_bytes for cost in call.chain.costs) / down_bytes_per_s  # new weights, home
        return max(streamed_s, step_s), full_s + 2 * device_bytes / DEVICE_BYTES_PER_S

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
