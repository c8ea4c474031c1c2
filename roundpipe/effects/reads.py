"""Which attributes of plain objects, such as a model's configuration, code reads while it runs.

What the bytecode says (`roundpipe.effects.uses`) is any attribute, as soon as one name is made up at run time. What was
read in fact is told by the objects' classes, whose ``__getattribute__`` writes it down.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from roundpipe.core.contexts import contextmanager
from roundpipe.effects.places import OF_TORCH, has_attributes

_ALL_AT_ONCE = frozenset({"__dict__", "__reduce__", "__reduce_ex__", "__getstate__", "__copy__", "__deepcopy__"})
"""What gives all attributes, whichever are used then."""


class AttributeReads:
    """The attributes that were read of objects in attributes of some modules, and of objects in those."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        held = [value for module in modules for name, value in module.__dict__.items() if name not in OF_TORCH]
        found = _objects(held)
        found |= _objects(value for each in list(found.values()) for value in each.__dict__.values())
        self._objects = found
        self._names: dict[int, set[str]] = {key: set() for key in found}
        self._watched: set[type] = set()

    def names(self, attributes: dict[str, Any]) -> set[str] | None:
        """Names read of the object with these attributes; None: all, or it was not looked at."""
        for key, value in self._objects.items():
            if value.__dict__ is attributes and type(value) in self._watched:
                names = self._names[key]
                return None if names & _ALL_AT_ONCE else names
        return None

    def owner(self, attributes: dict[str, Any]) -> Any:
        """The object with these attributes."""
        return next(value for value in self._objects.values() if value.__dict__ is attributes)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Write down what is read inside, by whichever thread."""
        undo = []
        try:
            for kind in {type(value) for value in self._objects.values()}:
                with contextlib.suppress(TypeError):  # a class that can't be changed tells nothing
                    undo.append(self._watch(kind))
                    self._watched.add(kind)
            yield
        finally:
            for action in undo:
                action()

    def _watch(self, kind: type) -> Callable[[], None]:
        plain: Any = kind.__getattribute__
        names, is_own = self._names, "__getattribute__" in vars(kind)

        def __getattribute__(owner: Any, name: str) -> Any:
            if (read := names.get(id(owner))) is not None and name not in read:
                caller = sys._getframe(1).f_globals.get("__name__", "")
                if name not in _ALL_AT_ONCE or not caller.startswith("roundpipe."):
                    read.add(name)
            return plain(owner, name)

        kind.__getattribute__ = __getattribute__  # type: ignore[method-assign,assignment]

        def undo() -> None:
            if is_own:
                kind.__getattribute__ = plain  # type: ignore[method-assign]
            else:
                del kind.__getattribute__

        return undo


def _objects(values: Iterable[Any]) -> dict[int, Any]:
    return {id(value): value for value in values if has_attributes(value) and not isinstance(value, nn.Module | type)}
