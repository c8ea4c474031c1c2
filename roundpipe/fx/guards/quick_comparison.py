"""Whether what a model's code can reach in Python still is what it was: at every call, of thousands of places.

No Python runs for each of them, as far as that is possible.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from roundpipe.effects.places import CONTAINER, Place


class QuickComparison:
    """Tells cheaply whether places hold the same objects as when this was made; too careful rather than too bold.

    Random generators among them are not looked at.
    """

    def __init__(self, all_places: Iterable[Place]) -> None:
        by_kind: dict[str, list[Place]] = {}
        for place in all_places:
            by_kind.setdefault(place.kind, []).append(place)
        containers = [place for place in by_kind.get("container", ()) if place.view is CONTAINER]
        dicts = [(place.owner, place.held) for place in containers if isinstance(place.owner, dict)]
        lists = [(place.owner, place.held) for place in containers if isinstance(place.owner, (list, deque))]
        self._contents = _Contents(dict.__len__, dict.values, dicts), _Contents(len, iter, lists)
        self._sets = [(p.owner, p.held) for p in containers if isinstance(p.owner, set)]
        variables = [(p.owner.get, p.key, p.held) for p in by_kind.get("global", [])]
        variables += [(vars(p.owner).get, p.key, p.held) for p in by_kind.get("class", [])]
        variables += [(functools.partial(getattr, p.owner), p.key, p.held) for p in by_kind.get("defaults", [])]
        variables += [(functools.partial(getattr, p.owner), "cell_contents", p.held) for p in by_kind.get("cell", [])]
        self._gets = [get for get, _, _ in variables], [key for _, key, _ in variables]
        self._values = [held for *_, held in variables]
        self._classes = [vars(place.owner) for place in by_kind.get("names", ())]
        self._sizes = list(map(len, self._classes))
        self._others = [place for kind in ("array", "slots", "context") for place in by_kind.get(kind, [])]
        self._others += [place for place in by_kind.get("container", ()) if place.view is not CONTAINER]

    def is_same(self) -> bool:
        with suppress(ValueError):  # of a closure's cell that was emptied
            return self._holds_the_same()
        return False

    def _holds_the_same(self) -> bool:
        return (
            all(held.is_same() for held in self._contents)
            and all(owner == held for owner, held in self._sets)
            and all(map(operator.is_, map(operator.call, *self._gets), self._values))
            and list(map(len, self._classes)) == self._sizes
            and not any(place.is_changed() for place in self._others)
        )


class _Contents:
    """What containers hold, compared all at once."""

    def __init__(
        self,
        length: Callable[[Any], int],
        items: Callable[[Any], Iterable[Any]],
        containers: Sequence[tuple[Any, Any]],
    ) -> None:
        self._length, self._items = length, items
        self._owners = [owner for owner, _ in containers]
        self._lengths = [len(held) for _, held in containers]
        self._held = list(chain.from_iterable(items(held) for _, held in containers))

    def is_same(self) -> bool:
        """Whether they hold these very objects in this order."""
        if list(map(self._length, self._owners)) != self._lengths:
            return False
        return all(map(operator.is_, chain.from_iterable(map(self._items, self._owners)), self._held))
