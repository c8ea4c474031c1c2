"""Schedules in which each device owns a part of the model: GPipe, 1F1B and interleaved 1F1B, for comparison.

    gpipe         all forwards, then all backwards
    1f1b          as many forwards as there are devices behind, then one backward, one forward in turn
    interleaved   the same with several chunks of the model on each device, dealt out in turn

Rounds end with a flush: the optimizer needs all gradients before the next forward. Devices hold their weights,
gradients and optimizer states; values go from device to device over both links and the host, beside the
computation. The step of the optimizer takes no time here.

Invariant: with equal stages and free links the idle share is (N - 1) / (v M + N - 1) for N devices with v chunks
each and M microbatches. Sources: Huang et al. 2019 (GPipe), Narayanan et al. 2021 (1F1B, interleaved).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from roundpipe.core.balance import cut_into
from roundpipe.core.errors import ConfigError
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import LayerRange
from roundpipe.planning.stage_costs import BOUNDARY_BUFFERS, num_trained

StaticKind = Literal["gpipe", "1f1b", "interleaved"]

Action = tuple[Literal["F", "B"], int, int]
"""Forward or backward, stage, microbatch."""


@dataclass(frozen=True, slots=True)
class StaticSimulation:
    """What a static schedule takes."""

    stages: tuple[LayerRange, ...]
    """Stage s is on device s mod N."""
    seconds_per_round: float
    idle: tuple[float, ...]
    """Per device, the share of the round in which it computes nothing."""
    peak_bytes: tuple[int, ...]
    """Per device."""

    @property
    def mean_idle(self) -> float:
        """The mean over the devices."""
        return sum(self.idle) / len(self.idle)


def static_actions(
    kind: StaticKind, num_workers: int, num_microbatches: int, num_chunks: int = 1
) -> list[list[Action]]:
    """Per device, what it does in order.

    Raises:
        ConfigError: interleaving asks for a number of microbatches that the devices don't divide, or a count is not
            positive.
    """
    if min(num_workers, num_microbatches, num_chunks) < 1:
        raise ConfigError(
            f"{num_workers} devices, {num_microbatches} microbatches, {num_chunks} chunks: at least 1 each"
        )
    if kind == "interleaved" and num_microbatches % num_workers:
        raise ConfigError(
            f"{num_microbatches} microbatches on {num_workers} devices: the interleaved schedule needs a multiple of "
            "the number of devices"
        )
    if kind != "interleaved" and num_chunks != 1:
        raise ConfigError(f"{kind} with {num_chunks} chunks per device: only the interleaved schedule has more than 1")
    return [list(_actions(kind, worker, num_workers, num_microbatches, num_chunks)) for worker in range(num_workers)]


def _actions(kind: StaticKind, worker: int, num_workers: int, num_microbatches: int, chunks: int) -> Iterator[Action]:
    total = num_microbatches * chunks

    def numbered(index: int, *, backward: bool) -> tuple[int, int]:
        """Stage and microbatch of a device's index-th forward or backward: N microbatches of a chunk, then the next."""
        chunk = index // num_workers % chunks if kind == "interleaved" else 0
        if backward:
            chunk = chunks - 1 - chunk
        microbatch = index
        if kind == "interleaved":
            microbatch = index // (num_workers * chunks) * num_workers + index % num_workers
        return chunk * num_workers + worker, microbatch

    behind = num_workers - worker - 1
    ahead = {"gpipe": total, "1f1b": behind, "interleaved": 2 * behind + (chunks - 1) * num_workers}[kind]
    ahead = min(ahead, total)
    for index in range(ahead):
        yield "F", *numbered(index, backward=False)
    for index in range(ahead, total):
        yield "F", *numbered(index, backward=False)
        yield "B", *numbered(index - ahead, backward=True)
    for index in range(total - ahead, total):
        yield "B", *numbered(index, backward=True)


