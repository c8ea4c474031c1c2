"""What was found, as a table, as totals by kind, and as numbers for a file.

A row counts if eager can train it: one that can't be built or trained by eager with the zoo's inputs says nothing
about roundpipe, and is listed with its error instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tests.zoo.catalog import MAIN_TASKS
from tests.zoo.overrides import NOT_TRACED

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


def model_types(results: Sequence[Result]) -> dict[str, bool]:
    """Model type of transformers -> whether all its rows that eager can train are right."""
    found: dict[str, bool] = {}
    for result in results:
        name = result.get("model_type")
        if name and result["status"] in COUNTED:
            found[name] = found.get(name, True) and result["status"] == "right"
    return found


def _numbers(results: Sequence[Result]) -> dict[str, Any]:
    counted = [result for result in results if result["status"] in COUNTED]
    right = [result for result in counted if result["status"] == "right"]
    batches = [result for result in right if "batch" in result["traces"]]
    lengths = [result for result in right if "length" in result["traces"]]
    blocks = [result for result in right if result["num_blocks"] >= 3]
    carried = [result for result in blocks if result["most_carried"] is not None]
    types = model_types(results)
    return {
        "rows": len(results),
        "eager_trains": len(counted),
        "right": len(right),
        "share_right": _share(len(right), len(counted)),
        "wrong": sum(result["status"] in ("wrong", "crashed") for result in counted),
        "right_in_float64_only": sum(bool(result.get("differences_float64")) for result in right),
        "model_types": len(types),
        "model_types_right": sum(types.values()),
        "share_model_types_right": _share(sum(types.values()), len(types)),
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
    ("types", "model_types", 5),
    ("right", "model_types_right", 5),
    ("f64", "right_in_float64_only", 3),
    ("<=1e-6", "within_1e-6", 6),
    ("1 trace, 2 batches", "one_trace_for_two_batch_sizes", 18),
    ("2 lengths", "no_trace_for_another_length", 9),
    ("layer/block", "layer_per_block", 11),
    ("carry 1", "one_value_between_blocks", 7),
    ("trace s", "median_trace_s", 7),
)


def totals(results: Sequence[Result]) -> str:
    """A line per kind, and the share of the model types of the main tasks."""
    lines = ["  ".join(name.ljust(width) for name, _, width in _TOTALS).rstrip()]
    lines.append("  ".join("-" * width for _, _, width in _TOTALS))
    for name, numbers in summary(results).items():
        cells = [name.ljust(_TOTALS[0][2])]
        cells += [_number(numbers[key]).rjust(width) for _, key, width in _TOTALS[1:] if key is not None]
        lines.append("  ".join(cells))
    types = model_types([result for result in results if result["kind"] in MAIN_TASKS])
    if types:
        share = 100 * sum(types.values()) / len(types)
        lines.append(
            f"\nModel types that eager can train in the five main tasks: {len(types)}, all rows right for "
            f"{sum(types.values())} of them ({share:.2f}%)."
        )
        lines += [f"Not right: {', '.join(sorted(name for name, right in types.items() if not right))}."] * (
            not all(types.values())
        )
    return "\n".join(lines)


LONGEST_CAUSE = 200
BAR = r"\|"
"""A bar in a cell of a Markdown table."""
START, END = "<!-- figures -->", "<!-- end of figures -->"


def with_figures(document: str, results: Sequence[Result]) -> str:
    """A document with what stands between its two marks written anew.

    Raises:
        ValueError: a mark is missing.
    """
    before, start, rest = document.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the document has no {START} or no {END} to write the figures between")
    return f"{before}{START}\n\n{figures(results)}\n\n{END}{after}"


def figures(results: Sequence[Result]) -> str:
    """The totals, and every row that is not right, in Markdown."""
    parts = [f"```text\n{totals(results)}\n```"]
    rounding = [result for result in results if result["status"] == "right" and result.get("differences_float64")]
    if rounding:
        parts += ["Right in float64, off in float32:", _rows_and_causes(rounding)]
    failed = [result for result in results if result["status"] in COUNTED and result["status"] != "right"]
    if failed:
        parts += ["Not right:", _rows_and_causes(failed)]
    others = [result for result in results if result["status"] not in COUNTED]
    if others:
        parts += ["Not counted, since eager can't train them here:", _rows_and_causes(others)]
    return "\n\n".join(parts)


def _rows_and_causes(results: Sequence[Result]) -> str:
    lines = ["| row | state | why |", "|---|---|---|"]
    for result in sorted(results, key=lambda result: str(result["key"])):
        cause = str(result.get("cause", ""))
        if result["status"] == "not traced":
            cause = NOT_TRACED.get(result["key"], cause)
        if result.get("sensitivity_float64") is not None:
            cause += f", where rounding moves eager itself by {result['sensitivity_float64']:.0e}"
        cause = cause if len(cause) <= LONGEST_CAUSE else cause[: LONGEST_CAUSE - 3] + "..."
        lines.append(f"| {result['key']} | {result['status']} | {cause.replace('|', BAR)} |")
    return "\n".join(lines)


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
