"""Values that a function leaves behind whenever it runs, such as a part of a loss in a dict for a log.

A graph of the function gives them beside its result, and whoever runs it puts them where the function would have.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from roundpipe.core import trees
from roundpipe.effects.places import CONTAINER, Place, View, contents

Moved = Mapping[int, Any]
"""By identity of a container in which values are left, another one that has taken its place since the trace."""
UNMOVED: Moved = MappingProxyType({})


class KeptHolder(NamedTuple):
    """What values are left in: a dict, such as the attributes of an object, a list, or what a view looks at."""

    traced: Callable[[], Any]
    """Gives the one that there was at the trace."""
    around: Kept | None = None
    """Where the function puts what has it, if it was not there."""
    path: tuple[Any, ...] = ()
    """From there to the holder."""
    empty: Any = None
    """What the function puts there, before anything is left in it."""

    def find(self, moved: Moved = UNMOVED) -> Any:
        """The one that there is now; None if it is not there yet."""
        if self.around is None:
            holder = self.traced()
            return moved.get(id(holder), holder)
        with suppress(KeyError, IndexError):
            return functools.reduce(operator.getitem, (self.around.key, *self.path), self.around.holder.find(moved))
        return None


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

    def put(self, value: Any, moved: Moved = UNMOVED) -> None:
        """Leave a value there, as the function does."""
        holder, around = self.holder.find(moved), self.holder.around
        if holder is None and around is not None:
            around.put(copy.deepcopy(self.holder.empty), moved)
            holder = self.holder.find(moved)
        if self.view is not None:
            self.view.write(holder, self.key, value)
        elif self.is_appended:
            holder.append(value)
        else:
            holder[self.key] = value

    def inside(self, path: tuple[Any, ...], empty: Any) -> KeptHolder:
        """The container at a path in the value that is left here."""
        return KeptHolder(lambda: None, self, path, empty)

    def has_same_place(self, other: Kept) -> bool:
        same_way = (self.key, self.view, self.is_appended) == (other.key, other.view, other.is_appended)
        return same_way and self.holder.find() is other.holder.find()


class KeptLeaf:
    """A value that a graph has computed, in the structure that is left."""

    __slots__ = ("is_added", "is_in_rows", "is_number", "value")  # no attributes of its own: a leaf of any structure

    def __init__(self, value: Any, *, is_number: bool, is_added: bool, is_in_rows: bool = False) -> None:
        self.value = value
        self.is_number = is_number
        """Whether a number of Python's is left in place of a tensor."""
        self.is_added = is_added
        """Whether those of microbatches add up to that of the batch."""
        self.is_in_rows = is_in_rows
        """Whether they make it up one behind the other."""


class _HolderPlace(NamedTuple):
    """Where code finds a container that values are left in."""

    words: str
    now: Callable[[], Any]
    """Gives what it finds there."""
    held: Any
    """What it found there when it was traced."""
    is_own: bool
    """Whether a copy of the function has a place of its own for it."""


