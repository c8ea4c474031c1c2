"""Chooses the forward, fused and backward ranges of a model.

The planner minimises the seconds per step in steady state (`step_times.step_seconds`) under a budget of
device memory. A longer fused tail lowers the total work, because it recomputes nothing, until memory or
the balance of the rotation forbids it.

Invariant: a plan covers every layer, its peak is within the budget, and equal arguments give equal plans.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from typing import Required, TypedDict, Unpack

from roundpipe.core.errors import DeviceMemoryError
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.layers import LayerCost
from roundpipe.planning.candidates import Candidate, Cuts
from roundpipe.planning.search import Search
from roundpipe.planning.stage_costs import RecomputeGrain, StageCost, device_memory
from roundpipe.reports.memory import DeviceMemory

_MOST_PREDICTED, _LEAST_PREDICTED = 800, 2
"""Visits, times microbatches, of the plans that a prediction chooses among (it takes about 0.2 ms for each), and
plans that it chooses among however many visits they have."""
_MOST_GREEDY = 300_000
"""Layers times target times of the chains whose greedy plan a prediction looks at, too: it takes up to half a second.
Chains of any length whose layers are alike have few target times."""
_ALIKE = 0.005
"""Share of a step's time by which plans may differ that are taken to be equally fast."""
_ROUNDING = 1 + 1e-8
"""Factor within which a time keeps a limit."""


class PlanArguments(TypedDict, total=False):
    """What every planner takes beside the costs of the layers."""

    num_workers: Required[int]
    num_microbatches: Required[int]
    memory_budget_bytes: int | None
    """What a plan may use of each device; None = no limit."""
    recompute_grain: RecomputeGrain
    """Whose activations a backward stage holds at once, ``"stage"`` (the default) or ``"layer"``."""
    names: Sequence[str] | None


def plan(
    costs: Sequence[LayerCost],
    *,
    replicate: bool = False,
    predict: Callable[[ExecutePlan], float] | None = None,
    link_bytes_per_s: float = inf,
    **arguments: Unpack[PlanArguments],
) -> ExecutePlan:
    """The fastest plan found for a chain of layers.

    Args:
        costs: for one microbatch.
        replicate: whether stages may have replicas. A stage heavier than the rest then gets several consecutive slots,
            at the price of as many uploads of its weights and downloads of its gradients.
        predict: seconds per step of a plan by a finer model, such as the simulator; it chooses among the most likely
            plans of different shape. By it no simple plan, of one or three stages, is faster than the chosen one, nor,
            if the chain is not too long, the greedy plan. Without it, transfers are left out.
        link_bytes_per_s: between host and device, one direction; tells which plans are likely.

    Raises:
        DeviceMemoryError: no plan fits; the message names the layer that is too large.
    """
    search = Search(costs, keep_slower=predict is not None, replicate=replicate, **arguments)
    candidates = search.run()
    if not candidates:
        raise _misfit(search)
    if predict is None:
        return candidates[0].plan(len(costs))
    return _best_predicted(search, candidates, predict, link_bytes_per_s)


def plan_greedy(costs: Sequence[LayerCost], **arguments: Unpack[PlanArguments]) -> ExecutePlan:
    """The plan of the simplest method, else that of single layers, to compare with; errors as for `plan`."""
    search = Search(costs, **arguments)
    candidate = _greedy(search)
    if candidate is None:
        raise _misfit(search)
    return candidate.plan(len(costs))


def least_seconds(costs: Sequence[LayerCost], *, replicate: bool = False, **arguments: Unpack[PlanArguments]) -> float:
    """Seconds per step that no plan goes below, with any number of replicas or without; infinite if none fits."""
    search = Search(costs, **arguments)
    most_replicas = min(search.num_workers, search.num_microbatches) if replicate else 1
    return min((bound_s for _, bound_s in search.fused_starts(most_replicas)), default=inf)


@dataclass(frozen=True, slots=True)
class LeastNeed:
    """What the plan of single layers takes: about the least of all plans."""

    layer_index: int
    """The layer that needs the most, with what comes and goes meanwhile."""
    stage: StageCost
    memory: DeviceMemory
    needs: list[DeviceMemory]
    """Of all stages."""


