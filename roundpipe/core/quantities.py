"""Numbers with a unit, as people write them: ``24GiB``, ``25GB/s``."""

from __future__ import annotations

import re
from math import isfinite
from typing import Any

_UNITS = {"": 1.0} | {unit: 1000.0 ** (1 + power) for power, unit in enumerate("KMGTP")}
_UNITS |= {f"{unit}i": 1024.0 ** (1 + power) for power, unit in enumerate("KMGTP")}


def parse_quantity(text: str) -> float:
    """A number with a unit, such as ``24GiB``, ``25GB/s``, ``165T`` or ``1.65e14``; 0 for none, or too large a one."""
    match = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)\s*([KMGTP]?i?)(?:B|FLOPS?)?(?:/s)?", text.strip(), re.IGNORECASE)
    if match is None:
        return 0.0
    try:
        quantity = float(match[1]) * _UNITS.get(match[2].upper().replace("I", "i"), 0.0)
    except ValueError:
        return 0.0
    return quantity if isfinite(quantity) else 0.0


def as_number(value: Any) -> Any:
    """What a text such as ``24GiB`` says, as an int; what is none, and anything else, as it is."""
    return (int(parse_quantity(value)) or value) if isinstance(value, str) else value
