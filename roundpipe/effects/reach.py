"""Finds what the code of some modules can change in Python beside the modules' own attributes.

    modules --attributes--> containers, objects, generators, caches, functions
    classes --methods-----> functions --closures, globals--> the same again
    hooks, and other modules that are reached as plain objects, such as those in a list
    functions --defaults, attributes--> the same again
    variables, objects --> other classes, and imported files --attributes that code names--> the same again

Beside these attributes, what code names decides about two things only: which modules, and which closed objects
(`places.is_closed`), count.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.effects import places
from roundpipe.effects.places import CONTAINERS, OF_TORCH, Place, View, has_attributes, is_layer_of_torch, is_library
from roundpipe.effects.uses import (
    OPERATORS,
    CodeUses,
    filled_cells,
    forward_hooks,
    uses_of_forward,
    uses_of_methods,
    uses_of_properties,
    variables_of,
)

MAX_DEPTH = 4
"""Functions are looked into that are reached from others in so many steps."""
_MAX_TABLE_ITEMS = 256
_VALUES = (*trees.PLAIN, torch.Tensor)
"""Types of values that hold no other ones."""
_CALLED_FIRST = ("forward", "__call__")
_Namespace = type | types.ModuleType
_DEFINED = (types.FunctionType, types.BuiltinFunctionType, type)
"""Types of what has a package of its own, rather than its type."""
_REPLACEABLE = (*_VALUES, *_DEFINED)
"""Types of values of global variables in whose place an installed package might put another."""
_METHODS = (types.FunctionType, staticmethod, classmethod, property)
_CACHE = type(functools.cache(len))
"""The type of functions with a `functools.lru_cache`."""
_PLAIN_CONTAINERS = frozenset(CONTAINERS)
"""Types; those of classes below them may have attributes."""
_NOT_OWN = frozenset(name for name in OF_TORCH if name in places.REGISTERED or "_hooks" in name)
"""Attributes that every module has of torch, and that hold no state of its own; found faster than by their names."""
_NOT_VISITED = (*_VALUES, nn.Module)
_PLAIN = frozenset(trees.PLAIN)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is looked at."""

    num_places: int = 30_000
    """A model with more has tables, not counters."""
    nesting: int = 100
    num_items: int = sys.maxsize
    num_bytes: int = places.MAX_ARRAY_BYTES
    all_methods: bool = True
    """Whether methods of modules count that code of their forwards does not name."""
    names: frozenset[str] | None = None
    """Attributes of the modules that count; None: all."""


EVERYTHING = Limits()
BETWEEN_CALLS = Limits(3000, nesting=MAX_DEPTH, num_items=_MAX_TABLE_ITEMS, num_bytes=1 << 20, all_methods=False)
"""For what is compared before every call: no large tables, and nothing that lies deep inside others."""


class _Way(NamedTuple):
    words: str
    depth: int = 0
    is_read: bool = True
    """Whether code names it."""
    in_global: bool = False
    by_hooks: bool = False
    is_called: bool = True
    """Whether forwards may call the code on it, and not only other methods."""

    def inside(self) -> _Way:
        return _Way(self.words, self.depth + 1, *self[2:])

    def to(self, words: str, is_read: bool, in_global: bool = False) -> _Way:
        return _Way(words, self.depth + 1, is_read, in_global or self.in_global, self.by_hooks, self.is_called)


@dataclass(slots=True)
class ReachedState:
    """What is found, with what it holds."""

    places: list[Place] = field(default_factory=list)
    caches: list[tuple[Any, int]] = field(default_factory=list)
    """Functions with a `functools.lru_cache`, and how often they were not answered from it."""
    generators: list[tuple[torch.Generator, torch.Tensor]] = field(default_factory=list)
    functions: list[types.FunctionType] = field(default_factory=list)
    """Those that were looked into."""
    cells: list[types.CellType] = field(default_factory=list)
    """Of closures, which hold functions that are not written in Python."""
    hidden: list[tuple[nn.Module, _Way]] = field(default_factory=list)
    """Modules that are reached as plain Python objects only."""
    closed: dict[str, str] = field(default_factory=dict)
    """What a forward seems to use although nothing tells how it changes it, in words, with the kind."""


