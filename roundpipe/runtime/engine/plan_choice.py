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
from dataclasses import dataclass, field, replace
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
from roundpipe.runtime.engine.spec import Call
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

ROOM_SHARES = (0.5, 0.0)
"""Shares of what temporaries are estimated at that a plan leaves room for if it can't leave all of it."""

GUESSED_ACTIVATIONS = 4
"""Values as large as the arguments that a layer of a chain without measured costs is taken to keep."""

Prediction = Callable[[ExecutePlan], float]
"""Seconds per step of a plan."""


@dataclass(slots=True)
class _KeptPlan:
    plan: ExecutePlan
    looked_at: int
    """How many measured steps there were when it was last chosen or looked at."""


@dataclass(slots=True)
class _ChainRecord:
    times: LayerTimes
    plans: dict[tuple[Any, ...], _KeptPlan] = field(default_factory=dict)
    spare_bytes: dict[tuple[Any, ...], int] = field(default_factory=dict)
    """Per plan, recomputation and size, the device memory left over."""
    settled: dict[tuple[Any, ...], tuple[int, RecomputeGrain]] = field(default_factory=dict)
    """Per size of batch, the options that were left to choice."""
    num_steps: int = 0
    unread: list[tuple[StepTimes, int]] = field(default_factory=list)
    """Measured steps that nobody has learned from: their times, and elements of their arguments."""


class PlanChooser:
    """Chooses plans for the calls of one model.

    Args:
        budgets_bytes: per worker, what may be used of its device; None: no limit.
        link_speeds: measured bytes per second up and down, per worker; infinity before anything was measured.
        accelerators: whether some devices are not CPU workers. Then layers' temporaries are in their memory too, and
            estimated seconds, which are an accelerator's, can be compared with what its link takes.
    """

    def __init__(
        self,
        num_workers: int,
        budgets_bytes: Iterable[int | None],
        link_speeds: Callable[[], tuple[float, float]] = lambda: (inf, inf),
        accelerators: bool = False,
    ) -> None:
        limits = [limit for limit in budgets_bytes if limit is not None]
        self._num_workers = num_workers
        self._budget_bytes = min(limits) if limits else None
        self._link_speeds = link_speeds
        self._accelerators = accelerators
        self._records: weakref.WeakKeyDictionary[LayerChain, _ChainRecord] = weakref.WeakKeyDictionary()
        self._may_replan = False

    def _of(self, chain: LayerChain) -> _ChainRecord:
        """What is known of a chain, the steps that are over learned from."""
        record = self._records.get(chain)
        if record is None:
            record = self._records[chain] = _ChainRecord(LayerTimes(chain.costs, chain.example_elements))
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
        record = self._of(chain)
        elements = call.elements()
        size = times_the_example(chain, elements)
        if self._budget_bytes is None:
            size = round(size, 1)
        elif not chain.example_elements:
            size = call.argument_bytes()
        key = (call.num_microbatches, config.recompute_grain, size)
        num_steps, kept = record.times.num_steps, record.plans.get(key)
        if kept is None:
            plan = self._choose(call, self.costs(chain, elements), self._links(chain))
            kept = record.plans[key] = _KeptPlan(plan, num_steps)
        elif self._may_replan and num_steps >= max(FIRST_REPLAN, 4 * kept.looked_at):
            kept.plan, kept.looked_at = self._replanned(call, kept.plan), num_steps
        self._may_replan = False
        return kept.plan

    def spare_bytes(self, call: Call, plan: ExecutePlan) -> int | None:
        """Device memory that a training plan leaves over, as predicted; None: there is no limit."""
        if self._budget_bytes is None:
            return None
        if not call.chain.example_elements:
            return 0  # nobody knows
        spare = self._of(call.chain).spare_bytes
        grain, elements = call.config.recompute_grain, call.elements()
        if (key := (plan, grain, elements)) not in spare:
            costs = self.costs(call.chain, elements)
            needed = plan_peak_bytes(plan, costs, num_workers=self._num_workers, recompute_grain=grain)
            spare[key] = max(self._budget_bytes - needed, 0)
        return spare[key]

    def update_begun(self) -> None:
        """The optimizer was given an update: the next step may have another plan."""
        self._may_replan = True

    def costs(self, chain: LayerChain, elements: int) -> list[LayerCost]:
        """Costs of a chain's layers for a microbatch of so many elements: measured ones once there are any."""
        if self.is_measured(chain):
            costs = self._of(chain).times.costs(elements)
        else:
            costs = [cost.scaled(times_the_example(chain, elements)) for cost in chain.costs]
        return with_temporaries(costs) if self._accelerators else costs

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
        if self._budget_bytes is None:
            return choose(costs)
        guessed = _with_guessed_activations(costs, call)
        attempts = [guessed, *(with_temporaries(guessed, share) for share in ROOM_SHARES if self._accelerators)]
        if guessed is not costs:
            attempts.append(costs)  # a guess must not refuse what may fit
        for attempt in attempts[:-1]:
            with contextlib.suppress(DeviceMemoryError):
                return choose(attempt, memory_budget_bytes=self._budget_bytes)
        return choose(attempts[-1], memory_budget_bytes=self._budget_bytes)

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


def times_the_example(chain: LayerChain, elements: int) -> float:
    """How many times the example a microbatch of so many elements is."""
    return elements / chain.example_elements if chain.example_elements else 1.0


def _numbers_of_microbatches(num_workers: int, batch_size: int) -> list[int]:
    """Numbers worth a look, ascending: the built-in one, as many as workers, and multiples, up to single samples."""
    numbers = {1, num_workers, num_workers + 1}
    number = 2 * num_workers
    while number < batch_size:
        numbers.add(number)
        number *= 2
    return sorted({min(number, batch_size) for number in (*numbers, batch_size)})


def with_temporaries(costs: Sequence[LayerCost], share: float = 1.0) -> list[LayerCost]:
    """Costs that count what comes and goes within a layer: a backward's temporaries are like its forward's."""
    return [replace(cost, temporary_bytes=round(share * cost.workspace_bytes)) for cost in costs]


def _with_guessed_activations(costs: list[LayerCost], call: Call) -> list[LayerCost]:
    """Costs for a chain that nobody measured: a layer keeps and passes on a few times the call's arguments."""
    if call.chain.example_elements or any(cost.activation_bytes or cost.carry_bytes for cost in costs):
        return costs
    size = call.argument_bytes()
    return [replace(cost, activation_bytes=GUESSED_ACTIVATIONS * size, carry_bytes=size) for cost in costs]
