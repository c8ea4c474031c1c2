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
from dataclasses import asdict
from math import inf, isinf
from pathlib import Path
from typing import Any

from roundpipe.core.errors import ConfigError
from roundpipe.core.layers import LayerCost
from roundpipe.planning.machine import HardwareProfile
from roundpipe.planning.planner import least_seconds
from roundpipe.planning.planner import plan as choose_plan
from roundpipe.planning.stage_costs import RecomputeGrain, plan_seconds
from roundpipe.tools.comparison import Setting

REQUIRED = ("forward_s", "backward_s", "weight_bytes", "activation_bytes", "carry_bytes")
OPTIONAL = ("gradient_bytes", "workspace_bytes")
LARGEST = 1e24
"""Of any number: sums and ratios of such can still be computed with."""
_MOST_SHOWN = 40
"""Characters of a wrong value."""


def read_costs(path: Path, **options: Any) -> Setting:
    """`parse_costs` of a file; a `ConfigError` if it can't be read or is not of the form above says where."""
    try:
        return parse_costs(json.loads(path.read_text(encoding="utf-8")), **options)
    except OSError as error:
        raise ConfigError(f"--costs {path}: {error.strerror or error}") from error
    except ConfigError as error:
        raise ConfigError(f"--costs {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--costs {path} is not JSON: {error}") from error


def parse_costs(
    document: Any, *, num_workers: int = 1, num_microbatches: int = 1, recompute_grain: RecomputeGrain = "stage"
) -> Setting:
    """The costs in the parsed JSON, to plan for; a `ConfigError` if it is not of the form above."""
    layers = document.get("layers") if isinstance(document, dict) else None
    if not isinstance(layers, list) or not layers:
        raise ConfigError('give an object with "layers", a list of at least one layer')
    memory_bytes = _optional_number(document, "device_memory_bytes")
    link = _optional_number(document, "link_bytes_per_s")
    if link == 0:
        raise ConfigError('"link_bytes_per_s" is 0; give a number above 0, or leave it out for transfers that are free')
    link = inf if link is None else link
    return Setting(
        costs=tuple(_layer_cost(layer, index) for index, layer in enumerate(layers)),
        names=tuple(str(layer.get("name", index)) for index, layer in enumerate(layers)),
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        budget_bytes=None if memory_bytes is None else int(memory_bytes),
        profile=HardwareProfile(upload_bytes_per_s=link, download_bytes_per_s=link),
        recompute_grain=recompute_grain,
    )


def _layer_cost(layer: Any, index: int) -> LayerCost:
    if not isinstance(layer, dict):
        raise ConfigError(f"layer {index} is {layer!r}; give an object with {', '.join(REQUIRED)}")
    where = f"layer {index} ({layer['name']})" if "name" in layer else f"layer {index}"
    given = {"gradient_bytes": layer.get("weight_bytes"), "workspace_bytes": 0, **layer}
    values: dict[str, Any] = {}
    for key in (*REQUIRED, *OPTIONAL):
        if key not in given:
            raise ConfigError(f"{where} has no {key!r}; every layer needs {', '.join(REQUIRED)}")
        value = _number(given[key], f"{where}: {key!r}")
        values[key] = int(value) if key.endswith("_bytes") else value
    return LayerCost(**values)


def _optional_number(document: dict[str, Any], key: str) -> float | None:
    return None if document.get(key) is None else _number(document[key], f'"{key}"')


def _number(value: Any, what: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= LARGEST:
        text = repr(value)
        text = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
        raise ConfigError(f"{what} is {text}; give a number from 0 to {LARGEST:.0e}")
    return value


def plan_costs(setting: Setting, *, replicate: bool = True) -> dict[str, Any]:
    """The plan as a value for JSON; errors as for the planner.

    With ``replicate``, a stage may take several slots of the rotation; not with a link, which would have to bring its
    weights several times.
    """
    costs, num_workers, num_microbatches = setting.costs, setting.num_workers, setting.num_microbatches
    is_free = _has_free_transfers(setting)
    replicate = replicate and is_free
    since = time.perf_counter()
    plan = choose_plan(costs, replicate=True, **setting.planner_arguments()) if replicate else setting.fastest_plan()
    if is_free:
        step_s = plan_seconds(plan, costs, num_workers=num_workers, num_microbatches=num_microbatches)
    else:
        step_s = setting.simulate(plan).seconds_per_step
    planning_s = time.perf_counter() - since
    assert plan.fused is not None
    work_s = sum(cost.forward_s + cost.backward_s for cost in costs)
    work_s += sum(cost.forward_s for cost in costs[: plan.fused[0]])  # recomputation
    return {
        **asdict(plan),
        "replicas": plan.replicas or (1,) * plan.num_stages,
        "round_s": step_s,
        "idle": max(1.0 - work_s * num_microbatches / num_workers / step_s, 0.0) if step_s else 0.0,
        "lower_bound_s": least_seconds(costs, replicate=replicate, **setting.planner_arguments()),
        "planning_s": planning_s,
    }


def _has_free_transfers(setting: Setting) -> bool:
    return isinf(setting.profile.upload_bytes_per_s)
