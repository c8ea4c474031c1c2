"""How much memory plans leave to devices' allocators, learned from how often those were at their limit.

An allocator keeps what is free for later, by stream and in pieces. At the device's limit it may have enough, and not
where it is asked for: it gives back all that it keeps and asks the device anew. For such a retry the device stands
still, at times for a good part of a second. Where steps have them, plans leave a share of the budget to the allocator,
more of it as long as there are retries.

Invariant: what is left stays only where steps got faster by it, as measured; all shares are tried once, then the
fastest is kept for good.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

import torch

from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.tiling import Tiles
from roundpipe.runtime.device.backend import Backend

logger = logging.getLogger(__name__)

SHARES = (0.03, 0.06, 0.12)
"""Of a budget, what is left to the allocator, one after the other."""
LOOKED_AT = 4
"""Steps in a row, by one plan, that are compared with those of another."""
WITH_RETRIES = 2
"""Of them, those that must have had retries."""
NOT_STEADY = 2
"""First steps by a plan, which are not among them: the allocator has other pieces yet, and peaks are measured."""
LONGEST_PAUSE = 32
"""Steps that are not looked at behind a look that showed no retries: 4 at first, then twice as many each time."""
GAIN = 0.03
"""Share of a step's time by which it must have become faster for what was left to stay."""
MOST_LOSS = 0.1
"""Share of a step's predicted time by which a plan that leaves more may be slower: retries take no more than that."""


class RetryCounter:
    """How often the allocators of all devices were at their limit."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = {backend.device: backend for backend in backends}
        self._before = self._sum()
        self.at_end = 0
        """When the latest step ended."""

    def read(self) -> int:
        """So many since the counter was made."""
        return self._sum() - self._before

    def _sum(self) -> int:
        return sum(backend.num_retries() for backend in self._backends.values())


class RunsBy(NamedTuple):
    """What steps run by."""

    plan: ExecutePlan
    tiles: Tiles
    share: float
    """Of the budget, what is left to the allocator."""


class StepRetries:
    """Retries during one training step, and its seconds."""

    def __init__(self, setting: RunsBy, counter: RetryCounter) -> None:
        self.setting = setting
        self._counter = counter
        self._at_begin = counter.read()
        self.number: int | None = None
        """None: the step is not over, or it failed."""
        self.seconds = 0.0

    def end(self, seconds: float, *, failed: bool) -> None:
        """The step is over, so long after its begin or the end of the step before."""
        now = self._counter.read()
        if not failed:
            self.number, self.seconds = now - max(self._at_begin, self._counter.at_end), seconds
        self._counter.at_end = now


@dataclass(slots=True)
class AllocatorRoom:
    """What the plan of one kind of call leaves to allocators."""

    share: float = 0.0
    """Of the budget."""
    is_settled: bool = False
    """Whether nothing more is tried."""
    _best: RunsBy | None = None
    """The fastest so far, once retries were seen."""
    _best_s: float = 0.0
    """Seconds of a step by it."""
    _steps: list[StepRetries] = field(default_factory=list)
    _pause: int = 0
    """Steps that were not looked at behind the latest look."""
    _rest: int = 0
    """Of them, those to come."""

    def begin(self, setting: RunsBy, counter: RetryCounter) -> StepRetries | None:
        """Where to note what a step brings; None: nobody asks."""
        if self.is_settled or torch.are_deterministic_algorithms_enabled():
            return None
        if self._steps and self._steps[-1].setting != setting:
            self._steps.clear()
            self._pause = self._rest = 0
        if self._rest:  # counters of allocators take time to read
            self._rest -= 1
            return None
        self._steps.append(step := StepRetries(setting, counter))
        return step

    def following(self, present: RunsBy, choose: Callable[[float], RunsBy | None]) -> RunsBy | None:
        """What steps run by from now on, if it is not the present; ``choose`` plans with a share left, if it can."""
        seen = self._seen(present)
        if seen is None:
            return None
        seconds, retries = seen
        if self._best is None or seconds <= (1 - GAIN) * self._best_s:
            if self._best is not None:
                text = "with %.0f%% of devices left to allocators a step takes %.3g s instead of %.3g s: that stays"
                logger.info(text, 100 * present.share, seconds, self._best_s)
            elif not retries:
                self._rest = self._pause = min(2 * self._pause or LOOKED_AT, LONGEST_PAUSE)
                return None
            self._best, self._best_s = present, seconds
        share = next((share for share in SHARES if share > present.share), None) if retries else None
        if share is not None and (other := choose(share)) is not None:
            text = "allocators stopped the devices %.1f times a step (%.3g s): plans leave them %.0f%% of devices"
            logger.info(text, retries, seconds, 100 * share)
            return other
        self.is_settled = True
        if present == self._best:
            return None
        text = "with %.0f%% of devices left to allocators a step takes %.3g s, and took %.3g s: all is as it was"
        logger.info(text, 100 * present.share, seconds, self._best_s)
        return self._best

    def _seen(self, present: RunsBy) -> tuple[float, float] | None:
        """Seconds of a step, and retries in it if those are steady, else 0; None: not enough steps are over."""
        over = [(step.seconds, step.number) for step in self._steps if step.number is not None]
        steady = over[NOT_STEADY:]
        if self.is_settled or len(steady) < LOOKED_AT or self._steps[-1].setting != present:
            return None
        del self._steps[NOT_STEADY:]  # the next look is at others
        numbers = [number for _, number in steady]
        are_steady = sum(map(bool, numbers)) >= WITH_RETRIES
        return median_low(seconds for seconds, _ in steady), are_steady * sum(numbers) / len(numbers)
