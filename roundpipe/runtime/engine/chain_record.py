"""What is known of one chain between its calls: its plans, what its layers took, and which steps ran out of memory."""

from __future__ import annotations

import bisect
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from roundpipe.core.attributes import stored_attribute
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.layers import LayerChain, LayerCost
from roundpipe.core.tiling import UNTILED, Tiles
from roundpipe.planning.residency import Residency
from roundpipe.runtime.config import RecomputeGrain
from roundpipe.runtime.engine.allocator_room import AllocatorRoom
from roundpipe.runtime.engine.spec import Call
from roundpipe.runtime.engine.visit_peaks import VisitPeaks
from roundpipe.runtime.profiling.layer_times import LayerTimes, StepTimes

GUESSED_ACTIVATIONS = 4
"""Values as large as the arguments that a layer of a chain without measured costs is taken to keep."""
SHORTEST_STEP_S = 0.02
"""Steps shorter than this keep their plan: what is measured of them is mostly noise."""
UPDATES_CHANGE, MOST_LOOKS = 0.25, 2
"""Share by which what updates take must have changed for another look at the plan, and how often that is a reason: when
it is first known, and once more."""


BUDGET_CHANGE = 0.03
"""Share by which what there is of devices must have changed before it is planned for anew."""


def is_other(before_bytes: int, now_bytes: int) -> bool:
    """Whether a budget is larger or smaller than before by more than a little."""
    return abs(now_bytes - before_bytes) > BUDGET_CHANGE * before_bytes


def has_grown(before_bytes: int | None, now_bytes: int | None) -> bool:
    """Whether a budget is larger than before by more than a little."""
    return before_bytes is not None and now_bytes is not None and now_bytes > (1 + BUDGET_CHANGE) * before_bytes


@dataclass(slots=True)
class KeptPlan:
    """A plan that a call of some size gets again."""

    plan: ExecutePlan
    looked_at: int
    """How many measured steps there were when it was last chosen or looked at."""
    tiles: Tiles = UNTILED
    budget_bytes: int | None = None
    """Device memory that there was when it was chosen; None: there was no limit."""
    is_proven: bool = False
    """Whether a step has run by it to its end."""
    num_corrections: int = 0
    """How many there were when it was last compared with the budget."""
    updates_s: float = 0.0
    """What the optimizer's side was known to take of a round when that was last a reason to look at it."""
    num_looks: int = 0
    """How often it was."""

    def is_of_less(self, budget_bytes: int | None) -> bool:
        """Whether there is more memory now, by more than a little."""
        return has_grown(self.budget_bytes, budget_bytes)

    def has_other_updates(self, updates_s: float) -> bool:
        """Whether updates turn out to take a lot more or less than it was chosen by; told a few times."""
        longer_s = max(updates_s, self.updates_s)
        is_other = longer_s >= SHORTEST_STEP_S and abs(updates_s - self.updates_s) > UPDATES_CHANGE * longer_s
        if not is_other or self.num_looks == MOST_LOOKS:
            return False
        self.updates_s, self.num_looks = updates_s, self.num_looks + 1
        return True


ALIKE = 0.125
"""Share by which microbatches that a plan is made for may be larger: sizes of padded batches differ all the time."""
SHRINK = 0.85
"""Share of what a plan was predicted to need that the next one may, after a step ran out of memory."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What plans are made for after a step ran out of memory."""

    budget_bytes: int
    grain: RecomputeGrain


class Room(NamedTuple):
    """What a step may do with the device memory that its plan leaves over."""

    residency: Residency
    spare_bytes: int | None
    """What is left beside the weights that stay in the step; None: there is no limit."""
    others_bytes: int | None
    """The most that weights may take which have stayed in others, and which this one does not use; None: no limit."""
    allocator_bytes: int = 0
    """What is left to the device's allocator, and so to nothing else."""