class KeptPlaces:
    """Tells whether no more has changed in Python than what is left there, also in other containers than at the trace.

    A training loop may make a new dict for each step: it takes the place of the one before if it is held where that was
    and has the same in it, but for what is left there. No code that was traced tells them apart.

    Args:
        kept: what is left.
        places: of the code that leaves it, with what they held when it was traced.
        modules: whose attributes the code may read.
    """

    def __init__(self, kept: Sequence[Kept], places: Iterable[Place], modules: Iterable[nn.Module]) -> None:
        kept = [*kept, *(each.holder.around for each in kept if each.holder.around is not None)]
        self._kept = [(each, each.holder.find()) for each in kept]
        self._holders = {id(holder) for each, holder in self._kept if each.view is None}
        places = [*places]
        self._contents = {id(place.owner): place.held for place in places if place.view is CONTAINER}
        """Of each container, by its identity, what it held when it was traced."""
        self._holder_places = [*self._places_in(places, modules)] if self._holders else []
        self.moved: Moved = UNMOVED
        """As of the latest `follow`."""

    def _places_in(self, places: Iterable[Place], modules: Iterable[nn.Module]) -> Iterator[_HolderPlace]:
        for place in places:
            for key, held in _items(place, place.held).items():
                if id(held) in self._holders:
                    is_own = place.view.kind in ("cell", "defaults")
                    yield _HolderPlace(place.words, functools.partial(_item_now, place, key), held, is_own)
        for module in modules:
            for name, held in module.__dict__.items():
                if id(held) in self._holders:
                    words = f"{type(module).__name__}.{name}"
                    yield _HolderPlace(words, functools.partial(module.__dict__.get, name), held, is_own=False)

    def follow(self, copy: Iterable[tuple[str, Any, Any]] = ()) -> str:
        """Find the containers that have taken the places of those that values are left in.

        Args:
            copy: of the function, by name what it held when it was traced, and what a copy of it that runs now holds.

        Returns:
            In words, a place that holds something else; empty if there is none.
        """
        if not self._holders:
            return ""
        found = [(words, held, now) for words, held, now in copy if id(held) in self._holders]
        in_copy = {id(held) for _, held, _ in found}
        links = [each for each in self._holder_places if not (each.is_own and id(each.held) in in_copy)]
        found += [(each.words, each.held, each.now()) for each in links]
        moved: dict[int, Any] = {}
        for words, held, now in found:
            if not self._takes_place(now, held, moved):
                return words
        self.moved = moved
        return ""

    def _takes_place(self, now: Any, held: Any, moved: dict[int, Any]) -> bool:
        """Whether one container takes the place of another, beside those that have ``moved``, which it joins."""
        if id(held) in moved:
            return moved[id(held)] is now
        if id(held) not in self._contents or type(now) is not type(held):
            return False
        moved[id(held)] = now
        return now is held or self._has_same(held, now, moved)

    def _has_same(self, held: Any, now: Any, moved: dict[int, Any]) -> bool:
        """Whether a container has the same in it as another had at the trace, but for values that are left there."""
        before, after = self._contents[id(held)], contents(now)
        own = [each for each, holder in self._kept if holder is held]

        def is_same(one: Any, other: Any) -> bool:
            return trees.same(one, other) or self._takes_place(other, one, moved)

        if isinstance(after, dict):
            keys = dict.fromkeys([*before, *after]).keys() - {each.key for each in own}
            return all(is_same(before.get(key, _MISSING), after.get(key, _MISSING)) for key in keys)
        if isinstance(after, set):
            return bool(before == after)
        has_length = len(after) >= len(before) if own else len(after) == len(before)
        return has_length and all(map(is_same, before, after))

    def explain(self, place: Place) -> bool:
        """Whether a place that has changed has only got what is left there, or containers in the place of others."""
        if self.moved.get(id(place.owner), place.owner) is not place.owner:
            return True
        own = [each for each, holder in self._kept if holder is place.owner]
        if place.view is CONTAINER:
            is_of_view = any(each.view is not None for each in own)
            return not is_of_view and self._has_same(place.owner, place.owner, dict(self.moved))
        is_own = any(each.view is place.view and each.key == place.key for each in own)
        return is_own or place.view.is_variable and self._takes_place(place.now(), place.held, dict(self.moved))

    def is_moved(self, held: Any, now: Any) -> bool:
        """Whether one container has taken the place of another."""
        return id(held) in self.moved and self.moved[id(held)] is now

    def has(self, holder: Any, key: Any) -> bool:
        """Whether a value is left under a key of a dict."""
        return any(each.view is None and found is holder and each.key == key for each, found in self._kept)


_MISSING = object()


def _item_now(place: Place, key: Any) -> Any:
    return _items(place, place.now()).get(key)


def _items(place: Place, value: Any) -> dict[Any, Any]:
    """What a place holds, by key; a variable holds one object."""
    if place.view.is_variable:
        return {None: value}
    if isinstance(value, dict):
        return dict(dict.items(value))
    return dict(enumerate(value)) if isinstance(value, (list, deque)) else {}
