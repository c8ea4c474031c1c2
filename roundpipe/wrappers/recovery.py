"""Out of device memory is an event, not an end: a step is planned anew and run again, with the same numbers.

What an attempt changed outside of its own values is put back first: random state, buffers and, as long as no step has
run by its plan, whatever Python the code of the layers and of the loss reaches. Gradients that it has added stay, and
the next attempt leaves them out; where a loss may have added some by itself (`host_gradients`), all are put back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from roundpipe.core.errors import DeviceMemoryError, add_note, release_frames, said
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.effects.run_once import FirstCall
from roundpipe.effects.snapshot import CodeSnapshot
from roundpipe.runtime.device.backend import OUT_OF_MEMORY
from roundpipe.runtime.engine.host_values import HostValues
from roundpipe.runtime.engine.plan_choice import PlanChooser
from roundpipe.runtime.engine.smaller_plans import proposal, shrink
from roundpipe.runtime.engine.spec import Call, StepSpec
from roundpipe.runtime.engine.step import StepState
from roundpipe.wrappers.host_gradients import HostGradients
from roundpipe.wrappers.session import Session

logger = logging.getLogger(__name__)


class CallSnapshot:
    """What a call may change before it ends; all that its code reaches if it is ``thorough``."""

    def __init__(self, call: Call, *, thorough: bool) -> None:
        self._random = torch.get_rng_state()
        self._code: list[FirstCall | CodeSnapshot] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        if thorough:
            self._code = [FirstCall(call.chain), CodeSnapshot([], call.loss_fn)]
        else:
            self._buffers = [(buffer, buffer.clone()) for buffer in call.inventory.buffers if not buffer.is_meta]

    def restore(self) -> None:
        torch.set_rng_state(self._random)
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        for snapshot in self._code:
            snapshot.restore()


def run_step(
    session: Session, plans: PlanChooser, call: Call, build: Callable[[], tuple[StepSpec, HostValues]]
) -> tuple[StepSpec, StepState]:
    """Run a step as it is built for a call; again with a plan that needs less memory, as long as there is one.

    Raises:
        DeviceMemoryError: no plan is known that fits.
    """
    for learn in session.engine.steps.take_short():
        learn()
    added: set[int] = set()
    before = gradients = None
    if plans.has_budget:
        is_first = not plans.is_proven(call)
        before = CallSnapshot(call, thorough=is_first)
        gradients = HostGradients(call.loss_fn, session.gradient_counts, session.wait_idle)
        gradients.note(call.chain.parameters() if is_first else (), keeps_values=is_first)
    while True:
        try:
            spec, values = build()
        except DeviceMemoryError as error:
            raise DeviceMemoryError(f"{error}. {plans.options.proposal(call)}") from None
        plan = spec.schedule.plan
        try:
            when_short = LateShortage(session, plans, call, plan)
            step = session.engine.run(spec, values, added=added, when_short=when_short)
        except OUT_OF_MEMORY as error:
            if before is None or gradients is None:  # nobody asked for a limit: the error is from the user's code
                raise
            reason = said(error).partition("\n")[0]
            release_frames(error)
            _release_memory(session, plans)
            if gradients.have_come and not gradients.can_restore:
                raise DeviceMemoryError(
                    f"{session.name} is out of memory, and its loss_fn has added gradients to tensors of the host, so "
                    f"that the call is not run again: {reason}. {proposal(plans, call, plan)}"
                ) from error
            if not shrink(plans, call, plan):
                raise DeviceMemoryError(
                    f"{session.name} is out of memory with {call.num_microbatches} microbatches, {plan.num_stages} "
                    f"stages and recompute_grain={call.config.recompute_grain!r}, and no plan is known that needs "
                    f"less: {reason}. {proposal(plans, call, plan)}"
                ) from error
            before.restore()
            call.look_again()
            if gradients.have_come:
                gradients.restore()
                added.clear()
            logger.warning(
                "%s ran out of device memory with %d stages and runs the call again with a smaller plan (%s). "
                "More microbatches, recompute_grain='layer' or tiles need less from the start",
                session.name,
                plan.num_stages,
                reason,
            )
        else:
            plans.prove(call)
            return spec, step


def _release_memory(session: Session, plans: PlanChooser) -> None:
    """Give back all device memory, and plan for what there is then."""
    session.optimizer.come_home()
    session.engine.release_memory()
    plans.set_budgets(session.engine.take_budgets())


@dataclass(frozen=True, slots=True)
class LateShortage:
    """What is done if a call's step runs out of memory and the call does not learn of it: see `Shortage`."""

    session: Session
    plans: PlanChooser
    call: Call
    plan: ExecutePlan

    def learn(self, reason: str) -> None:
        _release_memory(self.session, self.plans)
        has_smaller = shrink(self.plans, self.call, self.plan)
        logger.warning(
            "%s ran out of device memory with %d stages at the end of a round%s (%s). More microbatches, "
            "recompute_grain='layer' or tiles need less from the start",
            self.session.name,
            self.plan.num_stages,
            "; the next ones have a smaller plan" if has_smaller else "",
            reason,
        )

    def refusal(self, error: BaseException) -> DeviceMemoryError:
        """Has the notes of the error, whose tensors are let go of."""
        call, reason = self.call, said(error).partition("\n")[0]
        refusal = DeviceMemoryError(
            f"{self.session.name} is out of memory in a backward with {call.num_microbatches} microbatches, "
            f"{self.plan.num_stages} stages and recompute_grain={call.config.recompute_grain!r}, which is not run by "
            f"another plan: {reason}. {proposal(self.plans, call, self.plan)}"
        )
        for note in getattr(error, "__notes__", ()):
            add_note(refusal, note)
        release_frames(error)
        return refusal
