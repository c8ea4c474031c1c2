"""Types of options: text from the command line as numbers that make sense."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from roundpipe.core.checks import path_of
from roundpipe.core.errors import ConfigError
from roundpipe.core.quantities import parse_quantity

LEAST_QUANTITY = 1000.0
"""Below it a unit was forgotten: nobody means 24 bytes or 31 bytes/s."""
LARGEST_QUANTITY = 1e24

_Number = TypeVar("_Number", int, float)
_Value = TypeVar("_Value")


def quantity(text: str) -> float:
    """A number with a unit, such as ``24GiB``, ``25GB/s``, ``165T`` or ``1.65e14``, in the range of quantities."""
    value = parse_quantity(text)
    if not LEAST_QUANTITY <= value <= LARGEST_QUANTITY:
        problem = "has no unit" if 0 < value < LEAST_QUANTITY else "can't be used"
        raise argparse.ArgumentTypeError(f"{text!r} {problem}; give one such as 24GiB, 25GB/s or 165T")
    return value


def count(most: int) -> Callable[[str], int]:
    """The type of a number of things: from 1 to ``most``."""

    def parse(text: str) -> int:
        value = _number(int, text)
        if not 1 <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {most:,}")
        return value

    return parse


def share(text: str) -> float:
    """A share above 0 and up to 1."""
    value = _number(float, text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0 and up to 1, such as 0.5")
    return value


def checked(read: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """The type of what a function reads from the text; it raises `ConfigError` for what can't be meant."""

    def parse(text: str) -> _Value:
        try:
            return read(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def file_to_read(text: str) -> Path:
    """A file that is there."""
    path = path_of("FILE", text)
    if not path.is_file():
        raise ConfigError(f"{text}: {'this is not a file' if path.exists() else 'there is no such file'}")
    return path


def file_name(text: str) -> Path:
    """A file, which may be there or not."""
    path = path_of("FILE", text)
    if path.is_dir():
        raise ConfigError(f"{text}: this is a folder; give the path of a file")
    return path


def _number(kind: Callable[[str], _Number], text: str) -> _Number:
    """A number; 0 for what is none."""
    try:
        return kind(text)
    except ValueError:
        return kind("0")
