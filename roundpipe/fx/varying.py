"""What of a call varies, and is open in a graph: sizes of its arguments, and numbers and tensors that code finds.

A graph takes such a value as an input, as if it were one more argument. The placeholder of a number stands for a
tensor of no dimensions, so that passes over graphs know tensors and symbolic sizes only; in a call it has the number.
"""

from __future__ import annotations

import copy
import itertools
import math
import pathlib
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from roundpipe.core import trees
from roundpipe.effects.places import Place, View, are_other_numbers, items_of

Dimension = tuple[trees.Path, int]
"""A dimension of an input: the path to its tensor, and which one; or a number among the arguments, see `NUMBER`."""
NUMBER = -1
"""In place of a dimension: it is the number at the path that varies."""


class _Absent:
    """In a place that holds nothing."""

    def __repr__(self) -> str:
        return "gone"


_ABSENT = _Absent()


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


class ItemOfAttribute(NamedTuple):
    """Key of what is in a container that is an attribute, and may be another container at each call."""

    name: str
    item: Any


def _item_of_attribute(attributes: Any, key: ItemOfAttribute) -> Any:
    return items_of(_item(attributes, key.name)).get(key.item, _ABSENT)


def _put_item_of_attribute(attributes: Any, key: ItemOfAttribute, value: Any) -> None:
    """The container stays as it is: a copy takes its place."""
    container = attributes[key.name]
    if isinstance(container, dict):
        changed = copy.copy(container)
        dict.__setitem__(changed, key.item, value)
    else:
        changed = type(container)(value if i == key.item else each for i, each in enumerate(container))
    attributes[key.name] = changed


_ITEM_OF_ATTRIBUTE = View("item", _item_of_attribute, _put_item_of_attribute)


class ValuePlace:
    """Where a model's code finds a number or a tensor, other than in arguments: an attribute, an item, a variable.

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
    def changed_in(cls, place: Place) -> tuple[ValuePlace, ...]:
        """What a variable, or a container in its items, has and is another number or tensor now."""
        values, owner, view = place.changed_values(are_other_values), place.owner, place.view
        if view.is_variable:
            return tuple(cls(words, owner, key, view) for key, words in values.items() if key == place.key)
        is_open = isinstance(owner, (dict, list, deque))
        return tuple(cls(words, owner, key) for key, words in values.items() if is_open)

    @classmethod
    def in_attribute(cls, words: str, attributes: dict[str, Any], name: str, before: Any) -> tuple[ValuePlace, ...]:
        """The attribute that held another value before, or items of the container that it is, as they can be inputs."""
        if are_other_values(before, now := attributes.get(name)):
            return (cls(words, attributes, name),)
        held, items = items_of(before), items_of(now) if type(now) is type(before) else {}
        others = (item for item in held if item in items and are_other_values(held[item], items[item]))
        keys = (ItemOfAttribute(name, item) for item in others)
        return tuple(cls(f"{key.item!r} of {words}", attributes, key, _ITEM_OF_ATTRIBUTE) for key in keys)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ValuePlace) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    @property
    def identity(self) -> tuple[int, Any]:
        return id(self._owner), self._key

    @property
    def of_attribute(self) -> tuple[tuple[int, str], int, Any] | None:
        """Of an item of an attribute: the attribute's identity, that of the container it is now, and which item."""
        if not isinstance(self._key, ItemOfAttribute):
            return None
        name, item = self._key
        return (id(self._owner), name), id(_item(self._owner, name)), item

    def held(self) -> Any:
        """What is to be put back by `restore`: what is there, or the container that it is an item of."""
        return _item(self._owner, self._key.name) if isinstance(self._key, ItemOfAttribute) else self.read()

    def restore(self, held: Any) -> None:
        if isinstance(self._key, ItemOfAttribute):
            self._owner[self._key.name] = held
        else:
            self.put(held)

    def read(self) -> Any:
        """What is there now; an object of no other use if nothing is."""
        return self._view.read(self._owner, self._key)

    def put(self, value: Any) -> None:
        """Put what was read, or a symbol or fake for it, there."""
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


Varying = Dimension | ValuePlace | NumberRead


def is_value(varying: Varying) -> bool:
    """Whether it is a number or a tensor, and no dimension."""
    return isinstance(varying, (ValuePlace, NumberRead)) or varying[1] == NUMBER


class Varied:
    """What was seen to vary in the calls of a model, and is open in later traces.

    ``takes_tensors``: whether tensors that code finds can be inputs, too.
    """

    def __init__(self, *, takes_tensors: bool = True) -> None:
        self._seen: dict[Varying, None] = {}
        self._can_be_input = can_be_input if takes_tensors else may_vary
        self._closes_reads = self._closes_values = False

    def note(self, varying: Iterable[Varying], closes_reads: bool = False) -> None:
        """It has varied. ``closes_reads``: code needs what it reads from data as numbers."""
        self._closes_reads |= closes_reads
        self._seen = {each: None for each in (*self._seen, *varying) if not self._is_closed(each)}

    def close_values(self) -> None:
        """The model's code can't be traced with symbols in the place of numbers, or fakes in that of tensors."""
        self._closes_values = True
        self.note(())

    def _is_closed(self, varying: Varying) -> bool:
        return isinstance(varying, NumberRead) and self._closes_reads or self._closes_values and is_value(varying)

    def __iter__(self) -> Iterator[Varying]:
        """All that can be an input as it is now."""
        return (each for each in self._seen if not isinstance(each, ValuePlace) or self._can_be_input(each.read()))


class FoundName(str):
    """Of a value that is none of a call's arguments, and is one more keyword argument in their normal form."""

    __slots__ = ()

    @classmethod
    def free(cls, words: str, taken: Container[str]) -> FoundName:
        """The words, with a number behind them if there are such already."""
        names = itertools.chain([words], (f"{words} ({number})" for number in itertools.count(2)))
        return cls(next(name for name in names if name not in taken))

    @property
    def path(self) -> trees.Path:
        """Where it is among the arguments in normal form."""
        return trees.Access("item", 1), trees.Access("item", self)


def is_found(path: trees.Path) -> bool:
    """Whether a path into arguments in normal form is that of a value which is none of a call's arguments."""
    return len(path) > 1 and isinstance(path[1].key, FoundName)


def named_places(varying: Iterable[Varying]) -> dict[FoundName, ValuePlace]:
    """The places among what varies in one order, by names that differ."""
    named: dict[FoundName, ValuePlace] = {}
    for place in sorted((each for each in varying if isinstance(each, ValuePlace)), key=lambda each: each.words):
        named[FoundName.free(place.words, named)] = place
    return named


def is_tensor_for_input(value: Any) -> bool:
    """Whether a value is a tensor that can be an input, for which no gradient is asked."""
    is_dense = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested
    return is_dense and not value.requires_grad and not value.is_meta


def can_be_input(value: Any) -> bool:
    """Whether what code finds somewhere can be an input as it is."""
    return may_vary(value) or is_tensor_for_input(value)


def are_other_values(before: Any, now: Any) -> bool:
    """Whether two values are numbers, or tensors that can be inputs, and not the same."""
    are_tensors = is_tensor_for_input(before) and is_tensor_for_input(now)
    return before is not now if are_tensors else are_other_numbers(before, now)


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
