"""Tables for people, from cells that are formatted already. This file is the only user of tabulate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tabulate import tabulate


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> str:
    """Cells under headers; the first ``text_columns`` stand to the left, the others are figures, to the right."""
    alignment = ["left"] * text_columns + ["right"] * (len(headers) - text_columns)
    text = tabulate(rows, headers, tablefmt="simple", colalign=alignment, disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


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
