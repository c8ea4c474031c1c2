"""Options left to choice (``"auto"``), settled before a batch is split; and what to set where nothing fits.

Invariant: what is chosen or proposed was planned for, by the costs that calls are planned by.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any, NamedTuple

import torch

from roundpipe.core import trees
from roundpipe.core.errors import DeviceMemoryError
from roundpipe.core.tiling import UNTILED, Tiles
from roundpipe.planning.planner import has_plan, least_need, least_seconds
from roundpipe.planning.planner import plan as choose_plan
from roundpipe.planning.stage_costs import plan_seconds
from roundpipe.runtime.config import RECOMPUTE_GRAINS, RecomputeGrain, ResolvedConfig
from roundpipe.runtime.engine.chain_record import somewhat_larger
from roundpipe.runtime.engine.cost_model import CostModel
from roundpipe.runtime.engine.spec import Call
from roundpipe.runtime.engine.tile_choice import LADDER, given_tiles
from roundpipe.runtime.microbatch.split import batch_size

logger = logging.getLogger(__name__)

ROOM_SHARE = 0.1
"""What a device should have beside what is predicted, where an error says how much it must have."""


Sizes = Callable[[int], int]
"""Elements of the largest microbatch, by how many there are."""


class _Options(NamedTuple):
    """Options that are predicted to fit."""

    num_microbatch: int
    recompute_grain: RecomputeGrain
    seconds: float
    """Predicted per step."""


class OptionChooser:
    """Chooses options for the calls of one model; ``budget_bytes`` of each device, None: no limit."""

    def __init__(self, costs: CostModel, budget_bytes: int | None) -> None:
        self._costs = costs
        self.budget_bytes = budget_bytes

    def settle(self, whole: Call, batch_size: int | None) -> ResolvedConfig:
        """The options with what was left to choice (``"auto"``) chosen: the fastest that is predicted to fit.

        Without a known batch size no number of microbatches is chosen.

        Args:
            whole: the batch as one microbatch.
        """
        config, elements = whole.config, whole.elements()
        if not config.auto:
            return config
        record = self._costs.record(whole.chain)
        key = (config.auto, config.num_microbatch, config.recompute_grain, config.tiles, batch_size)
        settled = record.settled.setdefault(key, {})
        if (size := somewhat_larger(sorted(settled), elements)) not in settled:
            numbers, grains = [config.num_microbatch], [config.recompute_grain]
            if "num_microbatch" in config.auto and batch_size is not None:
                numbers = _numbers_of_microbatches(self._costs.num_workers, batch_size)
            if "recompute_grain" in config.auto and self.budget_bytes is not None:
                grains = list(RECOMPUTE_GRAINS)
            self._costs.measure_memory(whole)
            tiles = self._tiles(config)
            sizes = _sizes(elements, batch_size)
            found = self._first_fitting(whole, tiles, numbers, grains, sizes, self.budget_bytes, is_quick=False)
            settled[size] = found[:2] if found is not None else (numbers[-1], grains[-1])
            if found is not None:
                logger.info("num_microbatch=%d, recompute_grain=%r: predicted %.3g s per step", *found)
        number, grain = settled[size]
        return replace(config, num_microbatch=number, recompute_grain=grain)

    def proposal(self, call: Call, limit_bytes: int | None = None) -> str:
        """What to do about a call that does not fit, for a message: settings that are predicted to, if any.

        Args:
            limit_bytes: what they may be predicted to need, after more than that ran out of memory.
        """
        if proposed := self._proposed(call, self.budget_bytes if limit_bytes is None else limit_bytes):
            return f"{' or '.join(proposed)} is predicted to fit"
        needed = self._needed(call, limit_bytes)
        return f"No settings would fit{needed}: give shorter or fewer samples, or use a larger device"

    def _needed(self, call: Call, limit_bytes: int | None) -> str:
        """What a device must have for plans, if that is predicted; more where the budget was not enough for a limit."""
        tiles, budget_bytes = self._tiles(call.config)[-1], self.budget_bytes
        self._costs.measure_memory(call, tiles)
        if budget_bytes is None or not self._costs.record(call.chain).memory(tiles):
            return ""
        costs = self._costs.of(call.chain, call.elements(), tiles)
        least = least_need(
            costs,
            num_workers=self._costs.num_workers,
            num_microbatches=call.num_microbatches,
            memory_budget_bytes=budget_bytes,  # without one what is held between stages is left out
            recompute_grain=call.config.recompute_grain,
        )
        factor = 1.0 if limit_bytes is None else max(budget_bytes / max(limit_bytes, 1), 1.0)
        needed_bytes = int(max(factor * least.memory.total, budget_bytes) * (1 + ROOM_SHARE))
        return f" ({needed_bytes:,} bytes are needed for plans, which have {budget_bytes:,})"

    def _proposed(self, call: Call, budget_bytes: int | None) -> list[str]:
        """Settings that are predicted to fit."""
        number, samples = call.total_microbatches, _num_samples(call)
        numbers = [more for factor in (2, 4, 8, 16) if (more := number * factor) <= (samples or inf)]
        if samples is not None and samples > max(numbers, default=number):
            numbers.append(samples)
        sizes = _sizes_of(call)
        own, finer = self._tiles(call.config), () if call.config.tiles is None else LADDER
        proposals = []
        if found := self._first_fitting(call, own, numbers, RECOMPUTE_GRAINS, sizes, budget_bytes):
            proposals.append(f"num_microbatch={found[0]} with recompute_grain={found[1]!r}")
        if self._first_fitting(call, finer, [number], [call.config.recompute_grain], sizes, budget_bytes):
            proposals.append("tiles='auto'")
        if proposals:
            return proposals
        found = self._first_fitting(call, finer, [number, *numbers], RECOMPUTE_GRAINS, sizes, budget_bytes)
        return [f"num_microbatch={found[0]} with recompute_grain={found[1]!r} and tiles='auto'"] if found else []

    def _first_fitting(
        self,
        call: Call,
        tiles: Sequence[Tiles],
        numbers: Sequence[int],
        grains: Sequence[RecomputeGrain],
        sizes: Sizes,
        budget_bytes: int | None,
        is_quick: bool = True,
    ) -> _Options | None:
        """The fastest options in the fewest tiles in which some are predicted to fit; None if there are none."""
        for each in tiles:
            while (found := self._fastest(call, each, numbers, grains, sizes, budget_bytes, is_quick)) is not None:
                if not self._learns(call, each, found[0]):
                    return found
        return None

    def _learns(self, call: Call, tiles: Tiles, number: int) -> bool:
        """Compute what the microbatches take if there are so many; whether that was known by those of others alone."""
        args, kwargs, label = call.largest()
        samples = batch_size(args, kwargs, call.config)
        if samples is None:
            return False
        of_all = _num_samples(call) or samples * call.total_microbatches
        size, record = -(-of_all // number), self._costs.record(call.chain)

        def first(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[:size] if tensor.ndim and len(tensor) == samples else tensor

        args, kwargs, label = trees.map_tensors((args, kwargs, label), first)
        smaller = replace(call, args=[args], kwargs=[kwargs], labels=[label], total_microbatches=number, _tail=None)
        num_known = len(record.memory(tiles))
        self._costs.measure_memory(smaller, tiles)
        return len(record.memory(tiles)) > num_known

    def _tiles(self, config: ResolvedConfig) -> Sequence[Tiles]:
        """Those that a call may have, the fewest first."""
        if given := given_tiles(config):
            return given
        return (UNTILED,) if self.budget_bytes is None else (UNTILED, *LADDER)

    def _fastest(
        self,
        call: Call,
        tiles: Tiles,
        numbers: Sequence[int],
        grains: Sequence[RecomputeGrain],
        sizes: Sizes,
        budget_bytes: int | None,
        is_quick: bool,
    ) -> _Options | None:
        """The fastest options that are predicted to fit in tiles, the first of equals; None if none does.

        ``is_quick``: by what no plan of theirs goes below. The search for the fastest plan of each takes seconds.
        """
        self._costs.measure_memory(call, tiles)
        is_asked = tiles in (UNTILED, *given_tiles(call.config))
        if not is_asked and not self._costs.record(call.chain).memory(tiles):
            return None
        pairs, num_workers, tasks_s = list(product(numbers, grains)), self._costs.num_workers, self._costs.tasks_s
        costs = {number: self._costs.of(call.chain, sizes(number), tiles) for number in numbers}

        def options(number: int, grain: RecomputeGrain) -> dict[str, Any]:
            limits = {"memory_budget_bytes": budget_bytes, "recompute_grain": grain}
            return {"num_workers": num_workers, "num_microbatches": number, **limits}

        least_s = [least_seconds(costs[n], **options(n, grain)) + tasks_s(1, n) for n, grain in pairs]
        best: tuple[float, int] | None = None
        for position in sorted(range(len(pairs)), key=least_s.__getitem__):
            if best is not None and least_s[position] > best[0]:
                break
            number, grain = pairs[position]
            if is_quick:
                if has_plan(costs[number], **options(number, grain)):
                    return _Options(number, grain, least_s[position])
                continue
            try:
                plan = choose_plan(costs[number], **options(number, grain))
            except DeviceMemoryError:
                continue
            seconds = plan_seconds(plan, costs[number], num_workers=num_workers, num_microbatches=number)
            seconds += tasks_s(plan.num_stages, number)
            if best is None or (seconds, position) < best:
                best = seconds, position
        if best is None:
            return None
        return _Options(*pairs[best[1]], best[0])


def _num_samples(call: Call) -> int | None:
    """Of all microbatches, if it is known."""
    each = [batch_size(args, kwargs, call.config) for args, kwargs in zip(call.args, call.kwargs, strict=True)]
    known = [number for number in each if number is not None]
    if len(known) < call.num_microbatches:
        return None
    return sum(known) + (call.total_microbatches - call.num_microbatches) * max(known)


def _sizes_of(call: Call) -> Sizes:
    """With the call's samples in other numbers of microbatches."""
    number, largest = _num_samples(call), batch_size(*call.largest()[:2], call.config)
    if number is None or not largest:
        return _sizes(call.elements() * call.total_microbatches, None)
    return _sizes(-(-call.elements() * number // largest), number)


def _sizes(elements: int, num_samples: int | None) -> Sizes:
    """Of a batch with so many elements, whose samples are not cut if their number is known."""
    if not num_samples:
        return lambda number: -(-elements // number)
    return lambda number: -(-elements * -(-num_samples // number) // num_samples)


def _numbers_of_microbatches(num_workers: int, batch_size: int) -> list[int]:
    """Numbers worth a look, ascending: the built-in one, as many as workers, and multiples, up to single samples."""
    numbers = {1, num_workers, num_workers + 1}
    number = 2 * num_workers
    while number < batch_size:
        numbers.add(number)
        number *= 2
    return sorted({min(number, batch_size) for number in (*numbers, batch_size)})
