"""Text for people: numbers, each with a unit that suits its size, and tables of such cells.

This file is the only user of tabulate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from tabulate import tabulate

from roundpipe.core.tiling import UNTILED, Tiles


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


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


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


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> str:
    """Cells under headers; the first ``text_columns`` stand to the left, the others are figures, to the right."""
    alignment = ["left"] * text_columns + ["right"] * (len(headers) - text_columns)
    text = tabulate(rows, headers, tablefmt="simple", colalign=alignment, disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


def tiles_in_words(tiles: Tiles) -> str:
    """In how many tiles a step runs."""
    if tiles == UNTILED:
        return "none"
    return f"{tiles.tail} in the last layer with the loss, {tiles.layers if tiles.layers > 1 else 'none'} in others"


def summary_table(rows: Mapping[str, str]) -> str:
    """Names and values in two aligned columns, without a frame."""
    text = tabulate(list(rows.items()), tablefmt="plain", colalign=("left", "left"), disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


def repetitions(keys: Sequence[object], *, max_period: int, min_repeats: int) -> Iterator[tuple[int, int, int]]:
    """Start, period and number of repetitions of each part of a sequence; (start, 1, 1) where nothing repeats.

    Only repetitions of up to ``max_period`` entries, at least ``min_repeats`` times, count. Keys are equal where
    entries are alike.
    """
    start = 0
    while start < len(keys):
        period, repeats = 1, 1
        for length in range(1, min(max_period, (len(keys) - start) // min_repeats) + 1):
            stop = start + length
            while stop < len(keys) and keys[stop] == keys[stop - length]:
                stop += 1
            times = (stop - start) // length
            if times >= min_repeats and times * length > period * repeats:
                period, repeats = length, times
        yield start, period, repeats
        start += period * repeats
