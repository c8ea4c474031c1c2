"""What the examples' command lines share: one clear line and exit code 2 for what can't be used."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

import torch

from roundpipe.errors import RoundPipeError


class Refused(Exception):
    """Something given can't be used; the message tells the user what to change."""


class Parser(argparse.ArgumentParser):
    """Takes the options that both examples have, and refuses wrong ones without printing the usage."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--devices", help='such as "cuda:0" or "cpu,cpu"; default: all accelerators')
        self.add_argument("--microbatches", type=int, metavar="N", help="default: number of devices + 1")
        self.add_argument("--seed", type=int, default=0)

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


def parse_devices(text: str | None) -> list[str] | None:
    """The devices to rotate through; None leaves the choice to roundpipe."""
    if text is None:
        return None if torch.accelerator.is_available() else ["cpu", "cpu"]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        try:
            torch.empty(1, device=name)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise Refused(f"--devices {text}: {name!r} can't be used here: {reason}") from error
    return names


def main(name: str, program: Callable[[list[str] | None], int], argv: list[str] | None) -> int:
    """Runs a program; what it or roundpipe refuses becomes one line and exit code 2."""
    try:
        return program(argv)
    except (Refused, RoundPipeError) as error:
        print(f"{name}: error: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        return 2
