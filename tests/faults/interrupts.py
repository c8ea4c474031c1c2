"""Ctrl-C at any line of a step: ``python -m tests.faults.interrupts``.

A trace function raises KeyboardInterrupt in the calling thread at one line of the library, as the handler of SIGINT
would. Each case interrupts one step of training somewhere, then lets the caller go on. Afterwards:

    hang        nothing waits for ever
    torn        the weights are those before the update or those after it, all of them
    next call   the next step gives eager's loss and gradients
    unexpected  nothing else is raised than the interrupt
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import linecache
import os
import random
import sys
import threading
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

import roundpipe

LIBRARY = str(Path(roundpipe.__file__).parent) + os.sep
DEADLINE_S = 20.0
WIDTH = 6
RATE = 0.1


@dataclass(frozen=True)
class Case:
    """What is interrupted; ``line`` counts the lines of the library that the calling thread runs."""

    seed: int
    num_workers: int
    is_async: bool
    line: int = -1
    place: str = ""


def _takes_lock(frame: FrameType) -> bool:
    """Whether a line takes or gives back a lock: Python runs no signal handler between a lock and its ``with``."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return line.startswith("with ") and "lock" in line


class Interrupter:
    """Counts lines of the library in the calling thread, and interrupts at one of them."""

    def __init__(self, at: int = -1) -> None:
        self.count = 0
        self.place = ""
        self.at = at

    def __enter__(self) -> Interrupter:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        if event == "line" and not _takes_lock(frame):
            self.count += 1
            if self.count - 1 == self.at:
                self.place = f"{frame.f_code.co_filename.removeprefix(LIBRARY)}:{frame.f_lineno} {frame.f_code.co_name}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace


class Run:
    """One model and its eager twin."""

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(case.seed)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))).double()
        self.twin = copy.deepcopy(self.model)
        self.x, self.label = (torch.randn(6, WIDTH, dtype=torch.float64) for _ in range(2))
        config = roundpipe.RoundPipeRunConfig(num_microbatch=2)
        self.pipe = roundpipe.RoundPipe(self.model, devices=["cpu"] * case.num_workers, model_run_config=config)
        self.optimizer = torch.optim.SGD(self.pipe.optim_parameters(), lr=RATE)

    @staticmethod
    def loss(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Of a microbatch."""
        return (outputs - label).square().sum()

    def step(self) -> None:
        """One step of training, waited for."""
        self.pipe.forward_backward((self.x,), label=self.label, loss_fn=self.loss)
        self.pipe.step(lambda: (self.optimizer.step(), self.optimizer.zero_grad()), is_async=self.case.is_async)
        self.pipe.synchronize()

    def eager_step(self) -> None:
        """The twin's update from its present weights."""
        self.twin.zero_grad()
        self.loss(self.twin(self.x), self.label).backward()
        with torch.no_grad():
            for parameter in self.twin.parameters():
                parameter -= RATE * parameter.grad  # type: ignore[operator]

    def equals_twin(self) -> bool:
        """Whether all weights are the twin's."""
        pairs = zip(self.model.parameters(), self.twin.parameters(), strict=True)
        return all(torch.allclose(one, other, rtol=1e-10, atol=1e-13) for one, other in pairs)


def draw_case(seed: int) -> Case:
    """A random case."""
    rng = random.Random(seed)
    return Case(seed, rng.randint(1, 3), rng.random() < 0.5)


def examine(case: Case) -> tuple[Case, list[str]]:
    """Run a case; its line is drawn from those of a clean step."""
    run = Run(case)
    problems: list[str] = []
    try:
        run.step()
        with Interrupter() as counter:
            run.step()
        for _ in range(2):
            run.eager_step()
        if not run.equals_twin():
            return case, ["unexpected: a clean step is not eager's"]
        interrupter = Interrupter(random.Random(case.seed + 1).randrange(counter.count))
        try:
            with interrupter:
                run.step()
        except KeyboardInterrupt:
            pass
        case = Case(**{**asdict(case), "line": interrupter.at, "place": interrupter.place})
        run.pipe.synchronize()
        if not run.equals_twin():
            run.eager_step()
            if not run.equals_twin():
                problems.append("torn: the weights are neither those before the update nor those after it")
        run.pipe.zero_grad()
        run.optimizer.zero_grad()
        run.pipe.synchronize()
        run.twin.load_state_dict(run.model.state_dict())
        run.twin.zero_grad()
        expected = run.loss(run.twin(run.x), run.label)
        expected.backward()
        loss = run.pipe.forward_backward((run.x,), label=run.label, loss_fn=run.loss)
        run.pipe.synchronize()
        pairs = list(zip(run.model.parameters(), run.twin.parameters(), strict=True))
        if not torch.allclose(loss, expected.detach()) or not all(
            one.grad is not None and other.grad is not None and torch.allclose(one.grad, other.grad)
            for one, other in pairs
        ):
            problems.append("next call: not eager's")
    except BaseException as error:
        problems.append(f"unexpected: {type(error).__name__}: {error}")
    finally:
        sys.settrace(None)
        run.pipe.close()
    return case, problems


def _watch(seed: int) -> threading.Timer:
    def hang() -> None:
        print(f"HANG: seed {seed}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(3)

    timer = threading.Timer(DEADLINE_S, hang)
    timer.daemon = True
    timer.start()
    return timer


def main(arguments: list[str] | None = None) -> int:
    """Run a campaign; returns how many cases were not as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    classes: Counter[str] = Counter()
    wrong = 0
    for seed in tqdm(range(options.seed, options.seed + options.cases), disable=not sys.stderr.isatty()):
        timer = _watch(seed)
        case, problems = examine(draw_case(seed))
        timer.cancel()
        wrong += bool(problems)
        classes.update(problem.split(":")[0] for problem in problems)
        if problems:
            print(f"{case}: {'; '.join(problems)}", flush=True)
    print(f"{options.cases} interrupts, {options.cases - wrong} as promised; {dict(classes)}")
    return wrong


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
