"""Forecasts side by side: ``plan --sweep devices,batch,lora`` varies what it names and keeps the rest.

Invariant: a row is the forecast that ``plan`` makes for that row's options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tqdm import tqdm

from roundpipe.core.errors import ConfigError
from roundpipe.reports.tables import format_bytes, format_seconds, table
from roundpipe.tools.device_data import DEVICES, DeviceSpec
from roundpipe.tools.forecast import Forecast, forecast_at
from roundpipe.tools.forecast_report import verdict
from roundpipe.tools.problem import Layers, Machine, Training
from roundpipe.tools.target import Target

NUM_DEVICES, TIMES_THE_BATCH, RANKS = (1, 2, 4), (1, 2, 4), (None, 16)
"""What each name of a sweep is varied over."""
AXES = ("cards", "devices", "batch", "lora")


@dataclass(frozen=True, slots=True)
class SweptPlan:
    """One setting of a sweep, and its forecast."""

    lora_rank: int | None
    result: Forecast


def parse_axes(text: str) -> tuple[str, ...]:
    """The names of a sweep, in the order of its columns; a `ConfigError` for what is none."""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in AXES]
    if unknown:
        raise ConfigError(f"--sweep {text}: there is no {unknown[0]!r} to vary; there are {', '.join(AXES)}")
    return tuple(name for name in AXES if name in names)


def sweep(
    axes: Sequence[str],
    target_with: Callable[[int | None], Target],
    lora_rank: int | None,
    machine: Machine,
    training_on: Callable[[Target, int, int], Training],
) -> list[SweptPlan]:
    """A row for each setting, with a progress bar on stderr.

    Args:
        axes: what is varied.
        target_with: makes the model, with adapters of a rank.
        lora_rank: of a sweep that does not vary it.
        machine: device and number of a sweep that does not vary them.
        training_on: the training of a target on a number of devices, with a multiple of the batch.
    """
    ranks = dict.fromkeys((*RANKS, lora_rank)) if "lora" in axes else (lora_rank,)
    cards: Sequence[DeviceSpec] = DEVICES if "cards" in axes else (machine.device,)
    numbers = NUM_DEVICES if "devices" in axes else (machine.num_devices,)
    times = TIMES_THE_BATCH if "batch" in axes else (1,)
    rows = []
    with tqdm(total=len(ranks) * len(cards) * len(numbers) * len(times), desc="plans", leave=False) as bar:
        for rank in ranks:
            target = target_with(rank)
            for card in cards:
                layers = None
                for number, factor in product(numbers, times):
                    on = replace(machine, device=card, num_devices=number)
                    training = training_on(target, number, factor)
                    layers = layers or Layers.of(target, training.microbatch, on)
                    rows.append(SweptPlan(rank, forecast_at(layers, on, training)))
                    bar.update()
    return rows


def sweep_text(rows: Sequence[SweptPlan]) -> str:
    """The rows as a table; columns in which all are alike are left to its first line."""
    first = rows[0].result
    tokens = first.layers.target.tokens_per_sample
    columns: dict[str, list[str]] = {
        "device": [row.result.machine.device.name for row in rows],
        "devices": [str(row.result.machine.num_devices) for row in rows],
        "trains": ["all weights" if row.lora_rank is None else f"LoRA {row.lora_rank}" for row in rows],
        "batch": [f"{row.result.training.batch:,}" for row in rows],
        "microbatches": [str(row.result.training.num_microbatches) for row in rows],
    }
    same = {name: cells[0] for name, cells in columns.items() if len(set(cells)) == 1}
    shown = {name: cells for name, cells in columns.items() if name not in same}
    figures = {
        "step": [format_seconds(s.seconds_per_step) if (s := row.result.simulation) else "-" for row in rows],
        "tokens/s" if tokens else "samples/s": [_rate(row.result) for row in rows],
        "on a device": [format_bytes(need.total) if (need := row.result.device) else "-" for row in rows],
    }
    if any(row.result.residency.trained for row in rows):
        figures["lives there"] = [_layers_there(row.result) for row in rows]
    verdicts = [verdict(row.result, short=True) for row in rows]
    cells = [list(row) for row in zip(*shown.values(), *figures.values(), verdicts, strict=True)]
    headers = [*shown, *figures, "verdict"]
    size = f", {tokens:,} tokens a sample" if tokens else ""
    fixed = "".join(f", {name} {value}" for name, value in same.items())
    return f"{first.layers.target.name}{fixed}{size}\n\n{table(headers, cells, text_columns=len(headers))}"


def _layers_there(result: Forecast) -> str:
    """How many layers' trained weights live on the device."""
    number, of = len(result.residency.trained), len(result.costs)
    return f"{number} of {of} layers" if number else "-"


def _rate(result: Forecast) -> str:
    rate = result.samples_per_s() * (result.layers.target.tokens_per_sample or 1)
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}" if rate else "-"


def sweep_json(rows: Sequence[SweptPlan]) -> list[dict[str, Any]]:
    """The same as plain values."""
    return [
        {
            "device": row.result.machine.device.name,
            "devices": row.result.machine.num_devices,
            "lora": row.lora_rank,
            "batch": row.result.training.batch,
            "microbatches": row.result.training.num_microbatches,
            "seconds": None if row.result.simulation is None else row.result.simulation.seconds_per_step,
            "samples_per_s": row.result.samples_per_s(),
            "device_bytes": None if row.result.device is None else row.result.device.total,
            "trained_layers": sorted(row.result.residency.trained),
            "host_bytes": row.result.host_bytes,
            "fits": row.result.fits,
            "reasons": row.result.reasons,
        }
        for row in rows
    ]
