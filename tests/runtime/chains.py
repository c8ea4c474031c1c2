"""Chains of layer costs to plan for, and plain reference computations to hold the planner against."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from random import Random
from typing import Any

from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.layers import LayerCost
from roundpipe.planning import stage_costs, step_times

PUBLISHED: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data" / "published_layer_times.json").read_text()
)


def published_chain(name: str) -> list[LayerCost]:
    """Embedding, blocks and head of a published model, fp16, one microbatch."""
    model, tokens = PUBLISHED["models"][name], PUBLISHED["tokens"]
    hidden, vocab = model["hidden"], model["vocab"]
    attention = model["head_dim"] * 2 * (model["heads"] + model["kv_heads"])

    def layer(forward_ms: float, backward_ms: float, parameters: int, kept: int, carried_bytes: int) -> LayerCost:
        return LayerCost(
            forward_s=forward_ms / 1000,
            backward_s=backward_ms / 1000,
            num_parameters=parameters,
            weight_bytes=2 * parameters,
            gradient_bytes=2 * parameters,
            activation_bytes=2 * tokens * kept,
            workspace_bytes=2 * tokens * kept,
            carry_bytes=carried_bytes,
        )

    carried_bytes = 2 * tokens * hidden
    block_parameters = hidden * attention + 3 * hidden * model["intermediate"]
    block_kept = 5 * hidden + attention + 3 * model["intermediate"]
    block = layer(model["forward_ms"], model["backward_ms"], block_parameters, block_kept, carried_bytes)
    head = layer(model["head_forward_ms"], model["head_backward_ms"], vocab * hidden, 2 * hidden, 4)
    return [layer(0.3, 0.3, vocab * hidden, hidden, carried_bytes), *[block] * model["num_layers"], head]


def random_chain(random: Random, num_layers: int) -> list[LayerCost]:
    """Uneven layers whose bytes are small numbers."""
    chain = []
    for _ in range(num_layers):
        forward_s, weight_bytes = random.uniform(0.2, 2), random.randint(1, 10)
        chain.append(
            LayerCost(
                forward_s=forward_s,
                backward_s=forward_s * random.uniform(1.5, 3),
                num_parameters=weight_bytes // 2,
                weight_bytes=weight_bytes,
                gradient_bytes=weight_bytes,
                activation_bytes=random.randint(1, 20),
                workspace_bytes=random.randint(1, 5),
                carry_bytes=1,
            )
        )
    return chain


def stage_times(plan: ExecutePlan, costs: Sequence[LayerCost]) -> list[tuple[float, float]]:
    """Seconds of each job of a training round, and the part of it that is recomputation."""
    assert plan.fused is not None

    def total(start: int, stop: int, *fields: str) -> float:
        return sum(getattr(cost, field) for cost in costs[start:stop] for field in fields)

    times = [(total(*one, "forward_s"), 0.0) for one in plan.forward]
    times.append((total(*plan.fused, "forward_s", "backward_s"), 0.0))
    return times + [(total(*one, "forward_s", "backward_s"), total(*one, "forward_s")) for one in plan.backward]


def plain_round_seconds(
    plan: ExecutePlan,
    costs: Sequence[LayerCost],
    num_workers: int,
    num_microbatches: int,
    replicas: Sequence[int] | None = None,
    num_rounds: int = 24,
    window: int = 8,
) -> float:
    """The recurrence op by op, averaged over the last rounds."""
    times = stage_times(plan, costs)
    free, ends = [0.0] * num_workers, []
    slot, start = 0, 0.0
    for _ in range(num_rounds):
        given, losses, end = [start] * num_microbatches, start, 0.0
        for position, (seconds, early_s) in enumerate(times):
            count = replicas[position] if replicas else 1
            done = {}
            for replica in range(count):
                worker, slot = slot % num_workers, slot + 1
                for microbatch in range(replica, num_microbatches, count):
                    begin = max(free[worker] + early_s, given[microbatch])
                    free[worker] = done[microbatch] = begin + seconds - early_s
            given = [done[microbatch] for microbatch in range(num_microbatches)]
            end = max(end, *given)
            if position == len(plan.forward):
                losses = max(given)
        start = losses
        ends.append(end)
    return (ends[-1] - ends[-1 - window]) / window


def all_cuts(num_layers: int) -> Iterator[list[tuple[int, int]]]:
    """Every way to cut the first layers into ranges."""
    for count in range(num_layers):
        for inner in combinations(range(1, num_layers), count):
            yield list(pairwise((0, *inner, num_layers)))
    if num_layers == 0:
        yield []


def all_plans(num_layers: int) -> Iterator[ExecutePlan]:
    """Every training plan of a chain."""
    for start in range(num_layers):
        for forward in all_cuts(start):
            for backward in all_cuts(start):
                yield ExecutePlan(forward, (start, num_layers), backward[::-1])


def greedy_plan(costs: Sequence[LayerCost], num_workers: int, largest_stage: int) -> ExecutePlan:
    """The published method: minimise max(stages, workers) times the heaviest stage.

    Ranges are filled from the left against every target time that some range of layers sets, and hold at
    most ``largest_stage`` layers, which stands in for memory.
    """
    forward_s = [cost.forward_s for cost in costs]
    both_s = [cost.forward_s + cost.backward_s for cost in costs]

    def fill(times: list[float], target_s: float) -> list[tuple[int, int]] | None:
        edges, total = [0], 0.0
        for index, seconds in enumerate(times):
            if seconds > target_s:
                return None
            if index > edges[-1] and (total + seconds > target_s or index - edges[-1] == largest_stage):
                edges.append(index)
                total = 0.0
            total += seconds
        return list(pairwise((*edges, len(times)))) if times else []

    best: tuple[float, ExecutePlan] | None = None
    for start in range(max(len(costs) - largest_stage, 0), len(costs)):
        fused_s = sum(both_s[start:])
        targets = {fused_s}
        for first in range(start):
            targets.update(sum(both_s[first : first + count]) for count in range(1, largest_stage + 1))
        for target_s in sorted(target for target in targets if target >= fused_s):
            forward, backward = fill(forward_s[:start], target_s + 1e-9), fill(both_s[:start], target_s + 1e-9)
            if forward is None or backward is None:
                continue
            value = max(len(forward) + len(backward) + 1, num_workers) * target_s
            if best is None or value < best[0]:
                best = value, ExecutePlan(forward, (start, len(costs)), backward[::-1])
    assert best is not None
    return best[1]


def brute_force_s(
    costs: Sequence[LayerCost], plans: Sequence[ExecutePlan], num_workers: int, num_microbatches: int
) -> float:
    """The best of all plans; those whose work, or way to the losses, alone takes longer are left out."""
    table, entries = stage_costs.StageCosts(costs), []
    for one in plans:
        assert one.fused is not None
        stages = [table.forward(*r) for r in one.forward] + [table.fused(*one.fused)]
        times = [stage.seconds for stage in stages]
        to_losses_s = sum(times) + (num_microbatches - 1) * max(times)
        stages += [table.backward(*r) for r in one.backward]
        work_s = sum(stage.seconds for stage in stages) * num_microbatches / num_workers
        entries.append((max(work_s, to_losses_s), len(one.forward), stages))
    best_s = float("inf")
    for bound_s, num_forward, stages in sorted(entries, key=lambda entry: entry[0]):
        if bound_s > best_s:
            break
        value = step_times.step_seconds(stages, num_forward, num_workers, num_microbatches, limit_s=best_s)
        best_s = min(best_s, value)
    return best_s
