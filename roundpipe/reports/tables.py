"""Tables for people: what a chain of layers covers and weighs, and how a plan cuts it into stages.

Everything here is a plain function from values to a string; nothing is measured, logged or printed.
Quantities arrive in bytes, FLOPs and seconds and leave with a unit that suits their size, so this
is the only place where GiB are written. This file is the only user of tabulate.

Invariant: a table's totals are those of all its rows; folding repeated rows never changes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tabulate import tabulate

from roundpipe.core.balance import imbalance
from roundpipe.core.layers import LayerChain, LayerCost, LayerSpec
from roundpipe.core.schedule import ExecutePlan
from roundpipe.reports.quantities import format_bytes, format_count

MAX_NAMES_IN_FULL = 3
MIN_REPEATS = 3
"""Rows are folded from this many on; two alike are read faster than one folded."""
MAX_PERIOD = 4
"""Longest sequence of unlike rows whose repetition is folded (such as attention, mlp, attention, mlp)."""

_NOTHING = "-"
_FLOP_UNITS = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "KFLOP"))
"""One for a whole column: the largest that its largest number reaches."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One layer or stage; ``key`` says which neighbours it may be folded with."""

    label: str
    first: str
    """What the first of its layers covers."""
    last: str
    """What the last of its layers covers."""
    key: tuple[object, ...]
    cost: LayerCost
    """Of a stage: the sums over its layers, and the bytes of the cut that it hands on to the next job."""
    work_s: float
    """Seconds of one visit with one microbatch."""
    count: int = 1
    """How many alike rows it stands for."""

    @property
    def covers(self) -> str:
        return _span(self.first, self.last) + (f" ({self.count}x)" if self.count > 1 else "")


# Names


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
    """A name without its numbers, equal for the blocks of a stack."""
    return re.sub(r"\d+", "#", text)


# Rows


def _layer_rows(chain: LayerChain, costs: Sequence[LayerCost]) -> list[_Row]:
    return [
        _Row(
            label=str(index),
            first=_covers(spec),
            last=_covers(spec),
            key=("L", _pattern(_covers(spec)), *_sizes(cost)),
            cost=cost,
            work_s=cost.forward_s + cost.backward_s,
        )
        for index, (spec, cost) in enumerate(zip(chain.specs, costs, strict=True))
    ]


def _sizes(cost: LayerCost) -> tuple[int, ...]:
    """What repeated layers have in common; seconds are left out, since measured ones never repeat."""
    flops = (cost.forward_flops, cost.backward_flops)
    return (*flops, cost.num_parameters, cost.weight_bytes, cost.carry_bytes)


def _sum(costs: Sequence[LayerCost], *, forward: bool, backward: bool, carry_bytes: int = 0) -> LayerCost:
    """The cost of layers run in one visit, with the passes that this visit makes."""
    return LayerCost(
        forward_s=sum(cost.forward_s for cost in costs) * forward,
        backward_s=sum(cost.backward_s for cost in costs) * backward,
        forward_flops=sum(cost.forward_flops for cost in costs) * forward,
        backward_flops=sum(cost.backward_flops for cost in costs) * backward,
        num_parameters=sum(cost.num_parameters for cost in costs),
        weight_bytes=sum(cost.weight_bytes for cost in costs),
        carry_bytes=carry_bytes,
    )


def _stage_rows(chain: LayerChain, plan: ExecutePlan, layer_costs: Sequence[LayerCost]) -> list[_Row]:
    ranges = [("F", layer_range) for layer_range in plan.forward]
    if plan.fused is not None:
        ranges.append(("U", plan.fused))
    ranges += [("B", layer_range) for layer_range in plan.backward]
    rows, numbers = [], {"F": 0, "U": 0, "B": 1}  # as a schedule numbers them: F0 .. Fk, U, B1 .. Bm
    for phase, (start, stop) in ranges:
        costs = layer_costs[start:stop]
        cut = stop - 1 if phase == "F" else start - 1  # backward hands on the gradient of the cut in front
        cost = _sum(
            costs,
            forward=True,  # a backward stage recomputes
            backward=phase != "F",
            carry_bytes=layer_costs[cut].carry_bytes if cut >= 0 else 0,
        )
        first, last = _covers(chain.specs[start]), _covers(chain.specs[stop - 1])
        rows.append(
            _Row(
                label=phase if phase == "U" else f"{phase}{numbers[phase]}",
                first=first,
                last=last,
                key=(phase, stop - start, _pattern(first), _pattern(last), *_sizes(cost)),
                cost=cost,
                work_s=cost.forward_s + cost.backward_s,
            )
        )
        numbers[phase] += 1
    return rows


