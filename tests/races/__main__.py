"""The command line: ``python -m tests.races --count 500``."""

from __future__ import annotations

import argparse
import sys
import warnings

from tests.faults.deadline import watched
from tests.races.schedules import Schedule, problem_of


def main(arguments: list[str] | None = None) -> int:
    """Returns how many schedules differ under random timing."""
    parser = argparse.ArgumentParser(prog="python -m tests.races", description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; the others follow")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    wrong = 0
    for seed in range(given.seed, given.seed + given.count):
        with watched(Schedule.draw(seed)):
            problem = problem_of(seed)
        wrong += bool(problem)
        if problem:
            print(f"{Schedule.draw(seed)}: {problem}", flush=True)
    print(f"{given.count} schedules, {given.count - wrong} equal to the bit")
    return wrong


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
