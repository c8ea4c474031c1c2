"""Texts that a forward puts, once and for good, where there was None, such as ``config.problem_type``.

Whoever saves a configuration expects them there. Between two runs of the forward each is replaced by an equal copy: if
the second leaves the copy where it is, it only reads. A number could be one that each call sets anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from roundpipe.effects.places import Place


class CompletedTexts:
    """What one run of a forward has put into dicts and among objects' attributes, ``places`` being those it changed."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._found: list[tuple[dict[Any, Any], Any, str]] = []
        for place in places:
            owner, held, now = place.owner, place.held, place.now()
            if not (now is owner and type(owner) is dict and isinstance(held, dict)):
                continue
            for key, value in list(owner.items()):
                if type(value) is str and held.get(key, "") is None:
                    owner[key] = (value + " ")[:-1]
                    self._found.append((owner, key, owner[key]))

    def keep_read(self) -> None:
        """After another run: leave out what it has written, even if it is equal."""
        self._found = [(owner, key, text) for owner, key, text in self._found if owner.get(key) is text]

    def are_all_of(self, place: Place) -> bool:
        """Whether nothing else of a place has changed."""
        names = {str(key) for owner, key, _ in self._found if owner is place.owner}
        return bool(names) and names.issuperset(place.changed_items())

    def put(self) -> None:
        """Let the model have them."""
        for owner, key, text in self._found:
            owner[key] = text
