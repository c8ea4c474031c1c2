"""Campaigns of random cases against what `docs/reliability.md` promises: ``python -m tests.campaigns faults``.

    faults      raised in users' code and in the library
    sweep       the same at every visit of every place
    interrupts  Ctrl-C at a line or a moment of a step
    signals     Ctrl-C at a moment of a trace, a save or a load
    exits       signals that end a process
    races       schedules under random timing
    kills       SIGKILL in the middle of saves
    flips       one bit of a checkpoint is another
    cuts        a file of a checkpoint ends early
    actions     what users do between calls
    budgets     devices of 20 sizes, from what the smallest plan needs to all of the model
    memory      out of memory at a place of a step

Each case has a seed. With ``--log`` each is written to a file when it ends, and a run that is started again leaves out
those that are there; a case in which the process ended, or hung, is in the file, too, and counts as one that failed.
``--sum`` adds up such files.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import json
import logging
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from tests.faults.deadline import watched

if TYPE_CHECKING:
    from tests.faults.campaign import Outcome


class Result(NamedTuple):
    """What became of a case."""

    problems: list[str]
    """Empty: as promised."""
    count: int = 1
    """How many faults, actions and so on it was."""
    kind: str = "as promised"
    """If there is no problem."""


Examine = Callable[[int], Result]
Campaign = Callable[[], contextlib.AbstractContextManager[Examine]]
CAMPAIGNS: dict[str, Campaign] = {}


def _campaign(function: Callable[[], Iterator[Examine]]) -> None:
    CAMPAIGNS[function.__name__] = contextlib.contextmanager(function)


def _of_faults(outcome_of: Callable[[int], Outcome]) -> Iterator[Examine]:
    from tests.faults.library import points_in_library

    def run(seed: int) -> Result:
        outcome = outcome_of(seed)
        return Result([f"{outcome.case}: {problem}" for problem in outcome.problems], outcome.num_faults)

    with points_in_library():
        yield run


@_campaign
def faults() -> Iterator[Examine]:
    from tests.faults.campaign import examine
    from tests.faults.cases import draw_case

    yield from _of_faults(lambda seed: examine(draw_case(seed)))


@_campaign
def sweep() -> Iterator[Examine]:
    from tests.faults.campaign import sweep
    from tests.faults.cases import sweep_case

    yield from _of_faults(lambda seed: sweep(sweep_case(seed)))


@_campaign
def interrupts() -> Iterator[Examine]:
    from tests.faults.interrupts import draw_case, examine

    def run(seed: int) -> Result:
        case, problems = examine(draw_case(seed))
        return Result([f"{case}: {problem}" for problem in problems])

    yield run


@_campaign
def signals() -> Iterator[Examine]:
    from tests.faults.signals import Files

    with Files() as files:
        yield lambda seed: Result(files.examine(seed))


@_campaign
def exits() -> Iterator[Examine]:
    from tests.faults.exits import examine

    yield lambda seed: Result(examine(seed))


@_campaign
def races() -> Iterator[Examine]:
    from tests.races.schedules import Schedule, problem_of

    def run(seed: int) -> Result:
        problem = problem_of(seed)
        return Result([f"{Schedule.draw(seed)}: {problem}"] if problem else [])

    yield run


@_campaign
def kills() -> Iterator[Examine]:
    from tests.faults.checkpoints import Killer

    with Killer() as killer:
        yield lambda seed: Result(killer.kill(seed))


@_campaign
def flips() -> Iterator[Examine]:
    from tests.faults.checkpoints import Damager

    with Damager() as damager:
        yield lambda seed: Result(damager.damage(seed))


@_campaign
def cuts() -> Iterator[Examine]:
    from tests.faults.checkpoints import Damager

    with Damager() as damager:
        yield lambda seed: Result(damager.damage(seed, cuts=True))


@_campaign
def actions() -> Iterator[Examine]:
    from tests.actions.campaign import draw_case, run, shrink

    def examine(seed: int) -> Result:
        case = draw_case(seed, 0)
        outcome = run(case)
        if outcome.kind in ("equal", "refused"):
            detail = f": {outcome.detail}" if outcome.detail else ""
            return Result([], len(case.actions), outcome.kind + detail)
        shrunk, _ = shrink(case, outcome)
        return Result([f"{outcome.kind}: {outcome.detail}; shrunk to {shrunk}"], len(case.actions))

    yield examine


@_campaign
def budgets() -> Iterator[Examine]:
    from tests.fits.budgets import draw, examine

    def run(seed: int) -> Result:
        problems, kind = examine(draw(seed))
        return Result(problems, kind=kind)

    yield run


@_campaign
def memory() -> Iterator[Examine]:
    from tests.fits.phases import NUM_SETTINGS, examine, setting_of

    def run(seed: int) -> Result:
        problems, kind = examine(setting_of(seed), seed // NUM_SETTINGS)
        return Result(problems, kind=kind)

    yield run


class Log:
    """A file with one line of JSON per case: one when it begins, one when it ends."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self.results: dict[int, Result] = {}
        if self._path is not None and self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                ended = Result(["the process ended or hung"]) if row["result"] is None else Result(*row["result"])
                self.results[row["seed"]] = ended

    def write(self, seed: int, result: Result | None, **more: object) -> None:
        """One line; the result is None if the case begins."""
        if result is not None:
            self.results[seed] = result
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                print(json.dumps({"seed": seed, "result": result, **more}), file=file)

    def __str__(self) -> str:
        results = self.results.values()
        kinds = collections.Counter("not as promised" if each.problems else each.kind.split(":")[0] for each in results)
        return f"{len(results)} cases ({sum(each.count for each in results)}): {dict(kinds)}"


def commit() -> str:
    """The code under test."""
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return told.stdout.strip()


def main(arguments: list[str] | None = None) -> int:
    """Run a campaign; returns how many cases were not as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", nargs="?", choices=CAMPAIGNS)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--log", help="write each case to this file, and leave out those that are there")
    parser.add_argument("--sum", nargs="+", help="print what these files hold")
    options = parser.parse_args(arguments)
    for path in options.sum or ():
        print(f"{path}: {log}" if (log := Log(path)).results else f"{path}: nothing")
        for seed, result in log.results.items():
            for problem in result.problems:
                print(f"  seed {seed}: {problem[:600]}")
    if options.campaign is None:
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("roundpipe").addHandler(logging.NullHandler())
    logging.getLogger("roundpipe").propagate = False
    log, now = Log(options.log), commit()
    left = [seed for seed in range(options.seed, options.seed + options.cases) if seed not in log.results]
    with CAMPAIGNS[options.campaign]() as examine:
        for seed in left:
            gc.collect()
            gc.freeze()  # campaigns look through what is alive, but not through what was there before
            log.write(seed, None, commit=now)
            began_s, used_s = time.perf_counter(), time.process_time()
            with watched(f"seed {seed} of {options.campaign}"):
                try:
                    result = examine(seed)
                except Exception as error:
                    result = Result([f"unexpected: {type(error).__name__}: {error}"])
            taken = {"wall_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - used_s}
            log.write(seed, result, **taken)
            for problem in result.problems:
                print(f"seed {seed}: {problem}", flush=True)
    print(f"{options.campaign}: {log}")
    return sum(bool(result.problems) for result in log.results.values())


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
