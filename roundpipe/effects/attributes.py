"""What a module's forward does beside returning a value: parameters that it writes, attributes that it changes.

    before = AttributesBefore(module)     and `WeightsBefore`
    module(...)
    before.changed()

A module that runs as a copy, and once more for the backward, leaves there something else than in eager mode.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from roundpipe.core import trees

REGISTERED = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that hold what it registers."""


class WeightsBefore:
    """The parameters of a module before its forward."""

    __slots__ = ("_module", "_weights")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._weights = [
            (one, name, weight, _version_of(weight))
            for one in module.modules()
            for name, weight in one._parameters.items()
        ]

    def written(self) -> str | None:
        """The name of one that was written, or has another in its place."""
        for one, name, weight, version in self._weights:
            held = one._parameters  # those of script modules have no get
            if (held[name] if name in held else None) is not weight or _version_of(weight) != version:
                prefix = next((prefix for prefix, other in self._module.named_modules() if other is one), "")
                return f"{prefix}.{name}" if prefix else name
        return None


def _version_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


class ChangedAttribute(NamedTuple):
    """An attribute that holds something else than before."""

    place: int
    """Of its module among those of the tree."""
    name: str
    was: Any
    now: Any
    kind: type
    """Of the module."""

    @property
    def is_cached_property(self) -> bool:
        """Whether it holds what a property computed."""
        return isinstance(getattr(self.kind, self.name, None), functools.cached_property)


class AttributesBefore:
    """The attributes of a module, and of those in it, before its forward; not what they register."""

    __slots__ = ("_collections", "_generators", "_held")

    def __init__(self, module: nn.Module) -> None:
        plain = (one for one in module.modules() if not isinstance(one, torch.jit.ScriptModule))
        self._held = [(one, dict(one.__dict__)) for one in plain]
        attributes = [item for _, state in self._held for item in state.items() if item[0] not in REGISTERED]
        self._collections = [
            (name, value, copy.copy(value)) for name, value in attributes if type(value) in (list, dict)
        ]
        self._generators = [
            (name, value, value.get_state()) for name, value in attributes if isinstance(value, torch.Generator)
        ]

    def changed(self) -> Iterator[ChangedAttribute]:
        """Attributes that hold another object now."""
        for place, (module, was) in enumerate(self._held):
            for name, value in module.__dict__.items():
                if name in REGISTERED or value is was.get(name, was):
                    continue
                yield ChangedAttribute(place, name, was.get(name), value, type(module))

    def put_back_collections(self) -> tuple[str, Any] | None:
        """Makes lists and dicts in attributes again what they were; name and value of the first that was not."""
        changed = [(name, value) for name, value, was in self._collections if put_back([(value, was)])]
        return changed[0] if changed else None

    def changed_collection(self) -> tuple[str, Any] | None:
        """Name and value of an attribute whose list or dict holds other objects now."""
        return next(((name, value) for name, value, was in self._collections if differ(value, was)), None)

    def drawn(self) -> str | None:
        """The name of an attribute whose generator drew."""
        return next((name for name, one, was in self._generators if not torch.equal(one.get_state(), was)), None)


class Noticed:
    """What forwards of the copies of one layer were seen to change, looked at in their first calls."""

    CALLS = 8

    def __init__(self) -> None:
        self._calls_left = self.CALLS
        self._set: dict[tuple[int, str], Any] = {}
        """Simple values that a forward set."""

    def looks_again(self) -> bool:
        """Whether the next call is one to look at."""
        self._calls_left -= 1
        return self._calls_left >= 0

    def kept(self, before: AttributesBefore) -> str | None:
        """What the forward that ran since then keeps for later ones, in words.

        A simple value counts when a forward changes what an earlier one set, as a counter's does.
        """
        found = self._kept(before)
        if found is not None:
            self._calls_left = 0
        return found

    def _kept(self, before: AttributesBefore) -> str | None:
        collection = before.changed_collection()
        if collection is not None:
            name, value = collection
            return f"changes the {type(value).__name__} in attribute {name!r}"
        drawn = before.drawn()
        if drawn is not None:
            return f"draws from the generator in attribute {drawn!r}"
        for one in before.changed():
            is_torchs = one.kind.__module__.startswith("torch.")  # such as an RNN, which has its weights in a list, too
            if is_torchs or one.is_cached_property:
                continue
            if trees.tensors(one.now):
                return f"stores tensors in attribute {one.name!r}"
            if not isinstance(one.now, trees.PLAIN) or trees.same(one.was, one.now):
                continue
            key = one.place, one.name
            if key in self._set and trees.same(self._set[key], one.was):
                return f"changes attribute {one.name!r} from call to call"
            self._set[key] = one.now
        return None


def differ(one: Any, was: Any) -> bool:
    """Whether two lists, or two dicts, hold other objects."""
    if len(one) != len(was):
        return True
    if isinstance(one, dict):
        return any(key not in was or was[key] is not value for key, value in one.items())
    return any(a is not b for a, b in zip(one, was, strict=True))


def put_back(containers: Iterable[tuple[Any, Any]]) -> bool:
    """Makes lists and dicts again what their copies are; whether one was not."""
    changed = [(one, was) for one, was in containers if differ(one, was)]
    for one, was in changed:
        one.clear()
        one.extend(was) if isinstance(one, list) else one.update(was)
    return bool(changed)
