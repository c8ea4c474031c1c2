"""Raises faults in users' code at random places, and looks at what is left: ``python -m tests.faults.campaign``.

Each case makes a model in one of four ways (traced, wrapped by hand, wrapped module by module, fallback) for 1 to 3
workers, runs one clean step to count the visits of every place, and a second one in which one visit raises.
Afterwards:

    type        the caller got the exception that was raised, with its own type
    note        an `Exception` says where in the pipeline it was raised
    leak        as many bytes of tensors are alive as after the clean step
    threads     as many threads as after the clean step
    next call   the next step gives eager's loss and gradients
    hang        all of it takes less than `DEADLINE_S`
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import gc
import json
import os
import random
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

import roundpipe
from tests.faults.points import POINTS, InjectedBaseFault, InjectedFault, point

WIDTH = 8
NUM_LAYERS = 4
DEADLINE_S = 20.0
KINDS = ("traced", "by hand", "module by module", "fallback")
FAULTS: dict[str, Callable[[], BaseException]] = {
    "Exception": lambda: InjectedFault("injected"),
    "MemoryError": lambda: MemoryError("injected"),
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("injected"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("injected"),
    "SystemExit": lambda: SystemExit("injected"),
    "BaseException": lambda: InjectedBaseFault("injected"),
}


class Layer(nn.Module):
    """A linear layer with a place for faults behind it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return point(torch.tanh(self.linear(x)), self.index)


class Decides(nn.Module):
    """Runs its layers behind a branch on data, which can't be traced."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if x.sum() < 1e9 else -x


class Runs(nn.Module):
    """Runs its layers one after the other."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass(frozen=True)
class Case:
    """What is run, and where the fault is raised."""

    seed: int
    kind: str
    num_workers: int
    num_microbatches: int
    is_async: bool
    call: str
    """``forward_backward`` or ``forward``, which is followed by a backward."""
    fault: str
    place: str = ""
    visit: int = -1


@dataclass(frozen=True)
class Outcome:
    """A case and what was wrong with it; empty: as promised."""

    case: Case
    problems: tuple[str, ...]


def draw_case(seed: int) -> Case:
    """A random case."""
    rng = random.Random(seed)
    return Case(
        seed=seed,
        kind=rng.choice(KINDS),
        num_workers=rng.randint(1, 3),
        num_microbatches=rng.randint(1, 4),
        is_async=rng.random() < 0.5,
        call="forward" if rng.random() < 0.25 else "forward_backward",
        fault=rng.choice(list(FAULTS)),
    )


def _model(kind: str) -> nn.Module:
    layers = [Layer(index) for index in range(NUM_LAYERS)]
    if kind == "by hand":
        return nn.Sequential(*layers)
    return (Decides if kind == "fallback" else Runs)(nn.ModuleList(layers))


def _wrapper(kind: str, model: nn.Module, x: torch.Tensor, **options: Any) -> Any:
    if kind == "by hand":
        return roundpipe.RoundPipe(model, **options)
    if kind == "module by module":
        return roundpipe.wrap_model_to_roundpipe(model, use_sequential_preset=False, lower_threshold=1, **options)
    return roundpipe.compile(model, example_args=(x,), lower_threshold=1, **options)


