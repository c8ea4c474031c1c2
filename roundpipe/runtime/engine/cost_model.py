"""What steps of one model's chains take, in seconds and bytes: estimated until there is something measured.

What steps took is learned once they are over; memory is computed once per loss and size where there is a budget.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import TypedDict

import torch

from roundpipe.core import trees
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.layers import ESTIMATED_LINK_BYTES_PER_S, LayerChain, LayerCost
from roundpipe.core.schedule import Schedule, make_schedule
from roundpipe.core.tiling import UNTILED, Tiles
from roundpipe.planning.machine import ChainSeconds, HardwareProfile
from roundpipe.planning.residency import DEVICE_BYTES_PER_S, STREAMED, Residency
from roundpipe.planning.simulator import simulate
from roundpipe.planning.stage_costs import StageCosts, num_trained, without_backward
from roundpipe.runtime.engine.chain_record import ChainRecord, code_of, times_the_example
from roundpipe.runtime.engine.spec import Call
from roundpipe.runtime.engine.visit_peaks import VisitPeaks
from roundpipe.runtime.profiling.layer_times import LayerTimes, StepTimes

MEASURED_IN_A_ROW = 5
"""Steps of a chain that are measured from the start on, and once weights live on the device; then every
`MEASURED_EACH`-th."""
MEASURED_EACH = 8
MEASURED_PEAKS = 2
"""Steps by a plan whose peaks are measured. It moves torch's own mark of the most in use, which users may look at."""

MOST_SIMULATED = 4000
"""Visits of layers, times microbatches, of the largest steps that are simulated to choose among plans."""
MOST_SIMULATED_WORKERS = 2000
"""Workers, times microbatches, of such steps: a replay lasts until all workers have had several visits."""
TASK_S = 150e-6
"""Seconds that a worker needs for a microbatch of a stage beside what layers take; tells many small microbatches or
stages from few large ones, which cost the same otherwise."""
_ADD_ACCESSES = 3
"""How often adding to a gradient reads or writes as much as it has."""
WIDEST = 2
"""How many times the one below it the next larger size is whose memory is computed, at most, if those between are not.
"""

Prediction = Callable[[ExecutePlan], float]
"""Seconds per step of a plan."""
MemoryMeasure = Callable[[Call, Tiles], "list[LayerCost] | None"]
"""Costs with the memory that layers take, in tiles, for the largest microbatch of a call, its loss included; None:
unknown."""


class MeasuredTimes(TypedDict, total=False):
    """What else a run knows of itself; see `CostModel`."""

    chain: Callable[[], ChainSeconds | None]
    visit_s: Callable[[], float]
    machine: HardwareProfile | None
    has_peers: bool


