"""Values that people and programs put where they don't belong, and rules that say which of them an argument takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "0": lambda: 0,
    "-1": lambda: -1,
    "1": lambda: 1,
    "1.5": lambda: 1.5,
    "-1.5": lambda: -1.5,
    "large": lambda: 10**30,
    "huge": lambda: 10**400,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "empty text": lambda: "",
    "text": lambda: "no such \0thing",
    "long text": lambda: "x" * 100_000,
    "bytes": lambda: b"x",
    "empty tuple": lambda: (),
    "empty list": list,
    "empty dict": dict,
    "list of None": lambda: [None],
    "dict of numbers": lambda: {1: 2},
    "set": lambda: {3},
    "iterator": lambda: iter([]),
    "object": object,
    "function": lambda: lambda *args: None,
    "class": lambda: nn.Linear,
    "module": lambda: nn.Linear(6, 6),
    "tensor": lambda: torch.ones(4, 6),
    "tensor of nan": lambda: torch.tensor(float("nan")),
    "dtype": lambda: torch.int32,
}


@dataclass(frozen=True)
class Rule:
    """What an argument takes: a value that is not named here must be refused."""

    right: frozenset[str] = frozenset()
    """Names of values with which the call ends without an error."""
    either: frozenset[str] = frozenset()
    """Names of values that may do either: the user's own code runs, or the machine decides."""

    def __or__(self, other: Rule) -> Rule:
        return Rule(self.right | other.right, self.either | other.either)


def takes(*right: str, either: tuple[str, ...] = ()) -> Rule:
    """A rule for an argument that takes these values."""
    assert VALUES.keys() >= {*right, *either}
    return Rule(frozenset(right), frozenset(either))


NOTHING = takes()
NONE = takes("None")
FLAG = takes("True", "False")
COUNT = takes("1", "large", "huge")
POSITIVE = takes("1", "1.5", "large")
SECONDS = takes("0", "1", "-1", "1.5", "-1.5", "large", "inf")
TEXT = takes("empty text", "text", "long text")
EMPTY = takes("empty tuple", "empty list", "empty dict", "iterator")
TENSOR = takes("tensor", "tensor of nan")
ANYTHING = takes(*VALUES)
FUNCTION = takes(either=("function", "class", "module"))
"""What runs is the user's code, and what it raises is its own."""
DEVICES = takes("None", either=("0", "1"))
"""A number is the index of an accelerator, if there is one."""
