"""Schedules in which each device owns a part of the model: GPipe, 1F1B and interleaved 1F1B, for comparison.

GPipe runs all forwards, then all backwards; 1F1B as many forwards as there are devices behind, then one backward, one
forward in turn; interleaved 1F1B has several chunks of the model on each device, dealt out in turn.

Steps end with a flush: the optimizer needs all gradients before the next forward. Devices hold their weights,
gradients and optimizer states. Values go from device to device over both links and the host, beside the computation;
or as torch's schedules send them, within a host and over a network between hosts: one after the other to each host
and device, which in GPipe and 1F1B computes nothing meanwhile. The update takes no time here.

Invariant: with equal stages and free links the idle share is (N - 1) / (v M + N - 1) for N devices with v chunks
each and M microbatches. Sources: Huang et al. 2019 (GPipe), Narayanan et al. 2021 (1F1B, interleaved).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from roundpipe.core.balance import cut_into
from roundpipe.core.errors import ConfigError
from roundpipe.core.execute_plan import LayerRange
from roundpipe.core.layers import LayerCost
from roundpipe.planning.stage_costs import num_trained

StaticKind = Literal["gpipe", "1f1b", "interleaved"]

BOUNDARY_BUFFERS = 4
"""Copies of the values at a stage's cuts on a device: in and out, one in use and one on its way."""

Action = tuple[Literal["F", "B"], int, int]
"""Forward or backward, stage, microbatch."""


@dataclass(frozen=True, slots=True)
class HostNetwork:
    """What connects hosts that each have as many devices, one after the other in the schedule's order."""

    bytes_per_s: float
    """That a host receives."""
    devices_per_host: int


@dataclass(frozen=True, slots=True)
class StaticSimulation:
    """One step of a static schedule."""

    stages: tuple[LayerRange, ...]
    """Stage s is on device s mod N."""
    seconds_per_step: float
    idle: tuple[float, ...]
    """Per device, the share of the step in which it computes nothing."""
    peak_bytes: tuple[int, ...]
    """Per device."""

    @property
    def mean_idle(self) -> float:
        return sum(self.idle) / len(self.idle)


def static_actions(
    kind: StaticKind, num_workers: int, num_microbatches: int, num_chunks: int = 1
) -> list[list[Action]]:
    """Per device, what it does in order; a `ConfigError` for numbers that don't go together."""
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
        chunk, microbatch = 0, index
        if kind == "interleaved":
            chunk = index // num_workers % chunks
            microbatch = index // (num_workers * chunks) * num_workers + index % num_workers
        return (chunks - 1 - chunk if backward else chunk) * num_workers + worker, microbatch

    behind = num_workers - worker - 1
    ahead = {"gpipe": total, "1f1b": behind, "interleaved": 2 * behind + (chunks - 1) * num_workers}[kind]
    ahead = min(ahead, total)
    for index in range(total + ahead):
        if index < total:
            yield "F", *numbered(index, backward=False)
        if index >= ahead:
            yield "B", *numbered(index - ahead, backward=True)


def simulate_static(
    kind: StaticKind,
    costs: Sequence[LayerCost],
    *,
    num_workers: int,
    num_microbatches: int,
    num_chunks: int = 1,
    recompute: bool = False,
    link_bytes_per_s: float = inf,
    network: HostNetwork | None = None,
    state_bytes_per_parameter: float = 0.0,
) -> StaticSimulation:
    """Plays one step of a static schedule, stages cut as evenly as the layers allow.

    Costs are for one microbatch, ``num_chunks`` are parts of the model per device (1 unless interleaved), links are
    each device's to the host, per direction; with a network, what a device receives from another of its host. With
    ``recompute``, devices keep only stage inputs of microbatches in flight, and run the forward again. Errors as for
    `static_actions`; one, too, for fewer layers than stages.
    """
    actions = static_actions(kind, num_workers, num_microbatches, num_chunks)
    num_stages = num_workers * num_chunks
    if len(costs) < num_stages:
        raise ConfigError(f"{len(costs)} layers can't be {num_stages} stages, one or more per device")
    weights = [cost.forward_s * (1 + recompute) + cost.backward_s for cost in costs]
    stages = cut_into(weights, num_stages)
    forward_s = [sum(cost.forward_s for cost in costs[start:stop]) for start, stop in stages]
    backward_s = [sum(weights[start:stop]) - spent for (start, stop), spent in zip(stages, forward_s, strict=True)]
    rates = [_hop_bytes_per_s(stage, num_workers, link_bytes_per_s, network) for stage in range(num_stages)]
    hop_s = [
        costs[stop - 1].carry_bytes / rate * (num_workers > 1) for (_, stop), rate in zip(stages, rates, strict=True)
    ]
    over_s: dict[Action, float] = {}
    free_s, coming = [0.0] * num_workers, [iter(own) for own in actions]
    received_s: dict[int, float] = defaultdict(float)
    waiting: dict[int, Action] = {worker: next(own) for worker, own in enumerate(coming)}
    while waiting:
        ready = {worker: _ready_s(action, over_s, hop_s) for worker, action in waiting.items()}
        assert any(found is not None for found in ready.values()), "a static schedule stands still"
        for worker, found in ready.items():
            if found is None:
                continue
            ready_s, arrives_in_s = found
            action = waiting.pop(worker)
            if network is not None and arrives_in_s:
                receiver = _receiver(action, num_workers, network)
                waits_s = 0.0 if kind == "interleaved" else free_s[worker]
                ready_s = max(ready_s, received_s[receiver], waits_s)
                received_s[receiver] = ready_s + arrives_in_s
            ready_s += arrives_in_s
            spent_s = forward_s[action[1]] if action[0] == "F" else backward_s[action[1]]
            over_s[action] = free_s[worker] = max(free_s[worker], ready_s) + spent_s
            following = next(coming[worker], None)
            if following is not None:
                waiting[worker] = following
    seconds = max(free_s)
    parts = [range(worker, num_stages, num_workers) for worker in range(num_workers)]
    busy_s = [sum(forward_s[stage] + backward_s[stage] for stage in part) * num_microbatches for part in parts]
    return StaticSimulation(
        stages=tuple(stages),
        seconds_per_step=seconds,
        idle=tuple(max(1.0 - busy / seconds, 0.0) if seconds else 0.0 for busy in busy_s),
        peak_bytes=tuple(
            _peak_bytes(own, stages, costs, part, recompute, state_bytes_per_parameter)
            for own, part in zip(actions, parts, strict=True)
        ),
    )


