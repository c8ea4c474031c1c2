"""Chooses the forward, fused and backward ranges of a model.

The planner minimises the seconds per round in steady state (`stage_costs.round_seconds`) under a budget of
device memory. A longer fused tail lowers the total work, because it recomputes nothing, until memory or
the balance of the rotation forbids it.

Invariant: a plan covers every layer, its peak is within the budget, and equal arguments give equal plans.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import inf

from roundpipe.core.errors import ConfigError, DeviceMemoryError
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import ExecutePlan
from roundpipe.planning import stage_costs
from roundpipe.planning.search import Candidate, Cuts, Search
from roundpipe.planning.stage_costs import JobNeed, RecomputeGrain, StageCost, StageCosts, StagePhase

_MOST_PREDICTED = 800
"""Visits, times microbatches, of the plans that a prediction chooses among: it takes about 0.2 ms for each."""

_LEAST_PREDICTED = 2
"""Plans that it chooses among however many visits they have."""

_MOST_GREEDY = 300_000
"""Layers times target times of the chains whose greedy plan a prediction looks at, too: it takes up to half a second.
Chains of any length whose layers are alike have few target times."""

_ALIKE = 0.005
"""Share of a round's time by which plans may differ that are taken to be equally fast."""

_ROUNDING = 1 + 1e-8
"""Factor within which a range keeps a target time."""


@dataclass(frozen=True, slots=True)
class ReplicatedPlan:
    """A plan whose stages may take several consecutive slots of the rotation."""

    plan: ExecutePlan
    replicas: tuple[int, ...]
    """Per job of a training round; microbatch m runs on replica m mod r."""


def plan(
    costs: Sequence[LayerCost],
    *,
    num_workers: int,
    num_microbatches: int,
    memory_budget_bytes: int | None = None,
    recompute_grain: RecomputeGrain = "stage",
    names: Sequence[str] | None = None,
    predict: Callable[[ExecutePlan], float] | None = None,
    link_bytes_per_s: float = inf,
) -> ExecutePlan:
    """The fastest plan found for a chain of layers.

    Args:
        costs: one per layer, for one microbatch.
        num_workers: workers in the rotation.
        num_microbatches: microbatches per round.
        memory_budget_bytes: what a plan may use of each device; None = no limit.
        recompute_grain: whose activations a backward stage holds at once, ``"stage"`` or ``"layer"``.
        names: of the layers, for errors.
        predict: seconds per round of a plan by a finer model, such as the simulator; it chooses among plans of
            different shape, those first that are most likely the best, and by it no simple plan, of one or three
            stages, is faster than the chosen one, nor, if the chain is not too long, the greedy plan. Without it,
            transfers are left out.
        link_bytes_per_s: between host and device, one direction; tells which plans are likely.

    Raises:
        ConfigError: an argument out of range.
        DeviceMemoryError: no plan fits; the message names the layer that is too large.
    """
    _check(costs, num_workers, num_microbatches, recompute_grain, names)
    table = StageCosts(costs, recompute_grain)
    search = Search(table, num_workers, num_microbatches, memory_budget_bytes, keep_slower=predict is not None)
    found = search.run()
    if not found:
        raise _misfit(table, num_workers, memory_budget_bytes, names)
    if predict is None:
        return _to_plan(found[0], len(costs))
    return _best_predicted(search, found, predict, link_bytes_per_s)


def _best_predicted(
    search: Search, found: Sequence[Candidate], predict: Callable[[ExecutePlan], float], link_bytes_per_s: float
) -> ExecutePlan:
    """The plan that is predicted to be the fastest among the best of each shape, as many as there is time for.

    A prediction only adds to what the recurrence says, so plans that are slower by the recurrence alone are left out.
    """
    simple = _simple(search, link_bytes_per_s)
    shapes: dict[tuple[int, int, int], Candidate] = {}
    for candidate in found:
        shapes.setdefault(candidate.shape, candidate)
    likely_s = {one: search.with_transfers_s(one, link_bytes_per_s) for one in shapes.values()}
    predicted_s: dict[Candidate, float] = {}
    best_s, visits_left = inf, _MOST_PREDICTED
    for candidate in (*_fewest_stages_first(likely_s), *simple):
        if candidate in predicted_s or search.values[candidate] >= best_s:
            continue
        if candidate not in simple:
            visits_left -= len(candidate.replicas) * search.num_microbatches
        if visits_left < 0 and len(predicted_s) >= _LEAST_PREDICTED and candidate not in simple:
            continue
        predicted_s[candidate] = predict(_to_plan(candidate, search.num_layers))
        best_s = min(best_s, predicted_s[candidate])
    most_s = min((predicted_s.get(one, search.values[one]) for one in simple), default=inf)
    as_fast = {one: one_s for one, one_s in predicted_s.items() if one_s <= most_s * _ROUNDING or one_s == best_s}
    return _to_plan(_fewest_stages_first(as_fast)[0], search.num_layers)


