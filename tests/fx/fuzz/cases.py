"""A case: a model's source and how it is compiled and called, both drawn."""

from __future__ import annotations

import linecache
import random
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from tests.fx.fuzz.source import EDITS, write_source

WIDTH = 8


@dataclass(frozen=True)
class Step:
    """One call."""

    batch: int
    length: int
    training: bool = True
    needs_grad: bool = False
    scale: float = 1.0
    all_ones: bool = True
    seed: int = 0
    gain: float | None = None
    """Set on the model before the call."""
    mean: float | None = None
    """What a new buffer is filled with that is put in the place of every ``mean`` before the call."""
    edit: str = ""
    """One of `EDITS`, done before the call."""
    edits_all: bool = True
    """Whether to do it to every module of a random class, or to the root alone."""
    quiet: bool = False
    """Whether it is ``model(...)`` without gradients."""
    joined: bool = False
    """Whether it is ``model(...)``, in one microbatch, and a backward through what that returns."""


@dataclass(frozen=True)
class Scenario:
    """How a model is compiled and called."""

    steps: tuple[Step, ...]
    num_microbatches: int = 1
    num_workers: int = 1
    one_layer_per_stage: bool = True
    with_example: bool = True
    grain: str = "stage"
    drawn_costs: int | None = None
    """Seed of nodes' costs that are drawn, not measured: layers end anywhere they may, and tracing is quicker."""
    untraced: bool = False
    """As if the root could not be traced: module by module."""


@dataclass
class Case:
    """One model and how it is called."""

    source: str
    scenario: Scenario


def make_case(choose: random.Random) -> Case:
    """A random case."""
    read, edit = choose.choice(EDITS)
    is_edited = choose.random() < 0.6
    source = write_source(choose, read if is_edited else "")
    scale = choose.choice([0.5, 1.0])
    steps = []
    sizes = [(4, 6), (choose.choice([2, 5, 6]), 6), choose.choice([(3, 4), (6, 5), (4, 6)])]
    choose.shuffle(sizes)
    gain = choose.random() < 0.1
    eval_index = choose.choice([2, 2, 1, None])
    needs_grad = choose.random() < 0.4
    for index, (batch, length) in enumerate(sizes):
        steps.append(
            Step(
                batch,
                length,
                training=index != eval_index,
                needs_grad=needs_grad,
                scale=scale if choose.random() < 0.8 else 0.75,
                all_ones=choose.random() < 0.6,
                seed=choose.randrange(1000),
                gain=2.0 if gain and index == 1 else None,
            )
        )
    scenario = Scenario(
        tuple(steps),
        num_microbatches=choose.choice([1, 2, 2, 3]),
        num_workers=choose.choice([1, 1, 2]),
        one_layer_per_stage=choose.random() < 0.7,
        with_example=choose.random() < 0.7,
        grain=choose.choice(["stage", "layer"]),
    )
    joined = choose.randrange(len(steps)) if choose.random() < 0.3 else None
    renewed = choose.randrange(len(steps)) if choose.random() < 0.1 else None
    edited = choose.randrange(1, len(steps)) if is_edited else None
    edits_all = choose.random() < 0.8
    quiet = choose.randrange(len(steps)) if choose.random() < 0.15 else None
    return Case(
        source,
        replace(
            scenario,
            steps=tuple(
                replace(
                    step,
                    joined=index == joined and index != quiet,
                    quiet=index == quiet,
                    mean=0.25 if index == renewed else None,
                    edit=edit if index == edited else "",
                    edits_all=edits_all,
                )
                for index, step in enumerate(steps)
            ),
            drawn_costs=choose.randrange(1000) if choose.random() < 0.9 else None,
        ),
    )


def case_of(seed: int, index: int, *, untraced: bool = False) -> Case:
    """The case of a number under a seed."""
    case = make_case(random.Random(f"{seed}:{index}"))
    return replace(case, scenario=replace(case.scenario, untraced=untraced))


def inputs_of(step: Step) -> dict[str, Any]:
    """Keyword arguments of a call."""
    generator = torch.Generator().manual_seed(step.seed)
    x = torch.randn(step.batch, step.length, WIDTH, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 11, (step.batch, step.length), generator=generator)
    mask = torch.rand(step.batch, step.length, generator=generator) > (-1.0 if step.all_ones else 0.4)
    return {"x": x.requires_grad_(step.needs_grad), "ids": ids, "mask": mask, "scale": step.scale}


def loss_of(outputs: Any) -> torch.Tensor:
    """A number that every tensor and number of a model's outputs has a part in."""
    total: Any = 0.0
    for index, leaf in enumerate(trees.leaves(outputs)):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            total = total + (leaf.double() * (1 + 0.1 * index)).pow(2).mean() + leaf.double().sum() * 0.01
        elif isinstance(leaf, (int, float)):
            total = total * (1 + leaf * 0.01)
    return total


_NUM_FILES = 0
WORLDS: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
"""Model -> the globals of its source."""


def build(source: str) -> nn.Module:
    """The model of a source, in a world of its own: classes, closures and globals are new."""
    global _NUM_FILES
    _NUM_FILES += 1
    filename = f"random_model_{_NUM_FILES}.py"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": f"random_model_{_NUM_FILES}"}
    exec(compile(source, filename, "exec"), namespace)
    torch.manual_seed(0)
    model: nn.Module = namespace["Root"]().double()
    WORLDS[model] = namespace
    return model
