"""What was found, as a table, as totals by kind, and as numbers for a file.

A row counts if eager can train it: one that can't be built or trained by eager with the zoo's inputs says nothing
about roundpipe, and is listed with its error instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from roundpipe.testing.zoo.catalog import MAIN_TASKS

COUNTED = ("right", "wrong", "not traced", "too coarse", "crashed")
"""States of rows that eager can train."""
PRECISE = 1e-6
"""Differences up to this are those of another order of summation."""

_COLUMNS = (
    ("row", 62),
    ("state", 16),
    ("layers", 6),
    ("blocks", 6),
    ("opaque", 6),
    ("carried", 7),
    ("traces", 6),
    ("difference", 10),
    ("trace s", 7),
    ("all s", 6),
)

Result = Mapping[str, Any]


def table(results: Sequence[Result], header: bool = True) -> str:
    """A line per row, with the cause where it is not right."""
    lines = []
    if header:
        lines = ["  ".join(name.ljust(width) for name, width in _COLUMNS).rstrip()]
        lines.append("  ".join("-" * width for _, width in _COLUMNS))
    for result in results:
        cells = _cells(result)
        line = "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, (_, width)) in enumerate(zip(cells, _COLUMNS, strict=True))
        ).rstrip()
        lines.append(line if result["status"] == "right" else f"{line}\n    {result.get('cause', '')}")
    return "\n".join(lines)


def _cells(result: Result) -> list[str]:
    if not result.get("num_layers"):
        return [result["key"], result["status"], *[""] * 7, f"{result.get('total_s', 0.0):.1f}"]
    traces = list(result["traces"].values())
    carried = result["most_carried"]
    return [
        result["key"],
        result["status"],
        str(result["num_layers"]),
        str(result["num_blocks"]),
        str(len(result["opaque"])),
        "-" if carried is None else str(carried),
        str(traces[-1]) if traces else "-",
        f"{worst_difference(result):.0e}",
        f"{result['trace_s']:.2f}",
        f"{result['total_s']:.1f}",
    ]


def worst_difference(result: Result) -> float:
    """The largest difference over all calls."""
    return max(result.get("differences", {}).values(), default=0.0)


def summary(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Numbers for each kind, for the main tasks together, and for all."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result["kind"], []).append(result)
    main = [result for result in results if result["kind"] in MAIN_TASKS]
    if main:
        groups["main tasks"] = main
    groups["all"] = list(results)
    return {name: _numbers(group) for name, group in groups.items()}


def _numbers(results: Sequence[Result]) -> dict[str, Any]:
    counted = [result for result in results if result["status"] in COUNTED]
    right = [result for result in counted if result["status"] == "right"]
    batches = [result for result in right if "batch" in result["traces"]]
    lengths = [result for result in right if "length" in result["traces"]]
    blocks = [result for result in right if result["num_blocks"] >= 3]
    carried = [result for result in blocks if result["most_carried"] is not None]
    return {
        "rows": len(results),
        "eager_trains": len(counted),
        "right": len(right),
        "share_right": _share(len(right), len(counted)),
        "wrong": sum(result["status"] in ("wrong", "crashed") for result in counted),
        "within_1e-6": _share(sum(worst_difference(result) <= PRECISE for result in right), len(right)),
        "without_opaque": _share(sum(not result["opaque"] for result in right), len(right)),
        "one_trace_for_two_batch_sizes": _share(sum(r["traces"]["batch"] == 1 for r in batches), len(batches)),
        "no_trace_for_another_length": _share(
            sum(r["traces"]["length"] == r["traces"]["batch"] for r in lengths), len(lengths)
        ),
        "layer_per_block": _share(sum(r["num_layers"] >= r["num_blocks"] for r in blocks), len(blocks)),
        "one_value_between_blocks": _share(sum(r["most_carried"] <= 1 for r in carried), len(carried)),
        "median_trace_s": round(median(result["trace_s"] for result in right), 2) if right else None,
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


_TOTALS = (
    ("kind", None, 32),
    ("rows", "rows", 5),
    ("eager", "eager_trains", 5),
    ("right", "right", 5),
    ("share", "share_right", 6),
    ("wrong", "wrong", 5),
    ("<=1e-6", "within_1e-6", 6),
    ("1 trace, 2 batches", "one_trace_for_two_batch_sizes", 18),
    ("2 lengths", "no_trace_for_another_length", 9),
    ("layer/block", "layer_per_block", 11),
    ("carry 1", "one_value_between_blocks", 7),
    ("trace s", "median_trace_s", 7),
)


def totals(results: Sequence[Result]) -> str:
    """A line per kind."""
    lines = ["  ".join(name.ljust(width) for name, _, width in _TOTALS).rstrip()]
    lines.append("  ".join("-" * width for _, _, width in _TOTALS))
    for name, numbers in summary(results).items():
        cells = [name.ljust(_TOTALS[0][2])]
        cells += [_number(numbers[key]).rjust(width) for _, key, width in _TOTALS[1:] if key is not None]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
