"""Models that are made, used once and closed, or dropped: ``python -m tests.faults.lives --models 1000``.

Threads, open files and memory of the process stay level; a table shows them as they go.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import nn
from tqdm import tqdm

import roundpipe

WIDTH = 64
KINDS = ("RoundPipe", "compile", "fallback")
ROWS = 10
ALLOWED_BYTES_PER_MODEL = 10_000


class Figures(NamedTuple):
    """Of the process, after some models."""

    models: int
    threads: int
    files: int
    resident_bytes: int


class Decides(nn.Module):
    """Can't be traced."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) if x.sum() < 1e9 else x


def read(num_models: int) -> Figures:
    """The figures now."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    files = len(os.listdir("/proc/self/fd"))
    return Figures(num_models, threading.active_count(), files, pages * os.sysconf("SC_PAGE_SIZE"))


def _wrapper(kind: str, x: torch.Tensor) -> Any:
    model: nn.Module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    if kind == "RoundPipe":
        return roundpipe.RoundPipe(model, devices=["cpu"] * 2)
    if kind == "fallback":
        model = Decides(model)
    return roundpipe.compile(model, example_args=(x,), devices=["cpu"] * 2, lower_threshold=1)


def use(kind: str, closes: bool) -> None:
    """One life: two steps of training, one forward, and the end; the model refers to its wrapper."""
    x = torch.randn(8, WIDTH)
    pipe = _wrapper(kind, x)
    optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
    pipe.model.__dict__["trainer"] = pipe
    for is_async in (True, False):
        pipe.forward_backward((x,), loss_fn=lambda outputs, label: outputs.square().sum())
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
    pipe(x)
    if closes:
        pipe.close()


def live(num_models: int, kinds: Sequence[str] = KINDS) -> list[Figures]:
    """Live through many models; the figures at some moments, the first after a tenth of them."""
    figures = []
    for number in tqdm(range(num_models), disable=not sys.stderr.isatty()):
        use(kinds[number % len(kinds)], closes=number % 4 != 0)
        if (number + 1) % max(num_models // ROWS, 1) == 0:
            figures.append(read(number + 1))
    return figures


def main(arguments: list[str] | None = None) -> int:
    """Run it; returns how many figures grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--kind", choices=KINDS, help="of this kind only")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    figures = live(options.models, (options.kind,) if options.kind else KINDS)
    print(tabulate(figures, headers=Figures._fields, intfmt=","))
    first, last = figures[len(figures) // 2], figures[-1]  # in the first half, caches fill
    per_model = (last.resident_bytes - first.resident_bytes) / max(last.models - first.models, 1)
    grown = [last.threads > first.threads, last.files > first.files, per_model > ALLOWED_BYTES_PER_MODEL]
    print(f"{options.models} models; {per_model:,.0f} bytes more per model; {sum(grown)} figures grew")
    return sum(grown)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
