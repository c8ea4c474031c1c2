"""Places that hold state which Python code can change: what each holds, and how it is put back.

Attributes, lists, dicts and sets tell what they hold. So do, through a `View`, random generators, arrays and objects
with slots. Of iterators, and of objects that compiled code of other packages makes, nothing can be told without
changing it: those `is_closed`.
"""

from __future__ import annotations

import array
import copy
import copyreg
import functools
import io
import operator
import os
import pathlib
import pickle
import random
import sys
import types
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.attributes import attributes_of, given_attribute, stored_attribute

OF_TORCH = frozenset(nn.Module().__dict__)
"""Names of attributes that every module has."""
REGISTERED = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOK_TABLES = operator.itemgetter(*HOOKS)
CONTAINERS = (list, dict, set, deque, OrderedDict)
MAX_ARRAY_BYTES = 1 << 24
"""A larger array is taken for a table that no forward changes."""
_LIBRARIES = frozenset(
    "torch torchvision builtins collections functools typing types inspect logging math os sys re abc enum copy json "
    "warnings contextlib dataclasses itertools operator numpy sympy roundpipe importlib threading random".split()
)
"""Packages whose classes and functions are not looked into."""
_INSTALLED_IN = frozenset(("site-packages", "dist-packages"))
"""Folders of installed packages."""
_HELD_BY_NATURE = frozenset((*sys.stdlib_module_names, "torch", "torchvision", "numpy", "sympy"))
"""Packages whose compiled objects hold nothing that a forward changes, but for iterators and what has a `View`."""
_OF_USERS = (types.SimpleNamespace, UserDict, UserList, ChainMap, type(os.environ), os.getenv)
"""Classes and functions of those packages that hold, or look up, a user's values."""


def package_of(owner: Any) -> str:
    """The first word of the name of an imported file, or of the one that a class or function is from."""
    return _file_of(owner).partition(".")[0]


def _file_of(owner: Any) -> str:
    """The name of an imported file, or of the one that a class or function is from."""
    name = vars(owner).get("__name__") if isinstance(owner, types.ModuleType) else getattr(owner, "__module__", None)
    if isinstance(owner, types.FunctionType) and name in (None, "builtins"):
        return ""  # one that `exec` has made without a file: no function of Python's own there is written in Python
    return str(name or "builtins")


def is_installed(owner: Any) -> bool:
    """Whether an imported file, or the one that a class or function is from, is of an installed package."""
    return _is_installed(_file_of(owner))


@functools.cache
def _is_installed(name: str) -> bool:
    path = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(path, str) and not _INSTALLED_IN.isdisjoint(pathlib.PurePath(path).parts)


def is_library(owner: Any) -> bool:
    """Whether a class, function or imported file is of a package that is not looked into."""
    return package_of(owner) in _LIBRARIES and not any(owner is each for each in _OF_USERS)


def is_layer_of_torch(kind: type) -> bool:
    """Whether a class is one of torch's own layers."""
    return kind.__module__.startswith("torch.nn.modules.")


def is_of_packages(owner: Any) -> bool:
    """Whether a class, function or imported file is of Python, or of a package that was installed."""
    package = package_of(owner)
    return package in _LIBRARIES or package in _HELD_BY_NATURE or is_installed(owner)


def has_attributes(value: Any) -> bool:
    """Whether an object is of a user's class and has attributes of its own."""
    return attributes_of(value) is not None and not is_library(type(value))