def _hop_bytes_per_s(stage: int, num_workers: int, link_bytes_per_s: float, network: HostNetwork | None) -> float:
    """How fast values go from a stage to the next, and their gradients back."""
    if network is None:
        return link_bytes_per_s / 2
    return min(link_bytes_per_s, network.bytes_per_s) if _leaves_host(stage, num_workers, network) else link_bytes_per_s


def _leaves_host(stage: int, num_workers: int, network: HostNetwork) -> bool:
    """Whether the next stage is on another host."""
    worker, following = stage % num_workers, (stage + 1) % num_workers
    return worker // network.devices_per_host != following // network.devices_per_host


def _receiver(action: Action, num_workers: int, network: HostNetwork) -> int:
    """What takes one value after the other: the host, as a negative number, or a device."""
    way, stage, _ = action
    worker = stage % num_workers
    cut = stage - 1 if way == "F" else stage
    return -1 - worker // network.devices_per_host if _leaves_host(cut, num_workers, network) else worker


def _ready_s(action: Action, over_s: dict[Action, float], hop_s: Sequence[float]) -> tuple[float, float] | None:
    """When there is what an action takes, and how long its way to the device is; None: not known yet."""
    way, stage, microbatch = action
    arrives_in_s = 0.0
    if way == "F":
        if stage == 0:
            return 0.0, 0.0
        end_s, arrives_in_s = over_s.get(("F", stage - 1, microbatch)), hop_s[stage - 1]
    elif ("F", stage, microbatch) not in over_s or stage == len(hop_s) - 1:
        end_s = over_s.get(("F", stage, microbatch))
    else:
        end_s, arrives_in_s = over_s.get(("B", stage + 1, microbatch)), hop_s[stage]
    return None if end_s is None else (end_s, arrives_in_s)


def _peak_bytes(
    actions: Sequence[Action],
    stages: Sequence[LayerRange],
    costs: Sequence[LayerCost],
    own: range,
    recompute: bool,
    state_bytes_per_parameter: float,
) -> int:
    """What a device holds at most: its part of the model, and what the microbatches in flight keep."""
    layers = [cost for stage in own for cost in costs[slice(*stages[stage])]]
    fixed = sum(cost.weight_bytes + cost.gradient_bytes for cost in layers)
    states = sum(num_trained(cost) for cost in layers) * state_bytes_per_parameter
    activations = {stage: sum(cost.activation_bytes for cost in costs[slice(*stages[stage])]) for stage in own}
    inputs = {stage: costs[max(stages[stage][0] - 1, 0)].carry_bytes for stage in own}
    boundary = BOUNDARY_BUFFERS * max(costs[stop - 1].carry_bytes for _, stop in stages[:-1] or stages)
    in_flight = peak = 0
    for way, stage, _ in actions:
        saved = inputs[stage] if recompute else activations[stage]
        if way == "F":
            in_flight += saved
            peak = max(peak, in_flight)
        else:
            peak = max(peak, in_flight + recompute * activations[stage])
            in_flight -= saved
    return fixed + round(states) + peak + boundary + max(cost.temporary_bytes for cost in layers)