# Folding


def _fold(rows: Sequence[_Row]) -> list[_Row]:
    """The rows to show; a repeated sequence becomes one period of it."""
    folded: list[_Row] = []
    position = 0
    while position < len(rows):
        period, repeats = _longest_repetition(rows, position)
        for offset in range(period):
            alike = rows[position + offset : position + period * repeats : period]
            folded.append(_folded_row(alike))
        position += period * repeats
    return folded


def _longest_repetition(rows: Sequence[_Row], position: int) -> tuple[int, int]:
    """The period and the repeats that fold the most rows from ``position`` on; (1, 1) if none does."""
    best = (1, 1)
    for period in range(1, MAX_PERIOD + 1):
        stop = position + period
        while stop < len(rows) and rows[stop].key == rows[stop - period].key:
            stop += 1
        repeats = (stop - position) // period
        if repeats >= MIN_REPEATS and period * repeats > best[0] * best[1]:
            best = (period, repeats)
    return best


def _folded_row(alike: Sequence[_Row]) -> _Row:
    """One row for several: first and last name, the sizes of each, the mean of their seconds."""
    count = len(alike)
    cost = replace(
        alike[0].cost,
        forward_s=sum(row.cost.forward_s for row in alike) / count,
        backward_s=sum(row.cost.backward_s for row in alike) / count,
    )
    # Backward stages come deepest first, names are given in the order of the layers.
    ends = (alike[0], alike[-1]) if alike[0].key[0] != "B" else (alike[-1], alike[0])
    return replace(
        alike[0],
        label=_span(alike[0].label, alike[-1].label),
        first=ends[0].first,
        last=ends[1].last,
        cost=cost,
        count=count,
    )


# Tables


def _compute_columns(rows: Sequence[_Row], measured: bool) -> list[tuple[str, Callable[[LayerCost], str]]]:
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


def _table(first: str, rows: Sequence[_Row], total: _Row, measured: bool) -> str:
    shown = (*_fold(rows), total)
    compute = _compute_columns(shown, measured)
    headers = [first, "covers", "parameters", "weights", *(title for title, _ in compute), "carries"]
    body = []
    for row in shown:
        cost = row.cost
        body.append(
            [
                row.label,
                row.covers,
                format_count(cost.num_parameters) if cost.num_parameters else _NOTHING,
                format_bytes(cost.weight_bytes) if cost.weight_bytes else _NOTHING,
                *(cell(cost) for _, cell in compute),
                format_bytes(cost.carry_bytes) if cost.carry_bytes else _NOTHING,
            ]
        )
    alignment = ("left", "left", *["right"] * (len(headers) - 2))
    text = tabulate(body, headers, tablefmt="simple", colalign=alignment, disable_numparse=True)
    lines = text.splitlines()
    return "\n".join(line.rstrip() for line in (*lines[:-1], lines[1], lines[-1]))


def _balance(rows: Sequence[_Row]) -> float:
    """Heaviest over mean: by seconds where there are any, otherwise by weight bytes."""
    work = [row.work_s for row in rows]
    if not any(work):
        work = [float(row.cost.weight_bytes) for row in rows]
    return imbalance(work, [(index, index + 1) for index in range(len(work))])


def _total(label: str, rows: Sequence[_Row], costs: Sequence[LayerCost]) -> _Row:
    covers = f"balance (heaviest / mean) {_balance(rows):.2f}" if rows else ""
    return _Row(label, covers, covers, (), _sum(costs, forward=True, backward=True), 0.0)


def layer_table(chain: LayerChain, *, measured: Sequence[LayerCost] | None = None) -> str:
    """A table with one row per layer, repeated layers folded into one, and the totals.

    Args:
        chain: the layers with their specs and costs.
        measured: costs with measured seconds, one per layer, which are shown in place of FLOPs; None: there are none.

    Returns:
        The table, without a newline at the end. The rows of folded layers show one layer's sizes.
    """
    costs = chain.costs if measured is None else measured
    rows = _layer_rows(chain, costs)
    return _table("layer", rows, _total("total", rows, costs), measured is not None)


