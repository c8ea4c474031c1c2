"""One module of a replica, and how it takes over the attributes of the user's module.

Nearly all of them are the same objects as the last time. A few calls see that for all of them together, so that a
visit of a layer that nobody has changed costs little.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from operator import is_, itemgetter, methodcaller
from typing import Any, Protocol

import torch
from torch import nn

from roundpipe.core.compiled_modules import as_written, compiled_like, is_made_by_torch
from roundpipe.core.layers import EXECUTION_DEVICE

OWN = ("_parameters", "_buffers", "_modules")
"""What a copy has for itself."""
CHANGED_IN_PLACE = (dict, list, OrderedDict)
"""Attributes that a module may change later; their own `copy` takes a tenth of the time of the module of this name."""
_PLAIN = frozenset((int, float, bool, str, type(None)))
_VALUES = methodcaller("values")
_REDIRECTED = (dict, list)
"""Types of containers in `CHANGED_IN_PLACE` that `redirect` looks into."""
_NESTED = (list, tuple, dict)
"""Types of containers that it looks into within these."""
_LOOKED_INTO = (torch.Tensor, nn.Module, functools.partial)


class Tensors(Protocol):
    """Tensors, by the identities of those that they replace."""

    def get(self, key: int, default: torch.Tensor, /) -> torch.Tensor: ...


class ModuleCopy:
    """A shallow copy of a module, which takes over the attributes that this one has.

    ``compiles``: what torch has compiled of the module is compiled for the copy; else it runs as written.
    """

    __slots__ = (
        "_bound",
        "_compiles",
        "_containers",
        "_length",
        "_looked_into",
        "_open",
        "_pick_containers",
        "_pick_looked_into",
        "_pick_steady",
        "_steady",
        "_types",
        "_values",
    )

    def __init__(self, compiles: bool = True) -> None:
        self._compiles = compiles
        self._length = -1
        """How many attributes there were at the last time; those beside `OWN` are of four kinds:"""
        self._steady: tuple[str, ...] = ()
        """what stays as it is as long as it is the same object,"""
        self._bound: dict[str, tuple[Any, Any]] = {}
        """functions that may be bound to a module, and the copy's own,"""
        self._containers: tuple[str, ...] = ()
        """what may be filled in place,"""
        self._open: tuple[str, ...] = ()
        """and what may point into the tree;"""
        self._looked_into: tuple[str, ...] = ()
        """so may those of the second kind that are no hooks, when they are filled."""
        self._values: tuple[Any, ...] = ()
        """Of the first kind."""
        self._types: tuple[type, ...] = ()
        """Of the second."""
        self._pick_steady = self._pick_containers = self._pick_looked_into = _picker(())

    def take_over(
        self,
        attributes: Mapping[str, Any],
        state: dict[str, Any],
        modules: Mapping[int, nn.Module],
        tensors: Tensors,
        device: torch.device,
    ) -> list[str]:
        """Let the copy's ``state`` be these attributes, but for `OWN`; ``device`` is its `EXECUTION_DEVICE`.

        Returns the names of those that point into the replica, where the module's point into its own tree.
        """
        if not (self._is_as_noted(attributes) and self._has_values(state)):
            self._note(attributes, modules)
            state.update(zip(self._steady, self._values, strict=True))
        for name, (_, own) in self._bound.items():
            state[name] = own
        state.update(zip(self._containers, self._pick_containers(attributes), strict=True))
        others = self._open
        if any(self._pick_looked_into(attributes)):
            others += tuple(filter(attributes.__getitem__, self._looked_into))
        redirected = []
        for name in others:
            value = attributes[name]
            state[name] = mapped = redirect(value, modules, tensors)
            if mapped is not value:
                redirected.append(name)
        if EXECUTION_DEVICE in attributes:
            state[EXECUTION_DEVICE] = device
        if len(state) != len(attributes):  # set on the copy by a forward, or deleted since
            for name in [name for name in state if name not in attributes]:
                del state[name]
        return redirected

    @property
    def containers(self) -> tuple[str, ...]:
        """Names of attributes that may be filled in place."""
        return self._containers

    @property
    def points(self) -> bool:
        """Whether an attribute may point into the tree, filled containers aside."""
        return bool(self._open)

    def changed(self, state: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Attributes of simple types that a forward has given the copy since `take_over`, and their values."""
        if self._is_as_noted(state) and not any(type(state.get(name)) in _PLAIN for name in self._open):
            return []
        plain = {name: value for name, value in zip(self._steady, self._values, strict=True) if type(value) in _PLAIN}
        return [
            (name, value)
            for name, value in state.items()
            if type(value) in _PLAIN and name not in OWN and plain.get(name, plain) != value
        ]

    def _note(self, attributes: Mapping[str, Any], modules: Mapping[int, nn.Module]) -> None:
        steady, containers, others = [], [], []
        before, self._bound = self._bound, {}
        for name, value in attributes.items():
            if name in OWN or name == EXECUTION_DEVICE:
                continue
            if type(value) in CHANGED_IN_PLACE:
                containers.append(name)
            elif isinstance(value, types.MethodType) or is_made_by_torch(value):
                if (known := before.get(name)) is None or known[0] is not value:
                    is_to_compile = self._compiles or not is_made_by_torch(value)
                    known = value, redirect(value if is_to_compile else as_written(value), modules, {})
                self._bound[name] = known
            elif isinstance(value, _LOOKED_INTO) or (type(value) is tuple and not _PLAIN.issuperset(map(type, value))):
                others.append(name)
            else:
                steady.append(name)
        self._length = len(attributes)
        self._steady, self._containers, self._open = tuple(steady), tuple(containers), tuple(others)
        self._looked_into = tuple(name for name in containers if type(attributes[name]) in _REDIRECTED)
        self._pick_steady, self._pick_containers = _picker(self._steady), _picker(self._containers)
        self._pick_looked_into = _picker(self._looked_into)
        self._values = self._pick_steady(attributes)
        self._types = tuple(map(type, self._pick_containers(attributes)))

    def _has_values(self, attributes: Mapping[str, Any]) -> bool:
        try:
            return all(map(is_, self._pick_steady(attributes), self._values))
        except KeyError:
            return False

    def _has_bound(self, attributes: Mapping[str, Any]) -> bool:
        for name, (value, own) in self._bound.items():
            if attributes[name] is not value and attributes[name] is not own:
                return False
        return True

    def _is_as_noted(self, attributes: Mapping[str, Any]) -> bool:
        """Whether these differ in nothing but what is in containers, and where others point."""
        try:
            return (
                len(attributes) == self._length
                and self._has_values(attributes)
                and tuple(map(type, self._pick_containers(attributes))) == self._types
                and self._has_bound(attributes)
            )
        except KeyError:
            return False


class ContainedItems:
    """What is in some containers now, and in those within them, compared with what is in them later."""

    def __init__(self, containers: Iterable[Any]) -> None:
        known: set[int] = set()
        self._empty: list[Any] = []
        self._dicts: list[Any] = []
        self._others: list[Any] = []
        inner = [*containers]
        while inner:
            new = {id(each): each for each in inner if id(each) not in known}
            known.update(new)
            for each in new.values():
                of_its_kind = self._dicts if isinstance(each, dict) else self._others
                (of_its_kind if each else self._empty).append(each)
            items = chain.from_iterable(each.values() if isinstance(each, dict) else each for each in new.values())
            inner = [item for item in items if type(item) in _NESTED]
        self._lengths = [*map(len, chain(self._dicts, self._others))]
        self._keys = [*chain.from_iterable(self._dicts)]
        self._items = [*self]

    def __iter__(self) -> Iterator[Any]:
        """All that is in them now, but for keys."""
        return chain(chain.from_iterable(map(_VALUES, self._dicts)), chain.from_iterable(self._others))

    def are_same(self) -> bool:
        return (
            not any(self._empty)
            and [*map(len, chain(self._dicts, self._others))] == self._lengths
            and all(map(is_, self, self._items))
            and all(map(is_, chain.from_iterable(self._dicts), self._keys))
        )


class Attributes:
    """The attributes of some modules as they are now, compared all at once with what they are later.

    So is what is in those of certain types of ``containers``.
    """

    def __init__(self, modules: Iterable[nn.Module], containers: Collection[type] = _REDIRECTED) -> None:
        self._dicts = [module.__dict__ for module in modules]
        self._lengths = [*map(len, self._dicts)]
        self._names = [*chain.from_iterable(self._dicts)]
        self._values = [*chain.from_iterable(map(_VALUES, self._dicts))]
        own = {id(attributes[name]) for attributes in self._dicts for name in OWN if name in attributes}
        others = (each for each in self._values if id(each) not in own)
        self._contents = ContainedItems(each for each in others if type(each) in containers)

    @property
    def may_point(self) -> bool:
        """Whether a container among them holds what may point into a tree."""
        return any(isinstance(item, torch.Tensor) or callable(item) for item in self._contents)

    @property
    def hold_tensors(self) -> bool:
        """Whether a tensor is among them or in a container."""
        return any(isinstance(value, torch.Tensor) for value in chain(self._values, self._contents))

    def are_same(self) -> bool:
        """Whether all are the same objects under the same names, and containers have in them what they had."""
        return (
            [*map(len, self._dicts)] == self._lengths
            and all(map(is_, chain.from_iterable(map(_VALUES, self._dicts)), self._values))
            and [*chain.from_iterable(self._dicts)] == self._names
            and self._contents.are_same()
        )


def _picker(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Gives the values of some names."""
    if not names:
        return lambda attributes: ()
    if len(names) == 1:
        return lambda attributes: (attributes[names[0]],)
    return itemgetter(*names)


def redirect(value: Any, modules: Mapping[int, nn.Module], tensors: Tensors) -> Any:
    """A value with other modules and tensors in it, by the identities of those that they replace."""
    if isinstance(value, torch.Tensor):
        return tensors.get(id(value), value)
    if isinstance(value, nn.Module):
        return modules.get(id(value), value)
    if isinstance(value, types.MethodType):
        owner = modules.get(id(value.__self__))
        return value if owner is None else types.MethodType(value.__func__, owner)
    if is_made_by_torch(value):
        written = as_written(value)
        other = redirect(written, modules, tensors)
        return value if other is written else compiled_like(value, other)
    if isinstance(value, functools.partial):
        function, *args = new = [redirect(item, modules, tensors) for item in (value.func, *value.args)]
        unchanged = all(map(is_, new, (value.func, *value.args)))
        return value if unchanged else functools.partial(function, *args, **value.keywords)
    if type(value) in (list, tuple):
        items = [redirect(item, modules, tensors) for item in value]
        return value if all(map(is_, items, value)) else type(value)(items)
    if type(value) is dict:
        mapped = {key: redirect(item, modules, tensors) for key, item in value.items()}
        return value if all(map(is_, mapped.values(), value.values())) else mapped
    return value
