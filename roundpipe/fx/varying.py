"""What of a call varies, and is open in a graph: sizes of its arguments, and numbers that code finds.

A graph takes such a number as an input, as if it were one more argument. The placeholder of a number stands for a
tensor of no dimensions, so that passes over graphs know tensors and symbolic sizes only; in a call it has the number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

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
        """What a place holds itself, or as items, and is another number now."""
        view = place.view if place.view.is_variable else _ITEM
        return tuple(cls(words, place.owner, key, view) for key, words in place.changed_numbers().items())

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


Varying = Dimension | NumberPlace


def named_places(varying: Iterable[Varying]) -> dict[str, NumberPlace]:
    """The places among what varies in one order, by names that differ."""
    places = sorted((each for each in varying if isinstance(each, NumberPlace)), key=lambda each: each.words)
    number = Counter[str]()
    named: dict[str, NumberPlace] = {}
    for place in places:
        number[place.words] += 1
        named[place.words if number[place.words] == 1 else f"{place.words} ({number[place.words]})"] = place
    return named


def dimension_of(name: str) -> Dimension:
    """A named place among the arguments in normal form, where it is one more keyword argument."""
    return (trees.Access("item", 1), trees.Access("item", name)), NUMBER


def may_vary(value: Any) -> bool:
    """Whether a value is a number that can be an input."""
    return type(value) is int or type(value) is float and math.isfinite(value)


def tensor_of_kind(number: Any) -> torch.Tensor:
    """What stands for a number in a graph; it has no data."""
    return torch.empty((), dtype=torch.float64 if isinstance(number, (float, torch.SymFloat)) else torch.int64)
