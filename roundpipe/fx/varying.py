"""What of a call varies, and is open in a graph: sizes of its arguments, and numbers that code finds.

A graph takes such a number as an input, as if it were one more argument. The placeholder of a number stands for a
tensor of no dimensions, so that passes over graphs know tensors and symbolic sizes only; in a call it has the number.
"""

from __future__ import annotations

import itertools
import math
import pathlib
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from roundpipe.core import trees
from roundpipe.effects.places import Place, View, items_of

Dimension = tuple[trees.Path, int]
"""A dimension of an input: the path to its tensor, and which one; or a number among the arguments, see `NUMBER`."""
NUMBER = -1
"""In place of a dimension: it is the number at the path that varies."""


_ABSENT = object()


def _item(owner: Any, key: Any) -> Any:
    if isinstance(owner, dict):
        return dict.get(owner, key, _ABSENT)
    return owner[key] if len(owner) > key else _ABSENT


def _put_item(owner: Any, key: Any, value: Any) -> None:
    if value is not _ABSENT and isinstance(owner, dict):
        dict.__setitem__(owner, key, value)
    elif value is not _ABSENT:
        owner[key] = value


_ITEM = View("item", _item, _put_item)


class NumberPlace:
    """Where a model's code finds a number, other than in arguments: an attribute, an item, a variable.

    Args:
        words: for the user.
        owner, key: of the place. Of a container, or the attributes of an object or module, it is the item.
        view: of a variable.
    """

    __slots__ = ("_key", "_owner", "_view", "words")

    def __init__(self, words: str, owner: Any, key: Any, view: View = _ITEM) -> None:
        self.words = words
        self._owner, self._key, self._view = owner, key, view

    @classmethod
    def changed_in(cls, place: Place) -> tuple[NumberPlace, ...]:
        """What a variable, or a container in its items, has and is another number now."""
        numbers, owner, view = place.changed_numbers(), place.owner, place.view
        if view.is_variable:
            return tuple(cls(words, owner, key, view) for key, words in numbers.items() if key == place.key)
        is_open = isinstance(owner, (dict, list, deque))
        return tuple(cls(words, owner, key) for key, words in numbers.items() if is_open)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NumberPlace) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    @property
    def identity(self) -> tuple[int, Any]:
        return id(self._owner), self._key

    def read(self) -> Any:
        """What is there now; nobody's object if nothing is."""
        return self._view.read(self._owner, self._key)

    def put(self, value: Any) -> None:
        """Put what was read, or a symbol for it, there."""
        self._view.write(self._owner, self._key, value)


def without_items(view: View, keys: Collection[Any]) -> View:
    """A view of the rest of what a container holds."""

    def read(owner: Any, key: Any) -> Any:
        rest = {name: item for name, item in items_of(view.read(owner, key)).items() if name not in keys}
        return rest if isinstance(owner, dict) else [*rest.values()]

    return View(view.kind, read, view.write)


class NumberRead(NamedTuple):
    """A number, or a short list of numbers, that a model's code reads from data of its arguments."""

    function: str
    """Name of what reads it."""
    location: str
    position: int
    """Among all that are read there."""

    @property
    def words(self) -> str:
        file, _, line = self.location.rpartition(":")
        return f"{self.function}() at {pathlib.PurePath(file).name}:{line}"


Varying = Dimension | NumberPlace | NumberRead


def is_number(varying: Varying) -> bool:
    """Whether it is a number, and no dimension."""
    return isinstance(varying, (NumberPlace, NumberRead)) or varying[1] == NUMBER


class Varied:
    """What was seen to vary in the calls of a model, and is open in later traces."""

    def __init__(self) -> None:
        self._seen: dict[Varying, None] = {}
        self._closes_reads = self._closes_numbers = False

    def note(self, varying: Iterable[Varying], closes_reads: bool = False) -> None:
        """It has varied. ``closes_reads``: code needs what it reads from data as numbers."""
        self._closes_reads |= closes_reads
        self._seen = {each: None for each in (*self._seen, *varying) if not self._is_closed(each)}

    def close_numbers(self) -> None:
        """The model's code can't be traced with symbols in the place of numbers."""
        self._closes_numbers = True
        self.note(())

    def _is_closed(self, varying: Varying) -> bool:
        return isinstance(varying, NumberRead) and self._closes_reads or self._closes_numbers and is_number(varying)

    def __iter__(self) -> Iterator[Varying]:
        return iter(self._seen)


class NumberName(str):
    """Of a number that is none of a call's arguments, and is one more keyword argument in their normal form."""

    __slots__ = ()

    @classmethod
    def free(cls, words: str, taken: Container[str]) -> NumberName:
        """The words, with a number behind them if there are such already."""
        names = itertools.chain([words], (f"{words} ({number})" for number in itertools.count(2)))
        return cls(next(name for name in names if name not in taken))

    @property
    def path(self) -> trees.Path:
        """Where it is among the arguments in normal form."""
        return trees.Access("item", 1), trees.Access("item", self)


def named_places(varying: Iterable[Varying]) -> dict[NumberName, NumberPlace]:
    """The places among what varies in one order, by names that differ."""
    named: dict[NumberName, NumberPlace] = {}
    for place in sorted((each for each in varying if isinstance(each, NumberPlace)), key=lambda each: each.words):
        named[NumberName.free(place.words, named)] = place
    return named


def may_vary(value: Any) -> bool:
    """Whether a value is a number that can be an input."""
    return trees.number_kind(value) is not None and math.isfinite(value)


MOST_NUMBERS = 32
"""That a graph has as inputs since code reads them from data; each has its symbol, with which sizes are computed."""


def may_be_opened(value: Any) -> bool:
    """Whether what code reads from data, a number or a list, is nothing but numbers that can be inputs, and few."""
    if isinstance(value, list):
        leaves = trees.leaves(value)
        return 0 < len(leaves) <= MOST_NUMBERS and all(map(may_vary, leaves))
    return may_vary(value)


def tensor_of_kind(number: Any) -> torch.Tensor:
    """What stands for a number in a graph; it has no data."""
    return torch.empty((), dtype=torch.float64 if isinstance(number, (float, torch.SymFloat)) else torch.int64)
