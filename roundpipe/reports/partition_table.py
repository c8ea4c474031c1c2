"""What a chain of layers covers and weighs, and how a plan cuts it into stages, as tables.

Invariant: a table's totals are those of all its rows; folding repeated rows never changes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.layers import LayerChain, LayerCost, LayerSpec
from roundpipe.core.module_tree import parameters_in
from roundpipe.reports.memory import DeviceMemory, memory_table
from roundpipe.reports.tables import counted, dtype_name, format_bytes, format_count, repetitions, table

MAX_NAMES_IN_FULL = 3
MIN_REPEATS = 3
"""Rows are folded from this many on; two alike are read faster than one folded."""
MAX_PERIOD = 4
"""Longest sequence of unlike rows whose repetition is folded (such as attention, mlp, attention, mlp)."""

NOTHING_STAYS: Mapping[int, int] = {}

_NOTHING = "-"
_FLOP_UNITS = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "KFLOP"))
"""One for a whole column: the largest that its largest number reaches."""


_Column = Callable[[LayerCost], str]
_NO_COLUMNS: Mapping[str, _Column] = {}
_MEMORY_COLUMNS: Mapping[str, _Column] = {
    "working memory": lambda cost: format_bytes(cost.training_bytes) if cost.training_bytes else _NOTHING,
    "tiles": lambda cost: str(cost.num_tiles) if cost.num_tiles else _NOTHING,
}
"""What a layer and its backward take at once, and in how many tiles it runs; where anything is known."""


def layer_table(
    chain: LayerChain,
    *,
    costs: Sequence[LayerCost] | None = None,
    measured: bool = False,
    resident_bytes: Mapping[int, int] = NOTHING_STAYS,
    stays_bytes: int | None = None,
) -> str:
    """A table with one row per layer, repeated layers folded into one that shows one layer's sizes, and the totals.

    ``costs``, one per layer, are shown in place of the chain's; if ``measured``, their seconds in place of FLOPs.
    ``resident_bytes`` are those of weights that stay on the devices, ``stays_bytes`` all of them, if that is no sum.
    """
    rows = []
    for index, (spec, cost) in enumerate(zip(chain.specs, costs or chain.costs, strict=True)):
        covers, stays = _covers(spec) + (" and the loss" if cost.has_loss else ""), resident_bytes.get(index, 0)
        key = ("L", _pattern(covers), *_sizes(cost), stays)
        rows.append(_Row(str(index), covers, covers, key, cost, resident_bytes=stays))
    further = _NO_COLUMNS if costs is None else _MEMORY_COLUMNS
    return _cost_table("layer", rows, "total", measured, further, stays_bytes)


def stage_table(
    chain: LayerChain,
    plan: ExecutePlan,
    *,
    costs: Sequence[LayerCost] | None = None,
    measured: bool = False,
    resident_bytes: Mapping[int, int] = NOTHING_STAYS,
) -> str:
    """A table with one row per stage: F forward only, U fused, B recomputation and backward.

    A stage whose microbatches several workers share is marked with their number, such as U x2. Weights are what each
    visit uploads, so the total is what one step uploads, once ``resident_bytes`` of layers are on the devices; compute
    is per microbatch and includes recomputation. Costs are as for `layer_table`.
    """
    costs = [
        replace(cost, weight_bytes=cost.weight_bytes - resident_bytes.get(index, 0))
        for index, cost in enumerate(costs or chain.costs)
    ]
    rows = []
    shares = plan.replicas or (1,) * plan.num_stages
    for (label, (start, stop)), workers in zip(plan.named_stages(), shares, strict=True):
        phase = label[0]
        cut = stop - 1 if phase == "F" else start - 1  # backward hands on the gradient of the cut in front
        carry_bytes = costs[cut].carry_bytes if cut >= 0 else 0
        cost = _sum(costs[start:stop], backward=phase != "F", carry_bytes=carry_bytes)
        first, last = _covers(chain.specs[start]), _covers(chain.specs[stop - 1])
        key = (phase, stop - start, workers, _pattern(first), _pattern(last), *_sizes(cost))
        rows.append(_Row(label, first, last, key, cost, workers=workers))
    return _cost_table("stage", rows, "round", measured)


def partition_table(
    chain: LayerChain,
    plan: ExecutePlan | None = None,
    *,
    title: str = "",
    costs: Sequence[LayerCost] | None = None,
    measured: bool = False,
    memory: Mapping[str, DeviceMemory] | None = None,
    optim_dtypes: Sequence[torch.dtype] = (),
    resident_bytes: Mapping[int, int] = NOTHING_STAYS,
    stays_bytes: int | None = None,
) -> str:
    """What a model was cut into: its layers and, with a plan, its stages; the title is the first line's subject.

    Costs are as for `layer_table`; ``memory`` is that of a device by stage. ``optim_dtypes`` are those of the
    optimizer's copies. ``resident_bytes`` are, by layer, those of weights that stay on each device, and ``stays_bytes``
    all of them, where some layers share theirs.
    """
    num_parameters = sum(parameter.numel() for parameter in parameters_in(chain))  # shared ones once
    parts = [counted(len(chain.specs), "layer")]
    resident_bytes = resident_bytes if plan is not None else NOTHING_STAYS
    stays_bytes = sum(resident_bytes.values()) if plan is None or stays_bytes is None else stays_bytes
    tables = [
        layer_table(chain, costs=costs, measured=measured, resident_bytes=resident_bytes, stays_bytes=stays_bytes)
    ]
    if plan is not None:
        parts.append(f"{counted(plan.num_stages, 'stage')} in a round")
        tables.append(stage_table(chain, plan, costs=costs, measured=measured, resident_bytes=resident_bytes))
        parts += [] if plan.rotates else ["each layer on one device"]
    parts.append(f"{format_count(num_parameters)} parameters")
    if num_parameters < sum(cost.num_parameters for cost in chain.costs):
        parts[-1] += " (shared ones counted once)"
    if resident_bytes:
        where = "each device" if plan is None or plan.rotates else "the devices"
        parts.append(f"{format_bytes(stays_bytes)} of weights stay on {where}")
    if optim_dtypes:
        parts.append(f"optimizer in {' and '.join(map(dtype_name, optim_dtypes))}")
    what = "measured seconds" if measured else "compute and bytes"
    if chain.example_size:
        parts.append(f"{what} for {chain.example_size}")
    elif measured:
        parts.append(what)
    headline = (f"{title}: " if title else "") + ", ".join(parts)
    if memory:
        tables.append(f"device memory in a step, as planned\n\n{memory_table(memory)}")
    return "\n\n".join((headline, *tables))


def explain_table(chain: LayerChain | None, opaque: Mapping[str, str], costs: Sequence[LayerCost] | None = None) -> str:
    """What was traced, None: nothing; and which modules, by qualified name, stayed opaque and why.

    Costs are as for `layer_table`.
    """
    if chain is None:
        parts = ["The model's own forward could not be traced, so it is not cut."]
    else:
        whole = f"{len(opaque)} of its modules stayed whole" if opaque else "nothing stayed opaque"
        parts = [f"Traced into {len(chain.specs)} layers; {whole}."]
    if opaque:
        rows = [(name or "(the model)", reason) for name, reason in opaque.items()]
        parts.append(table(("module", "why"), rows, text_columns=2))
    if chain is not None:
        parts.append(layer_table(chain, costs=costs))
    return "\n\n".join(parts)


@dataclass(frozen=True, slots=True)
class _Row:
    """One layer or stage; ``key`` says which neighbours it may be folded with."""

    label: str
    first: str
    last: str
    """What the first and the last of its layers cover."""
    key: tuple[object, ...]
    cost: LayerCost
    """Of a stage: the sums over its layers, and the bytes of the cut that it hands on to the next job."""
    count: int = 1
    workers: int = 1
    """That share a stage's microbatches."""
    resident_bytes: int = 0
    """Of weights that stay on the devices."""

    @property
    def title(self) -> str:
        return self.label + (f" x{self.workers}" if self.workers > 1 else "")

    @property
    def covers(self) -> str:
        return _span(self.first, self.last) + (f" ({self.count}x)" if self.count > 1 else "")


