"""Ctrl-C at any moment of a trace, a save and a load: ``python -m tests.campaigns signals``.

Of each case one call is timed and, made once more, interrupted by a signal at a random moment. Afterwards:

    type         the caller got a KeyboardInterrupt, or the call ended before
    environment  a trace has left nothing in torch, Python or the model
    half         a load has changed everything or nothing; after a save the old or the new checkpoint loads
    next call    the same call works, and training is eager's
"""

from __future__ import annotations

import builtins
import copy
import gc
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils import _python_dispatch

import roundpipe
from tests.faults.checkpoints import Trained
from tests.faults.interrupts import Alarm, Interrupter

WHAT = ("trace", "first call", "save", "load")
NAMESPACES = (builtins, random, numpy.random, torch, torch.cuda, torch.nn.functional, torch.Tensor, nn.Module)
WIDTH = 8
ONE = roundpipe.RoundPipeRunConfig(num_microbatch=1)


def moment(call: Callable[[], object], share: float, by_line: bool) -> Alarm | Interrupter:
    """What interrupts the next call after about a share of the lines, or of the time, that this one takes."""
    if by_line:
        with Interrupter() as counter:
            call()
        return Interrupter(int(share * counter.count))
    began_s = time.perf_counter()
    call()
    return Alarm(share * (time.perf_counter() - began_s), lambda: True)


def interrupted(call: Callable[[], object], interrupter: Alarm | Interrupter, problems: list[str]) -> bool:
    """Whether the call was interrupted before it ended."""
    try:
        with interrupter:
            call()
    except KeyboardInterrupt as error:
        traceback.clear_frames(error.__traceback__)
    except BaseException as error:
        problems.append(f"type: {type(error).__name__} at {interrupter.place}: {error}")
    return bool(interrupter.place)


class Block(nn.Module):
    """Has a hook, a running mean and something that a trace must put back."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.seen: torch.Tensor | None = None
        self.linear.register_forward_hook(lambda module, args, output: output * 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        self.seen = x.detach()
        with torch.random.fork_rng(devices=[]):
            return x + torch.tanh(self.linear(self.norm(x)))


class Decides(nn.Sequential):
    """Can't be traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) if x.sum() < 1e9 else x


def environment(model: nn.Module) -> dict[str, Any]:
    """What a trace may set and must put back; objects by identity."""
    found: dict[str, Any] = {
        "grad mode": torch.is_grad_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": len(_python_dispatch._get_current_dispatch_mode_stack()),
        "trace and profile functions": (sys.gettrace(), sys.getprofile()),
        "dtype and device": (torch.get_default_dtype(), torch.get_default_device()),
        "random state": torch.get_rng_state().tolist(),
        "weights and buffers": [tensor.tolist() for tensor in model.state_dict().values()],
    }
    for space in NAMESPACES:
        found |= {f"{space.__name__}.{name}": id(value) for name, value in vars(space).items()}
    for name, module in model.named_modules():
        found[f"class of {name}"] = type(module)
        for key, value in vars(module).items():
            is_dict = isinstance(value, dict)
            found[f"{name}.{key}"] = {k: id(v) for k, v in value.items()} if is_dict else id(value)
    return found


