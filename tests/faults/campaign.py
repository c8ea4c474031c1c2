"""Raises faults in users' code and in the library, and looks at what is left: ``python -m tests.campaigns faults``.

Each case makes a model in one of four ways (traced, wrapped by hand, wrapped module by module, fallback) for 1 to 3
workers, or for one on which its weights live, runs a clean step to count the visits of every place, and then another
one in which one visit raises, several times. ``python -m tests.campaigns sweep`` goes through all visits of all places
instead. After each:

    type        the caller got the exception that was raised; a visit that is only delayed raises nothing, nor does a
                lack of memory on a worker with a budget, whose call is run again
    update      if nothing was raised, the weights are those of eager's update, or of none
    note        it says where it was raised: layer, stage, microbatch and phase are right; and if gradients are left
    checkpoint  one that was written before, or the one that was being written, loads
    leak        as many bytes of tensors are alive as after the clean step
    threads     no more than the workers and the optimizer have
    next call   the next step gives eager's loss and gradients
    hang        all of it takes less than `DEADLINE_S`
"""

from __future__ import annotations

import copy
import gc
import itertools
import random
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from roundpipe import Device, DeviceMemoryError, RoundPipeRunConfig
from tests.faults import models
from tests.faults.cases import FAULTS, Case, draw_plan
from tests.faults.library import PREFIX
from tests.faults.models import loss_of
from tests.faults.notes import problem_of_gradient_note, problems_of_notes
from tests.faults.points import POINTS, Delay, FrozenFault

FAULTS_PER_CASE = 4
"""One after the other in one model, which is traced once."""
RATE = 0.01
BUDGET = 2**22
"""Bytes of a worker on which the weights live."""


@dataclass(frozen=True)
class Outcome:
    """A case, what was wrong with it (empty: as promised), and how many faults it had."""

    case: Case
    problems: tuple[str, ...]
    num_faults: int


class Run:
    """One case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(case.seed)
        self.model = models.make_model(case.kind, has_hooks=case.has_hooks, has_function=case.has_function).double()
        self.twin = copy.deepcopy(self.model)
        self.x, self.label = models.make_batch()
        self.plan = None
        if case.kind == "by hand" and not case.lives_there:
            plan = draw_plan(rng := random.Random(case.seed))
            self.plan = replace(plan, replicas=rng.choices((1, 1, 2, 3), k=plan.num_stages))
        config = RoundPipeRunConfig(
            num_microbatch=case.num_microbatches,
            recompute_grain=case.grain,
            split_input=models.split_input if case.has_rules else None,
            split_label=models.split_label if case.has_rules else None,
            merge_output=models.merge_output if case.has_rules else None,
            execute_plan=self.plan,
            residency="full" if case.lives_there else None,
            tiles=case.tiles,
            loss_scope=case.scope,
            loss_reduction=case.reduction,
        )
        devices = [Device("cpu", memory_bytes=BUDGET)] if case.lives_there else ["cpu"] * case.num_workers
        self.pipe = models.wrap(case.kind, self.model, self.x, devices=devices, model_run_config=config, name="faults")
        self.optimizer = torch.optim.SGD(self.pipe.optim_parameters(), lr=RATE)
        self.folder = tempfile.TemporaryDirectory()
        self.visits: Counter[str] = Counter()
        """Of each place in the last clean step."""

    def step(self) -> float:
        """One step of training, with the gradients it began with taken away."""
        if self.case.call == "evaluate":
            with torch.no_grad():
                self.pipe(self.x)
            return float(self.pipe.forward_loss((self.x,), label=self.label, loss_fn=loss_of))
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

    def clean_step(self) -> None:
        """A step without a fault, whose visits are counted."""
        self.settle()
        self.clear_gradients()
        self.twin.zero_grad()
        POINTS.visits.clear()
        self.step()
        self.settle()
        self.visits = POINTS.visits.copy()

    def loss_of_twin(self) -> torch.Tensor:
        """Eager's loss on the present weights; its gradients are in the twin's parameters."""
        case, loss = self.case, torch.zeros((), dtype=torch.float64)
        self.twin.load_state_dict(self.model.state_dict())
        self.twin.zero_grad()
        is_mean = case.reduction == "mean" and case.scope != "batch"
        num_pieces = case.num_microbatches if is_mean else 1
        for x, label in zip(self.x.tensor_split(num_pieces), self.label.tensor_split(num_pieces), strict=True):
            loss = loss + (self.twin(x) - label).square().sum() * (len(x) / len(self.x) if is_mean else 1.0)
        loss.backward()
        return loss.detach()

    def next_weights(self) -> list[torch.Tensor]:
        """What the step that comes will leave in the model."""
        self.settle()
        self.loss_of_twin()
        rate = 0.0 if self.case.call == "evaluate" else RATE
        if self.case.call == "forward":  # whose loss is the caller's own
            self.twin.zero_grad()
            (self.twin(self.x) - self.label).square().sum().backward()
        return [p.detach() - rate * p.grad for p in self.twin.parameters() if p.grad is not None]

    def settle(self) -> None:
        """Wait until nothing is under way; raises what was raised meanwhile."""
        self.pipe.synchronize()

    def problems_of(self, caught: BaseException) -> list[str]:
        """What is wrong with the notes at the exception that was raised."""
        case, visit, notes = self.case, POINTS.raised, getattr(caught, "__notes__", [])
        assert visit is not None
        is_backward = visit.place.startswith("backward of")
        is_on_host = case.has_function or ("hook" in visit.place and case.kind in ("fallback", "module by module"))
        if case.call == "forward" and (visit.place == "loss_fn" or (is_backward and is_on_host)):
            return []  # the caller's own code, or the host's part of a model, whose backward the caller runs
        if visit.place.startswith(PREFIX):
            return []  # no place of the user's
        if visit.place == "step_fn":
            return [] if any("raised in step_fn" in note for note in notes) else [f"note: {notes}"]
        has_gradients = any(parameter.grad is not None for parameter in self.model.parameters())
        return [
            *problems_of_notes(notes, visit, case.kind, case.num_microbatches, self.plan, case.scope == "batch"),
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
        expected = self.loss_of_twin()
        loss = self.pipe.forward_backward((self.x,), label=self.label, loss_fn=loss_of)
        self.settle()
        problems = []
        if not torch.allclose(loss, expected, rtol=1e-9, atol=0):
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
    """Bytes of all tensors that Python can reach and that were made since the last ``gc.freeze()``.

    Workers' room for weights does not count, since plans follow measured times, nor do samples of weights that stay on
    devices (int64), which are taken once, in some step.
    """
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    storages = [(tensor.dtype, tensor.untyped_storage()) for tensor in tensors if tensor.device.type == "cpu"]
    uncounted = {storage.data_ptr() for dtype, storage in storages if dtype in (torch.uint8, torch.int64)}
    sizes = {storage.data_ptr(): storage.nbytes() for _, storage in storages}
    return sum(size for address, size in sizes.items() if address not in uncounted)


def leaks(bytes_before: int, threads_before: int) -> list[str]:
    """What is more than before, once the workers have let go of the last step."""
    for _ in range(20):
        num_bytes, num_threads = alive_bytes(), threading.active_count()
        if num_bytes <= bytes_before and num_threads <= threads_before:
            return []
        time.sleep(0.05)
    return [f"leak: {num_bytes} bytes for {bytes_before}, {num_threads} threads for {threads_before}"]


def _drawn(run: Run) -> Iterator[Case]:
    """The case, each time with a place, a visit that a clean step showed, and a fault; its own fault comes first."""
    case, choose = run.case, random.Random(run.case.seed)
    for number in itertools.count():
        place = choose.choice(sorted(run.visits))
        visit = choose.choice([0, run.visits[place] - 1, choose.randrange(run.visits[place])])
        fault = choose.choice(list(FAULTS)) if number else case.fault
        yield replace(case, place=place, visit=visit, fault=fault)


def _all(run: Run) -> Iterator[Case]:
    """The case with each visit of each place, and one fault after the other."""
    first = list(FAULTS).index(run.case.fault)
    faults = itertools.islice(itertools.cycle(FAULTS), first, None)
    for place, num_visits in sorted(run.visits.items()):
        for visit in range(num_visits):
            yield replace(run.case, place=place, visit=visit, fault=next(faults))


def examine(case: Case) -> Outcome:
    """Run a case: `FAULTS_PER_CASE` one after the other at random visits; the outcome's case has the last one."""
    return _examine(case, _drawn, FAULTS_PER_CASE)