def least_need(costs: Sequence[LayerCost], **arguments: Unpack[PlanArguments]) -> LeastNeed:
    """The least device memory that a chain can be trained in, by the layer that needs the most."""
    return _least_need(Search(costs, **arguments))


def has_plan(costs: Sequence[LayerCost], **arguments: Unpack[PlanArguments]) -> bool:
    """Whether `plan` finds one that fits; takes a small part of its time."""
    return Search(costs, **arguments).is_feasible()


def _best_predicted(
    search: Search, candidates: Sequence[Candidate], predict: Callable[[ExecutePlan], float], link_bytes_per_s: float
) -> ExecutePlan:
    """The plan that is predicted to be the fastest among the best of each shape, as many as there is time for.

    A prediction only adds to what the recurrence says, so plans that are slower by the recurrence alone are left out.
    """
    simple = _simple(search, link_bytes_per_s)
    shapes: dict[tuple[int, int, int, int], Candidate] = {}
    for candidate in candidates:
        shapes.setdefault(candidate.shape, candidate)
    likely_s = {candidate: search.with_transfers_s(candidate, link_bytes_per_s) for candidate in shapes.values()}
    predicted_s: dict[Candidate, float] = {}
    best_s, visits_left = inf, _MOST_PREDICTED
    for candidate in (*_fewest_stages_first(likely_s), *simple):
        if candidate in predicted_s or search.values[candidate] >= best_s:
            continue
        if candidate not in simple:
            visits_left -= candidate.num_stages * search.num_microbatches
            if visits_left < 0 and len(predicted_s) >= _LEAST_PREDICTED:
                continue
        predicted_s[candidate] = predict(candidate.plan(search.num_layers))
        best_s = min(best_s, predicted_s[candidate])
    most_s = min((predicted_s.get(candidate, search.values[candidate]) for candidate in simple), default=inf)
    most_s = max(most_s * _ROUNDING, best_s)
    fast = {candidate: seconds for candidate, seconds in predicted_s.items() if seconds <= most_s}
    return _fewest_stages_first(fast)[0].plan(search.num_layers)


def _simple(search: Search, link_bytes_per_s: float) -> list[Candidate]:
    """The plan of one stage, the likeliest of three, and the greedy one, those of them that fit."""
    splits = [Candidate.split_at(start) for start in range(search.num_layers)]
    splits = [split for split in splits if search.evaluate(split) < inf]
    simple = [split for split in splits if not split.fused_start]
    three_stages = [split for split in splits if split.fused_start]
    simple += sorted(three_stages, key=lambda split: search.with_transfers_s(split, link_bytes_per_s))[:1]
    if search.replicate:
        most = min(search.num_workers, search.num_microbatches)
        shared = [Candidate.split_at(0)._replace(fused_replicas=count) for count in {*search.fused_counts, most}]
        simple += [candidate for candidate in shared if search.evaluate(candidate) < inf]
    if search.num_layers * len(_target_times_s(search)) <= _MOST_GREEDY:
        greedy = _greedy(search)
        if greedy is not None and search.evaluate(greedy) < inf:
            simple.append(greedy)
    return simple


def _greedy(search: Search) -> Candidate | None:
    """The best greedy plan; where none fits, that of single layers, if it does."""
    best: tuple[float, Candidate] | None = None
    for cap_bytes in search.packing.caps_bytes():
        best = _best_greedy(search, cap_bytes, best)
    if best is not None:
        return best[1]
    singles = Candidate.singles(search.num_layers)
    return singles if search.fits(singles, search.stages(singles)) else None


def _target_times_s(search: Search) -> list[float]:
    """The times that some range of layers takes, ascending."""
    both_s = search.packing.times_s["B"]
    return sorted({float(f"{stop_s - start_s:.9g}") for start_s, stop_s in combinations(both_s, 2)})


def _filled(search: Search, start: int, target_s: float, cap_bytes: int | None) -> Candidate | None:
    forward = search.packing.fill("F", start, target_s * _ROUNDING, cap_bytes)
    backward = search.packing.fill("B", start, target_s * _ROUNDING, cap_bytes)
    if forward is None or backward is None:
        return None
    return Candidate(Cuts.single(forward), Cuts.single(backward))