def _simple(search: Search, link_bytes_per_s: float) -> list[Candidate]:
    """The plan of one stage, the likeliest of three, and the greedy one, those of them that fit."""
    split = [Candidate.split_at(start) for start in range(search.num_layers)]
    split = [one for one in split if search.evaluate(one) < inf]
    chosen = split[:1] if split and split[0].fused_start == 0 else []
    chosen += sorted(
        (one for one in split if one.fused_start), key=lambda one: search.with_transfers_s(one, link_bytes_per_s)
    )[:1]
    if search.num_layers * len(_targets_s(search)) <= _MOST_GREEDY:
        greedy = _greedy(search)
        if greedy is not None and search.evaluate(greedy) < inf:
            chosen.append(greedy)
    return chosen


def _fewest_stages_first(seconds: Mapping[Candidate, float]) -> list[Candidate]:
    """Candidates by time; of those alike the ones with the fewest stages, which move and wait the least."""
    least_s = min(seconds.values())

    def key(candidate: Candidate) -> tuple[float, int, float, Candidate]:
        steps = (seconds[candidate] - least_s) // (least_s * _ALIKE) if least_s else seconds[candidate]
        return steps, len(candidate.replicas), seconds[candidate], candidate

    return sorted(seconds, key=key)


def plan_replicated(
    costs: Sequence[LayerCost],
    *,
    num_workers: int,
    num_microbatches: int,
    memory_budget_bytes: int | None = None,
    recompute_grain: RecomputeGrain = "stage",
    names: Sequence[str] | None = None,
) -> ReplicatedPlan:
    """The fastest plan found whose stages may have replicas; arguments and errors as for `plan`.

    A stage heavier than the rest gets r consecutive slots, at the price of r uploads of its weights and r
    downloads of its gradients.
    """
    _check(costs, num_workers, num_microbatches, recompute_grain, names)
    table = StageCosts(costs, recompute_grain)
    found = Search(table, num_workers, num_microbatches, memory_budget_bytes, replicate=True).run()
    if not found:
        raise _misfit(table, num_workers, memory_budget_bytes, names)
    return ReplicatedPlan(_to_plan(found[0], len(costs)), found[0].replicas)


def least_seconds(
    costs: Sequence[LayerCost],
    *,
    num_workers: int,
    num_microbatches: int,
    memory_budget_bytes: int | None = None,
    recompute_grain: RecomputeGrain = "stage",
) -> float:
    """Seconds per round that no plan without replicas goes below; infinite if none fits. Arguments as for `plan`."""
    _check(costs, num_workers, num_microbatches, recompute_grain, None)
    search = Search(StageCosts(costs, recompute_grain), num_workers, num_microbatches, memory_budget_bytes)
    return min((bound_s for _, bound_s in search.fused_starts()), default=inf)


def plan_greedy(
    costs: Sequence[LayerCost],
    *,
    num_workers: int,
    num_microbatches: int,
    memory_budget_bytes: int | None = None,
    recompute_grain: RecomputeGrain = "stage",
    names: Sequence[str] | None = None,
) -> ExecutePlan:
    """The plan of the simplest method, to compare with; arguments and errors as for `plan`.

    It minimises max(stages, workers) times the heaviest stage: for each start of the fused tail and each time that some
    range of layers takes, ranges are filled from the left. Where no such plan fits, it is that of single layers.
    """
    _check(costs, num_workers, num_microbatches, recompute_grain, names)
    table = StageCosts(costs, recompute_grain)
    search = Search(table, num_workers, num_microbatches, memory_budget_bytes)
    found = _greedy(search)
    if found is None:
        raise _misfit(table, num_workers, memory_budget_bytes, names)
    return _to_plan(found, len(costs))


