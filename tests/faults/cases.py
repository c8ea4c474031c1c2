"""What the campaign of faults runs: random cases, and those of a sweep over all places."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from roundpipe import ExecutePlan
from roundpipe.runtime.config import RECOMPUTE_GRAINS, LossReduction, LossScope, RecomputeGrain
from tests.faults.models import KINDS, NUM_LAYERS
from tests.faults.points import Delay, FrozenFault, InjectedBaseFault, InjectedFault

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
    """``forward_backward``; ``forward``, which is followed by a backward; ``evaluate``: both without gradients."""
    fault: str
    grain: RecomputeGrain
    has_hooks: bool
    has_function: bool
    has_rules: bool
    """Whether functions of the user's split and merge."""
    saves: bool
    """Whether each step ends with a checkpoint."""
    lives_there: bool = False
    """Whether the weights live on the worker, which then has a budget."""
    tiles: int | None = None
    scope: LossScope | None = None
    reduction: LossReduction | None = None
    place: str = ""
    visit: int = -1


def draw_case(seed: int) -> Case:
    """A random case."""
    case, rng = draw_plain_case(seed), random.Random(f"more of {seed}")
    case = replace(case, tiles=rng.choice((None, None, 2)), lives_there=rng.random() < 0.2)
    if rng.random() < 0.15:
        case = replace(case, call="evaluate", saves=False)
    if case.call != "forward":
        case = replace(case, scope=rng.choice((None, "batch")), reduction=rng.choice((None, "mean")))
    return case


def sweep_case(seed: int) -> Case:
    """One of every kind, asynchronous or not, for a `sweep`, whose first fault it says."""
    kind, rest = KINDS[seed % len(KINDS)], seed // len(KINDS)
    return Case(
        seed=seed,
        kind=kind,
        num_workers=2,
        num_microbatches=2,
        is_async=bool(rest % 2),
        call="forward_backward",
        fault=list(FAULTS)[rest // 2 % len(FAULTS)],
        grain="stage",
        has_hooks=True,
        has_function=bool(rest // 2 % 2),
        has_rules=True,
        saves=True,
    )


def draw_plain_case(seed: int) -> Case:
    """A random case without tiles, evaluation, losses of the whole batch, means, and weights that live on a worker."""
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
