"""Which plan a call gets: the user's, or the planner's, by estimated costs until there are measured ones.

Plans are kept per chain, number of microbatches and size. What steps took is learned once they are over; the next step
behind an update then gets another plan, if that is predicted to be faster by enough. Options left to choice
(``"auto"``) are settled here too, before a batch is split.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.errors import DeviceMemoryError
from roundpipe.core.layers import ESTIMATED_LINK_BYTES_PER_S, LayerChain, LayerCost
from roundpipe.core.schedule import ExecutePlan, make_schedule
from roundpipe.planning.machine import HardwareProfile
from roundpipe.planning.planner import least_seconds
from roundpipe.planning.planner import plan as choose_plan
from roundpipe.planning.simulator import simulate
from roundpipe.planning.stage_costs import plan_peak_bytes, plan_seconds
from roundpipe.runtime.config import RECOMPUTE_GRAINS, RecomputeGrain, ResolvedConfig
from roundpipe.runtime.engine.chain_record import ChainRecord, KeptPlan, Limit, code_of, guess_memory, times_the_example
from roundpipe.runtime.engine.spec import Call
from roundpipe.runtime.microbatch.split import batch_size
from roundpipe.runtime.profiling.layer_times import LayerTimes, StepTimes

logger = logging.getLogger(__name__)

REPLAN_GAIN = 0.03
"""Share of a step's time that another plan must be predicted to save before it takes the place of the present one."""
SHORTEST_STEP_S = 0.02
"""Steps shorter than this keep their plan: what is measured of them is mostly noise."""
FIRST_REPLAN = 2
"""Measured steps before the first look at the plan; then four times as many each time."""
MEASURED_IN_A_ROW = 5
"""Steps of a chain that are measured from the start on; then every `MEASURED_EACH`-th."""
MEASURED_EACH = 8

MOST_SIMULATED = 4000
"""Visits of layers, times microbatches, of the largest steps that are simulated to choose among plans."""
MOST_SIMULATED_WORKERS = 2000
"""Workers, times microbatches, of such steps: a replay lasts until all workers have had several visits."""
TASK_S = 150e-6
"""Seconds that a worker needs for a microbatch of a stage beside what layers take; tells many small microbatches or
stages from few large ones, which cost the same otherwise."""

SHRINK = 0.85
"""Share of what a plan was predicted to need that the next one may, after a step ran out of memory."""
MOST_TRIES = 16
MOST_SIZES = 8
"""Sizes of microbatches whose memory is computed; that of others is scaled from the nearest."""

Prediction = Callable[[ExecutePlan], float]
"""Seconds per step of a plan."""
MemoryMeasure = Callable[[Call], "list[LayerCost] | None"]
"""Costs with the memory that layers take for the largest microbatch of a call, its loss included; None: unknown."""


