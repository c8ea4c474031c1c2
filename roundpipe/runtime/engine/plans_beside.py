"""Plans in the memory that is left beside trained weights that stay, of all layers or of some.

Of some, the first layers stay: their gradients come last and their new weights are needed first, so that streaming them
is what is hidden the least. A parameter of several layers stays for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from roundpipe.core.errors import DeviceMemoryError
from roundpipe.core.execute_plan import ExecutePlan, ScheduleKind
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import Schedule, make_schedule
from roundpipe.planning.planner import PlanArguments, has_plan, least_seconds
from roundpipe.planning.planner import plan as choose_plan
from roundpipe.planning.residency import (
    Residency,
    choose_residency,
    full_residency,
    trained_residency,
    with_weights_home,
)
from roundpipe.planning.stage_costs import StageCosts, plan_peak_bytes, plan_seconds
from roundpipe.reports.tables import format_bytes
from roundpipe.runtime.engine.chain_record import Room
from roundpipe.runtime.engine.cost_model import CostModel, Prediction
from roundpipe.runtime.engine.spec import Call

EIGHTHS = range(8, 0, -1)
"""Of the most layers that fit, those that are looked at."""


class OptimizerFacts(Protocol):
    """What plans ask of the optimizer's side: that of a run, or one that a forecast makes up."""

    @property
    def has_twins(self) -> bool:
        """Whether trained weights live on the device."""

    @property
    def is_unasked(self) -> bool:
        """Whether they do without that anyone has asked for it."""

    @property
    def may_stay_unasked(self) -> bool:
        """Whether nothing has shown that then they had better not."""

    @property
    def is_over(self) -> bool:
        """Whether all stays on the host from now on, unless somebody asks."""

    @property
    def is_async(self) -> bool:
        """Whether updates run beside rounds."""

    @property
    def adds_up(self) -> bool:
        """Whether rounds add to gradients that those before have brought."""

    def suits(self) -> bool:
        """Whether copies may go to the device without that anyone has asked for it."""

    def foresees(self) -> bool:
        """Whether it is known before the first step which optimizers make it, and nothing speaks against a move."""

    @property
    def homes(self) -> Mapping[int, int]:
        """The model's parameters that live on a device, by their identities, and the worker whose it is."""

    def rest(self) -> None:
        """Return when no round and no update is under way, so that nothing is measured meanwhile."""

    def on_host_s(self) -> tuple[float, float] | None:
        """Seconds of an update on the host, its hand-over among them, and of a step; None: not known, or of no use."""

    def end_measuring(self) -> None:
        """It was decided that nothing leaves the host."""

    def device_bytes(self, parameters: Collection[torch.Tensor]) -> int:
        """What copies of these with their gradients and states would take of a device, and an update besides."""


@dataclass(frozen=True, slots=True)
class Stays:
    """What stays, and what a step takes."""

    residency: Residency
    seconds: float
    """Per step, those of updates among them if ``has_updates``."""
    has_updates: bool


@dataclass(frozen=True, slots=True)
class PlanBeside(Stays):
    """A plan, and what stays beside it."""

    plan: ExecutePlan
    room: Room


@dataclass(slots=True)
class KeptBeside:
    """What calls that are alike have of such a plan."""

    found: PlanBeside | None = None
    """None: nothing fits, or it is slower."""
    is_proven: bool = False
    looked_at: int = 0
    """Measured steps when it was chosen."""
    is_final: bool = False
    """Whether it was looked at again since."""
    device_bytes: int | None = None
    """Memory for plans that there was when it was chosen."""

    def take(self, more_bytes: int) -> bool:
        """Leave so much more memory over, or less; False if it does not fit any more."""
        if self.found is None:
            return True
        room = self.found.room
        if room.spare_bytes is not None:
            if room.spare_bytes + more_bytes < 0:
                return False
            room = room._replace(spare_bytes=room.spare_bytes + more_bytes)
        if room.others_bytes is not None:
            room = room._replace(others_bytes=room.others_bytes + more_bytes)
        self.found = replace(self.found, room=room)
        return True

    @property
    def layers(self) -> frozenset[int]:
        """Those whose trained weights live on the device."""
        return self.found.residency.trained if self.found is not None else frozenset()


def homes_of(call: Call, residency: Residency, plan: ExecutePlan, num_workers: int) -> dict[int, int]:
    """The parameters that live on a device, by their identities, and the worker whose it is."""
    owners = [0] * len(call.chain) if num_workers == 1 else plan.owners(num_workers)
    return {id(each): owners[index] for index in residency.trained for each in call.trained.get(index, ())}