def sweep(case: Case) -> Outcome:
    """The same at all visits."""
    return _examine(case, _all, sys.maxsize)


def _examine(case: Case, faults: Callable[[Run], Iterator[Case]], most: int) -> Outcome:
    # of each worker two, and the optimizer's, some of which begin when they are first needed
    most_threads = threading.active_count() + 2 * case.num_workers + 1
    run = Run(case)
    problems: list[str] = []
    number = 0
    try:
        run.step()
        run.clean_step()
        problems += run.check_next_step()
        run.clean_step()
        bytes_before, threads_before = alive_bytes(), max(most_threads, threading.active_count())
        for each in faults(run):
            if number == most or problems:
                break
            case = each
            problems += _raise_and_look(run, case)
            if POINTS.raised is None and _depends_on_plan(case):
                continue
            number += 1
            run.clean_step()  # buffers that an update needs are there again
            problems += leaks(bytes_before, threads_before)
            problems += run.check_next_step()
    except BaseException as error:
        problems.append(f"unexpected: {type(error).__name__}: {error}")
        traceback.clear_frames(error.__traceback__)
    finally:
        run.pipe.close()
    return Outcome(case, tuple(problems), number)


def _depends_on_plan(case: Case) -> bool:
    """Whether a step of another plan may do without the visit: an upload of what stays, a recomputation.

    Plans change once steps were measured.
    """
    is_again = case.place.startswith("forward of ") and case.visit >= case.num_microbatches
    return case.place.startswith(PREFIX) or is_again


def _raise_and_look(run: Run, case: Case) -> list[str]:
    """Run a step with the fault, and look at what the caller gets."""
    expected = type(FAULTS[case.fault]())
    problems: list[str] = []
    caught: BaseException | None = None
    run.clear_gradients()
    weights = run.next_weights()
    may_run_again = case.lives_there and expected is torch.OutOfMemoryError
    with POINTS.armed(case.place, case.visit, FAULTS[case.fault]()):
        try:
            run.step()
            run.settle()
        except BaseException as error:
            caught = error
        if caught is None and POINTS.raised and expected is not Delay and not may_run_again:
            problems.append("type: nothing was raised")
        if POINTS.raised is None and not _depends_on_plan(case):
            problems.append("type: the place was not visited again")
    try:
        run.settle()
    except BaseException as error:
        problems.append(f"again: synchronize raised {type(error).__name__}: {error}")
    if caught is None and not all(map(torch.allclose, run.model.parameters(), weights)):
        problems.append("update: not eager's")
    if may_run_again and type(caught) is DeviceMemoryError:  # no smaller plan is known
        caught = caught.__cause__
    if caught is not None:
        if type(caught) is not expected:
            problems.append(f"type: {type(caught).__name__}: {caught}")
        elif expected is not FrozenFault:
            problems += run.problems_of(caught)
        traceback.clear_frames(caught.__traceback__)
        caught = None
    run.clear_gradients()
    return problems
