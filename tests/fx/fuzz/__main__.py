"""The command line."""

from __future__ import annotations

import argparse
import collections
import gc
import time

import torch

from tests.fx.fuzz.cases import case_of
from tests.fx.fuzz.outcomes import KINDS, run
from tests.fx.fuzz.preamble import PREAMBLE


def _totals(counts: collections.Counter[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)


def main(arguments: list[str] | None = None) -> int:
    """The command line; 0 if no case differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fx.fuzz", description="Random modules against eager PyTorch."
    )
    parser.add_argument("--cases", type=int, default=2000, help="how many valid cases to run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--show", type=int, help="print and run this case alone")
    parser.add_argument("--untraced", action="store_true", help="as if no root could be traced: module by module")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.show is not None:
        case = case_of(given.seed, given.show, untraced=given.untraced)
        print(case.source[len(PREAMBLE) :])
        print(case.scenario)
        print(run(case))
        return 0
    counts: collections.Counter[str] = collections.Counter()
    layers: collections.Counter[bool] = collections.Counter()
    gc.freeze()  # what is imported need not be looked through after every few cases
    start, index = time.monotonic(), given.start
    while sum(counts.values()) - counts["invalid"] < given.cases and time.monotonic() - start < given.seconds:
        outcome = run(case_of(given.seed, index, untraced=given.untraced))
        counts[outcome.kind] += 1
        layers[outcome.num_layers > 1] += outcome.kind != "invalid"
        if outcome.kind in ("different", "crashed", "refused"):
            print(f"{outcome.kind} case {index}: {outcome.detail[:300]}", flush=True)
        index += 1
        if index % 100 == 0:
            print(f"after {index}: {_totals(counts)}", flush=True)
    valid = sum(counts.values()) - counts["invalid"]
    print(_totals(counts))
    print(
        f"{valid} valid cases of seed {given.seed}, {layers[True]} of several layers, {time.monotonic() - start:.0f} s"
    )
    return 1 if counts["different"] or counts["crashed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