def _covers(spec: LayerSpec) -> str:
    """The modules of a layer: its name where that says it all, otherwise the first and the last."""
    names = spec.module_names
    if not names or all(name == spec.name or name.startswith(spec.name + ".") for name in names):
        return spec.name or "(whole model)"
    if len(names) <= MAX_NAMES_IN_FULL:
        return ", ".join(names)
    return f"{names[0]} .. {names[-1]} ({len(names)} modules)"


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first} .. {last}"


def _pattern(text: str) -> str:
    return re.sub(r"\d+", "#", text)


def _sizes(cost: LayerCost) -> tuple[int, ...]:
    """What repeated layers have in common; seconds are left out, since measured ones never repeat."""
    flops = (cost.forward_flops, cost.backward_flops)
    memory = (cost.training_bytes, cost.num_tiles)
    return (*flops, cost.num_parameters, cost.weight_bytes, cost.carry_bytes, *memory)


def _sum(costs: Sequence[LayerCost], *, backward: bool = True, carry_bytes: int = 0) -> LayerCost:
    """The cost of layers run in one visit: a forward, which a backward stage recomputes, and maybe a backward."""
    return LayerCost(
        forward_s=sum(cost.forward_s for cost in costs),
        backward_s=sum(cost.backward_s for cost in costs) * backward,
        forward_flops=sum(cost.forward_flops for cost in costs),
        backward_flops=sum(cost.backward_flops for cost in costs) * backward,
        num_parameters=sum(cost.num_parameters for cost in costs),
        weight_bytes=sum(cost.weight_bytes for cost in costs),
        carry_bytes=carry_bytes,
    )


