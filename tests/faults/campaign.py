"""Raises faults in users' code and in the library, and looks at what is left: ``python -m tests.faults.campaign``.

Each case makes a model in one of four ways (traced, wrapped by hand, wrapped module by module, fallback) for 1 to 3
workers, runs one clean step to count the visits of every place, and a second one in which one visit raises.
Afterwards:

    type        the caller got the exception that was raised; a visit that is only delayed raises nothing
    note        it says where it was raised: layer, stage, microbatch and phase are right; and if gradients are left
    checkpoint  one that was written before, or the one that was being written, loads
    leak        as many bytes of tensors are alive as after the clean step
    threads     as many threads as after the clean step
    next call   the next step gives eager's loss and gradients
    hang        all of it takes less than `DEADLINE_S`
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import random
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn
from tqdm import tqdm

from roundpipe import ExecutePlan, RoundPipeRunConfig
from roundpipe.runtime.config import RECOMPUTE_GRAINS, RecomputeGrain
from tests.faults import models
from tests.faults.deadline import watched
from tests.faults.library import PREFIX, points_in_library
from tests.faults.models import KINDS, NUM_LAYERS, loss_of
from tests.faults.notes import problem_of_gradient_note, problems_of_notes
from tests.faults.points import POINTS, Delay, FrozenFault, InjectedBaseFault, InjectedFault

FAULTS: dict[str, Callable[[], BaseException]] = {
    "Exception": lambda: InjectedFault("injected"),
    "MemoryError": lambda: MemoryError("injected"),
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("injected"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("injected"),
    "SystemExit": lambda: SystemExit("injected"),
    "BaseException": lambda: InjectedBaseFault("injected"),
    "frozen": lambda: FrozenFault("injected"),
    "delay": lambda: Delay(),
}


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
    grain: RecomputeGrain
    has_hooks: bool
    has_function: bool
    has_rules: bool
    """Whether functions of the user's split and merge."""
    saves: bool
    """Whether each step ends with a checkpoint."""
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
        grain=rng.choice(RECOMPUTE_GRAINS),
        has_hooks=rng.random() < 0.4,
        has_function=rng.random() < 0.4,
        has_rules=rng.random() < 0.4,
        saves=rng.random() < 0.15,
    )


def draw_plan(rng: random.Random, num_layers: int = NUM_LAYERS) -> ExecutePlan:
    """A random plan for the layers of a model that is wrapped by hand."""

    def pieces(end: int) -> list[tuple[int, int]]:
        cuts = [0, *sorted(rng.sample(range(1, end), rng.randrange(end))), end] if end else [0]
        return list(itertools.pairwise(cuts))

    tail = rng.randrange(num_layers)
    return ExecutePlan(pieces(tail), (tail, num_layers), list(reversed(pieces(tail))))