class CostModel:
    """Costs of the chains of one model, and records of them.

    Args:
        link_speeds: measured bytes per second up and down, per worker; infinity before anything was measured.
        accelerators: whether some devices are not CPU workers. Then estimated seconds, which are an accelerator's, can
            be compared with what its link takes.
        measure: computes memory; None: that of the chain's costs is what is known.
        chain: what the optimizer's side takes of a round with all copies on the host; None: that is not known.
        visit_s: measured seconds that beginning a visit of a stage takes.
        has_peers: whether all devices read each other's memory.
        machine: what takes the place of all that is measured of links, updates and visits, as in a forecast.
    """

    def __init__(
        self,
        num_workers: int,
        link_speeds: Callable[[], tuple[float, float]] = lambda: (inf, inf),
        accelerators: bool = False,
        measure: MemoryMeasure | None = None,
        *,
        chain: Callable[[], ChainSeconds | None] = lambda: None,
        visit_s: Callable[[], float] = lambda: 0.0,
        machine: HardwareProfile | None = None,
        has_peers: bool = True,
    ) -> None:
        self.num_workers = num_workers
        self._machine = machine
        self._has_peers = has_peers
        self._chain = chain
        self._visit_s = visit_s
        self._link_speeds = link_speeds
        self._accelerators = accelerators
        self._measure = measure
        self._records: weakref.WeakKeyDictionary[LayerChain, ChainRecord] = weakref.WeakKeyDictionary()

    def record(self, chain: LayerChain) -> ChainRecord:
        """What is known of a chain, the steps that are over learned from."""
        record = self._records.get(chain)
        if record is None:
            record = self._records[chain] = ChainRecord()
        while record.unread and record.unread[0][0].is_done:
            times, elements, tiles = record.unread.pop(0)
            if not times.failed:
                known = record.times.setdefault(tiles, LayerTimes(chain.costs, chain.example_elements))
                known.learn(times, elements)
        while record.peaks and record.peaks[0].is_over:
            peaks = record.peaks.pop(0)
            if not peaks.failed:
                peaks.correct()
                record.num_corrections += 1
                record.rooms.clear()
        return record

    # Memory

    def budget_changed(self) -> None:
        """Forget what depends on how much memory there is; plans are compared with what there is now."""
        for record in self._records.values():
            record.limits.clear()
            record.allocators.clear()
            record.settled.clear()
            record.rooms.clear()
            record.streaming.clear()
            record.num_corrections += 1

    def measure_memory(self, call: Call, tiles: Tiles = UNTILED) -> None:
        """Compute what a call's layers and its loss take, if its size is a new one."""
        if self._measure is None or not call.has_arguments:
            return
        record, elements = self.record(call.chain), call.elements()
        if call.loss_fn is not None:
            record.loss = code_of(call.loss_fn), call.make_tail is None
        elif call.has_own_plan:
            record.loss = None
        computed = record.computed.setdefault((record.loss, tiles), {})
        if elements in computed or (computed and record.planned_for(elements) in record.sizes):
            return
        below = max((size for size in computed if size < elements), default=0)
        above = min((size for size in computed if size > elements), default=0)
        if not (below and below < above <= WIDEST * below):
            computed[elements] = self._measure(call, tiles)

    def elements(self, call: Call) -> int:
        """Elements that the largest microbatch of a call is planned for: see `ChainRecord.planned_for`."""
        return self.record(call.chain).planned_for(call.elements())

    def size_of(self, call: Call) -> int:
        """What tells calls apart that may need other memory: these elements, or bytes where there is no example."""
        return self.elements(call) if call.chain.example_elements else call.argument_bytes()

    def of(self, chain: LayerChain, elements: int, tiles: Tiles = UNTILED) -> list[LayerCost]:
        """Costs of a chain's layers for a microbatch of so many elements: measured ones once there are any."""
        record, basis = self.record(chain), self._basis(chain, tiles)
        if basis is not None:
            costs = record.times[basis].costs(elements)
        else:
            costs = [cost.scaled(times_the_example(chain, elements)) for cost in chain.costs]
        memory = record.memory_at(elements, tiles)
        if basis != tiles and memory is not None:
            costs = with_tiles(costs, memory)
        if memory is None:
            return costs
        return [cost.with_memory_of(other) for cost, other in zip(costs, memory, strict=True)]

    def of_call(self, call: Call, tiles: Tiles = UNTILED) -> list[LayerCost]:
        """Costs that a call is planned by."""
        costs = self.of(call.chain, self.elements(call), tiles)
        return without_backward(costs) if call.has_own_plan else costs

    def training_bytes(self, call: Call, tiles: Tiles) -> list[int] | None:
        """What each layer takes in tiles; None: that is not known."""
        self.measure_memory(call, tiles)
        memory = self.record(call.chain).memory_at(self.elements(call), tiles)
        return None if memory is None else [cost.training_bytes for cost in memory]

    def is_less(self, call: Call, tiles: Tiles, finer: Tiles) -> bool:
        """Whether some layer takes another amount of memory in finer tiles."""
        before, after = (self.training_bytes(call, each) for each in (tiles, finer))
        return before is not None and after is not None and before != after

    # Time

    def num_steps(self, chain: LayerChain, tiles: Tiles = UNTILED) -> int:
        """Steps whose measured times count."""
        times = self.record(chain).times.get(tiles)
        return 0 if times is None else times.num_steps

    def is_measured(self, chain: LayerChain, tiles: Tiles = UNTILED) -> bool:
        """Whether costs rest on measured times.

        With deterministic algorithms asked of torch they never do, so that plans, and with them the order of
        summation, are the same in every run.
        """
        return self._basis(chain, tiles) is not None

    def _basis(self, chain: LayerChain, tiles: Tiles) -> Tiles | None:
        """The tiles in whose measured times costs are; None: there are none, or they don't count."""
        if torch.are_deterministic_algorithms_enabled():
            return None
        return next((known for known in (tiles, UNTILED) if self.num_steps(chain, known)), None)

    def measured(self, chain: LayerChain) -> list[LayerCost] | None:
        """Measured costs for a microbatch like the example, or like the first one; None before there are any."""
        times = self.record(chain).times
        tiles = max(times, key=lambda tiles: times[tiles].num_steps, default=UNTILED)
        return self.of(chain, times[tiles].example_elements, tiles) if self.is_measured(chain, tiles) else None

    def times_of(self, call: Call) -> StepTimes | None:
        """Where to note what a training step takes, if it is its turn to be measured; else None."""
        if trees.tensors([call.args, call.kwargs]) and not call.elements():
            return None  # without samples it tells nothing
        record = self.record(call.chain)
        record.num_steps += 1
        is_due = record.num_steps <= MEASURED_IN_A_ROW or record.num_steps % MEASURED_EACH == 1
        return StepTimes() if is_due else None

    def measure_anew(self, chain: LayerChain) -> None:
        """The next steps run otherwise than those before: measure as many as from the start on."""
        self.record(chain).num_steps = 0

    def learn_from(self, times: StepTimes | None, call: Call) -> None:
        """Take in what a step took, once it is over; the step has begun."""
        if times is not None:
            self.record(call.chain).unread.append((times, call.elements(), call.tiles))

    def expect(self, chain: LayerChain, costs: Sequence[LayerCost], elements: int, tiles: Tiles = UNTILED) -> None:
        """Take seconds of a chain's layers, for a microbatch of so many elements, as if steps had been measured.

        ``costs`` are those without tiles; ``tiles``: those that the steps ran in.
        """
        record = self.record(chain)
        record.times[UNTILED] = LayerTimes.known(costs, elements)
        if tiles != UNTILED and (memory := record.memory_at(elements, tiles)) is not None:
            record.times[tiles] = LayerTimes.known(with_tiles(costs, memory), elements)

    def peaks_of(self, call: Call, plan: ExecutePlan) -> VisitPeaks | None:
        """Where to note what visits of a training step take, if memory was computed and a first step is to show it."""
        record, elements, grain = self.record(call.chain), call.elements(), call.config.recompute_grain
        costs = record.memory(call.tiles).get(elements)
        if costs is None or plan.fused is None or torch.are_deterministic_algorithms_enabled():
            return None
        key = plan, grain, call.tiles, elements
        record.num_measured[key] += 1
        if record.num_measured[key] > MEASURED_PEAKS:
            return None
        is_alone = call.num_microbatches == 1
        record.peaks.append(peaks := VisitPeaks(plan, grain, self.num_workers, costs, is_alone))
        return peaks

    def links(self, chain: LayerChain, tiles: Tiles = UNTILED) -> tuple[float, float]:
        """Bytes per second up and down that go with a chain's costs: measured, or estimated for accelerators."""
        if self.is_measured(chain, tiles):
            return self._link_speeds()
        if self._accelerators and chain.example_elements:
            return ESTIMATED_LINK_BYTES_PER_S, ESTIMATED_LINK_BYTES_PER_S
        return inf, inf

    def prediction(
        self,
        call: Call,
        costs: Sequence[LayerCost],
        links: tuple[float, float],
        choose_residency: Callable[[Schedule, StageCosts], Residency] = lambda schedule, costs: STREAMED,
    ) -> Prediction | None:
        """The simulator's seconds per step of a plan, with updates if it is known what they take (`chain_of`).

        None if transfers take no time, or the simulator too much.
        """
        number, workers, grain = call.num_microbatches, self.num_workers, call.config.recompute_grain
        is_large = 2 * len(costs) * number > MOST_SIMULATED or workers * number > MOST_SIMULATED_WORKERS
        if min(links) == inf or is_large:
            return None
        profile = self._profile(call, costs, links)
        stage_costs = StageCosts(costs, grain, is_alone=number == 1)

        @functools.cache
        def seconds(plan: ExecutePlan) -> float:
            schedule = make_schedule(plan, workers, number)
            residency = choose_residency(schedule, stage_costs)
            result = simulate(schedule, costs, profile, recompute_grain=grain, residency=residency)
            return result.seconds_per_step + self.tasks_s(plan.num_stages, number)

        return seconds

    def chain_of(self, call: Call) -> ChainSeconds | None:
        """What `prediction` counts with of the optimizer's side for a call; None: nothing."""
        if call.is_evaluation or not self.is_measured(call.chain, call.tiles):
            return None
        if self._machine is not None:
            return self._machine.chain(sum(map(num_trained, call.chain.costs)))
        return self._chain()

    def _profile(self, call: Call, costs: Sequence[LayerCost], links: tuple[float, float]) -> HardwareProfile:
        is_measured = self.is_measured(call.chain, call.tiles)
        there_bytes_per_s = DEVICE_BYTES_PER_S if self._accelerators else inf
        if self._machine is not None and is_measured and not call.is_evaluation:
            return replace(self._machine, device_bytes_per_s=there_bytes_per_s)
        up, down = links
        profile = HardwareProfile(
            upload_bytes_per_s=up,
            download_bytes_per_s=down,
            visit_s=self._visit_s() if is_measured else 0.0,
            has_peers=self._has_peers,
        )
        chain, num_parameters = self.chain_of(call), sum(map(num_trained, costs))
        if chain is None or not num_parameters:
            return profile
        return replace(profile, device_bytes_per_s=there_bytes_per_s).with_optimizer(num_parameters, chain)

    def tasks_s(self, num_stages: int, num_microbatches: int) -> float:
        """Seconds per step that workers need beside what layers take."""
        return TASK_S * num_stages * num_microbatches / self.num_workers


def with_tiles(costs: Sequence[LayerCost], tiled: Sequence[LayerCost]) -> list[LayerCost]:
    """Costs of layers that were measured whole, as they are in tiles."""
    return [
        _in_tiles(cost, memory) if memory.num_tiles > 1 else cost for cost, memory in zip(costs, tiled, strict=True)
    ]


def _in_tiles(cost: LayerCost, tiled: LayerCost) -> LayerCost:
    """Each tile reads the weights, and adds to their gradients; the backward of some layers repeats their forward."""
    read_s = tiled.num_tiles * cost.weight_bytes / DEVICE_BYTES_PER_S
    add_s = tiled.num_tiles * _ADD_ACCESSES * cost.gradient_bytes / DEVICE_BYTES_PER_S
    forward_s, backward_s, backward_flops = max(cost.forward_s, read_s), cost.backward_s, cost.backward_flops
    if backward_s:
        backward_s = max(backward_s, read_s) + add_s
    if tiled.repeats:
        backward_s, backward_flops = backward_s + forward_s, backward_flops + cost.forward_flops
    return replace(cost, forward_s=forward_s, backward_s=backward_s, backward_flops=backward_flops)
