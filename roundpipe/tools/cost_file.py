"""Plans for a chain of layers given as numbers, without a model: costs in as JSON, the plan out as JSON.

    {"layers": [{"name", "forward_s", "backward_s", "weight_bytes", "activation_bytes", "carry_bytes"}, ...],
     "device_memory_bytes": int}

Times are those of one microbatch; recomputation takes as long as the forward. Optional, per layer:
``gradient_bytes`` (as many as the weights), ``workspace_bytes`` (0); for all: ``link_bytes_per_s`` (transfers free).

Invariant: the plan's seconds are those of the rotation's recurrence, or with a link those of the simulator.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from typing import Any

from roundpipe.core.errors import ConfigError
from roundpipe.core.layers import LayerCost
from roundpipe.planning.machine import HardwareProfile
from roundpipe.planning.planner import ReplicatedPlan, plan_replicated
from roundpipe.planning.planner import plan as choose_plan
from roundpipe.planning.stage_costs import plan_seconds
from roundpipe.runtime.config import RecomputeGrain
from roundpipe.tools.comparison import ComparedSchedule, Setting, compare_schedules

REQUIRED = ("forward_s", "backward_s", "weight_bytes", "activation_bytes", "carry_bytes")
OPTIONAL = ("gradient_bytes", "workspace_bytes")
LARGEST = 1e24
"""Of any number: sums and ratios of such can still be computed with."""
_MOST_SHOWN = 40
"""Characters of a wrong value."""


@dataclass(frozen=True, slots=True)
class ChainCosts:
    """What a file of costs says."""

    names: tuple[str, ...]
    costs: tuple[LayerCost, ...]
    device_memory_bytes: int | None
    """None = no limit."""
    link_bytes_per_s: float | None
    """Per device and direction; None = transfers take no time."""


def read_costs(path: Path) -> ChainCosts:
    """The costs in a file; a `ConfigError` if it can't be read or is not of the form above says where."""
    try:
        return parse_costs(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error


def parse_costs(document: Any) -> ChainCosts:
    """The costs in the parsed JSON; a `ConfigError` if it is not of the form above."""
    layers = document.get("layers") if isinstance(document, dict) else None
    if not isinstance(layers, list) or not layers:
        raise ConfigError('give an object with "layers", a list of at least one layer')
    memory_bytes = _optional_number(document, "device_memory_bytes")
    link = _optional_number(document, "link_bytes_per_s")
    if link == 0:
        raise ConfigError('"link_bytes_per_s" is 0; give a number above 0, or leave it out for transfers that are free')
    return ChainCosts(
        costs=tuple(_layer_cost(layer, index) for index, layer in enumerate(layers)),
        names=tuple(str(layer.get("name", index)) for index, layer in enumerate(layers)),
        device_memory_bytes=None if memory_bytes is None else int(memory_bytes),
        link_bytes_per_s=link,
    )


def _layer_cost(layer: Any, index: int) -> LayerCost:
    if not isinstance(layer, dict):
        raise ConfigError(f"layer {index} is {layer!r}; give an object with {', '.join(REQUIRED)}")
    where = f"layer {index} ({layer['name']})" if "name" in layer else f"layer {index}"
    values: dict[str, float] = {}
    for key in REQUIRED:
        if key not in layer:
            raise ConfigError(f"{where} has no {key!r}; every layer needs {', '.join(REQUIRED)}")
        values[key] = _number(layer[key], f"{where}: {key!r}")
    for key in OPTIONAL:
        default = values["weight_bytes"] if key == "gradient_bytes" else 0
        values[key] = _number(layer.get(key, default), f"{where}: {key!r}")
    sizes = {key: int(value) for key, value in values.items() if key.endswith("_bytes")}
    return LayerCost(forward_s=values["forward_s"], backward_s=values["backward_s"], **sizes)


def _optional_number(document: dict[str, Any], key: str) -> float | None:
    return None if document.get(key) is None else _number(document[key], f'"{key}"')


def _number(value: Any, what: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= LARGEST:
        text = repr(value)
        text = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
        raise ConfigError(f"{what} is {text}; give a number from 0 to {LARGEST:.0e}")
    return value


def plan_costs(
    chain: ChainCosts,
    *,
    num_workers: int,
    num_microbatches: int,
    replicate: bool = True,
    recompute_grain: RecomputeGrain = "stage",
) -> dict[str, Any]:
    """The plan as a value for JSON.

    With ``replicate``, a stage may take several slots of the rotation; not with a link, which would have to bring its
    weights several times.

    Raises:
        ConfigError: an argument out of range.
        DeviceMemoryError: no plan fits.
    """
    replicate = replicate and chain.link_bytes_per_s is None
    setting = _setting(chain, num_workers, num_microbatches, recompute_grain)
    since = time.perf_counter()
    chosen = _choose(chain, setting, replicate)
    plan, replicas = chosen.plan, chosen.replicas
    if chain.link_bytes_per_s is not None:
        step_s = setting.simulate(plan).seconds_per_step
    else:
        machine = {"num_workers": num_workers, "num_microbatches": num_microbatches}
        step_s = plan_seconds(plan, chain.costs, **machine, replicas=replicas if replicate else None)
    planning_s = time.perf_counter() - since
    assert plan.fused is not None
    busy_s = _work_s(chain.costs, plan.fused[0]) * num_microbatches / num_workers
    return {
        "forward": [list(stage) for stage in plan.forward],
        "fused": list(plan.fused),
        "backward": [list(stage) for stage in plan.backward],
        "replicas": list(replicas),
        "round_s": step_s,
        "idle": max(1.0 - busy_s / step_s, 0.0) if step_s else 0.0,
        "lower_bound_s": lower_bound_s(chain, num_workers, num_microbatches, replicate=replicate),
        "planning_s": planning_s,
    }


def compare_costs(
    chain: ChainCosts, *, num_workers: int, num_microbatches: int, recompute_grain: RecomputeGrain = "stage"
) -> list[ComparedSchedule]:
    """Schedules side by side on the chain; arguments and errors as for `plan_costs`."""
    setting = _setting(chain, num_workers, num_microbatches, recompute_grain)
    return compare_schedules(setting, _choose(chain, setting, replicate=False).plan)


def _setting(chain: ChainCosts, num_workers: int, num_microbatches: int, recompute_grain: RecomputeGrain) -> Setting:
    link = inf if chain.link_bytes_per_s is None else chain.link_bytes_per_s
    profile = HardwareProfile(link, link)
    return Setting(chain.costs, num_workers, num_microbatches, chain.device_memory_bytes, profile, recompute_grain)


def _choose(chain: ChainCosts, setting: Setting, replicate: bool) -> ReplicatedPlan:
    """The fastest plan found: with a link by the simulator, else by the recurrence."""
    limits: dict[str, Any] = {
        "num_workers": setting.num_workers,
        "num_microbatches": setting.num_microbatches,
        "memory_budget_bytes": setting.budget_bytes,
        "recompute_grain": setting.recompute_grain,
        "names": chain.names,
    }
    if replicate:
        return plan_replicated(chain.costs, **limits)
    predict = None if chain.link_bytes_per_s is None else lambda plan: setting.simulate(plan).seconds_per_step
    chosen = choose_plan(chain.costs, predict=predict, **limits)
    return ReplicatedPlan(chosen, (1,) * chosen.num_stages)


def _work_s(costs: Sequence[LayerCost], fused_start: int) -> float:
    """Compute of one microbatch: a forward, a backward, and a recomputation in front of the fused tail."""
    total_s = sum(cost.forward_s + cost.backward_s for cost in costs)
    return total_s + sum(cost.forward_s for cost in costs[:fused_start])


def lower_bound_s(chain: ChainCosts, num_workers: int, num_microbatches: int, *, replicate: bool = True) -> float:
    """Seconds that no plan's step can go below: all devices always busy, or the way to the losses.

    The next step starts when the losses are known, so a step takes at least one microbatch's way to the fused
    tail and all visits of a replica of that tail, whichever start of the tail within memory is the best.
    """
    costs, best_s = chain.costs, inf
    copies = min(num_workers, num_microbatches) if replicate else 1
    for start in range(len(costs)):
        tail = costs[start:]
        tail_bytes = sum(cost.weight_bytes + cost.gradient_bytes + cost.activation_bytes for cost in tail)
        if start + 1 < len(costs) and chain.device_memory_bytes is not None and tail_bytes > chain.device_memory_bytes:
            continue
        tail_s = sum(cost.forward_s + cost.backward_s for cost in tail)
        to_losses_s = sum(cost.forward_s for cost in costs[:start]) + tail_s * ceil(num_microbatches / copies)
        best_s = min(best_s, max(_work_s(costs, start) * num_microbatches / num_workers, to_losses_s))
    return best_s
