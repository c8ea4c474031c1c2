"""What the examples' command lines share: one clear line and exit code 2 for what can't be used."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

import roundpipe
from roundpipe.core.errors import RoundPipeError
from roundpipe.reports.timeline import check_path

CPU_MEMORY_BYTES = 4 * 1024**3
"""Limit of a CPU worker, which counts what layers allocate under one only."""
RECORDED_STEPS = 4
WARM_UP_STEPS = 6
"""Steps before those that are recorded, if there are as many."""

Step = TypeVar("Step")


class Refused(Exception):
    """Something given can't be used; the message tells the user what to change."""


class WithDefaults(argparse.RawDescriptionHelpFormatter):
    """Shows the description as it stands, and numbers that are defaults."""

    def _get_help_string(self, action: argparse.Action) -> str:
        is_number = type(action.default) in (int, float)
        return f"{action.help}; default: {action.default}" if is_number else action.help or ""


class Parser(argparse.ArgumentParser):
    """Takes the options that all examples have, and refuses wrong ones without printing the usage."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=WithDefaults)
        self.add_argument("--devices", help='such as "cuda:0" or "cpu,cpu"; default: all accelerators, or cpu,cpu')
        self.add_argument("--microbatches", type=int, metavar="N", help="default: number of devices + 1")
        self.add_argument("--seed", type=int, default=0, help="of weights and batches")
        self.add_argument("--check", action="store_true", help="compare with plain PyTorch")
        self.add_argument(
            "--timeline",
            type=timeline_path,
            metavar="FILE",
            help=f"record {RECORDED_STEPS} steps: .json for ui.perfetto.dev, .png",
        )

    def add_text_options(self, steps: int, batch: int, lr: float | None, rate: str = "") -> None:
        """What examples that train on a text have."""
        self.add_argument("--data", type=Path, metavar="FILE", help="UTF-8 text to train on")
        self.add_argument("--steps", type=int, default=steps, help="updates of the weights")
        self.add_argument("--batch", type=int, default=batch, help="sequences per step")
        self.add_argument("--seq", type=int, default=128, help="tokens per sequence")
        self.add_argument("--lr", type=float, default=lr, help=f"learning rate; {rate}".removesuffix("; "))

    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message} (--help shows the options)")

    def require_positive(self, options: argparse.Namespace, *names: str) -> None:
        """Refuses counts below one; None is an option that was not given."""
        for name in names:
            value = getattr(options, name)
            if value is not None and value < 1:
                self.error(f"--{name} must be at least 1, not {value}")
        if not options.lr > 0:
            self.error(f"--lr must be positive, not {options.lr}")


def parse_devices(text: str | None) -> list[roundpipe.Device] | None:
    """The devices to rotate through; None leaves the choice to roundpipe."""
    if text is None and torch.accelerator.is_available():
        return None
    names = ["cpu", "cpu"] if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        try:
            torch.empty(1, device=name)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise Refused(f"--devices {text}: {name!r} can't be used here: {reason}") from error
    return [roundpipe.Device(name, memory_bytes=CPU_MEMORY_BYTES if name == "cpu" else None) for name in names]


def folder_path(text: str) -> Path:
    """A folder that something can be written to."""
    if Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text} is a file; give a folder")
    return Path(text)


def timeline_path(text: str) -> Path:
    """A file that a timeline can be written to."""
    try:
        return check_path(text)
    except RoundPipeError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def recorded(steps: Iterable[Step], model: Any, path: Path | None, num_steps: int) -> Iterator[Step]:
    """The steps, as they are; a timeline of some of them is recorded, unless the path is None."""
    first = min(WARM_UP_STEPS, max(num_steps - RECORDED_STEPS, 0))
    with ExitStack() as recording:
        for index, step in enumerate(steps):
            if path is not None and index == first:
                recording.enter_context(model.record_timeline(path))
            yield step
            if index == first + RECORDED_STEPS - 1:
                recording.close()


def main(name: str, program: Callable[[list[str] | None], int], argv: list[str] | None) -> int:
    """Runs a program; what it or roundpipe refuses becomes one line and exit code 2."""
    try:
        return program(argv)
    except (Refused, RoundPipeError) as error:
        print(f"{name}: error: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"{name}: error: {error}; pip install {(error.name or '').partition('.')[0]}", file=sys.stderr)
        return 2
