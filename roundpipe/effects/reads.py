"""Which attributes of plain objects, such as a model's configuration, and which items of registries code reads.

What the bytecode says (`roundpipe.effects.uses`) is any attribute, as soon as one name is made up at run time. What was
read in fact is told by the objects' classes, whose ``__getattribute__`` writes it down; so do the methods of classes
made from dict, of which some packages make registries. A plain dict tells nothing.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from roundpipe.core.contexts import contextmanager
from roundpipe.effects.places import (
    CONTAINERS,
    OF_TORCH,
    View,
    attributes_view,
    has_attributes,
    is_library,
    same_contents,
)
from roundpipe.effects.reach import BETWEEN_CALLS, StateWalk

_ALL_AT_ONCE = frozenset({"__dict__", "__reduce__", "__reduce_ex__", "__getstate__", "__copy__", "__deepcopy__"})
"""What gives all attributes, whichever are used then."""


class Reads:
    """The attributes that were read of objects in attributes of some modules, and of objects in those; and lookups."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        held = [value for module in modules for name, value in module.__dict__.items() if name not in OF_TORCH]
        found = _objects(held)
        found |= _objects(value for each in list(found.values()) for value in each.__dict__.values())
        self._objects = found
        self._names: dict[int, set[str]] = {key: set() for key in found}
        self._watched: set[type] = set()
        places = StateWalk(modules, BETWEEN_CALLS, None).reach.places
        registries = (place.owner for place in places if isinstance(place.owner, dict))
        self._lookups = {id(each): _Lookups(each) for each in registries if _is_registry(type(each))}

    def view(self, owner: Any) -> View | None:
        """How to look at what was read of a dict, or of an object, by its attributes; None: all counts."""
        if (lookups := self._lookups.get(id(owner))) is not None:
            return lookups.view()
        for key, value in self._objects.items():
            if value.__dict__ is owner and type(value) in self._watched:
                names = self._names[key]
                return None if names & _ALL_AT_ONCE else attributes_view(value, sorted(names))
        return None

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Write down what is read inside, by whichever thread."""
        undo = []
        try:
            for kind in {type(value) for value in self._objects.values()}:
                with contextlib.suppress(TypeError):  # a class that can't be changed tells nothing
                    undo.append(self._watch(kind))
                    self._watched.add(kind)
            for kind in {type(each.registry) for each in self._lookups.values()}:
                undo.append(_watch_registries(kind, self._lookups))
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


@dataclass(slots=True)
class _Lookups:
    """What a registry was asked for."""

    registry: Any
    asked: dict[tuple[str, int], Any] = field(default_factory=dict)
    """Keys, by method and identity."""
    is_whole: bool = False
    """Whether it was used in another way, too."""

    def view(self) -> View | None:
        """Of what it answers; None: all counts."""
        view = View("container", lambda _, key: self._answers(), lambda *_: None)
        return None if self.is_whole or not same_contents(self._answers(), self._answers()) else view

    def _answers(self) -> dict[tuple[str, int], Any]:
        return {how: self._answer(how[0], key) for how, key in self.asked.items()}

    def _answer(self, method: str, key: Any) -> Any:
        try:
            value = getattr(type(self.registry), method)(self.registry, key)
        except LookupError:
            return LookupError
        return type(value) if isinstance(value, CONTAINERS) and not value else value  # may be made anew each time


_LOOKUPS = ("get", "__getitem__", "__contains__")
_OF_C = types.MethodDescriptorType | types.WrapperDescriptorType
_METHODS = tuple(name for name, value in vars(dict).items() if isinstance(value, _OF_C) and name not in dir(object))


def _is_registry(kind: type) -> bool:
    """Whether a class is made from dict in Python, and its objects look items up as dict does."""
    return kind not in CONTAINERS and not is_library(kind) and not hasattr(kind, "__missing__")


def _own_names_of_methods(kind: type) -> dict[str, str]:
    """Under which other names a class has methods of dict, and theirs: ``__getattr__ = dict.get`` is common."""
    held = (item for owner in kind.__mro__ if owner not in (dict, object) for item in vars(owner).items())
    methods = {name: value.__name__ for name, value in held if isinstance(value, _OF_C)}
    return {name: of_dict for name, of_dict in methods.items() if getattr(kind, name) is vars(dict).get(of_dict)}


def _watch_registries(kind: type, lookups: dict[int, _Lookups]) -> Callable[[], None]:
    """Have the methods of a class write down what they are asked for."""
    before = dict(vars(kind))
    names = {name: name for name in _METHODS} | _own_names_of_methods(kind)

    def watched(name: str, of_dict: str) -> Callable[..., Any]:
        plain: Any = getattr(kind, name)

        def method(registry: Any, *args: Any, **kwargs: Any) -> Any:
            found = lookups.get(id(registry))
            if found is not None and not sys._getframe(1).f_globals.get("__name__", "").startswith("roundpipe."):
                if of_dict in _LOOKUPS and len(args) in (1, 2):  # what is said when it is not there is in the code
                    found.asked.setdefault((of_dict, id(args[0])), args[0])
                else:
                    found.is_whole = True
            return plain(registry, *args, **kwargs)

        return method

    for name, of_dict in names.items():
        setattr(kind, name, watched(name, of_dict))

    def undo() -> None:
        for name in names:
            if name in before:
                setattr(kind, name, before[name])
            else:
                delattr(kind, name)

    return undo


def _objects(values: Iterable[Any]) -> dict[int, Any]:
    return {id(value): value for value in values if has_attributes(value) and not isinstance(value, nn.Module | type)}
