"""Parameters of tests of which `make test` runs some, and `make test-long` the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def repeats(values: Iterable[Any], kept: Collection[str]) -> list[Any]:
    """A parameter for each value, or tuple of values; those whose id is not `kept` are marked as long."""
    parameters = []
    for value in values:
        parts = value if isinstance(value, tuple) else (value,)
        name = "-".join(map(str, parts))
        parameters.append(pytest.param(*parts, id=name, marks=() if name in kept else pytest.mark.long))
    assert set(kept) <= {parameter.id for parameter in parameters}, f"not all of {kept} exist"
    return parameters