def _of_trace(what: str, seed: int) -> list[str]:
    rng, problems = random.Random(seed), list[str]()
    torch.manual_seed(seed)
    model = (Decides if rng.random() < 0.3 else nn.Sequential)(Block(), Block(), Block()).double()
    twin = copy.deepcopy(model)
    x, label = torch.randn(4, WIDTH, dtype=torch.float64), torch.randn(4, WIDTH, dtype=torch.float64)
    options = {"devices": ["cpu"] * rng.randint(1, 2), "lower_threshold": 1}
    pipes = []

    def loss_of(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (outputs - label).square().sum()

    def trace() -> None:
        example = {"example_args": (x,)} if what == "trace" else {}
        pipes.append(roundpipe.compile(model, **options, **example))

    def train() -> torch.Tensor:
        return pipes[-1].forward_backward((x,), label=label, loss_fn=loss_of, run_config=ONE)

    trace()
    call = trace if what == "trace" else train
    interrupter = moment(call, rng.random(), by_line=False)  # a signal's handler may hold it back, a line's not
    pipes[-1].synchronize()
    model.load_state_dict(twin.state_dict())
    model.zero_grad()
    for block in model.children():
        block.seen = None
    if what == "first call":
        trace()
    before = environment(model)
    is_cut = interrupted(call, interrupter, problems)
    try:
        pipes[-1].synchronize()
        gc.collect()  # a wrapper that was cut off while it was made takes its hooks with it
        after = environment(model)
        if is_cut and what == "trace":
            changed = [name for name in before if after.get(name, before) != before[name]]
            changed += after.keys() - before.keys()
            problems += [f"environment: {changed} are others"] if changed else []
        model.load_state_dict(twin.state_dict())
        if what == "trace":
            trace()
        pipes[-1].zero_grad()
        loss = train()
        pipes[-1].synchronize()
        expected = loss_of(twin(x), label)
        expected.backward()
        pairs = [(loss, expected.detach()), *zip(model.buffers(), twin.buffers(), strict=True)]
        pairs += [(one.grad, other.grad) for one, other in zip(model.parameters(), twin.parameters(), strict=True)]
        if not all(torch.allclose(one, other) for one, other in pairs):
            problems.append("next call: not eager's")
    finally:
        for pipe in pipes:
            pipe.close()
    return problems


class Files:
    """Cases of saves and loads, which share their models."""

    def __enter__(self) -> Files:
        self._root = tempfile.TemporaryDirectory()
        self._trained = [Trained(1), Trained(2)]
        for each in self._trained:
            each.step()
        return self

    def __exit__(self, *exception: object) -> None:
        for each in self._trained:
            each.pipe.close()
        self._root.cleanup()

    def save(self, seed: int) -> list[str]:
        """Interrupt a save over an old checkpoint."""
        rng, problems = random.Random(seed), list[str]()
        folder = Path(self._root.name) / "saved"
        old, new = self._trained
        interrupter = moment(lambda: old.save(folder), rng.random(), by_line=rng.random() < 0.7)
        states = [each.snapshot() for each in (old, new)]
        interrupted(lambda: new.save(folder), interrupter, problems)
        reader = Trained(3)
        with reader.pipe:
            reader.step()
            reader.load(folder)
            if reader.snapshot() not in states:
                problems.append("half: neither the old nor the new checkpoint")
        new.save(folder)
        if (names := [path.name for path in folder.parent.iterdir()]) != ["saved"]:
            problems.append(f"next call: left behind: {names}")
        return problems

    def load(self, seed: int) -> list[str]:
        """Interrupt a load."""
        rng, problems = random.Random(seed), list[str]()
        with tempfile.TemporaryDirectory() as root:
            saved, reader = self._trained[0], Trained(3)
            saved.save(Path(root) / "c")
            with reader.pipe:
                reader.step()
                reader.save(Path(root) / "own")
                own = reader.snapshot()
                interrupter = moment(lambda: reader.load(Path(root) / "c"), rng.random(), by_line=rng.random() < 0.5)
                loaded = reader.snapshot()
                reader.load(Path(root) / "own")
                interrupted(lambda: reader.load(Path(root) / "c"), interrupter, problems)
                if reader.snapshot() not in (own, loaded):
                    problems.append("half: neither the state before the load nor that after it")
                reader.load(Path(root) / "c")
                if reader.snapshot() != loaded:
                    problems.append("next call: a load gives another state")
                reader.step()
        return problems

    def examine(self, seed: int) -> list[str]:
        """One case."""
        what = WHAT[seed % len(WHAT)]
        cases = {"save": self.save, "load": self.load}
        found = cases[what](seed) if what in cases else _of_trace(what, seed)
        return [f"{what}: {problem}" for problem in found]
