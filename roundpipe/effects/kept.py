"""Values that a function leaves behind whenever it runs, such as a part of a loss in a dict for a log.

A graph of the function gives them beside its result, and whoever runs it puts them where the function would have.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from roundpipe.core import trees
from roundpipe.effects.places import CONTAINER, Place, View, contents


class KeptHolder(NamedTuple):
    """What values are left in: a dict, such as the attributes of an object, a list, or what a view looks at."""

    find: Callable[[], Any]
    """Gives it; None if it is not there yet."""
    around: Kept | None = None
    """Where the function puts what has it, if it is not there yet."""
    path: tuple[Any, ...] = ()
    """From there to the holder."""
    empty: Any = None
    """What the function puts there, before anything is left in it."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Where one value is left."""

    words: str
    holder: KeptHolder
    key: Any = None
    """In a dict, or by the view."""
    view: View | None = None
    """Of a variable; None: the holder is a container."""
    is_appended: bool = False
    """To a list."""

    def put(self, value: Any) -> None:
        """Leave a value there, as the function does."""
        holder, around = self.holder.find(), self.holder.around
        if holder is None and around is not None:
            around.put(copy.deepcopy(self.holder.empty))
            holder = self.holder.find()
        if self.view is not None:
            self.view.write(holder, self.key, value)
        elif self.is_appended:
            holder.append(value)
        else:
            holder[self.key] = value

    def inside(self, path: tuple[Any, ...], empty: Any) -> KeptHolder:
        """The container at a path in the value that is left here."""
        return KeptHolder(lambda: self._at(path), self, path, empty)

    def _at(self, path: tuple[Any, ...]) -> Any:
        with suppress(KeyError, IndexError):
            return functools.reduce(operator.getitem, (self.key, *path), self.holder.find())
        return None

    def has_same_place(self, other: Kept) -> bool:
        same_way = (self.key, self.view, self.is_appended) == (other.key, other.view, other.is_appended)
        return same_way and self.holder.find() is other.holder.find()


class KeptLeaf:
    """A value that a graph has computed, in the structure that is left."""

    __slots__ = ("is_added", "is_number", "value")  # without attributes of its own it is a leaf of any structure

    def __init__(self, value: Any, *, is_number: bool, is_added: bool) -> None:
        self.value = value
        self.is_number = is_number
        """Whether a number of Python's is left in place of a tensor."""
        self.is_added = is_added
        """Whether those of microbatches add up to that of the batch."""


class KeptPlaces:
    """Tells of places whether no more has changed there than what is kept, and of its holders whether they are there.

    Args:
        places: of the code that keeps it, with what they held when it was traced.
    """

    def __init__(self, kept: Sequence[Kept], places: Iterable[Place]) -> None:
        kept = [*kept, *(each.holder.around for each in kept if each.holder.around is not None)]
        self._kept = [(each, each.holder.find()) for each in kept]
        holders = {id(holder) for each, holder in self._kept if each.view is None}
        self._links = [
            (place, key, holder) for place in places for key, holder in _items(place) if id(holder) in holders
        ]
        """Where a holder is itself held."""

    def __bool__(self) -> bool:
        return bool(self._kept)

    def are_elsewhere(self) -> str:
        """The first place, in words, that holds another object in place of one that values are left in, or none."""
        now = ((place.words, dict(_items(place, place.now())).get(key), holder) for place, key, holder in self._links)
        return next((words for words, value, holder in now if value is not holder), "")

    def explain(self, place: Place) -> bool:
        """Whether a place that has changed has only got what is kept there."""
        own = [each for each, holder in self._kept if holder is place.owner]
        if place.view is not CONTAINER:
            return any(each.view is place.view and each.key == place.key for each in own)
        held, now = place.held, contents(place.owner)
        if not own or any(each.view is not None for each in own):
            return False
        if isinstance(now, dict):
            keys = {each.key for each in own}
            missing = object()
            others = dict.fromkeys([*held, *now]).keys() - keys
            return all(trees.same(held.get(key, missing), now.get(key, missing)) for key in others)
        return len(now) >= len(held) and all(map(trees.same, held, now))

    def has(self, holder: Any, key: Any) -> bool:
        """Whether a value is left under a key of a dict."""
        return any(each.view is None and found is holder and each.key == key for each, found in self._kept)


def _items(place: Place, value: Any = None) -> list[tuple[Any, Any]]:
    """What a place held, or the value that is there now, by key; a variable holds one object."""
    value = place.held if value is None else value
    if place.view.is_variable:
        return [(None, value)]
    if isinstance(value, dict):
        return list(dict.items(value))
    return list(enumerate(value)) if isinstance(value, (list, deque)) else []