def _greedy(search: Search) -> Candidate | None:
    """The best greedy plan; where none fits, that of single layers, if it does."""
    best: tuple[float, Candidate] | None = None
    for cap_bytes in search.caps_bytes():
        best = _fill_greedily(search, cap_bytes, best)
    if best is not None:
        return best[1]
    singles = Candidate.singles(search.num_layers)
    return singles if search.fits(singles, search.stages(singles)) else None


def _targets_s(search: Search) -> list[float]:
    """The times that some range of layers takes, ascending."""
    table = search.costs
    both_s = [forward + backward for forward, backward in zip(table.forward_s, table.backward_s, strict=True)]
    return sorted({float(f"{stop_s - start_s:.9g}") for start_s, stop_s in combinations(both_s, 2)})


def _fill_greedily(
    search: Search, cap_bytes: int | None, best: tuple[float, Candidate] | None
) -> tuple[float, Candidate] | None:
    """The best greedy plan whose stages keep a limit for their weights, if it is better than one known."""
    table, num_workers = search.costs, search.num_workers
    num_layers = len(table.layers)
    both_s = [forward + backward for forward, backward in zip(table.forward_s, table.backward_s, strict=True)]

    def fill(phase: StagePhase, layers: int, target_s: float) -> Cuts | None:
        edges, times, ahead = [0], table.forward_s if phase == "F" else both_s, search.reach(phase, cap_bytes).ahead
        while edges[-1] < layers:
            start = edges[-1]
            in_time = bisect_right(times, times[start] + target_s * _ROUNDING) - 1
            stop = min(in_time, ahead[start], layers)
            while stop > start and not search.allowed(phase, start, stop, cap_bytes):
                stop -= 1
            if stop == start:
                return None
            edges.append(stop)
        return Cuts.single(edges)

    targets_s = _targets_s(search)
    for fused_start in reversed(range(num_layers)):
        fused_s = table.fused(fused_start, num_layers).seconds
        if not search.allowed("U", fused_start, num_layers, cap_bytes) or (best and num_workers * fused_s >= best[0]):
            break
        forward, backward = fill("F", fused_start, inf), fill("B", fused_start, inf)
        if forward is None or backward is None:
            continue
        # The work alone, and as many stages as memory demands, take so much longer the longer the target is.
        work_s = (table.forward_s[fused_start] + both_s[fused_start]) / _ROUNDING
        least_slots = max(len(Candidate(forward, backward).replicas), num_workers)
        for target_s in targets_s[bisect_left(targets_s, fused_s / _ROUNDING) :]:
            if best is not None and max(work_s + target_s, least_slots * target_s) >= best[0]:
                break
            forward, backward = fill("F", fused_start, target_s), fill("B", fused_start, target_s)
            if forward is None or backward is None:
                continue
            candidate = Candidate(forward, backward)
            value = max(len(candidate.replicas), num_workers) * target_s
            if (best is None or value < best[0]) and search.fits(candidate, search.stages(candidate)):
                best = value, candidate
    return best


def peak_bytes(
    execute_plan: ExecutePlan,
    costs: Sequence[LayerCost],
    *,
    num_workers: int,
    recompute_grain: RecomputeGrain = "stage",
) -> int:
    """Peak of device memory of a training plan: the largest of its jobs' needs."""
    return device_need(execute_plan, costs, num_workers=num_workers, recompute_grain=recompute_grain).total


def device_need(
    execute_plan: ExecutePlan,
    costs: Sequence[LayerCost],
    *,
    num_workers: int,
    recompute_grain: RecomputeGrain = "stage",
    replicas: Sequence[int] | None = None,
) -> JobNeed:
    """What the job of a training plan needs that needs the most device memory."""
    needs = stage_needs(
        execute_plan, costs, num_workers=num_workers, recompute_grain=recompute_grain, replicas=replicas
    )
    return max(needs, key=lambda need: need.total)


def stage_needs(
    execute_plan: ExecutePlan,
    costs: Sequence[LayerCost],
    *,
    num_workers: int,
    recompute_grain: RecomputeGrain = "stage",
    replicas: Sequence[int] | None = None,
) -> list[JobNeed]:
    """Device memory while each job of a training round runs, by what for, in the order of the round."""
    stages = _training_stages(execute_plan, StageCosts(costs, recompute_grain))
    counts = [1] * len(stages) if replicas is None else replicas
    slots = [stage for stage, count in zip(stages, counts, strict=True) for _ in range(count)]
    return stage_costs.job_needs(slots, num_workers)