def simulate_static(
    kind: StaticKind,
    costs: Sequence[LayerCost],
    *,
    num_workers: int,
    num_microbatches: int,
    num_chunks: int = 1,
    recompute: bool = False,
    link_bytes_per_s: float = inf,
    state_bytes_per_parameter: float = 0.0,
) -> StaticSimulation:
    """Plays one round of a static schedule, stages cut as evenly as the layers allow.

    Args:
        kind: which one.
        costs: of the layers, for one microbatch.
        num_workers: devices.
        num_microbatches: microbatches per round.
        num_chunks: parts of the model per device; 1 unless interleaved.
        recompute: whether devices keep only stage inputs of microbatches in flight, and run the forward again.
        link_bytes_per_s: of each device's link to the host, per direction.
        state_bytes_per_parameter: what the optimizer keeps on the device per trained parameter.

    Raises:
        ConfigError: as `static_actions`, or there are fewer layers than stages.
    """
    actions = static_actions(kind, num_workers, num_microbatches, num_chunks)
    num_stages = num_workers * num_chunks
    if len(costs) < num_stages:
        raise ConfigError(f"{len(costs)} layers can't be {num_stages} stages, one or more per device")
    weights = [cost.forward_s * (1 + recompute) + cost.backward_s for cost in costs]
    stages = cut_into(weights, num_stages)
    forward_s = [sum(cost.forward_s for cost in costs[start:stop]) for start, stop in stages]
    backward_s = [sum(weights[start:stop]) - spent for (start, stop), spent in zip(stages, forward_s, strict=True)]
    hop_s = [2 * costs[stop - 1].carry_bytes / link_bytes_per_s for _, stop in stages]
    over: dict[Action, float] = {}
    free_s, position = [0.0] * num_workers, [0] * num_workers
    progress = True
    while progress:
        progress = False
        for worker, mine in enumerate(actions):
            while position[worker] < len(mine):
                action = mine[position[worker]]
                ready_s = _ready_s(action, over, hop_s, num_stages, num_workers)
                if ready_s is None:
                    break
                way, stage, _ = action
                spent = forward_s[stage] if way == "F" else backward_s[stage]
                over[action] = free_s[worker] = max(free_s[worker], ready_s) + spent
                position[worker] += 1
                progress = True
    assert all(done == len(mine) for done, mine in zip(position, actions, strict=True)), (
        "a static schedule stands still"
    )
    seconds = max(free_s)
    busy_s = [
        sum(forward_s[stage] + backward_s[stage] for stage in range(worker, num_stages, num_workers)) * num_microbatches
        for worker in range(num_workers)
    ]
    return StaticSimulation(
        stages=tuple(stages),
        seconds_per_round=seconds,
        idle=tuple(max(1.0 - busy / seconds, 0.0) if seconds else 0.0 for busy in busy_s),
        peak_bytes=tuple(
            _peak_bytes(mine, stages, costs, worker, num_workers, recompute, state_bytes_per_parameter)
            for worker, mine in enumerate(actions)
        ),
    )


def _ready_s(
    action: Action, over: dict[Action, float], hop_s: Sequence[float], num_stages: int, num_workers: int
) -> float | None:
    """When what an action takes is on its device; None: not known yet."""
    way, stage, microbatch = action
    if way == "F":
        if stage == 0:
            return 0.0
        done = over.get(("F", stage - 1, microbatch))
        return None if done is None else done + (hop_s[stage - 1] if num_workers > 1 else 0.0)
    forward = over.get(("F", stage, microbatch))
    if stage == num_stages - 1 or forward is None:
        return forward
    done = over.get(("B", stage + 1, microbatch))
    return None if done is None else done + (hop_s[stage] if num_workers > 1 else 0.0)


def _peak_bytes(
    actions: Sequence[Action],
    stages: Sequence[LayerRange],
    costs: Sequence[LayerCost],
    worker: int,
    num_workers: int,
    recompute: bool,
    state_bytes_per_parameter: float,
) -> int:
    """What a device holds at most: its part of the model, and what the microbatches in flight keep."""
    mine = range(worker, len(stages), num_workers)
    layers = [cost for stage in mine for cost in costs[slice(*stages[stage])]]
    fixed = sum(cost.weight_bytes + cost.gradient_bytes for cost in layers)
    states = sum(num_trained(cost) for cost in layers) * state_bytes_per_parameter
    activations = {stage: sum(cost.activation_bytes for cost in costs[slice(*stages[stage])]) for stage in mine}
    inputs = {stage: costs[max(stages[stage][0] - 1, 0)].carry_bytes for stage in mine}
    boundary = BOUNDARY_BUFFERS * max(costs[stop - 1].carry_bytes for _, stop in stages[:-1] or stages)
    held = peak = 0
    for way, stage, _ in actions:
        kept = inputs[stage] if recompute else activations[stage]
        if way == "F":
            held += kept
        peak = max(peak, held + (activations[stage] if recompute and way == "B" else 0))
        if way == "B":
            held -= kept
    temporary = max(cost.temporary_bytes for stage in mine for cost in costs[slice(*stages[stage])])
    return fixed + round(states) + peak + boundary + temporary
