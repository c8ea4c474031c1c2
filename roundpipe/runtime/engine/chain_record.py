"""What is known of one chain between its calls: its plans, what its layers took, and which steps ran out of memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from roundpipe.core.layers import LayerChain, LayerCost
from roundpipe.core.schedule import ExecutePlan
from roundpipe.runtime.config import RecomputeGrain
from roundpipe.runtime.engine.spec import Call
from roundpipe.runtime.profiling.layer_times import LayerTimes, StepTimes

GUESSED_ACTIVATIONS = 4
"""Values as large as the arguments that a layer of a chain without measured costs is taken to keep."""


@dataclass(slots=True)
class KeptPlan:
    """A plan that a call of some size gets again."""

    plan: ExecutePlan
    looked_at: int
    """How many measured steps there were when it was last chosen or looked at."""
    is_proven: bool = False
    """Whether a step has run by it to its end."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What plans are made for after a step ran out of memory."""

    budget_bytes: int
    grain: RecomputeGrain


@dataclass(slots=True)
class ChainRecord:
    """What calls of one chain have shown."""

    times: LayerTimes
    plans: dict[tuple[Any, ...], KeptPlan] = field(default_factory=dict)
    spare_bytes: dict[tuple[Any, ...], int] = field(default_factory=dict)
    """Per plan, recomputation and size, the device memory left over."""
    limits: dict[tuple[int, float], Limit] = field(default_factory=dict)
    """By number of microbatches and size."""
    settled: dict[tuple[Any, ...], tuple[int, RecomputeGrain]] = field(default_factory=dict)
    """Per size of batch, the options that were left to choice."""
    memory: dict[int, list[LayerCost]] = field(default_factory=dict)
    """Per elements of a microbatch, costs that tell what memory layers take, with that of the loss."""
    loss: Any = None
    """The code of the loss function that this is of."""
    num_steps: int = 0
    unread: list[tuple[StepTimes, int]] = field(default_factory=list)
    """Measured steps that nobody has learned from: their times, and elements of their arguments."""


def times_the_example(chain: LayerChain, elements: int) -> float:
    """How many times the example a microbatch of so many elements is."""
    return elements / chain.example_elements if chain.example_elements else 1.0


def guess_memory(costs: list[LayerCost], call: Call) -> list[LayerCost]:
    """Costs for a chain whose memory is not known: a layer keeps and passes on a few times the call's arguments."""
    if call.chain.example_elements or any(cost.activation_bytes or cost.carry_bytes for cost in costs):
        return costs
    size = call.argument_bytes()
    return [replace(cost, activation_bytes=GUESSED_ACTIVATIONS * size, carry_bytes=size) for cost in costs]
