"""Nested values: find the tensors in any Python structure, and rebuild it with other ones.

Everything that walks arguments and outputs does it here, so that one rule decides what counts as a container: lists,
tuples (named ones too), dicts, dataclass instances, classes registered with torch's pytree, and plain objects with
attributes.

Invariant: ``rebuild(value, leaves(value))`` equals ``value``; walking never mutates.
This file is the only user of torch's private pytree module.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.utils._pytree as torch_pytree
from torch import nn
from torch.utils.hooks import RemovableHandle

from roundpipe.core.errors import ConfigError

ATOMS = (
    type(None), bool, int, float, complex, str, bytes, type, range,
    torch.dtype, torch.device, torch.Size, torch.Generator, nn.Module,
    torch.SymInt, torch.SymFloat, torch.SymBool,
)  # fmt: skip
MAX_DEPTH = 12


class Access(NamedTuple):
    """One access on the path into a structure."""

    kind: str
    """``"item"`` for ``value[key]``, ``"attribute"`` for ``value.key``, ``"node"`` for a pytree child."""
    key: Any


Path = tuple[Access, ...]


def path_string(path: Path) -> str:
    """A path as a user would write it, such as ``[0]['mask'].values``."""
    return "".join(f".{access.key}" if access.kind == "attribute" else f"[{access.key!r}]" for access in path)


def _registered(kind: type) -> bool:
    return kind in torch_pytree.SUPPORTED_NODES and kind not in torch_pytree.BUILTIN_TYPES


def children(value: Any) -> list[tuple[Access, Any]] | None:
    """The direct children of a container, or None for a leaf."""
    if isinstance(value, (torch.Tensor, *ATOMS)):
        return None
    if isinstance(value, Mapping):
        return [(Access("item", key), value[key]) for key in value]
    if isinstance(value, (list, tuple)):
        return [(Access("item", index), item) for index, item in enumerate(value)]
    if isinstance(value, slice):
        return [(Access("attribute", name), getattr(value, name)) for name in ("start", "stop", "step")]
    if _registered(type(value)):
        parts, _ = torch_pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
        return [(Access("node", index), part) for index, part in enumerate(parts)]
    if dataclasses.is_dataclass(value):
        return [
            (Access("attribute", field.name), getattr(value, field.name))
            for field in dataclasses.fields(value)
            if hasattr(value, field.name)
        ]
    if callable(value) or not hasattr(value, "__dict__"):
        return None
    return [(Access("attribute", name), item) for name, item in vars(value).items()]


class Container(NamedTuple):
    """One container of a structure."""

    path: Path
    kind: type
    length: int

    @property
    def kind_name(self) -> str:
        """Of its class, which is the same for one that is defined anew at every call."""
        return f"{self.kind.__module__}.{self.kind.__qualname__}"


def walk(value: Any, path: Path = (), containers: list[Container] | None = None) -> Iterator[tuple[Path, Any]]:
    """Every leaf of a structure with its path, in a fixed order; ``containers`` gets what is not a leaf."""
    below = children(value) if len(path) < MAX_DEPTH else None
    if below is None:
        yield path, value
        return
    if containers is not None:
        containers.append(Container(path, type(value), len(below)))
    for access, child in below:
        yield from walk(child, (*path, access), containers)


def leaves(value: Any) -> list[Any]:
    """Every leaf of a structure, in the order of `walk`."""
    return [leaf for _, leaf in walk(value)]


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a structure, in the order of `walk`."""
    result: list[torch.Tensor] = []
    _gather(value, result, 0)
    return result


def _gather(value: Any, result: list[torch.Tensor], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        result.append(value)
    elif depth < MAX_DEPTH:
        for child in _below(value):
            if isinstance(child, torch.Tensor):  # an optimizer's operator has thousands
                result.append(child)
            else:
                _gather(child, result, depth + 1)


def _below(value: Any) -> Collection[Any]:
    """What `children` gives, without the ways there."""
    if type(value) in (list, tuple):
        return cast(Collection[Any], value)
    return value.values() if type(value) is dict else [child for _, child in children(value) or ()]


def checked_tensors(arguments: Any) -> list[torch.Tensor]:
    """The tensors in positional and keyword arguments.

    Raises:
        ConfigError: some lie too deep to be found, or what is there refers to itself in too many ways.
    """
    refuse_endless("the arguments have", arguments, refuses_deep=True)
    return tensors(arguments)


def refuse_endless(what: str, value: Any, *, refuses_deep: bool = False) -> None:
    """Raise if a structure is found again on so many ways that walking it has no end."""
    count = _LeafCount(refuses_deep)
    if count.leaves(value, 0) > max(MAX_REPEATED, 10 * count.num_distinct):
        raise ConfigError(f"{what} objects that refer to each other in more ways than can be walked; {_FLAT}")


MAX_REPEATED = 20_000
"""Leaves that a structure may have, those found on several ways counted for each."""
_FLAT = "give tensors, or lists and dicts of them, without references back such as those of nodes to their parents"


class _LeafCount:
    """Counts leaves on all ways, and looks at each container once for each depth at which it lies."""

    def __init__(self, refuses_deep: bool) -> None:
        self._refuses_deep = refuses_deep
        self.num_distinct = 0
        self._known: dict[tuple[int, int], tuple[Any, int]] = {}
        """Leaves below, with the container, whose identity stays its own while it is kept."""
        self._seen: set[int] = set()

    def leaves(self, value: Any, depth: int) -> int:
        if isinstance(value, (torch.Tensor, *ATOMS)):
            return 1
        key = id(value), depth
        if key not in self._known:
            below = _below(value)
            if below and depth == MAX_DEPTH:
                if self._refuses_deep and _reaches_tensor(value):
                    raise ConfigError(
                        f"a tensor of the arguments lies in {depth - 1} or more containers inside each other, or in an "
                        f"object that refers back to itself, and is not found there; {_FLAT}"
                    )
                below = ()
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self.num_distinct += len(below)
            self._known[key] = value, sum(self.leaves(child, depth + 1) for child in below) if below else 1
        return self._known[key][1]


def _reaches_tensor(value: Any) -> bool:
    """Whether a tensor lies anywhere below, however deep."""
    seen: dict[int, Any] = {}
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, torch.Tensor):
            return True
        if id(one) not in seen and not isinstance(one, ATOMS):
            seen[id(one)] = one
            pending += _below(one)
    return False


