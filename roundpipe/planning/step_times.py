"""Seconds per step of a rotation: its recurrence, in steady state.

Op (K, m) waits for (K, m - 1), for (K - 1, m) and for the end of job K - N, or of the worker's job before where layers
have one worker each; the recomputation in a backward op does not wait for the incoming gradient; a step starts when the
losses of the one before are known.

Invariant: `step_seconds` is the exact steady state of that recurrence, its maximum cycle mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from operator import sub
from typing import Any, Protocol

_EQUAL = 1e-9
"""Relative difference below which two states of the recurrence count as one."""
_NO_LINES: tuple[Any, ...] = (inf, -inf, -inf, ())
"""The bottom of a stack of lines: steeper than any."""


class TimedStage(Protocol):
    """A stage's op: one microbatch."""

    @property
    def seconds(self) -> float:
        """In all."""

    @property
    def early_s(self) -> float:
        """The part of it that needs nothing from the stage before."""


def step_seconds(
    stages: Sequence[TimedStage],
    num_forward: int,
    num_workers: int,
    num_microbatches: int,
    replicas: Sequence[int] | None = None,
    limit_s: float = inf,
    owners: Sequence[int] | None = None,
) -> float:
    """Seconds per step in steady state, transfers left out.

    The workers are alike, so with their free times listed from the next job's worker on, every step is the
    same map of those times, and a monotone one: when all of them gained the same over some steps, that is
    the steady state, and the least gain is a lower bound before.

    Args:
        stages: of a step, in order.
        num_forward: how many of them are forward stages; the fused one is next.
        num_workers: workers in the rotation.
        num_microbatches: microbatches of every job.
        replicas: per stage, how many consecutive slots share its microbatches (microbatch m on
            replica m mod r); None = one each.
        limit_s: what is of interest; above it the result may be any lower bound that is also above it.
        owners: per stage, the worker that runs it in every step; None = stages rotate.
    """
    if owners is not None:
        run = partial(_run_owned_step, list(zip(stages, owners, strict=True)))
    elif replicas is None:
        run = partial(_run_step, [(stage.seconds, stage.early_s, stage.seconds - stage.early_s) for stage in stages])
    else:
        run = partial(_run_replicated_step, list(zip(stages, replicas, strict=True)))
    state = [0.0] * (num_workers + 1)
    states = [state]
    for _ in range(max(24, 3 * num_workers)):
        state = run(num_forward, num_microbatches, state)
        for age, old in enumerate(reversed(states), 1):
            gains = [*map(sub, state, old)]
            slowest, fastest = min(gains), max(gains)
            if fastest - slowest <= _EQUAL * fastest:
                return fastest / age
            if slowest > limit_s * age:
                return slowest / age
        states.append(state)
    return (max(states[-1]) - max(states[-1 - num_workers])) / num_workers


def _run_step(
    times: Sequence[tuple[float, float, float]], num_forward: int, num_microbatches: int, state: Sequence[float]
) -> list[float]:
    """Runs one step from a state to the next: when the losses are known, and when each worker is free.

    The end of op (K, m) is the largest of a few lines in m: a stage takes over the lines steeper than its own
    time and makes one line of the others. So a job costs the same however many microbatches there are. The
    lines are a stack, the least steep on top: how steep it is, where it begins, the end of the last microbatch by
    it and those below, and these; all less ``shift``. ``times`` are a stage's seconds, the early part, and the rest.
    """
    repeats, shift = num_microbatches - 1, 0.0
    ends = list(state[1:])
    add_end, num_workers = ends.append, len(ends)
    slope, head, end, below = 0.0, state[0], state[0], _NO_LINES
    # Job K runs where job K - N ran: the list grows by the end of each job while the ends of earlier ones are read.
    for (seconds, early_s, late_s), free in zip(times, ends, strict=False):
        begin = free + early_s - shift
        while slope <= seconds:
            if head > begin:
                begin = head
            slope, head, end, below = below
        below = (slope, head, end, below)
        slope, head = seconds, begin
        begin += repeats * seconds
        if begin > end:
            end = begin
        shift += late_s
        add_end(end + shift)
    return [ends[num_workers + num_forward], *ends[-num_workers:]]


def _run_owned_step(
    stages: Sequence[tuple[TimedStage, int]], num_forward: int, num_microbatches: int, state: Sequence[float]
) -> list[float]:
    """The same, op by op, where each stage has its worker."""
    ends, losses_known, free = [state[0]] * num_microbatches, state[0], list(state[1:])
    for position, (stage, worker) in enumerate(stages):
        early_s, late_s, end = stage.early_s, stage.seconds - stage.early_s, free[worker]
        for microbatch, input_s in enumerate(ends):
            end = max(end + early_s, input_s) + late_s
            ends[microbatch] = end
        free[worker] = end
        if position == num_forward:
            losses_known = end
    return [losses_known, *free]


def _run_replicated_step(
    stages: Sequence[tuple[TimedStage, int]], num_forward: int, num_microbatches: int, state: Sequence[float]
) -> list[float]:
    """The same, op by op, where stages have replicas."""
    previous, losses_known, free = [state[0]] * num_microbatches, state[0], list(state[1:])
    slot, num_workers = 0, len(free)
    for position, (stage, count) in enumerate(stages):
        early_s, late_s = stage.early_s, stage.seconds - stage.early_s
        ends = [0.0] * num_microbatches
        for replica in range(count):
            end = free[slot]
            for microbatch in range(replica, num_microbatches, count):
                begin, input_s = end + early_s, previous[microbatch]
                end = (begin if begin > input_s else input_s) + late_s
                ends[microbatch] = end
            free[slot] = end
            slot = (slot + 1) % num_workers
        if position == num_forward:
            losses_known = max(ends)
        previous = ends
    return [losses_known, *free[slot:], *free[:slot]]