@dataclass(slots=True)
class ChainRecord:
    """What calls of one chain have shown."""

    times: dict[Tiles, LayerTimes] = field(default_factory=dict)
    plans: dict[tuple[Any, ...], KeptPlan] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    """Elements of microbatches that have plans, ascending."""
    rooms: dict[tuple[Any, ...], Room] = field(default_factory=dict)
    """Per plan, recomputation and size, what to do with the device memory left over."""
    limits: dict[tuple[int, float], Limit] = field(default_factory=dict)
    """By number of microbatches and size."""
    allocators: dict[tuple[Any, ...], AllocatorRoom] = field(default_factory=dict)
    """Per plan's key, what is left to allocators."""
    streaming: set[tuple[int, float]] = field(default_factory=set)
    """Numbers of microbatches and sizes with which a step ran out of memory while weights stayed: they don't any more.
    """
    settled: dict[tuple[Any, ...], dict[int, tuple[int, RecomputeGrain]]] = field(default_factory=dict)
    """Per number of samples, and by elements of a batch, the options that were left to choice."""
    computed: dict[tuple[Any, Tiles], dict[int, list[LayerCost] | None]] = field(default_factory=dict)
    """By code of the loss and tiles, and by elements of a microbatch, costs that tell what memory layers take; None:
    can't be had."""
    loss: Any = None
    """The code of the latest call's loss function, and whether it stays apart from the last layer."""
    peaks: list[VisitPeaks] = field(default_factory=list)
    """Of steps that nobody has learned from."""
    num_measured: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    """By plan, recomputation and size, steps whose peaks were measured."""
    num_corrections: int = 0
    """How often measured peaks have corrected what is known of memory."""
    num_steps: int = 0
    unread: list[tuple[StepTimes, int, Tiles]] = field(default_factory=list)
    """Measured steps that nobody has learned from: their times, elements of their arguments, and tiles."""

    def memory(self, tiles: Tiles = UNTILED) -> dict[int, list[LayerCost]]:
        """Per elements of a microbatch, what is known of memory with the latest loss."""
        computed = self.computed.get((self.loss, tiles), {})
        return {elements: costs for elements, costs in computed.items() if costs is not None}

    def memory_at(self, elements: int, tiles: Tiles = UNTILED) -> list[LayerCost] | None:
        """The same for so many elements, between two numbers or scaled from the nearest; None: nothing is known."""
        if not (known := self.memory(tiles)):
            return None
        below = max((size for size in known if size <= elements), default=min(known))
        above = min((size for size in known if size >= elements), default=below)
        if not below < elements < above:
            return [cost.scaled(elements / max(below, 1)) for cost in known[below]]
        share = (elements - below) / (above - below)
        return [one.between(two, share) for one, two in zip(known[below], known[above], strict=True)]

    def add_size(self, elements: int) -> None:
        """Microbatches of so many elements have a plan now."""
        if elements not in self.sizes:
            bisect.insort(self.sizes, elements)

    def planned_for(self, elements: int) -> int:
        """Elements that microbatches of so many are planned for.

        If somewhat larger ones have a plan, theirs; if somewhat smaller ones have, as many more than these as leaves
        room for others, since sizes differ. To give a plan to the answer changes no answer.
        """
        position, larger = bisect.bisect_left(self.sizes, elements), somewhat_larger(self.sizes, elements)
        most = int(self.sizes[position - 1] * (1 + ALIKE)) if position else 0
        return most if elements <= most and larger not in self.sizes else larger


def somewhat_larger(sizes: Sequence[int], elements: int) -> int:
    """The least of some ascending sizes that is at least as large, but not much larger; if there is none, it itself."""
    position = bisect.bisect_left(sizes, elements)
    return sizes[position] if position < len(sizes) and sizes[position] <= (1 + ALIKE) * elements else elements


def code_of(function: Any) -> Any:
    """What runs when a function is called: the same for one that is made anew for each call."""
    while isinstance(function, functools.partial):
        function = function.func
    return stored_attribute(function, "__code__", type(function))


def times_the_example(chain: LayerChain, elements: int) -> float:
    """How many times the example a microbatch of so many elements is."""
    return elements / chain.example_elements if chain.example_elements else 1.0


def guess_memory(costs: list[LayerCost], call: Call) -> list[LayerCost]:
    """Costs for a chain whose memory is not known: a layer keeps and passes on a few times the call's arguments."""
    if call.chain.example_elements or any(cost.activation_bytes or cost.carry_bytes for cost in costs):
        return costs
    size = call.argument_bytes()
    return [replace(cost, activation_bytes=GUESSED_ACTIVATIONS * size, carry_bytes=size) for cost in costs]