def holds_any(value: Any, objects: list[Any], depth: int = 0) -> bool:
    """Whether a value is one of some objects, or holds one."""
    if any(value is each for each in objects):
        return True
    below = children(value) if depth < MAX_DEPTH else None
    return any(holds_any(child, objects, depth + 1) for _, child in below or ())


PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Types of leaves that are compared by what they are."""


def number_kind(value: Any) -> type[int] | type[float] | None:
    """``int`` or ``float`` if a value is a number of Python's, or NumPy's of double precision, which is a float.

    Truths are no numbers.
    """
    kind = type(value)
    if kind is int or kind is float:
        return kind
    return float if isinstance(value, float) and kind.__module__ == "numpy" else None


def same(first: Any, second: Any) -> bool:
    """Whether two leaves are one object, or do the same wherever code finds them.

    Equal plain values do, partial functions of the same, and handles of hooks, which tell nothing of the hooks.
    """
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, PLAIN):
        return bool(first == second)
    if type(first) is functools.partial:
        names, *parts = first.keywords.keys(), _parts_of(first), _parts_of(second)
        return names == second.keywords.keys() and len(parts[0]) == len(parts[1]) and all(map(same, *parts))
    return type(first) is RemovableHandle


def _parts_of(function: functools.partial[Any]) -> list[Any]:
    """What a partial function is made of, keywords in the order of their names."""
    return [function.func, *function.args, *(function.keywords[name] for name in sorted(function.keywords))]


def gained(before: Mapping[Path, Any], after: Mapping[Path, Any]) -> list[Path]:
    """Paths at which ``after``, leaves by their paths, has a leaf that ``before`` does not have there."""
    missing = object()
    return [path for path, now in after.items() if not same(before.get(path, missing), now)]


def above(value: Any, path: Path, first: int) -> list[Any]:
    """The containers on the way to a leaf, from the access of number ``first`` on."""
    return [get(value, path[:length]) for length in range(first, len(path))]


def put(value: Any, other: Any, path: Path) -> None:
    """Copy the item of a structure once of the same form into ``value``; lists shorter in ``other`` are left alone."""
    for index, access in enumerate(path):
        below = dict(children(value) or ())
        if access in below and index + 1 < len(path):
            value, other = below[access], get(other, (access,))
            continue
        item = get(other, (access,))
        if isinstance(value, list) and len(other) < len(value):
            return
        if access.kind == "attribute":
            setattr(value, access.key, item)
        elif isinstance(value, list) and access.key >= len(value):
            value.append(item)
        elif access.kind == "item" and not isinstance(value, tuple):
            value[access.key] = item
        return


def get(value: Any, path: Path) -> Any:
    """The item of ``value`` at ``path``."""
    for kind, key in path:
        if kind == "attribute":
            value = getattr(value, key)
        elif kind == "item":
            value = value[key]
        else:
            value = torch_pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0][key]
    return value


def map_leaves(value: Any, function: Callable[[Any], Any], depth: int = 0) -> Any:
    """A structure of the same form with every leaf replaced by ``function(leaf)``."""
    below = children(value) if depth < MAX_DEPTH else None
    if below is None:
        return function(value)
    return with_children(value, [map_leaves(child, function, depth + 1) for _, child in below])


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """A structure of the same form with every tensor replaced; the value itself if it holds none."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if not tensors(value):
        return value
    return map_leaves(value, lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def map_numbered(value: Any, function: Callable[[int, torch.Tensor], Any]) -> Any:
    """The same for a function that is also given each tensor's position among `tensors`."""
    positions = itertools.count()
    return map_tensors(value, lambda tensor: function(next(positions), tensor))


def rebuild(value: Any, new_leaves: list[Any]) -> Any:
    """A structure of the form of ``value`` over other leaves, given in the order of `walk`."""
    remaining = iter(new_leaves)
    return map_leaves(value, lambda _: next(remaining))


def with_children(value: Any, new: list[Any]) -> Any:
    """A container of the form of ``value`` over other direct children."""
    kind = type(value)
    if isinstance(value, tuple):
        if hasattr(kind, "_make"):
            return kind._make(new)  # whatever its own constructor asks of what is in it
        return tuple(new) if kind is tuple else kind(new)
    if isinstance(value, slice):
        return slice(*new)
    if kind is list:
        return new
    if kind is dict:
        return dict(zip(value, new, strict=True))
    if _registered(kind):
        definition = torch_pytree.SUPPORTED_NODES[kind]
        _, context = definition.flatten_fn(value)
        return definition.unflatten_fn(new, context)
    if isinstance(value, Mapping):
        items = dict(zip(value, new, strict=True))
        if dataclasses.is_dataclass(value):  # such as transformers' ModelOutput
            return kind(**items)
        mapping: Any = copy.copy(value)
        for key, item in items.items():
            mapping[key] = item
        return mapping
    clone = copy.copy(value)
    if isinstance(value, list):
        clone[:] = new
        return clone
    for (access, _), item in zip(children(value) or (), new, strict=True):
        object.__setattr__(clone, access.key, item)
    return clone
