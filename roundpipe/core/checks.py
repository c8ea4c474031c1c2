"""Checks of arguments by type and range; what they raise names the argument, what was found and what to give."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from roundpipe.core.errors import ConfigError, RoundPipeError, shown

_NO_NAME = (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL)
"""How a file system says that no file could have this name."""


def check_type(name: str, value: Any, kind: Any, give: str) -> None:
    """Raise `ConfigError` unless a value is of a class, or of one of a union of classes."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is {type(value).__name__}; give {give}")


def check_flag(name: str, value: Any) -> None:
    """Raise `ConfigError` for what is not True or False: a text such as ``"no"`` would count as True."""
    check_type(name, value, bool, "True or False")


def check_count(
    name: str,
    value: Any,
    give: str,
    least: int = 1,
    most: int | None = None,
    error: type[RoundPipeError] = ConfigError,
) -> None:
    """Raise an error for what is no whole number of a range; True is none."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        raise error(f"{name}={shown(value)}; give {give}")


def is_number(value: Any) -> bool:
    """Whether a value is a number, of a size that floats have; NaN and True are none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return not math.isnan(float(value))
    except OverflowError:
        return False


def items_of(name: str, value: Any, give: str, error: type[RoundPipeError] = ConfigError) -> list[Any]:
    """What a list or another iterable holds; an error for what has no items, or is a text."""
    try:
        if isinstance(value, Iterable) and not isinstance(value, str | bytes):
            return list(value)
    except TypeError:  # a tensor without dimensions
        pass
    raise error(f"{name} is {type(value).__name__}; give {give}")


def check_keywords(name: str, value: Any) -> None:
    """Raise `ConfigError` for what can't be a call's keyword arguments."""
    check_type(name, value, dict, "a dict of keyword arguments")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"{name}: the keyword {key!r} is {type(key).__name__}; keywords are strings")


def positional(keywords: str) -> str:
    """What to give as a call's positional arguments, for a message; ``keywords`` is the option beside them."""
    return f"a tuple of the model's arguments, such as (x,), and those with a name as a dict, {keywords}={{...}}"


def check_example(example_args: Any, example_kwargs: Any) -> None:
    """Raise `ConfigError` for what can't be the arguments of a call."""
    check_type("example_args", example_args, tuple, positional("example_kwargs"))
    if example_kwargs is not None:
        check_keywords("example_kwargs", example_kwargs)


def path_of(name: str, value: Any, give: str = "the path of a file") -> Path:
    """A path; `ConfigError` for what a file system can't have."""
    is_path = isinstance(value, str | os.PathLike) and isinstance(text := os.fspath(value), str)
    if not is_path or not text or "\0" in text:
        raise ConfigError(f"{name}={shown(value)}; give {give}")
    try:
        os.stat(text)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno in _NO_NAME:
            raise ConfigError(f"{name}={shown(value)}: {error.strerror}; give {give}") from None
    return Path(text)
