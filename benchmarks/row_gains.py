"""What each item brings, measured beside predicted: of two ways of a row that differ in it alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tabulate import tabulate

ITEMS = {"double": "second memory for weights", "alone": "replicas"}
"""What stands behind a way's residency, as in `auto/double`, and what it changes."""


def way_and_item(way: str) -> tuple[str, str]:
    """The residency of one of our ways, and what else is different in it."""
    residency, _, item = way.partition("/")
    if residency not in ("off", "auto", "full") or item not in ("", *ITEMS):
        raise SystemExit(f"--residency {way}: give off, auto or full, and behind it /{' or /'.join(ITEMS)}")
    return residency, item


def _pairs() -> Iterator[tuple[str, str, str]]:
    """An item, the way without it and the way with it."""
    for way in ("auto", "full"):
        yield f"residency, {way}", "off", way
    for residency in ("off", "auto", "full"):
        yield ITEMS["double"], residency, f"{residency}/double"
        yield ITEMS["alone"], f"{residency}/alone", residency


def gains(rows: dict[str, Any]) -> str:
    """A table of all rows of which both ways were run; empty: there is none."""
    lines = []
    for name, row in rows.items():
        ways = row.get("ways", {})
        for item, without, with_it in _pairs():
            before, after = ways.get(without, {}), ways.get(with_it, {})
            if "seconds" not in before or "seconds" not in after:
                continue
            measured, predicted = (
                f"{before[key] / after[key] - 1:+.1%}" if before[key] and after[key] else "-"
                for key in ("seconds", "predicted_s")
            )
            lines.append([name, item, without, with_it, measured, predicted])
    headers = ("row", "gain of", "without", "with", "measured", "predicted")
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True) if lines else ""