class PlanChooser:
    """Chooses plans for the calls of one model.

    Args:
        budgets_bytes: per worker, what may be used of its device; None: no limit.
        link_speeds: measured bytes per second up and down, per worker; infinity before anything was measured.
        accelerators: whether some devices are not CPU workers. Then estimated seconds, which are an accelerator's, can
            be compared with what its link takes.
        measure: computes memory, where there is a budget; None: that of the chain's costs is what is known.
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
        self._link_speeds = link_speeds
        self._accelerators = accelerators
        self._measure = measure
        self._records: weakref.WeakKeyDictionary[LayerChain, ChainRecord] = weakref.WeakKeyDictionary()
        self._may_replan = False

    @property
    def has_budget(self) -> bool:
        return self._budget_bytes is not None

    def _of(self, chain: LayerChain) -> ChainRecord:
        """What is known of a chain, the steps that are over learned from."""
        record = self._records.get(chain)
        if record is None:
            record = self._records[chain] = ChainRecord(LayerTimes(chain.costs, chain.example_elements))
        while record.unread and record.unread[0][0].is_done:
            times, elements = record.unread.pop(0)
            if not times.failed:
                record.times.learn(times, elements)
        return record

    def plan(self, call: Call) -> ExecutePlan:
        """The plan of a call: the user's, or the planner's for microbatches of this size."""
        chain, config = call.chain, call.config
        if config.execute_plan is not None:
            config.execute_plan.validate(len(chain))
            return config.execute_plan
        record, key = self._of(chain), self._key(call)
        call.config = replace(config, recompute_grain=key[1])
        num_steps, kept = record.times.num_steps, record.plans.get(key)
        if kept is None:
            plan = self._choose(call, self.costs(chain, call.elements()), self._links(chain))
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
        record, number, size = self._of(call.chain), call.num_microbatches, self._size(call)
        limit = record.limits.get((number, size))
        loss = record.loss if record.memory else None
        return number, call.config.recompute_grain if limit is None else limit.grain, size, loss

    def is_proven(self, call: Call) -> bool:
        """Whether a step like a call's has run by its plan, or can't get another one."""
        kept = self._of(call.chain).plans.get(self._key(call))
        is_free = self._budget_bytes is not None and call.config.execute_plan is None
        return not is_free or (kept is not None and kept.is_proven)

    def prove(self, call: Call) -> None:
        """A call's step has run."""
        if (kept := self._of(call.chain).plans.get(self._key(call))) is not None:
            kept.is_proven = True

    def shrink(self, call: Call, plan: ExecutePlan) -> bool:
        """Take in that a step ran out of memory: the next plan needs less. False if none is known that does."""
        if call.config.execute_plan is not None:
            return False
        record, costs, before = self._of(call.chain), self.costs(call.chain, call.elements()), call.config
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
                    smaller = self._choose(call, costs, self._links(call.chain))
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

    def proposal(self, call: Call) -> str:
        """What to do about a call that does not fit, for a message: settings that are predicted to, if any."""
        number, samples = call.total_microbatches, batch_size(call.args[0], call.kwargs[0], call.config)
        most = inf if samples is None else samples * number
        numbers = [more for factor in (2, 4, 8, 16) if (more := number * factor) <= most]
        found = self._fastest(call.chain, numbers, RECOMPUTE_GRAINS, call.elements() * number)
        if found is None:
            return "Use a device with more memory, or shorter or fewer samples in a microbatch"
        return f"num_microbatch={found[0]} with recompute_grain={found[1]!r} is predicted to fit"

    def spare_bytes(self, call: Call, plan: ExecutePlan) -> int | None:
        """Device memory that a training plan leaves over, as predicted; None: there is no limit."""
        if self._budget_bytes is None:
            return None
        if not call.chain.example_elements and not self._of(call.chain).memory:
            return 0  # nobody knows
        spare = self._of(call.chain).spare_bytes
        if (key := (*self._key(call), plan)) not in spare:
            costs, grain = self.costs(call.chain, call.elements()), call.config.recompute_grain
            needed = plan_peak_bytes(plan, costs, num_workers=self._num_workers, recompute_grain=grain)
            spare[key] = max(self._budget_bytes - needed, 0)
        return spare[key]

    def update_begun(self) -> None:
        """The optimizer was given an update: the next step may have another plan."""
        self._may_replan = True

    def measure_memory(self, call: Call) -> None:
        """Compute what a call's layers and its loss take, if plans have a budget and the call's size is a new one."""
        if self._budget_bytes is None or self._measure is None:
            return
        record, elements = self._of(call.chain), call.elements()
        if call.loss_fn is not None:
            record.loss = code_of(call.loss_fn)
        computed = record.computed.setdefault(record.loss, {})
        if elements not in computed and len(computed) < MOST_SIZES:
            computed[elements] = self._measure(call)

    def costs(self, chain: LayerChain, elements: int) -> list[LayerCost]:
        """Costs of a chain's layers for a microbatch of so many elements: measured ones once there are any."""
        record = self._of(chain)
        if self.is_measured(chain):
            costs = record.times.costs(elements)
        else:
            costs = [cost.scaled(times_the_example(chain, elements)) for cost in chain.costs]
        if not (known := record.memory):
            return costs
        nearest = min(known, key=lambda size: abs(size - elements))
        memory = (cost.scaled(elements / max(nearest, 1)) for cost in known[nearest])
        return [cost.with_memory_of(other) for cost, other in zip(costs, memory, strict=True)]

    def measured(self, chain: LayerChain) -> list[LayerCost] | None:
        """Measured costs for a microbatch like the example, or like the first one; None before there are any."""
        return self.costs(chain, self._of(chain).times.example_elements) if self.is_measured(chain) else None

    def is_measured(self, chain: LayerChain) -> bool:
        """Whether costs rest on measured times.

        With deterministic algorithms asked of torch they never do, so that plans, and with them the order of
        summation, are the same in every run.
        """
        return self._of(chain).times.num_steps > 0 and not torch.are_deterministic_algorithms_enabled()

    def _choose(self, call: Call, costs: list[LayerCost], links: tuple[float, float]) -> ExecutePlan:
        choose = functools.partial(
            choose_plan,
            num_workers=self._num_workers,
            num_microbatches=call.num_microbatches,
            recompute_grain=call.config.recompute_grain,
            names=[spec.name for spec in call.chain.specs],
            predict=self._prediction(call, costs, links),
            link_bytes_per_s=min(links),
        )
        limit = self._of(call.chain).limits.get((call.num_microbatches, self._size(call)))
        budget_bytes = self._budget_bytes if limit is None else limit.budget_bytes
        if budget_bytes is None:
            return choose(costs)
        if not self._of(call.chain).memory:
            with contextlib.suppress(DeviceMemoryError):  # a guess must not refuse what may fit
                return choose(guess_memory(costs, call), memory_budget_bytes=budget_bytes)
        return choose(costs, memory_budget_bytes=budget_bytes)

    def _replanned(self, call: Call, present: ExecutePlan) -> ExecutePlan:
        """The best plan by what was measured, if it is better by enough; else the present one."""
        if not self.is_measured(call.chain) or present.fused is None:
            return present
        costs, links = self.costs(call.chain, call.elements()), self._link_speeds()
        seconds = self._prediction(call, costs, links) or functools.partial(  # the latter leaves transfers out
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

    def _links(self, chain: LayerChain) -> tuple[float, float]:
        """Bytes per second up and down that go with a chain's costs: measured, or estimated for accelerators."""
        if self.is_measured(chain):
            return self._link_speeds()
        if self._accelerators and chain.example_elements:
            return ESTIMATED_LINK_BYTES_PER_S, ESTIMATED_LINK_BYTES_PER_S
        return inf, inf

    def _prediction(self, call: Call, costs: Sequence[LayerCost], links: tuple[float, float]) -> Prediction | None:
        """The simulator's seconds per step of a plan; None if transfers take no time, or the simulator too much."""
        number, workers, grain = call.num_microbatches, self._num_workers, call.config.recompute_grain
        up, down = links
        is_large = 2 * len(costs) * number > MOST_SIMULATED or workers * number > MOST_SIMULATED_WORKERS
        if min(up, down) == inf or is_large:
            return None
        profile = HardwareProfile.of_devices(self._accelerators, upload_bytes_per_s=up, download_bytes_per_s=down)

        @functools.cache
        def seconds(plan: ExecutePlan) -> float:
            result = simulate(make_schedule(plan, workers, number), costs, profile, recompute_grain=grain)
            return result.seconds_per_step + self._tasks_s(plan.num_stages, number)

        return seconds

    def _tasks_s(self, num_stages: int, num_microbatches: int) -> float:
        """Seconds per step that workers need beside what layers take."""
        return TASK_S * num_stages * num_microbatches / self._num_workers

    def times_of(self, call: Call) -> StepTimes | None:
        """Where to note what a training step takes, if it is its turn to be measured; else None."""
        if trees.tensors([call.args, call.kwargs]) and not call.elements():
            return None  # without samples it tells nothing
        record = self._of(call.chain)
        record.num_steps += 1
        is_due = record.num_steps <= MEASURED_IN_A_ROW or record.num_steps % MEASURED_EACH == 1
        return StepTimes() if is_due else None

    def learn_from(self, times: StepTimes | None, call: Call) -> None:
        """Take in what a step took, once it is over; the step has begun."""
        if times is not None:
            self._of(call.chain).unread.append((times, call.elements()))

    def settle(
        self, config: ResolvedConfig, chain: LayerChain | None, batch_size: int | None, elements: int
    ) -> ResolvedConfig:
        """The options with what was left to choice (``"auto"``) chosen: the fastest that is predicted to fit.

        Without a chain, before anything was traced, built-in options serve. Without a known batch size no number of
        microbatches is chosen. ``elements`` are those of the whole batch's tensor arguments.
        """
        if not config.auto or chain is None:
            return config
        record = self._of(chain)
        key = (config.auto, config.num_microbatch, config.recompute_grain, batch_size, elements)
        if key not in record.settled:
            numbers, grains = [config.num_microbatch], [config.recompute_grain]
            if "num_microbatch" in config.auto and batch_size is not None:
                numbers = _numbers_of_microbatches(self._num_workers, batch_size)
            if "recompute_grain" in config.auto and self._budget_bytes is not None:
                grains = list(RECOMPUTE_GRAINS)
            record.settled[key] = self._fastest(chain, numbers, grains, elements) or (numbers[-1], grains[-1])
        number, grain = record.settled[key]
        return replace(config, num_microbatch=number, recompute_grain=grain)

    def _fastest(
        self, chain: LayerChain, numbers: Sequence[int], grains: Sequence[RecomputeGrain], elements: int
    ) -> tuple[int, RecomputeGrain] | None:
        """The fastest options that are predicted to fit, the first of equals; None if none does."""
        pairs = list(product(numbers, grains))
        costs = {number: self.costs(chain, -(-elements // number)) for number in numbers}

        def options(number: int, grain: RecomputeGrain) -> dict[str, Any]:
            limits = {"memory_budget_bytes": self._budget_bytes, "recompute_grain": grain}
            return {"num_workers": self._num_workers, "num_microbatches": number, **limits}

        least_s = [least_seconds(costs[n], **options(n, grain)) + self._tasks_s(1, n) for n, grain in pairs]
        best: tuple[float, int] | None = None
        for position in sorted(range(len(pairs)), key=least_s.__getitem__):
            if best is not None and least_s[position] > best[0]:
                break
            number, grain = pairs[position]
            try:
                plan = choose_plan(costs[number], **options(number, grain))
            except DeviceMemoryError:
                continue
            seconds = plan_seconds(plan, costs[number], num_workers=self._num_workers, num_microbatches=number)
            seconds += self._tasks_s(plan.num_stages, number)
            if best is None or (seconds, position) < best:
                best = seconds, position
        if best is None:
            return None
        number, grain = pairs[best[1]]
        logger.info("num_microbatch=%d, recompute_grain=%r: predicted %.3g s per step", number, grain, best[0])
        return number, grain


def _numbers_of_microbatches(num_workers: int, batch_size: int) -> list[int]:
    """Numbers worth a look, ascending: the built-in one, as many as workers, and multiples, up to single samples."""
    numbers = {1, num_workers, num_workers + 1}
    number = 2 * num_workers
    while number < batch_size:
        numbers.add(number)
        number *= 2
    return sorted({min(number, batch_size) for number in (*numbers, batch_size)})