def hook_tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """A module's own hooks, by kind."""
    tables: tuple[dict[int, Any], ...] = _HOOK_TABLES(module.__dict__)
    return tables


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its own."""
    return any(hook_tables(module))


@dataclass(frozen=True, slots=True)
class View:
    """How to look at places of one kind, each given by an owner and a key; objects are owners without a key."""

    kind: str
    read: Callable[[Any, Any], Any]
    """What a place holds: something that does not change with the place, except for a container, which is itself."""
    write: Callable[[Any, Any, Any], object]
    """Gives a place back what it held."""
    is_variable: bool = False
    """Whether a place holds an object itself, in whose place another may be put, and not what is in it."""

    def is_same(self, was: Any, now: Any) -> bool:
        """Whether a place that held one value still does if it holds another now."""
        return trees.same(was, now) if self.is_variable else same_contents(was, now)


@dataclass(slots=True, eq=False)  # not frozen: that makes thousands of them slower by half
class Place:
    """One place, and what it held when it was looked at; never changed."""

    words: str
    view: View
    owner: Any
    key: Any
    held: Any
    by_hooks: bool
    """Whether only hooks reach it: what those write down is not the forward's own."""

    def now(self) -> Any:
        return self.view.read(self.owner, self.key)

    def is_changed(self) -> bool:
        held, now = self.held, self.owner
        if self.view is not CONTAINER:
            return not self.view.is_same(held, self.now())
        if not held and type(now) in CONTAINERS and not now:  # as nearly all are; others may ask code of the user's
            return False
        return not same_contents(held, now)

    def value(self) -> Any:
        """What it holds now, to be kept: of a container a copy."""
        now = self.now()
        if self.view.is_variable:
            return now
        return contents(now) if isinstance(now, dict) else copy.copy(now)

    def restore(self) -> None:
        self.view.write(self.owner, self.key, self.held)

    @property
    def kind(self) -> str:
        return self.view.kind

    @property
    def identity(self) -> tuple[str, int, Any]:
        """Equal for the same place in another snapshot."""
        return self.view.kind, id(self.owner), self.key

    def changed_items(self) -> list[str]:
        """Names of what is another now in a dict, or among attributes."""
        now, missing = self.now(), object()
        if not isinstance(now, dict) or not isinstance(self.held, dict):
            return []
        names = dict.fromkeys([*self.held, *dict.keys(now)])
        return [
            str(name) for name in names if not trees.same(self.held.get(name, missing), dict.get(now, name, missing))
        ]

    def changed_values(self, are_others: Callable[[Any, Any], bool]) -> dict[Any, str]:
        """By key, in words, values that are others now: what it holds itself, or items."""
        if are_others(self.held, now := self.now()):
            return {self.key: self.words}
        before, after = items_of(self.held), items_of(now)
        keys = (key for key in before if key in after and are_others(before[key], after[key]))
        return {key: f"{key!r} of {self.words}" for key in keys}

    def gained_tensors_only(self) -> bool:
        """Whether a dict got tensors and is else what it was, as a cache of tables does."""
        if not isinstance(self.owner, dict) or self.kind != CONTAINER.kind:
            return False
        now = contents(self.now())
        return all(key in now and trees.same(value, now[key]) for key, value in self.held.items()) and all(
            holds_tensors(value) for key, value in now.items() if holds_tensors(key) or key not in self.held
        )


def are_other_numbers(before: Any, now: Any) -> bool:
    """Whether two values are numbers, and not the same."""
    return bool(trees.number_kind(before) and trees.number_kind(now) and before != now)


def items_of(value: Any) -> dict[Any, Any]:
    """What is in a dict by key, and in a sequence by position; nothing of other values."""
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    return dict(dict.items(value)) if isinstance(value, dict) else {}


def contents(container: Any) -> Any:
    """A copy of a list, dict, set or deque; of a dict as it is stored, since a class may override ``[]``."""
    if type(container) is dict:
        return container.copy()
    return dict(dict.items(container)) if isinstance(container, dict) else container.copy()


def same_contents(was: Any, now: Any) -> bool:
    """Whether two values are the same, item by item if they are containers."""
    if isinstance(was, dict):
        if len(was) == dict.__len__(now) and all(map(operator.is_, was.values(), dict.values(now))):
            return list(was) == list(dict.keys(now)) or was.keys() == dict.keys(now)
        held = contents(now)
        return was.keys() == held.keys() and all(trees.same(value, held[key]) for key, value in was.items())
    if isinstance(was, set):
        return bool(was == now)
    if isinstance(was, (list, tuple, deque)):
        return len(was) == len(now) and all(map(trees.same, was, now))
    return trees.same(was, now)


def holds_tensors(value: Any, depth: int = 0) -> bool:
    """Whether a value is, or holds, a tensor or a symbolic size."""
    if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return True
    if depth > 3:
        return False
    if isinstance(value, dict):
        return any(holds_tensors(item, depth + 1) for pair in value.items() for item in pair)
    if isinstance(value, (list, tuple, set, deque)):
        return any(holds_tensors(item, depth + 1) for item in value)
    return False


def _fill(container: Any, _: None, held: Any) -> None:
    container.clear()
    if isinstance(container, dict):
        dict.update(container, held)
    else:
        (container.update if isinstance(container, set) else container.extend)(held)


def _cell_contents(cell: types.CellType, _: None) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it was emptied
        return None


def names_of_class(kind: type, _: None = None) -> set[str]:
    """Names of a class's attributes, but for those that Python sets."""
    return {name for name in vars(kind) if not name.startswith(("__", "_abc"))}


def _remove_names(kind: type, _: None, held: set[str]) -> None:
    for name in names_of_class(kind) - held:
        delattr(kind, name)


CONTAINER = View("container", lambda owner, _: owner, _fill)
CELL = View("cell", _cell_contents, lambda cell, _, held: setattr(cell, "cell_contents", held), is_variable=True)
GLOBAL = View("global", lambda owner, name: owner.get(name), dict.__setitem__, is_variable=True)
CLASS = View("class", lambda kind, name: vars(kind).get(name), setattr, is_variable=True)
"""As the class has it: a method before it is bound."""
DEFAULTS = View("defaults", getattr, setattr, is_variable=True)
"""Of a function: its code, which tools that reload files replace, and its arguments' defaults."""
NAMES = View("names", names_of_class, _remove_names)
_UNSET = object()
_CONTEXT = View(
    "context",
    lambda variable, _: variable.get(_UNSET),
    lambda variable, _, held: None if held is _UNSET else variable.set(held),
)