class StateWalk:
    """Goes wherever the code of some modules can; other modules are looked through, too, if ``not_hidden`` is given."""

    def __init__(self, modules: list[nn.Module], limits: Limits, not_hidden: set[nn.Module] | None) -> None:
        self.reach = ReachedState()
        self._limits = limits
        self._known = not_hidden
        """Modules that are not hidden, and those that were found; None: none is asked for."""
        self._seen: dict[int, Any] = {}
        """By identity, which stays their own while they are kept here."""
        self._variables: set[tuple[int, str | None]] = set()
        self._most_places = limits.num_places
        self._namespaces: dict[int, tuple[_Namespace, _Way]] = {}
        """Classes that are no modules', and files that were imported, by identity."""
        self._called: list[types.CodeType] = []
        """Of the code that was found, what forwards may call."""
        self._kinds: set[type] = set()
        """Whose objects were visited."""
        kinds = {type(module) for module in modules}
        self._names: frozenset[str] = frozenset().union(*(uses_of_forward(kind).reads for kind in kinds))
        self._names |= uses_of_properties(kinds, self._names).reads
        passed_over = {kind for kind in kinds if is_layer_of_torch(kind)}
        visited: set[type] = set()
        for module in modules:
            if (kind := type(module)) not in passed_over:
                own, names = module.__dict__, limits.names
                attributes = own if names is None else {name: own[name] for name in own if name in names}
                self._visit_named(attributes, _Way(kind.__name__, depth=-1), self._names, _NOT_OWN)
                if kind not in visited:
                    visited.add(kind)
                    self._visit_class(kind, _Way(""))
        for module in modules:
            for hook in forward_hooks(module) if module._forward_hooks or module._forward_pre_hooks else ():
                self._visit(hook, _Way(f"a hook of {type(module).__name__}", by_hooks=True))
        self._visit_found()

    def _is_new(self, value: Any) -> bool:
        key = id(value)
        if key in self._seen or len(self.reach.places) - len(self._variables) >= self._most_places:
            return False
        self._seen[key] = value
        return True

    def _add(self, words: str, view: View, owner: Any, key: Any, held: Any, way: _Way) -> None:
        self.reach.places.append(Place(words, view, owner, key, held, way.by_hooks))

    def _visit(self, value: Any, way: _Way) -> None:
        if id(value) in self._seen and not issubclass(type(value), type):  # a class may have bases that are not seen
            return  # isinstance may run code of its class, for each module that holds it
        if type(value) in _PLAIN_CONTAINERS:  # nearly all there are
            if way.depth <= MAX_DEPTH or way.depth <= self._max_depth(way):
                self._visit_container(value, way)
            return
        if isinstance(value, nn.Module) and way.is_read:
            self._note_hidden(value, way)
        if isinstance(value, _NOT_VISITED) or way.depth > self._max_depth(way):
            return
        if type(value) not in self._kinds:
            self._kinds.add(type(value))
            self._visit_type(type(value), way)
        if isinstance(value, torch.Generator):
            if self._is_new(value):
                self.reach.generators.append((value, value.get_state()))
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, way)
        elif isinstance(value, (types.MethodType, functools.partial, staticmethod, classmethod, property)):
            for name in ("__self__", "__func__", "func", "fget"):
                self._visit(getattr(value, name, None), way)
            if isinstance(value, functools.partial):
                self._visit((*value.args, *value.keywords.values()), way)
        elif isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
            self._visit(value.__self__, way)
        elif isinstance(value, _CACHE):
            if self._is_new(value):
                self.reach.caches.append((value, value.cache_info().misses))
                self._visit(value.__wrapped__, way)
        elif isinstance(value, CONTAINERS):
            self._visit_container(value, way)
        elif isinstance(value, tuple):
            self._visit_items(value[: self._limits.num_items], way)
        elif isinstance(value, type):
            self._visit_type(value, way)
        elif isinstance(value, types.ModuleType):
            if not places.is_installed(value):
                self._namespaces.setdefault(id(value), (value, way))
        else:
            self._visit_object(value, way)

    def _max_depth(self, way: _Way) -> int:
        return MAX_DEPTH if way.in_global else self._limits.nesting  # packages have large tables there

    def _visit_object(self, value: Any, way: _Way) -> None:
        if places.is_closed(value):
            if way.is_read and (way.depth == 0 or hasattr(type(value), "__next__")):
                self.reach.closed[way.words] = type(value).__name__
            return
        view = places.view_of(value, self._limits.num_bytes)
        if (view is None and not has_attributes(value)) or not self._is_new(value):
            return
        if view is not None:
            held = view.read(value, None)
            by_hooks = way.by_hooks and view.kind != "random"
            self.reach.places.append(Place(way.words, view, value, None, held, by_hooks))
            if view.kind == "slots":
                self._visit_attributes(value, held, way)
        self._visit_own_attributes(value, way)

    def _visit_own_attributes(self, value: Any, way: _Way) -> None:
        if has_attributes(value):
            self._add_container(value.__dict__, way)
            self._visit_attributes(value, value.__dict__, way)

    def _visit_attributes(self, owner: Any, attributes: Mapping[str, Any], way: _Way) -> None:
        names: frozenset[str] = frozenset()
        if way.is_read:
            names = self._names | uses_of_methods(type(owner), self._names).reads
        self._visit_named(attributes, way, names)

    def _visit_named(
        self, attributes: Mapping[str, Any], way: _Way, names: frozenset[str], skipped: frozenset[str] = frozenset()
    ) -> None:
        """Visits attributes, of which some have names that code reads; those skipped are torch's, and all hooks are."""
        depth = way.depth + 1
        for key, value in list(attributes.items()):
            kind = type(value)
            if kind in _PLAIN or key in skipped or skipped and "_hooks" in key:
                continue
            if id(value) in self._seen if kind in _PLAIN_CONTAINERS else isinstance(value, _VALUES):
                continue
            self._visit(value, _Way(f"{way.words}.{key}", depth, key in names, *way[3:]))

    def _visit_container(self, value: Any, way: _Way) -> None:
        num_items = len(value)
        if num_items > self._limits.num_items or not self._is_new(value):
            return
        self.reach.places.append(Place(way.words, places.CONTAINER, value, None, places.contents(value), way.by_hooks))
        if type(value) not in _PLAIN_CONTAINERS:
            self._visit_own_attributes(value, way)
        if num_items and not (way.in_global and num_items > _MAX_TABLE_ITEMS):
            self._visit_items(list(value.values() if isinstance(value, dict) else value), way)

    def _visit_items(self, items: Sequence[Any], way: _Way) -> None:
        if not _PLAIN.issuperset(map(type, items)):
            inside = way.inside()
            for item in items:
                self._visit(item, inside)

    def _add_container(self, value: Any, way: _Way, words: str = "") -> None:
        self._add(words or way.words, places.CONTAINER, value, None, places.contents(value), way)

    def _visit_class(self, kind: type, way: _Way) -> None:
        if way.depth > MAX_DEPTH:
            return
        for owner in kind.__mro__:
            if is_library(owner) or not self._is_new(owner):
                continue
            members = [
                (name, value) for name, value in vars(owner).items() if name in _CALLED_FIRST or name[:2] != "__"
            ]
            called = {name: self._may_be_called(name, value, kind) for name, value in members}
            for name, value in sorted(members, key=lambda member: not called[member[0]]):
                if called[name] or self._limits.all_methods:
                    is_called = way.is_called and called[name]
                    to_member = way._replace(words=f"{owner.__name__}.{name}", is_called=is_called)
                    if called[name] or not places.is_installed(owner):
                        self._visit_variable(places.CLASS, owner, name, value, to_member)
                    else:
                        self._visit(value, to_member)
            self._add(owner.__name__, places.NAMES, owner, None, places.names_of_class(owner), way)

    def _may_be_called(self, name: str, value: Any, kind: type) -> bool:
        """Whether a method may be, by a forward; attributes of a class that are something else always count."""
        if not isinstance(value, _METHODS) or name in _CALLED_FIRST:
            return True
        return name in self._names or issubclass(kind, nn.Module) and name in uses_of_forward(kind).reads

    def _visit_function(self, function: types.FunctionType, way: _Way) -> None:
        if is_library(function) or way.depth > MAX_DEPTH or not self._is_new(function):
            return
        self.reach.functions.append(function)
        if way.is_called:
            self._called.append(function.__code__)
        cells = zip(function.__closure__ or (), function.__code__.co_freevars, strict=True)
        names = {id(cell): name for cell, name in cells}
        for cell in filled_cells(function):
            value, words = cell.cell_contents, f"{names[id(cell)]} of {function.__qualname__}"
            if isinstance(value, types.BuiltinFunctionType):
                self.reach.cells.append(cell)
            self._visit_variable(places.CELL, cell, None, value, way.to(words, way.is_read))
        is_users, variables = not places.is_of_packages(function), function.__globals__
        if is_users:
            self._visit_function_itself(function, way)
        for name in variables_of(function.__code__):
            if name in variables:
                value, to_global = variables[name], way.to(f"global {name}", way.is_read, in_global=True)
                if is_users or isinstance(value, _REPLACEABLE):
                    self._visit_variable(places.GLOBAL, variables, name, value, to_global)
                else:
                    self._visit(value, to_global)

    def _visit_function_itself(self, function: types.FunctionType, way: _Way) -> None:
        """Visits what a user's function holds: code, defaults and attributes."""
        self._add(f"code of {function.__qualname__}", places.DEFAULTS, function, "__code__", function.__code__, way)
        for name in ("__defaults__", "__kwdefaults__"):
            if held := getattr(function, name):
                to_defaults = way.to(f"defaults of {function.__qualname__}", way.is_read)
                self._visit_variable(places.DEFAULTS, function, name, held, to_defaults)
        if function.__dict__.keys() - {"__wrapped__"}:  # of one that only has this, nothing is its user's
            self._visit_container(function.__dict__, way.to(function.__qualname__, way.is_read))

    def _visit_variable(self, view: View, owner: Any, name: str | None, value: Any, way: _Way) -> None:
        """Visits what a variable, or an attribute of a class, holds; another object may be put in its place."""
        if (id(owner), name) not in self._variables and not isinstance(value, types.ModuleType):
            self._variables.add((id(owner), name))
            self._add(way.words, view, owner, name, value, way)
        self._visit(value, way)

    def _visit_type(self, kind: type, way: _Way) -> None:
        """Visits the class of a module; notes others, with those that they are made from, for `_visit_found`."""
        if issubclass(kind, nn.Module):
            if not is_library(kind):
                self._visit_class(kind, way.inside())
            return
        for owner in kind.__mro__:
            if id(owner) not in self._namespaces and id(owner) not in self._seen and not places.is_of_packages(owner):
                self._namespaces[id(owner)] = owner, way
                self._add(owner.__name__, places.NAMES, owner, None, places.names_of_class(owner), way)

    def _visit_found(self) -> None:
        """Visits hidden modules, and attributes of namespaces that code names, which lead to more code, and so on.

        A package's classes have many other attributes.
        """
        names = self._names | OPERATORS
        num_hidden = num_functions = 0
        visited: set[tuple[int, str]] = set()
        while True:
            while num_hidden < len(self.reach.hidden):
                module, way = self.reach.hidden[num_hidden]
                self._visit_hidden(module, _Way(way.words, by_hooks=way.by_hooks))
                num_hidden += 1
            uses = CodeUses.of([each.__code__ for each in self.reach.functions[num_functions:]])
            names, num_functions = names | uses.reads | uses.sets, len(self.reach.functions)
            called = self._names | CodeUses.of(self._called).reads
            named = [
                (owner, name, way)
                for owner, way in self._namespaces.values()
                for name in sorted(names.intersection(vars(owner)))
                if (id(owner), name) not in visited
            ]
            if not named:
                return
            self._most_places = max(self._most_places, len(self.reach.places) + self._limits.num_places // 2)
            for owner, name, way in named:
                visited.add((id(owner), name))
                to_attribute = way.to(f"{owner.__name__}.{name}", is_read=name in called, in_global=True)
                self._visit_attribute(owner, name, to_attribute)

    def _visit_attribute(self, owner: _Namespace, name: str, way: _Way) -> None:
        value = vars(owner)[name]
        if isinstance(owner, type):
            self._visit_variable(places.CLASS, owner, name, value, way)
        elif not (places.is_of_packages(owner) and is_library(value if isinstance(value, _DEFINED) else type(value))):
            self._visit_variable(places.GLOBAL, vars(owner), name, value, way)

    def _note_hidden(self, module: nn.Module, way: _Way) -> None:
        is_own = type(module).__module__.startswith("roundpipe.")  # such as the compiled model, which counts calls
        if self._known is not None and module not in self._known and not is_own:
            self._known.add(module)
            self.reach.hidden.append((module, way))

    def _visit_hidden(self, module: nn.Module, way: _Way) -> None:
        if isinstance(module, torch.jit.ScriptModule) or not self._is_new(module):
            return
        self._add_container(module.__dict__, way)
        for key, value in module.__dict__.items():
            is_registry = key in OF_TORCH and isinstance(value, dict)
            if is_registry and (value or key in ("_forward_hooks", "_forward_pre_hooks")):
                self._add_container(value, way, f"{way.words}.{key}")
        own = {key: value for key, value in module.__dict__.items() if key not in OF_TORCH}
        self._visit_named(own, way, self._names | uses_of_forward(type(module)).reads)
        for name, child in module._modules.items():
            self._visit(child, way.to(f"{way.words}.{name}", is_read=True))
        if not is_layer_of_torch(type(module)):
            self._visit_class(type(module), way)
