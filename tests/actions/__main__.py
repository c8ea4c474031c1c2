"""The command line: ``python -m tests.actions --seed 1 --count 500``."""

from __future__ import annotations

import argparse
import collections
import gc
import itertools
import time

import torch

from tests.actions.campaign import KINDS, draw_case, run, shrink

PROGRESS = 25
"""Cases from one line with totals to the next."""


def _totals(counts: collections.Counter[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)


def main(arguments: list[str] | None = None) -> int:
    """0 if no case differs or ends in an unclear error; a case that hangs ends the process with 3."""
    parser = argparse.ArgumentParser(prog="python -m tests.actions", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100, help="how many cases to run")
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--show-refused", action="store_true", help="print what refusals say")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    gc.freeze()
    counts: collections.Counter[str] = collections.Counter()
    num_actions, began = 0, time.monotonic()
    for index in itertools.islice(itertools.count(given.start), given.count):
        if time.monotonic() - began > given.seconds:
            break
        case = draw_case(given.seed, index)
        outcome = run(case)
        counts[outcome.kind] += 1
        num_actions += len(case.actions)
        if outcome.kind in ("different", "unclear", "invalid"):
            shrunk, detail = shrink(case, outcome)
            print(f"case {index} is {outcome.kind}: {outcome.detail[:400]}", flush=True)
            print(f"  shrunk to {shrunk}\n  {detail.detail[:400]}", flush=True)
        elif outcome.kind == "refused" and given.show_refused:
            print(f"case {index} is refused: {outcome.detail[:400]}", flush=True)
        if sum(counts.values()) % PROGRESS == 0:
            print(_totals(counts), flush=True)
    print(f"{sum(counts.values())} cases of seed {given.seed}, {num_actions} actions: {_totals(counts)}, 0 hung")
    return 1 if counts["different"] or counts["unclear"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