class Run:
    """One case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(case.seed)
        self.model = models.make_model(case.kind, has_hooks=case.has_hooks, has_function=case.has_function).double()
        self.twin = copy.deepcopy(self.model)
        self.x, self.label = models.make_batch()
        self.plan = None
        if case.kind == "by hand":
            plan = draw_plan(rng := random.Random(case.seed))
            self.plan = replace(plan, replicas=rng.choices((1, 1, 2, 3), k=plan.num_stages))
        config = RoundPipeRunConfig(
            num_microbatch=case.num_microbatches,
            recompute_grain=case.grain,
            split_input=models.split_input if case.has_rules else None,
            split_label=models.split_label if case.has_rules else None,
            merge_output=models.merge_output if case.has_rules else None,
            execute_plan=self.plan,
        )
        self.pipe = models.wrap(
            case.kind, self.model, self.x, devices=["cpu"] * case.num_workers, model_run_config=config, name="faults"
        )
        self.optimizer = torch.optim.SGD(self.pipe.optim_parameters(), lr=0.01)
        self.folder = tempfile.TemporaryDirectory()

    def step(self) -> float:
        """One step of training, with the gradients it began with taken away."""
        if self.case.call == "forward":
            outputs = self.pipe(self.x)
            loss = loss_of(outputs, self.label)
            loss.backward()
        elif self.case.has_rules:
            arguments = {"input_args": (self.x,), "label": self.label, "loss_fn": loss_of}
            loss, _ = self.pipe.forward_backward(**arguments, return_outputs=True)
        else:
            loss = self.pipe.forward_backward((self.x,), label=self.label, loss_fn=loss_of)
        self.pipe.step(self._update, is_async=self.case.is_async)
        if self.case.saves:
            self.pipe.save_checkpoint(self.folder.name, optimizer=self.optimizer)
        return float(loss.detach())

    def _update(self) -> None:
        POINTS.visit("step_fn")
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self) -> None:
        """Wait until nothing is under way; raises what was raised meanwhile."""
        self.pipe.synchronize()

    def problems_of(self, caught: BaseException) -> list[str]:
        """What is wrong with the notes at the exception that was raised."""
        case, visit, notes = self.case, POINTS.raised, getattr(caught, "__notes__", [])
        assert visit is not None
        is_backward = visit.place.startswith("backward of")
        if case.call == "forward" and (visit.place == "loss_fn" or (is_backward and case.has_function)):
            return []  # the caller's own code, or the host's part of a model, whose backward the caller runs
        if visit.place.startswith(PREFIX):
            return []  # no place of the user's
        if visit.place == "step_fn":
            return [] if any("raised in step_fn" in note for note in notes) else [f"note: {notes}"]
        has_gradients = any(parameter.grad is not None for parameter in self.model.parameters())
        return [
            *problems_of_notes(notes, visit, case.kind, case.num_microbatches, self.plan),
            *problem_of_gradient_note(notes, visit, has_gradients),
        ]

    def clear_gradients(self) -> None:
        """Drop what a failed step may have left, as the error's note says."""
        self.pipe.zero_grad()
        self.optimizer.zero_grad()

    def check_next_step(self) -> list[str]:
        """Whether a step on the present weights is eager's."""
        self.settle()
        if self.case.saves:
            self.pipe.load_checkpoint(self.folder.name, optimizer=self.optimizer)
        self.clear_gradients()
        self.twin.load_state_dict(self.model.state_dict())
        self.twin.zero_grad()
        expected = (self.twin(self.x) - self.label).square().sum()
        expected.backward()
        loss = self.pipe.forward_backward((self.x,), label=self.label, loss_fn=loss_of)
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


def alive_bytes() -> int:
    """Bytes of all tensors that Python can reach, but for workers' room for weights, since plans follow measured times.

    Samples of weights that stay on devices (int64) do not count either: they are taken once, in some step.
    """
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in gc.get_objects()
            if isinstance(tensor, torch.Tensor)
            and tensor.device.type == "cpu"
            and tensor.dtype not in (torch.uint8, torch.int64)
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
        choose = random.Random(case.seed)
        place = choose.choice(sorted(POINTS.visits))
        visit = choose.choice([0, POINTS.visits[place] - 1, choose.randrange(POINTS.visits[place])])
        case = Case(**{**asdict(case), "place": place, "visit": visit})
        run.clear_gradients()
        run.step()
        run.settle()
        alive_before, threads_before = alive_bytes(), threading.active_count()
        problems += _raise_and_look(run, case)
        run.step()  # buffers that an update needs are there again
        run.settle()
        alive, threads = alive_bytes(), threading.active_count()
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
        if caught is None and POINTS.raised and expected is not Delay:
            problems.append("type: nothing was raised")
        if POINTS.raised is None:
            problems.append("type: the place was not visited again")
    if caught is not None:
        if type(caught) is not expected:
            problems.append(f"type: {type(caught).__name__}: {caught}")
        elif expected is not FrozenFault:
            problems += run.problems_of(caught)
        traceback.clear_frames(caught.__traceback__)
        caught = None
    try:
        run.settle()
    except BaseException as error:
        problems.append(f"again: synchronize raised {type(error).__name__}: {error}")
    run.clear_gradients()
    return problems


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
        with watched(case), points_in_library():
            outcome = examine(case)
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
