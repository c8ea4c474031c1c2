"""Parameters of tests of which `make test` runs some, and `make test-long` the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

LONG_CASES = Path(__file__).with_name("long_cases.txt")


def repeats(values: Iterable[Any], kept: Collection[str]) -> list[Any]:
    """A parameter for each value, or tuple of values; those whose id is not `kept` are marked as long."""
    parameters = []
    for value in values:
        parts = value if isinstance(value, tuple) else (value,)
        name = "-".join(map(str, parts))
        parameters.append(pytest.param(*parts, id=name, marks=() if name in kept else pytest.mark.long))
    assert set(kept) <= {parameter.id for parameter in parameters}, f"not all of {kept} exist"
    return parameters


GONE_CASES: list[str] = []
"""Cases of `LONG_CASES` that no test has, if all test files were collected; `tests.test_repeats` looks at it."""


def mark_long_cases(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of `LONG_CASES` as long."""
    listed = {line for line in LONG_CASES.read_text().splitlines() if not line.startswith("#")}
    by_name = {item.nodeid.removeprefix("tests/"): item for item in items}
    for name in listed & by_name.keys():
        by_name[name].add_marker(pytest.mark.long)
    files = {item.path for item in items}
    if files >= set(LONG_CASES.parent.rglob("test_*.py")):
        GONE_CASES.extend(sorted(listed - by_name.keys()))