def attributes_view(owner: Any, names: Iterable[str]) -> View:
    """A `CONTAINER` of those attributes of an object that have some names; computed ones have no value of their own."""
    kind, missing = type(owner), object()
    names = [name for name in names if not name.startswith("__")]

    def value(attributes: dict[str, Any], name: str) -> Any:
        if name in attributes or hasattr(kind, name):
            return attributes.get(name, missing)
        return given_attribute(owner, name, missing)  # the class may give another attribute under this name

    def read(attributes: dict[str, Any], _: None) -> dict[str, Any]:
        values = {name: value(attributes, name) for name in names}
        return {name: found for name, found in values.items() if found is not missing}

    return View("container", read, _fill)


def view_of(value: Any, max_bytes: int = MAX_ARRAY_BYTES) -> View | None:
    """How to look at an object; None: its attributes tell, nothing does, or it is an array too large to be state."""
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else _PYTHON_RANDOM
    if isinstance(value, ContextVar):
        return _CONTEXT
    if isinstance(value, bytearray):
        return _BYTES if len(value) <= max_bytes else None
    if isinstance(value, array.array):
        return _ARRAY if len(value) * value.itemsize <= max_bytes else None
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and package_of(type(value)) == "numpy":
        if isinstance(value, numpy.ndarray):
            is_data = not value.dtype.hasobject and value.flags.writeable and value.nbytes <= max_bytes
            return _NUMPY_ARRAY if is_data else None
        if isinstance(value, numpy.random.Generator):
            return _NUMPY_GENERATOR
        if isinstance(value, numpy.random.RandomState):
            return _NUMPY_RANDOM_STATE
        return _NUMPY_BITS if isinstance(value, numpy.random.BitGenerator) else None
    return _SLOTS if _slot_names(type(value)) and not _holds_by_nature(type(value)) else None


def is_closed(value: Any) -> bool:
    """Whether nothing tells what an object that may change holds: an iterator, or made by compiled code."""
    kind = type(value)
    if isinstance(value, random.SystemRandom):
        return True
    tells = stored_attribute(value, "__dict__") is not None or any("__slots__" in vars(base) for base in kind.__mro__)
    if hasattr(kind, "__next__"):
        return not isinstance(value, io.IOBase) and (_holds_by_nature(kind) or not tells)
    return not (tells or _holds_by_nature(kind) or isinstance(value, type) or callable(value))


def _holds_by_nature(kind: type) -> bool:
    return package_of(kind) in _HELD_BY_NATURE


def _slot_names(kind: type) -> list[str]:
    return copyreg._slotnames(kind)  # type: ignore[attr-defined]


def _slots(value: Any, _: None = None) -> dict[str, Any]:
    missing = object()
    held = {name: stored_attribute(value, name, missing) for name in _slot_names(type(value))}
    return {name: item for name, item in held.items() if item is not missing}


def _put_slots(value: Any, _: None, held: Mapping[str, Any]) -> None:
    for name in _slots(value).keys() - held.keys():
        object.__delattr__(value, name)
    for name, item in held.items():
        object.__setattr__(value, name, item)


def _put_array(value: Any, _: None, held: bytes) -> None:
    del value[:]
    value.frombytes(held)


def _put_numpy_array(value: Any, _: None, held: bytes) -> None:
    value[...] = sys.modules["numpy"].frombuffer(held, value.dtype).reshape(value.shape)


def _random(take: Callable[[Any], Any], put: Callable[[Any, Any], object]) -> View:
    return View(
        "random", lambda value, _: pickle.dumps(take(value)), lambda value, _, held: put(value, pickle.loads(held))
    )


_PYTHON_RANDOM = _random(lambda value: value.getstate(), lambda value, held: value.setstate(held))
_NUMPY_BITS = _random(lambda value: value.state, lambda value, held: setattr(value, "state", held))
_NUMPY_GENERATOR = _random(
    lambda value: value.bit_generator.state, lambda value, held: setattr(value.bit_generator, "state", held)
)
_NUMPY_RANDOM_STATE = _random(lambda value: value.get_state(legacy=False), lambda value, held: value.set_state(held))
_BYTES = View("array", lambda value, _: bytes(value), lambda value, _, held: value.__setitem__(slice(None), held))
_ARRAY = View("array", lambda value, _: value.tobytes(), _put_array)
_NUMPY_ARRAY = View("array", lambda value, _: value.tobytes(), _put_numpy_array)
_SLOTS = View("slots", _slots, _put_slots)