def _best_greedy(
    search: Search, cap_bytes: int | None, best: tuple[float, Candidate] | None
) -> tuple[float, Candidate] | None:
    """The best greedy plan whose stages keep a limit for their weights, if it is better than one known."""
    packing, num_workers, num_layers = search.packing, search.num_workers, search.num_layers
    targets_s = _target_times_s(search)
    for start in reversed(range(num_layers)):
        fused_s = search.costs.fused(start, num_layers).seconds
        if not packing.allows("U", start, num_layers, cap_bytes) or (best and num_workers * fused_s >= best[0]):
            break
        fewest = _filled(search, start, inf, cap_bytes)
        if fewest is None:
            continue
        # The work alone, and as many stages as memory demands, take so much longer the longer the target is.
        work_s = (packing.times_s["F"][start] + packing.times_s["B"][start]) / _ROUNDING
        least_slots = max(fewest.num_stages, num_workers)
        for target_s in targets_s[bisect_left(targets_s, fused_s / _ROUNDING) :]:
            if best is not None and max(work_s + target_s, least_slots * target_s) >= best[0]:
                break
            candidate = _filled(search, start, target_s, cap_bytes)
            if candidate is None:
                continue
            value = max(candidate.num_stages, num_workers) * target_s
            if (best is None or value < best[0]) and search.fits(candidate, search.stages(candidate)):
                best = value, candidate
    return best


def _fewest_stages_first(seconds: Mapping[Candidate, float]) -> list[Candidate]:
    """Candidates by time; of those alike the ones with the fewest stages, which move and wait the least."""
    least_s = min(seconds.values())

    def key(candidate: Candidate) -> tuple[float, int, float, Candidate]:
        apart = (seconds[candidate] - least_s) // (least_s * _ALIKE) if least_s else seconds[candidate]
        return apart, sum(candidate.replicas), seconds[candidate], candidate

    return sorted(seconds, key=key)


def _least_need(search: Search) -> LeastNeed:
    num_layers = search.num_layers
    stages = search.stages(Candidate.singles(num_layers))
    needs = device_memory(stages, search.num_workers)
    position = max(range(len(needs)), key=lambda index: (needs[index].total, stages[index].own_bytes))
    layer_index = position if position < num_layers else 2 * (num_layers - 1) - position
    return LeastNeed(layer_index, stages[position], needs[position], needs)


def _misfit(search: Search) -> DeviceMemoryError:
    """Why not even stages of one layer fit: the one that needs the most, its bytes and what can help.

    What it needs is the same for every budget; from there on, stages of one layer fit.
    """
    budget_bytes, num_layers, layers = search.budget_bytes, search.num_layers, search.costs.layers
    assert budget_bytes is not None, "without a budget every plan fits"
    least = _least_need(search)
    layer_index, stage, need, needs = least.layer_index, least.stage, least.memory, least.needs

    def layer_name(index: int) -> str:
        return f"layer {index}" + (f" ({search.names[index]})" if search.names is not None else "")

    others = f"{need.total - stage.own_bytes:,} for weights that come up and gradients that go down meanwhile"
    heaviest = max(range(num_layers), key=lambda index: layers[index].weight_bytes)
    if heaviest != layer_index and layers[heaviest].weight_bytes > stage.own_bytes:
        others += f" (of them {layer_name(heaviest)} has the most: {layers[heaviest].weight_bytes:,})"
    remedies = ["a device with more memory"]
    if max(memory.of_weights for memory in needs) <= budget_bytes:  # there is room without any values
        remedies = ["more and smaller microbatches (num_microbatch)", "shorter sequences", *remedies]
    return DeviceMemoryError(
        f"{layer_name(layer_index)} does not fit the device budget of {budget_bytes:,} bytes even as a stage "
        f"of its own: it needs {need.total:,} bytes, of which weights {stage.weight_bytes:,}, gradients "
        f"{stage.gradient_bytes:,}, activations and carried values {stage.working_bytes:,}, and "
        f"{others}. Use {', '.join(remedies)}, or split the layer"
    )
