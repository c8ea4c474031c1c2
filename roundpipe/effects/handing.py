"""What one function leaves where another one may look for it: a dict that both have, an attribute, a variable.

Goes by the names in bytecode, as `roundpipe.effects.uses` does.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import types
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from roundpipe.core.attributes import stored_attribute
from roundpipe.effects.bytecode import names_in
from roundpipe.effects.places import CONTAINERS, has_attributes, is_library
from roundpipe.effects.uses import CodeUses, function_of

_MAX_FUNCTIONS = 64


@dataclass(slots=True)
class Places:
    """Containers, attributes and variables that a function, with those that it calls, can look up; by identity."""

    found: set[Hashable] = field(default_factory=set)
    left: set[Hashable] = field(default_factory=set)
    """Those of them that it may change."""

    @classmethod
    def of(cls, function: Any) -> Places:
        """Those of anything that can be called."""
        places = cls()
        pending, seen = [function], set[Hashable]()
        while pending and len(seen) < _MAX_FUNCTIONS:
            target = pending.pop()
            key = id(function_of(target)), id(stored_attribute(target, "__self__"))
            if key not in seen:
                seen.add(key)
                pending += places._add(target)
        return places

    def _add(self, target: Any) -> Iterator[Any]:
        """Note what a function uses; gives functions that it may call."""
        if isinstance(target, functools.partial):
            yield target.func
            for value in (*target.args, *target.keywords.values()):
                yield from self._look_at(value, frozenset(), CodeUses(reads_any_name=True, changes_items=True))
            return
        if isinstance(target, nn.Module):
            target = target.forward
        elif not isinstance(target, (types.FunctionType, types.MethodType)):
            target = stored_attribute(target, "__call__")
        function = function_of(target)
        if not isinstance(function, types.FunctionType) or is_library(function):
            return
        uses, names = CodeUses.of([function.__code__]), frozenset(names_in(function.__code__))
        rebound = frozenset(_rebound_in(function.__code__)) if uses.rebinds else frozenset()
        held = [target.__self__] if isinstance(target, types.MethodType) else []
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._note(("variable", id(cell)), name in rebound)
            with contextlib.suppress(ValueError):  # it is empty
                held.append(cell.cell_contents)
        for name in names & function.__globals__.keys():
            self._note(("global", id(function.__globals__), name), name in rebound)
            held.append(function.__globals__[name])
        held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for value in held:
            yield from self._look_at(value, names, uses)

    def _look_at(self, value: Any, names: frozenset[str], uses: CodeUses) -> Iterator[Any]:
        if isinstance(value, CONTAINERS):
            self._note(("container", id(value)), uses.changes_items)
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            yield value
        elif has_attributes(value) or isinstance(value, nn.Module):
            attributes = value.__dict__
            for name in names & (attributes.keys() | uses.sets):
                self._note(("attribute", id(value), name), name in uses.sets)
                if isinstance(attributes.get(name), CONTAINERS):
                    self._note(("container", id(attributes[name])), uses.changes_items)
            for name in names:
                if isinstance(method := getattr(type(value), name, None), types.FunctionType):
                    yield types.MethodType(method, value)
            if callable(value):
                yield value

    def _note(self, place: Hashable, is_left: bool) -> None:
        self.found.add(place)
        if is_left:
            self.left.add(place)


def _rebound_in(code: types.CodeType) -> Iterator[str]:
    """Names of variables from outside that a function's code, nested functions included, assigns to."""
    for inner in (code, *(constant for constant in code.co_consts if isinstance(constant, types.CodeType))):
        for instruction in dis.get_instructions(inner):
            if instruction.opname in ("STORE_GLOBAL", "STORE_DEREF"):
                yield str(instruction.argval)