def is_all(call: Call, found: Stays) -> bool:
    """Whether all layers stay."""
    return len(found.residency.trained) == len(call.chain)


def described(call: Call, found: Stays) -> str:
    """What stays, for the log."""
    number, num_bytes = len(found.residency.trained), format_bytes(found.residency.num_bytes)
    of = "" if is_all(call, found) else f" of {number} of {len(call.chain)} layers"
    return f"weights{of}, {num_bytes} with gradients and the optimizer's side,"


class PlansBeside:
    """Finds them for a call.

    Args:
        streamed: the plan without them, which is asked for where the user has given it.
        budget_bytes: for the plan and what stays.
        is_unasked: whether nobody has asked for weights to stay in training: the host's follow.
        may_win: told what a step takes at least, whether the best plan is worth a search; None: it always is, as it is
            for `of_those`.
    """

    _num_workers = 1

    def __init__(
        self,
        costs: CostModel,
        call: Call,
        streamed: ExecutePlan | None,
        budget_bytes: int,
        optimizer: OptimizerFacts,
        *,
        is_unasked: bool,
        may_win: Callable[[Stays], bool] | None = None,
    ) -> None:
        self._model, self._call, self._streamed = costs, call, streamed
        self._budget_bytes, self._optimizer, self._is_unasked = budget_bytes, optimizer, is_unasked
        self._may_win = may_win
        optimizer.rest()  # or what is compared with these plans would be of later measurements
        self._costs = costs.of(call.chain, costs.elements(call), call.tiles)
        self._trained = call.trained

    def keep_homes(self, plan_there: ExecutePlan | None) -> None:
        """Find only plans by which what lives on a device now would be there; it is by a plan, if any does."""

    def of_all(self) -> PlanBeside | None:
        """Everything stays; None: there is no plan."""
        optimizer_bytes = self._optimizer.device_bytes(self._parameters(self._trained))
        residency = full_residency(self._costs, optimizer_bytes, adds_up=self._optimizer.adds_up)
        return self._plan(residency, self._may_win)

    def of_those(self, there: Collection[int]) -> PlanBeside | None:
        """The layers stay that have certain parameters, given by their identities; None: there is no plan, or others.

        Frozen weights stay as there is room.
        """
        layers = [index for index, each in self._trained.items() if all(id(one) in there for one in each)]
        if {id(one) for one in self._parameters(layers)} != set(there):
            return None
        return self._plan(self._residency(layers))

    def seconds(self, found: PlanBeside) -> float:
        """What a plan takes that was found before, by what is known now."""
        residency = found.residency
        predict = self._prediction(residency)
        return self._seconds(found.plan, predict, residency.streamed(self._costs))

    def of_some(self, most_layers: int | None) -> Iterator[PlanBeside]:
        """Some layers stay: as many as fit, but at most so many, and then fewer."""
        low, high = 0, len(self._trained) if most_layers is None else min(most_layers, len(self._trained))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(self._first(middle)) else (low, middle - 1)
        for number in dict.fromkeys(low * eighths // 8 for eighths in EIGHTHS):
            if number and (found := self._plan(self._residency(self._first(number)), self._may_win)) is not None:
                yield found

    def _first(self, number: int) -> list[int]:
        """The first layers that have trained weights, and those that have no others than these."""
        first = list(self._trained)[:number]
        held = {id(one) for one in self._parameters(first)}
        return [index for index, each in self._trained.items() if all(id(one) in held for one in each)]

    def _parameters(self, layers: Iterable[int]) -> set[torch.Tensor]:
        return {parameter for index in layers for parameter in self._trained[index]}

    def _residency(self, layers: Sequence[int]) -> Residency:
        optimizer_bytes = self._optimizer.device_bytes(self._parameters(layers))
        return trained_residency(self._costs, layers, optimizer_bytes, adds_up=self._optimizer.adds_up)

    def _arguments(self, left_bytes: int) -> PlanArguments:
        return PlanArguments(
            num_workers=self._num_workers,
            num_microbatches=self._call.num_microbatches,
            memory_budget_bytes=left_bytes,
            recompute_grain=self._call.config.recompute_grain,
            names=[spec.name for spec in self._call.chain.specs],
        )

    def _fits(self, layers: Sequence[int]) -> bool:
        residency = self._residency(layers)
        there, left_bytes = residency.streamed(self._costs), self._left_bytes(residency)
        if left_bytes <= 0:
            return False
        if self._call.config.execute_plan is not None:
            return self._peak_bytes(there) <= left_bytes
        return has_plan(there, **self._arguments(left_bytes))

    def _left_bytes(self, residency: Residency) -> int:
        """For a plan beside what stays."""
        return self._budget_bytes - residency.num_bytes

    def _peak_bytes(self, costs: Sequence[LayerCost]) -> int:
        """Of the plan that the user has given."""
        number, grain = self._call.num_microbatches, self._call.config.recompute_grain
        assert self._streamed is not None
        return plan_peak_bytes(
            self._streamed, costs, num_workers=self._num_workers, recompute_grain=grain, is_alone=number == 1
        )

    def _plan(self, residency: Residency, may_win: Callable[[Stays], bool] | None = None) -> PlanBeside | None:
        call, links = self._call, self._links
        if self._is_unasked:
            residency = with_weights_home(residency, self._costs)
        there, left_bytes = residency.streamed(self._costs), self._left_bytes(residency)
        predict = self._prediction(residency)
        has_updates = predict is not None and self._model.chain_of(call) is not None
        plan: ExecutePlan | None = None
        if call.config.execute_plan is not None:
            plan = self._streamed if self._peak_bytes(there) <= left_bytes else None
        elif left_bytes > 0:
            arguments = self._arguments(left_bytes)
            if may_win and not may_win(Stays(residency, least_seconds(there, **arguments), has_updates)):
                return None
            if may_win and has_updates and not may_win(Stays(residency, self._computed_s, has_updates)):
                return None
            try:
                plan = choose_plan(there, **arguments, predict=predict, link_bytes_per_s=min(links))
            except DeviceMemoryError:
                plan = None
        return None if plan is None else self._found(plan, residency, predict)

    @functools.cached_property
    def _computed_s(self) -> float:
        """What a step would take if nothing stayed, moved or was updated: with less memory no plan takes less."""
        try:
            plan = choose_plan(self._costs, **self._arguments(self._budget_bytes))
        except DeviceMemoryError:
            return 0.0
        tasks_s = self._model.tasks_s(plan.num_stages, self._call.num_microbatches)
        return self._seconds(plan, None, self._costs) + tasks_s

    def _found(self, plan: ExecutePlan, residency: Residency, predict: Prediction | None) -> PlanBeside:
        has_updates = predict is not None and self._model.chain_of(self._call) is not None
        seconds = self._seconds(plan, predict, residency.streamed(self._costs))
        return PlanBeside(residency, seconds, has_updates, plan, self._room(plan, residency))

    @property
    def _links(self) -> tuple[float, float]:
        return self._model.links(self._call.chain, self._call.tiles)

    def _prediction(self, residency: Residency) -> Prediction | None:
        """Seconds per step of plans beside what stays, if the simulator is asked."""

        def stays(schedule: Schedule, costs: StageCosts) -> Residency:
            return choose_residency(schedule, costs, self._budget_bytes, residency)

        return self._model.prediction(self._call, self._costs, self._links, stays)

    def _seconds(self, plan: ExecutePlan, predict: Prediction | None, there: Sequence[LayerCost]) -> float:
        if predict is not None:
            return predict(plan)
        return plan_seconds(plan, there, num_workers=self._num_workers, num_microbatches=self._call.num_microbatches)

    def _room(self, plan: ExecutePlan, trained: Residency) -> Room:
        """What stays beside a plan in all, and what is left."""
        call, costs = self._call, self._costs
        if call.is_evaluation:
            others = (replace(cost, gradient_bytes=0) for cost in costs)
            costs = [costs[index] if index in trained.trained else cost for index, cost in enumerate(others)]
        ranges = StageCosts(costs, call.config.recompute_grain, is_alone=call.num_microbatches == 1)
        kind: ScheduleKind = "forward" if call.is_evaluation or plan.fused is None else "train"
        schedule = make_schedule(plan, self._num_workers, call.num_microbatches, kind=kind)
        has_all = len(trained.layers) == len(costs)
        residency = trained if has_all else choose_residency(schedule, ranges, self._budget_bytes, trained)
        spare_bytes = max(self._budget_bytes - residency.peak_bytes(schedule, ranges), 0)
        return Room(residency, spare_bytes, None if has_all else spare_bytes)
