"""Plans in which each layer has one worker, and lives on its device with all that belongs to it, as there is room.

What lives on N devices is then N times as much. A layer that has trained weights in common with another worker's does
not live anywhere: its weights are streamed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.schedule import make_schedule
from roundpipe.planning.owned_plans import first_best, owned_plans
from roundpipe.planning.residency import Residency, full_residency, on_several, trained_residency, with_weights_home
from roundpipe.planning.stage_costs import StageCosts
from roundpipe.runtime.engine.plans_beside import EIGHTHS, PlanBeside, PlansBeside


class OwnedPlansBeside(PlansBeside):
    """Finds them for a call on several workers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._num_workers = self._model.num_workers
        self._plans: list[ExecutePlan] = []

    def keep_homes(self, plan_there: ExecutePlan | None) -> None:
        self._plans = list(self._candidates(plan_there))

    def _candidates(self, plan_there: ExecutePlan | None) -> Iterator[ExecutePlan]:
        """The plans by which every weight that lives on a device now would be there."""
        given, homes = self._call.config.execute_plan, self._optimizer.homes
        plans: Iterable[ExecutePlan] = owned_plans(self._costs, self._num_workers)
        if given is not None:
            plans = () if given.rotates or given.fused is None else (given,)
        elif plan_there is not None and plan_there.num_layers == len(self._costs):
            plans = (plan_there,)
        for plan in plans:
            owners = plan.owners(self._num_workers)
            if all(homes.get(id(one), owners[index]) == owners[index] for index, one in self._each_trained()):
                yield plan

    def _each_trained(self) -> Iterator[tuple[int, torch.Tensor]]:
        return ((index, one) for index, each in self._trained.items() for one in each)

    def of_all(self) -> PlanBeside | None:
        """Everything stays; None: there is no plan."""
        wholes = ((plan, self._by_worker(plan)) for plan in self._plans)
        number = len(self._trained)
        return self._best(((plan, of) for plan, of in wholes if sum(map(len, of.values())) == number), is_all=True)

    def of_those(self, there: Collection[int]) -> PlanBeside | None:
        """The layers stay that have certain parameters, given by their identities; None: as for one worker."""
        layers = {index for index, each in self._trained.items() if all(id(one) in there for one in each)}
        if {id(one) for one in self._parameters(layers)} != set(there):
            return None
        return self._best(
            (
                plan,
                {worker: [index for index in own if index in layers] for worker, own in self._by_worker(plan).items()},
            )
            for plan in self._plans
        )

    def of_some(self, most_layers: int | None) -> Iterator[PlanBeside]:
        """Some layers of each worker stay: as many as fit, but at most so many in all, and then fewer."""
        most = {plan: self._most(plan) for plan in self._plans}
        for eighths in EIGHTHS:
            part = {
                plan: {worker: own[: len(own) * eighths // 8] for worker, own in of.items()}
                for plan, of in most.items()
            }
            found = self._best(
                (plan, of)
                for plan, of in part.items()
                if 0 < (number := sum(map(len, of.values()))) and (most_layers is None or number <= most_layers)
            )
            if found is not None:
                yield found

    def _by_worker(self, plan: ExecutePlan) -> dict[int, list[int]]:
        """Per worker, its layers that may live on its device."""
        owners = plan.owners(self._num_workers)
        workers_of: defaultdict[int, set[int]] = defaultdict(set)
        for index, one in self._each_trained():
            workers_of[id(one)].add(owners[index])
        own: dict[int, list[int]] = {worker: [] for worker in range(self._num_workers)}
        for index, each in self._trained.items():
            if all(len(workers_of[id(one)]) == 1 for one in each):
                own[owners[index]].append(index)
        return own

    def _most(self, plan: ExecutePlan) -> dict[int, list[int]]:
        """Per worker, as many of its first layers as its device has room for beside the plan."""
        own = self._by_worker(plan)
        most: dict[int, list[int]] = {}
        for worker, layers in own.items():
            low, high = 0, len(layers)
            while low < high:
                middle = (low + high + 1) // 2
                alone = {each: layers[:middle] if each == worker else [] for each in own}
                low, high = (middle, high) if self._has_room(plan, self._stays(plan, alone)) else (low, middle - 1)
            most[worker] = layers[:low]
        return most

    def _stays(self, plan: ExecutePlan, layers: dict[int, list[int]], *, is_all: bool = False) -> Residency:
        """What stays if what is trained of these layers of each worker does, or everything."""
        adds_up, parts, owners = self._optimizer.adds_up, [], plan.owners(self._num_workers)
        for ring in plan.rings("train", self._num_workers):
            (worker,) = ring.workers
            own = layers.get(worker, [])
            optimizer_bytes = self._optimizer.device_bytes(self._parameters(own)) if own else 0
            if is_all:
                every = [index for index, owner in enumerate(owners) if owner == worker]
                part = full_residency(self._costs, optimizer_bytes, every, adds_up=adds_up)
            else:
                part = trained_residency(self._costs, own, optimizer_bytes, adds_up=adds_up)
            parts.append(with_weights_home(part, self._costs) if self._is_unasked else part)
        return on_several(parts)

    def _has_room(self, plan: ExecutePlan, residency: Residency) -> bool:
        if residency.num_bytes >= self._budget_bytes:
            return False
        number = self._call.num_microbatches
        costs = StageCosts(self._costs, self._call.config.recompute_grain, is_alone=number == 1)
        return residency.peak_bytes(make_schedule(plan, self._num_workers, number), costs) <= self._budget_bytes

    def _best(
        self, pairs: Iterable[tuple[ExecutePlan, dict[int, list[int]]]], *, is_all: bool = False
    ) -> PlanBeside | None:
        """The fastest of some plans beside which these layers have room.

        Where predictions know nothing of updates, the one with the most layers: these are what is not updated at home.
        """
        all_stays = ((plan, self._stays(plan, of, is_all=is_all)) for plan, of in pairs)
        fitting = (each for each in all_stays if self._has_room(*each))
        found = (self._found(plan, stays, self._prediction(stays)) for plan, stays in fitting)
        return first_best(found, lambda one: (-len(one.residency.trained) * (not one.has_updates), one.seconds))
