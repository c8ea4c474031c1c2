"""``python -m tests.zoo``: examines rows and prints what was found."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from tests.zoo.catalog import all_rows
from tests.zoo.report import summary, table, totals, with_figures
from tests.zoo.run import read_results, results_of


def main(arguments: list[str] | None = None) -> int:
    """The command; exit code 1 if a row is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.zoo",
        description="Compile tiny models of other packages and compare them with eager PyTorch.",
    )
    parser.add_argument("rows", nargs="*", help="rows, or parts of their names such as causal-lm/ or timm; none: all")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and stop")
    parser.add_argument("--every", type=int, default=1, help="only every so manieth row of each kind")
    parser.add_argument("--results", type=Path, help="lines of JSON, one per finished row; a second run goes on there")
    parser.add_argument("--json", type=Path, help="write totals and rows to this file")
    parser.add_argument("--seconds", type=float, default=120.0, help="that a row may take")
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="run nothing; take rows from such files, the last one wins",
    )
    parser.add_argument("--document", type=Path, help="write the figures between the marks of this Markdown file")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.answer:
        return _answer()
    if options.merge:
        merged: dict[str, dict[str, Any]] = {}
        for path in options.merge:
            merged |= read_results(path)
        return _finish([result for key, result in merged.items() if _chosen(key, options.rows)], options)
    rows = [row for row in all_rows() if _chosen(row.key, options.rows)]
    kinds: dict[str, int] = {}
    keys = []
    for row in rows:
        kinds[row.kind] = kinds.get(row.kind, -1) + 1
        if kinds[row.kind] % options.every == 0:
            keys.append(row.key)
    if options.list:
        _write("\n".join(keys))
        return 0
    found = []
    for result in results_of(keys, options.results, options.seconds):
        found.append(result)
        _write(table([result], header=len(found) == 1))
    return _finish(found, options)


def _finish(found: list[dict[str, Any]], options: argparse.Namespace) -> int:
    """Prints the totals and writes the files asked for."""
    _write("\n" + totals(found))
    if options.json is not None:
        options.json.write_text(json.dumps({"summary": summary(found), "rows": found}, indent=1) + "\n")
    if options.document is not None:
        options.document.write_text(with_figures(options.document.read_text(), found))
    return int(any(result["status"] in ("wrong", "crashed") for result in found))


def _chosen(key: str, parts: list[str]) -> bool:
    return not parts or any(part in key for part in parts)


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _answer() -> int:
    """Examines the rows named on standard input; other packages may print to standard error only."""
    import torch

    from tests.zoo.compare import examine

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    rows = {row.key: row for row in all_rows()}
    for line in sys.stdin:
        answers.write(json.dumps(examine(rows[line.strip()]).as_dict()) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