def stage_table(chain: LayerChain, plan: ExecutePlan, *, measured: Sequence[LayerCost] | None = None) -> str:
    """A table with one row per stage: F forward only, U fused, B recomputation and backward.

    Args:
        chain: the layers with their specs and costs.
        plan: the stages, as ranges over the chain's layers.
        measured: costs with measured seconds, one per layer, which are shown in place of FLOPs; None: there are none.

    Returns:
        The table, without a newline at the end. Weights are what each visit uploads, so the total
        is what one round uploads; compute is per microbatch and includes recomputation.
    """
    rows = _stage_rows(chain, plan, chain.costs if measured is None else measured)
    return _table("stage", rows, _total("round", rows, [row.cost for row in rows]), measured is not None)


def partition_table(
    chain: LayerChain, plan: ExecutePlan | None = None, *, title: str = "", measured: Sequence[LayerCost] | None = None
) -> str:
    """What a model was cut into: its layers and, with a plan, its stages.

    Args:
        chain: the layers with their specs and costs.
        plan: the stages; None shows the layers alone.
        title: the first line's subject, such as the model's name.
        measured: costs with measured seconds, one per layer, which are shown in place of FLOPs; None: there are none.

    Returns:
        A headline and one or two tables, without a newline at the end.
    """
    num_layers = len(chain.specs)
    num_parameters = sum(parameter.numel() for parameter in chain.parameters())  # shared ones once
    parts = [f"{num_layers} layer{'s' * (num_layers != 1)}"]
    if plan is not None:
        parts.append(f"{plan.num_stages} stage{'s' * (plan.num_stages != 1)} in a round")
    parts.append(f"{format_count(num_parameters)} parameters")
    if num_parameters < sum(cost.num_parameters for cost in chain.costs):
        parts[-1] += " (shared ones counted once)"
    what = "compute and bytes" if measured is None else "measured seconds"
    if chain.example_elements:
        parts.append(f"{what} for {chain.example_elements:,} input elements")
    elif measured is not None:
        parts.append(what)
    headline = (f"{title}: " if title else "") + ", ".join(parts)
    tables = [layer_table(chain, measured=measured)]
    if plan is not None:
        tables.append(stage_table(chain, plan, measured=measured))
    return "\n\n".join((headline, *tables))


def explain_table(chain: LayerChain | None, opaque: Mapping[str, str]) -> str:
    """What was traced, and which modules stayed opaque and why.

    Args:
        chain: the layers, or None when the model could not be traced at all.
        opaque: qualified module name, ``""`` for the model itself, to the reason.

    Returns:
        A sentence, and tables where there is something to list.
    """
    if chain is None:
        parts = ["The model's own forward could not be traced, so it is not cut."]
    elif opaque:
        parts = [f"Traced into {len(chain.specs)} layers; {len(opaque)} of its modules stayed whole."]
    else:
        parts = [f"Traced into {len(chain.specs)} layers; nothing stayed opaque."]
    if opaque:
        rows = [(name or "(the model)", reason) for name, reason in opaque.items()]
        parts.append(tabulate(rows, ("module", "why"), tablefmt="simple", disable_numparse=True))
    if chain is not None:
        parts.append(layer_table(chain))
    return "\n\n".join(parts)


def summary_table(rows: Mapping[str, str]) -> str:
    """Names and values in two aligned columns, without a frame.

    Args:
        rows: name to value, already formatted.

    Returns:
        One line per row, without a newline at the end.
    """
    text = tabulate(list(rows.items()), tablefmt="plain", colalign=("left", "left"), disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


def columns_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formatted cells under headers, the first column to the left, the others to the right.

    Args:
        headers: one per column.
        rows: as many cells each.

    Returns:
        One line per row, without a newline at the end.
    """
    alignment = ("left", *["right"] * (len(headers) - 1))
    text = tabulate(rows, headers, tablefmt="simple", colalign=alignment, disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


def worker_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with one row per worker, the first column to the left and figures to the right.

    Args:
        headers: of the columns.
        rows: cells, already formatted.

    Returns:
        The table, without a newline at the end.
    """
    alignment = ("left", *["right"] * (len(headers) - 1))
    text = tabulate(rows, headers, tablefmt="simple", colalign=alignment, disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.splitlines())
