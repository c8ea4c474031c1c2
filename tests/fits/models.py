"""Models that train for a few steps on CPU workers with budgets, against eager PyTorch."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import roundpipe
from roundpipe import Device, RoundPipeRunConfig
from tests.equality import difference

TOLERANCE = 1e-5
"""Weights are float64; losses of language models are computed in float32."""
NUM_STEPS = 3
NO_LIMIT = 10**12
MODELS = (
    "decoder 151,936, tied",
    "decoder 32,000, LoRA, loss inside",
    "U-Net",
    "encoder and decoder",
    "mixture of experts",
    "ViT",
    "decoder 128,256",
    "decoder 262,144, tied, soft-capped, loss inside",
)


@dataclass(frozen=True)
class Setting:
    """A model on devices of one size, and how it is run."""

    model: str
    memory_bytes: int = NO_LIMIT
    num_microbatch: int = 2
    grain: Any = "stage"
    tiles: Any = None
    is_async: bool = False
    num_workers: int = 1

    def __str__(self) -> str:
        options = f"{self.num_microbatch} microbatches, grain {self.grain!r}, tiles {self.tiles}"
        steps = "asynchronous" if self.is_async else "synchronous"
        return f"{self.model} on {self.num_workers} x {self.memory_bytes:,} bytes, {options}, {steps}"


@dataclass(frozen=True)
class Run:
    """What became of one."""

    losses: list[torch.Tensor]
    weights: dict[str, torch.Tensor]
    peak_bytes: int = 0
    left_bytes: int = 0
    """On devices, once it was over."""


def case_of(setting: Setting) -> Any:
    """The model and its batch, the same each time."""
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        cases = importlib.import_module("memory_cases")
    finally:
        sys.path.remove(folder)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        case = cases.CASES[setting.model](replace(cases.SMALL, depth=2))
    finally:
        torch.set_default_dtype(before)
    number = min(16, len(case.args[0]))
    first = tuple(each[:number] for each in case.args)
    return replace(case, args=first, label=None if case.label is None else case.label[:number])


def trained(setting: Setting, watch: Callable[[Any], None] = lambda pipe: None) -> Run:
    """Through roundpipe; ``watch`` gets the wrapper before the first step."""
    case, losses = case_of(setting), []
    config = RoundPipeRunConfig(
        num_microbatch=setting.num_microbatch, recompute_grain=setting.grain, tiles=setting.tiles
    )
    devices = [Device("cpu", memory_bytes=setting.memory_bytes)] * setting.num_workers
    with roundpipe.compile(
        case.model, devices=devices, model_run_config=config, optim_dtype=torch.float64, name="case"
    ) as pipe:
        watch(pipe)
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.05)
        for _ in range(NUM_STEPS):
            found = pipe.forward_backward(case.args, label=case.label, loss_fn=case.loss_fn)
            losses.append(found.detach().clone())
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=setting.is_async)
        pipe.synchronize()
        peak_bytes = pipe.peak_device_bytes()
        ledgers = [backend.ledger for backend in pipe._session.engine.backends]  # public numbers are peaks
    return Run(losses, case.model.state_dict(), peak_bytes, sum(ledger.total_bytes for ledger in ledgers))


def eager(setting: Setting) -> Run:
    """The same in plain PyTorch; asynchronous steps are one update behind."""
    case, losses, waiting = case_of(setting), [], None
    parameters = [parameter for parameter in case.model.parameters() if parameter.requires_grad]

    def update(gradients: list[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.data.sub_(gradient, alpha=0.05)

    for _ in range(NUM_STEPS):
        pieces = zip(*(torch.tensor_split(each, setting.num_microbatch) for each in case.args), strict=True)
        labels = [None] * setting.num_microbatch
        if case.label is not None:
            labels = torch.tensor_split(case.label, setting.num_microbatch)
        parts = []
        for piece, label in zip(pieces, labels, strict=True):
            loss = case.loss_fn(case.model(*piece), label)
            loss.backward()
            parts.append(loss.detach())
        losses.append(torch.stack(parts).sum())
        gradients = [parameter.grad for parameter in parameters]
        case.model.zero_grad()
        if setting.is_async:
            waiting, gradients = gradients, waiting
        if gradients is not None:
            update(gradients)
    if waiting is not None:
        update(waiting)
    return Run(losses, case.model.state_dict())


_EAGER: dict[Setting, Run] = {}


def expected(setting: Setting) -> Run:
    """What eager gives, which memory has nothing to do with."""
    key = Setting(setting.model, num_microbatch=setting.num_microbatch, is_async=setting.is_async)
    if key not in _EAGER:
        _EAGER[key] = copy.deepcopy(eager(key))
    return _EAGER[key]


def problems_of(setting: Setting, found: Run) -> list[str]:
    """Where a run differs from eager, and what it has left on devices."""
    right = expected(setting)
    gaps = {
        f"loss of step {step}": difference(one, other)
        for step, (one, other) in enumerate(zip(found.losses, right.losses, strict=True))
    }
    gaps |= {name: difference(found.weights[name], value) for name, value in right.weights.items()}
    name = max(gaps, key=gaps.__getitem__)
    problems = [] if gaps[name] <= TOLERANCE else [f"{setting}: {name} is off by {gaps[name]:.3g}"]
    if found.left_bytes:
        problems.append(f"{setting}: {found.left_bytes:,} bytes are left on devices")
    if found.peak_bytes > setting.memory_bytes * setting.num_workers:
        problems.append(f"{setting}: the peak is {found.peak_bytes:,} bytes")
    return problems