def _loss(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    POINTS.visit("loss_fn")
    return (outputs - label).square().sum()


class Run:
    """One case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(case.seed)
        self.model = _model(case.kind).double()
        self.twin = copy.deepcopy(self.model)
        self.x = torch.randn(8, WIDTH, dtype=torch.float64)
        self.label = torch.randn(8, WIDTH, dtype=torch.float64)
        config = roundpipe.RoundPipeRunConfig(num_microbatch=case.num_microbatches)
        self.pipe = _wrapper(
            case.kind, self.model, self.x, devices=["cpu"] * case.num_workers, model_run_config=config, name="faults"
        )
        self.optimizer = torch.optim.SGD(self.pipe.optim_parameters(), lr=0.01)

    def step(self) -> float:
        """One step of training, with the gradients it began with taken away."""
        if self.case.call == "forward":
            outputs = self.pipe(self.x)
            loss = _loss(outputs, self.label)
            loss.backward()
        else:
            loss = self.pipe.forward_backward((self.x,), label=self.label, loss_fn=_loss)
        self.pipe.step(self._update, is_async=self.case.is_async)
        return float(loss.detach())

    def _update(self) -> None:
        POINTS.visit("step_fn")
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self) -> None:
        """Wait until nothing is under way; raises what was raised meanwhile."""
        self.pipe.synchronize()

    def clear_gradients(self) -> None:
        """Drop what a failed step may have left, as the error's note says."""
        self.pipe.zero_grad()
        self.optimizer.zero_grad()

    def check_next_step(self) -> list[str]:
        """Whether a step on the present weights is eager's."""
        self.settle()
        self.clear_gradients()
        self.twin.load_state_dict(self.model.state_dict())
        self.twin.zero_grad()
        expected = (self.twin(self.x) - self.label).square().sum()
        expected.backward()
        loss = self.pipe.forward_backward((self.x,), label=self.label, loss_fn=_loss)
        self.settle()
        problems = []
        if not torch.allclose(loss, expected.detach(), rtol=1e-9, atol=0):
            problems.append(f"next call: loss {float(loss)} for {float(expected)}")
        for (name, one), other in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
            if (
                one.grad is None
                or other.grad is None
                or not torch.allclose(one.grad, other.grad, rtol=1e-8, atol=1e-12)
            ):
                problems.append(f"next call: another gradient of {name}")
                break
        return problems


def _alive_bytes() -> int:
    """Bytes of all tensors that Python can reach."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in gc.get_objects()
            if isinstance(tensor, torch.Tensor)
            and tensor.device.type == "cpu"
            and type(tensor) in (torch.Tensor, nn.Parameter)
        }
    return sum(storages.values())


def examine(case: Case) -> Outcome:
    """Run a case; its place and visit are drawn from those that a clean step shows."""
    run = Run(case)
    problems: list[str] = []
    try:
        run.step()
        run.settle()
        POINTS.visits.clear()
        run.step()
        run.settle()
        visits = sorted((place, number) for place, count in POINTS.visits.items() for number in range(count))
        place, visit = random.Random(case.seed).choice(visits)
        case = Case(**{**asdict(case), "place": place, "visit": visit})
        run.clear_gradients()
        run.step()
        run.settle()
        alive_before, threads_before = _alive_bytes(), threading.active_count()
        problems += _raise_and_look(run, case)
        run.step()  # buffers that an update needs are there again
        run.settle()
        alive, threads = _alive_bytes(), threading.active_count()
        if alive > alive_before:
            problems.append(f"leak: {alive - alive_before} bytes more are alive")
        if threads > threads_before:
            problems.append(f"threads: {threads} for {threads_before}")
        problems += run.check_next_step()
    except BaseException as error:
        problems.append(f"unexpected: {type(error).__name__}: {error}")
        traceback.clear_frames(error.__traceback__)
    finally:
        run.pipe.close()
    return Outcome(case, tuple(problems))


def _raise_and_look(run: Run, case: Case) -> list[str]:
    """Run a step with the fault, and look at what the caller gets."""
    expected = type(FAULTS[case.fault]())
    problems: list[str] = []
    caught: BaseException | None = None
    with POINTS.armed(case.place, case.visit, FAULTS[case.fault]()):
        try:
            run.step()
            run.settle()
        except BaseException as error:
            caught = error
        if caught is None and POINTS.raised:
            problems.append("type: nothing was raised")
    if caught is not None:
        if type(caught) is not expected:
            problems.append(f"type: {type(caught).__name__}: {caught}")
        notes = getattr(caught, "__notes__", [])
        inside = case.place not in ("step_fn",) and not (case.place == "loss_fn" and case.call == "forward")
        if inside and isinstance(caught, Exception) and not any("roundpipe: raised in" in note for note in notes):
            problems.append(f"note: {notes}")
        traceback.clear_frames(caught.__traceback__)
        caught = None
    try:
        run.settle()
    except BaseException as error:
        problems.append(f"again: synchronize raised {type(error).__name__}: {error}")
    run.clear_gradients()
    return problems


def _watch(case: Case) -> threading.Timer:
    """Ends the process, with the stacks of its threads, if a case hangs."""

    def hang() -> None:
        print(f"HANG: {case}", file=sys.stderr, flush=True)
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
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--json", help="write the outcomes to this file")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    outcomes = []
    for seed in tqdm(range(options.seed, options.seed + options.cases), disable=not sys.stderr.isatty()):
        case = draw_case(seed)
        timer = _watch(case)
        outcome = examine(case)
        timer.cancel()
        outcomes.append(outcome)
        if outcome.problems:
            print(f"{outcome.case}: {'; '.join(outcome.problems)}", flush=True)
    wrong = [outcome for outcome in outcomes if outcome.problems]
    classes = Counter(problem.split(":")[0] for outcome in wrong for problem in outcome.problems)
    print(f"{len(outcomes)} cases, {len(outcomes) - len(wrong)} as promised; {dict(classes)}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([asdict(outcome) for outcome in outcomes], file)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
