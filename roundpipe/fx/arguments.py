"""Arguments in one normal form, so that ``f(x, mask=m)`` and ``f(x=x, mask=m)`` are one call, and their comparison.

Everything that can be named is a keyword argument under its parameter's name; arguments left at their default (the very
object) are dropped. Positional-only parameters, and all in front of a ``*args`` that is not empty, stay positional.

Invariant: calling the model with the normal form equals calling it with the arguments as given.
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.effects.places import are_other_numbers, view_of
from roundpipe.fx.sizes import Symbolic
from roundpipe.fx.varying import FoundName, ValuePlace, is_found, may_vary

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
ReadsNumbers = Callable[[Arguments, Arguments | None], Mapping[Any, Any]]
"""From arguments in normal form, and from the batch that they are a piece of."""


class CallForm:
    """The signature of one model's forward, which is looked at once.

    Args:
        places: whose values the normal form has as further keyword arguments, as they are now.
    """

    def __init__(self, model: nn.Module, places: Mapping[Any, ValuePlace] = MappingProxyType({})) -> None:
        self.places = places
        self.reads: ReadsNumbers | None = None
        """Gives numbers that the model's code reads from data, which the normal form has, too."""
        self._signature: inspect.Signature | None = None
        with suppress(TypeError, ValueError):  # Python can't tell that of compiled and scripted functions
            self._signature = inspect.signature(model.forward)

    def names(self, parameter: str) -> bool:
        """Whether the signature has a parameter of this name."""
        return self._signature is not None and parameter in self._signature.parameters

    def normalise(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Arguments | None = None) -> Arguments:
        """The arguments in normal form; of those that are a piece of a ``batch``, some numbers are those of the batch.

        Numbers that `completed` has added stay as they are.

        Raises:
            TypeError: they don't fit the signature, in Python's own words.
        """
        known = self._read_in(kwargs)
        args, named = self._normalised(*without_found((args, kwargs)))
        if self.reads is None:
            return args, named
        if not known:
            whole = None if batch is None else self._normalised(*without_found(batch))
            known = dict(self.reads((args, named), whole))
        return args, {**named, **known}

    def completed(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Arguments | None) -> dict[str, Any]:
        """The keyword arguments of a piece of a batch, with numbers that are read from its data or its batch's."""
        if self.reads is None:
            return kwargs
        return kwargs | self._read_in(self.normalise(args, kwargs, batch)[1])

    def _read_in(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Those of some keyword arguments that are numbers read from data."""
        return {name: kwargs[name] for name in kwargs if isinstance(name, FoundName) and name not in self.places}

    def _normalised(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        found = {name: place.read() for name, place in self.places.items()}
        if self._signature is None:
            return tuple(args), {**kwargs, **found}
        positional: list[Any] = []
        named: dict[str, Any] = {}
        given = [
            (self._signature.parameters[name], value)
            for name, value in self._signature.bind(*args, **kwargs).arguments.items()
        ]
        before_variadic = any(
            parameter.kind is inspect.Parameter.VAR_POSITIONAL and value for parameter, value in given
        )
        for parameter, value in given:
            kind = parameter.kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                positional.extend(value)
                before_variadic = False
            elif kind is inspect.Parameter.VAR_KEYWORD:
                named.update(value)
            elif kind is inspect.Parameter.POSITIONAL_ONLY or before_variadic:
                positional.append(value)
            elif value is not parameter.default:
                named[parameter.name] = value
        return tuple(positional), {**named, **found}


def without_found(arguments: Arguments) -> Arguments:
    """Of arguments in normal form, those that a call has."""
    args, kwargs = arguments
    return args, {name: value for name, value in kwargs.items() if not isinstance(name, FoundName)}


class ArgumentForm:
    """What a trace is specialized for in its arguments, in normal form: containers, places and plain values.

    ``takes_numpy``: whether numbers that vary may be NumPy's, which code may tell from Python's.
    """

    def __init__(self, arguments: Any, *, takes_numpy: bool = False) -> None:
        self._takes_numpy = takes_numpy
        self._containers: list[trees.Container] = []
        leaves = list(trees.walk(arguments, (), self._containers))
        self._paths = [path for path, _ in leaves]
        self._values = [(path, leaf) for path, leaf in leaves if not isinstance(leaf, torch.Tensor)]
        contents = [(path, leaf, _contents(leaf)) for path, leaf in self._values]
        self._contents = [entry for entry in contents if entry[2] is not None]

    def difference(self, arguments: Any, tensors: list[torch.Tensor]) -> str | None:
        """What is otherwise in other arguments, in words, but for numbers that vary; their tensors are added to
        ``tensors``.
        """
        paths: list[trees.Path] = []
        values: list[tuple[trees.Path, Any]] = []
        containers: list[trees.Container] = []
        for path, leaf in trees.walk(arguments, (), containers):
            paths.append(path)
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
            else:
                values.append((path, leaf))
        if paths != self._paths or len(values) != len(self._values):
            return _path_difference(self._paths, paths)
        if containers != self._containers and (words := _container_difference(self._containers, containers)):
            return words
        for (path, before), (other, now) in zip(self._values, values, strict=True):
            if path != other or not self._is_same(before, now):
                traced = before.node.hint if isinstance(before, Symbolic) else before
                return f"{place_words(path)} is {now!r}, traced with {traced!r}"
        for path, leaf, contents in self._contents:  # the graph has the very object
            if _contents(leaf) != contents:
                return f"{place_words(path)} was written in place since it was traced"
        return None

    def _is_same(self, before: Any, now: Any) -> bool:
        if before is now:
            return True
        if isinstance(before, Symbolic):
            kind = trees.number_kind(now) if self._takes_numpy else type(now)
            return kind is before.node.pytype and may_vary(now)
        if type(before) is not type(now):
            return False
        try:
            return bool(before == now)
        except Exception:  # an object whose comparison fails is another object
            return False

    def changed_number(self, arguments: Any) -> trees.Path | None:
        """Where other arguments have another Python number, first of all."""
        values = dict(trees.walk(arguments))
        return next((path for path, before in self._values if are_other_numbers(before, values.get(path))), None)


def argument_words(path: trees.Path) -> str:
    """A path into normal-form arguments as the user would write it."""
    (_, half), *steps = path
    if half == 1 and steps:
        return str(steps[0].key) + trees.path_string(tuple(steps[1:]))
    return "args" + trees.path_string(tuple(steps))


def place_words(path: trees.Path) -> str:
    """The same, told from a value that is none of a call's arguments."""
    words = argument_words(path)
    return words if is_found(path) else f"argument {words}"


def _path_difference(before: list[trees.Path], now: list[trees.Path]) -> str:
    gone = [argument_words(path) for path in before if path not in now]
    new = [argument_words(path) for path in now if path not in before]
    parts = [f"without {', '.join(gone)}"] if gone else []
    parts += [f"with {', '.join(new)}"] if new else []
    return f"the arguments are now {' and '.join(parts) or 'in another order'}"


def _container_difference(before: list[trees.Container], now: list[trees.Container]) -> str | None:
    """Which container differs, for arguments with the same leaves; a class of the same name is the same."""
    forms = [{item.path: (item.kind_name, item.length) for item in containers} for containers in (before, now)]
    if forms[0] == forms[1]:
        return None
    for path in dict.fromkeys((*forms[1], *forms[0])):
        if len(path) > 1 and forms[0].get(path) != forms[1].get(path):
            words = [_container_words(*form[path]) if path in form else "not given" for form in forms]
            return f"argument {argument_words(path)} is {words[1]}, traced with {words[0]}"
    return "the arguments are now in other containers"


def _container_words(kind_name: str, length: int) -> str:
    return f"{'' if length else 'empty '}{kind_name.removeprefix('builtins.')}"


def _contents(value: Any) -> Any:
    """What an array, a set or a deque of plain values holds, to compare it later; None for other values."""
    if isinstance(value, (set, deque)):
        items = [(type(item), item) for item in value]
        if not all(isinstance(item, trees.PLAIN) for item in value):
            return None
        return set(items) if isinstance(value, set) else items
    view = view_of(value, sys.maxsize)
    return (type(value), view.read(value, None)) if view is not None and view.kind == "array" else None