def round_seconds(
    execute_plan: ExecutePlan,
    costs: Sequence[LayerCost],
    *,
    num_workers: int,
    num_microbatches: int,
    replicas: Sequence[int] | None = None,
) -> float:
    """Seconds per round of a training plan in steady state, transfers left out."""
    stages = _training_stages(execute_plan, StageCosts(costs))
    num_forward = len(execute_plan.forward)
    return stage_costs.round_seconds(stages, num_forward, num_workers, num_microbatches, replicas)


def _training_stages(execute_plan: ExecutePlan, table: StageCosts) -> list[StageCost]:
    """Costs of the jobs of a training round, in order."""
    execute_plan.validate(len(table.layers))
    if execute_plan.fused is None:
        raise ConfigError("the plan has no fused range: only plans that train in one call have a round")
    stages = [table.forward(*one) for one in execute_plan.forward]
    stages.append(table.fused(*execute_plan.fused))
    stages += [table.backward(*one) for one in execute_plan.backward]
    return stages


def _to_plan(candidate: Candidate, num_layers: int) -> ExecutePlan:
    backward = reversed(list(pairwise(candidate.backward.edges)))
    return ExecutePlan(pairwise(candidate.forward.edges), (candidate.fused_start, num_layers), backward)


def _check(
    costs: Sequence[LayerCost],
    num_workers: int,
    num_microbatches: int,
    recompute_grain: str,
    names: Sequence[str] | None,
) -> None:
    if not costs:
        raise ConfigError("there are no layers to plan for; give the cost of at least one")
    if num_workers < 1 or num_microbatches < 1:
        raise ConfigError(f"num_workers={num_workers}, num_microbatches={num_microbatches}: both must be at least 1")
    if recompute_grain not in ("stage", "layer"):
        raise ConfigError(f"recompute_grain is {recompute_grain!r}; allowed are 'stage' and 'layer'")
    if names is not None and len(names) != len(costs):
        raise ConfigError(f"{len(names)} names for {len(costs)} layers; give one per layer or none")


def _misfit(
    table: StageCosts, num_workers: int, budget_bytes: int | None, names: Sequence[str] | None
) -> DeviceMemoryError:
    """Why not even stages of one layer fit: the one that needs the most, its bytes and what can help.

    What it needs is the same for every budget; from there on, stages of one layer fit.
    """
    assert budget_bytes is not None, "without a budget every plan fits"
    num_layers = len(table.layers)
    singles = _to_plan(Candidate.singles(num_layers), num_layers)
    stages = _training_stages(singles, table)
    needs = stage_costs.job_needs(stages, num_workers)
    position = max(range(len(needs)), key=lambda one: (needs[one].total, stages[one].own_bytes))
    stage, need = stages[position], needs[position]

    def layer_name(index: int) -> str:
        return f"layer {index}" + (f" ({names[index]})" if names is not None else "")

    layer_index = position if position < num_layers else 2 * (num_layers - 1) - position
    others_bytes = need.total - stage.own_bytes
    others = f"{others_bytes:,} for weights that come up and gradients that go down meanwhile"
    heaviest = max(range(num_layers), key=lambda index: table.layers[index].weight_bytes)
    if heaviest != layer_index and table.layers[heaviest].weight_bytes > stage.own_bytes:
        others += f" (of them {layer_name(heaviest)} has the most: {table.layers[heaviest].weight_bytes:,})"
    remedies = ["a device with more memory"]
    if max(one.weights + one.gradients for one in needs) <= budget_bytes:  # there is room without any values
        remedies = ["more and smaller microbatches (num_microbatch)", "shorter sequences", *remedies]
    return DeviceMemoryError(
        f"{layer_name(layer_index)} does not fit the device budget of {budget_bytes:,} bytes even as a stage "
        f"of its own: it needs {need.total:,} bytes, of which weights {stage.weight_bytes:,}, gradients "
        f"{stage.gradient_bytes:,}, activations and carried values {stage.working_bytes:,}, and "
        f"{others}. Use {', '.join(remedies)}, or split the layer"
    )
