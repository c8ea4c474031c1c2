"""Numbers for people: bytes, counts, FLOPs, seconds, rates and shares, each with a unit that suits its size."""

from __future__ import annotations

from collections.abc import Sequence


def _scaled(value: float, base: float, units: Sequence[str]) -> str:
    """``value`` with three significant digits in the largest unit that keeps it at or above one."""
    unit_index = 0
    while unit_index + 1 < len(units) and abs(value) >= base * 0.9995:
        value /= base
        unit_index += 1
    if unit_index == 0 and value == int(value):
        return f"{int(value)} {units[0]}".rstrip()
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {units[unit_index]}".rstrip()


def format_bytes(num_bytes: float) -> str:
    """Bytes in binary units, such as ``1.50 GiB``."""
    return _scaled(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_count(count: float) -> str:
    """A number of things in decimal units, such as ``8.03 B`` parameters."""
    return _scaled(count, 1000, ("", "K", "M", "B", "T"))


def format_flops(flops: float) -> str:
    """Floating-point operations, such as ``1.25 TFLOP``."""
    return _scaled(flops, 1000, ("FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def format_seconds(seconds: float) -> str:
    """A duration, such as ``12.3 ms``."""
    if seconds >= 120:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    if seconds >= 1:
        return _scaled(seconds, 1000, ("s",))
    return _scaled(seconds * 1e6, 1000, ("us", "ms", "s"))


def format_rate(bytes_per_s: float) -> str:
    """Bytes per second in the decimal unit of datasheets, such as ``25 GB/s``."""
    return f"{bytes_per_s / 1e9:,.4g} GB/s"


def format_share(share: float) -> str:
    """A share such as ``12.3%``; a dash for NaN."""
    return "-" if share != share else f"{share:.1%}"


def counted(number: int, singular: str, plural: str = "") -> str:
    """A number of things, such as ``1 step`` or ``4,096 tokens``."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
