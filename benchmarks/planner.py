"""How good plans are, and how long finding them takes.

    python -m benchmarks.planner [--out benchmarks/results/planner.json]

Published layer times: seconds per round and idle share of the planner, with and without replicas, and of the
published greedy method. Synthetic chains: processor time of the planner, and how far the plan is above the
time that its work alone would take. Short chains: how far plans are above the best of all plans, as the planner makes
them and as its search, which longer chains get, would.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.environment import report
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.layers import LayerCost
from roundpipe.planning import search as plan_search
from roundpipe.planning.planner import plan
from roundpipe.planning.stage_costs import plan_peak_bytes, plan_seconds
from tests.runtime.chains import (
    PUBLISHED,
    all_plans,
    brute_force_s,
    greedy_plan,
    published_chain,
    random_chain,
    stage_times,
)

MACHINE = {"num_workers": PUBLISHED["num_workers"], "num_microbatches": PUBLISHED["num_microbatches"]}
LARGEST_STAGE = {"qwen3-1.7b": 12, "llama3.1-8b": 10, "qwen3-32b": 4}


def describe(chosen: ExecutePlan, costs: Sequence[LayerCost], took_s: float) -> dict[str, Any]:
    """One row: time of a round, idle share, peak, and the time it took to find."""
    seconds = plan_seconds(chosen, costs, **MACHINE)
    compute_s = sum(total for total, _ in stage_times(chosen, costs))
    work_s = compute_s * MACHINE["num_microbatches"] / MACHINE["num_workers"]
    return {
        "seconds_per_round": round(seconds, 4),
        "idle_percent": round(100 * (1 - work_s / seconds), 2),
        "stages": chosen.num_stages,
        "peak_gb": round(plan_peak_bytes(chosen, costs, num_workers=MACHINE["num_workers"]) / 1e9, 2),
        "planning_s": round(took_s, 3),
    }


def published() -> dict[str, Any]:
    """The published models, planned three ways."""
    budget_bytes, rows = PUBLISHED["device_memory_bytes"], {}
    for name in PUBLISHED["models"]:
        costs = published_chain(name)
        start_s = time.process_time()
        greedy = greedy_plan(costs, MACHINE["num_workers"], LARGEST_STAGE[name])
        greedy_s = time.process_time()
        chosen = plan(costs, **MACHINE, memory_budget_bytes=budget_bytes)
        chosen_s = time.process_time()
        replicated = plan(costs, replicate=True, **MACHINE, memory_budget_bytes=budget_bytes)
        replicated_s = time.process_time()
        rows[f"{name} greedy"] = describe(greedy, costs, greedy_s - start_s)
        rows[f"{name} planned"] = describe(chosen, costs, chosen_s - greedy_s)
        rows[f"{name} replicated"] = describe(replicated, costs, replicated_s - chosen_s)
    return rows


def synthetic() -> dict[str, Any]:
    """Long chains of uneven layers."""
    rows = {}
    for num_layers in (50, 200, 500, 1000):
        random = Random(0)
        sizes = [random.uniform(0.5, 2) for _ in range(num_layers)]
        costs = [
            LayerCost(
                forward_s=0.01 * size,
                backward_s=0.02 * size,
                weight_bytes=round(4e8 * size),
                gradient_bytes=round(4e8 * size),
                activation_bytes=round(1e9 * size),
                workspace_bytes=round(1e8 * size),
                carry_bytes=5 * 10**7,
            )
            for size in sizes
        ]
        for budget_gb in (24, 80):
            before_s = time.process_time()
            chosen = plan(costs, **MACHINE, memory_budget_bytes=budget_gb * 10**9)
            rows[f"{num_layers} layers, {budget_gb} GB"] = describe(chosen, costs, time.process_time() - before_s)
    return rows


def short(num_chains: int = 200, num_layers: int = 7) -> dict[str, Any]:
    """Random chains that are short enough to evaluate every plan; gaps in percent."""
    rows, plans, every_plan_up_to = {}, list(all_plans(num_layers)), plan_search._EXHAUSTIVE_LAYERS
    for name, layers in (("planned", every_plan_up_to), ("searched", 0)):
        plan_search._EXHAUSTIVE_LAYERS = layers
        random, gaps, took_s = Random(7), [], 0.0
        for _ in range(num_chains):
            costs, num_workers = random_chain(random, num_layers), random.randint(2, 5)
            machine = {"num_workers": num_workers, "num_microbatches": num_workers + random.randint(0, 4)}
            start_s = time.process_time()
            seconds = plan_seconds(plan(costs, **machine), costs, **machine)
            took_s += time.process_time() - start_s
            gaps.append(100 * (seconds / brute_force_s(costs, plans, **machine) - 1))
        rows[f"{num_chains} chains of {num_layers}, {name}"] = {
            "mean_gap_percent": round(sum(gaps) / num_chains, 3),
            "worst_gap_percent": round(max(gaps), 3),
            "planning_s": round(took_s / num_chains, 4),
        }
    plan_search._EXHAUSTIVE_LAYERS = every_plan_up_to
    return rows


def main() -> None:
    """Runs both parts and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    arguments = parser.parse_args()
    rows = published() | synthetic() | short()
    for name, row in rows.items():
        print(f"{name:27}", "  ".join(f"{key} {value}" for key, value in row.items()))
    report(arguments.out, rows)


if __name__ == "__main__":
    main()