def _fold(rows: Sequence[_Row]) -> list[_Row]:
    """The rows to show; a repeated sequence becomes one period of it."""
    keys = [row.key for row in rows]
    return [
        _folded_row(rows[start + offset : start + period * repeats : period])
        for start, period, repeats in repetitions(keys, max_period=MAX_PERIOD, min_repeats=MIN_REPEATS)
        for offset in range(period)
    ]


def _folded_row(alike: Sequence[_Row]) -> _Row:
    """One row for several: first and last name, the sizes of each, the mean of their seconds."""
    count = len(alike)
    cost = replace(
        alike[0].cost,
        forward_s=sum(row.cost.forward_s for row in alike) / count,
        backward_s=sum(row.cost.backward_s for row in alike) / count,
    )
    # Backward stages come deepest first, names are given in the order of the layers.
    first, last = (alike[0], alike[-1]) if alike[0].key[0] != "B" else (alike[-1], alike[0])
    label = _span(alike[0].label, alike[-1].label)
    return replace(alike[0], label=label, first=first.first, last=last.last, cost=cost, count=count)


def _cost_table(
    first: str,
    rows: Sequence[_Row],
    total_label: str,
    measured: bool,
    further: Mapping[str, _Column] = _NO_COLUMNS,
    stays_bytes: int | None = None,
) -> str:
    covers = ""
    if rows:
        jobs = [row for row in rows for _ in range(row.workers)]
        work = [(row.cost.forward_s + row.cost.backward_s) / row.workers for row in jobs]
        if not any(work):
            work = [float(row.cost.weight_bytes) for row in jobs]
        balance = max(work) * len(work) / sum(work) if any(work) else 1.0
        covers = f"balance (heaviest / mean) {balance:.2f}"
    weight_bytes = sum(row.cost.weight_bytes * row.workers for row in rows)
    total_cost = replace(_sum([row.cost for row in rows]), weight_bytes=weight_bytes)
    stays_bytes = sum(row.resident_bytes for row in rows) if stays_bytes is None else stays_bytes
    total = _Row(total_label, covers, covers, (), total_cost, resident_bytes=stays_bytes)
    shown = (*_fold(rows), total)
    compute = _compute_columns(shown, measured)
    memory = {title: cell for title, cell in further.items() if any(cell(row.cost) != _NOTHING for row in rows)}
    stays = ["stays"] if stays_bytes else []
    headers = [first, "covers", "parameters", "weights", *stays, *(title for title, _ in compute), "carries", *memory]
    body = [
        [
            row.title,
            row.covers,
            format_count(row.cost.num_parameters) if row.cost.num_parameters else _NOTHING,
            format_bytes(row.cost.weight_bytes) if row.cost.weight_bytes else _NOTHING,
            *(format_bytes(row.resident_bytes) if row.resident_bytes else _NOTHING for _ in stays),
            *(cell(row.cost) for _, cell in compute),
            format_bytes(row.cost.carry_bytes) if row.cost.carry_bytes else _NOTHING,
            *(cell(row.cost) for cell in memory.values()),
        ]
        for row in shown
    ]
    lines = table(headers, body, text_columns=2).splitlines()
    return "\n".join((*lines[:-1], lines[1], lines[-1]))


def _compute_columns(rows: Sequence[_Row], measured: bool) -> list[tuple[str, _Column]]:
    if measured:
        return [
            ("forward ms", lambda cost: f"{cost.forward_s * 1e3:.2f}"),
            ("backward ms", lambda cost: f"{cost.backward_s * 1e3:.2f}" if cost.backward_s else _NOTHING),
        ]
    heaviest = max(max(row.cost.forward_flops, row.cost.backward_flops) for row in rows)
    scale, unit = next(((scale, unit) for scale, unit in _FLOP_UNITS if heaviest >= scale), _FLOP_UNITS[-1])

    def cell(flops: int) -> str:
        value = flops / scale
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if flops else _NOTHING

    return [
        (f"forward {unit}", lambda cost: cell(cost.forward_flops)),
        (f"backward {unit}", lambda cost: cell(cost.backward_flops)),
    ]
