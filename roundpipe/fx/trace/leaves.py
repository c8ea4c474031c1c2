"""What the modules and arguments of a call hold in Python, before it and after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.effects.snapshot import AttributeChange, ModuleSnapshot
from roundpipe.effects.uses import attributes_read
from roundpipe.fx.flat import flat_tensors


class Unread:
    """Stands in for an attribute's value. Whatever is done with it, ``isinstance`` included, raises and is noted."""

    _used = False

    def is_used(self) -> bool:
        return bool(object.__getattribute__(self, "_used"))

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name == "is_used" else _refuse(self)


def _refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
    object.__setattr__(self, "_used", True)
    raise LookupError("this attribute was to be set first")


_NOT_REFUSED = frozenset(
    "__class__ __new__ __init__ __getattribute__ __init_subclass__ __subclasshook__ __class_getitem__ __doc__".split()
)
_FURTHER = frozenset("__call__ __enter__ __exit__ __next__ __matmul__ __rmatmul__ __complex__ __fspath__".split())
for _name in {name for kind in (int, float, str, list, dict, set, tuple) for name in dir(kind)} | _FURTHER:
    if _name.startswith("__") and _name not in _NOT_REFUSED:
        setattr(Unread, _name, _refuse)


def sets_before_reading(changes: list[AttributeChange], call: Callable[[], Any]) -> bool:
    """Whether a second call sets the attributes that a first one changed to the same, before it reads them."""
    for change in changes:
        change.module.__dict__[change.name] = Unread()
    try:
        call()
        return all(_is_alike(change.now, change.module.__dict__.get(change.name)) for change in changes)
    except Exception:
        return False
    finally:
        for change in changes:
            change.module.__dict__[change.name] = change.now


def _is_alike(first: Any, second: Any) -> bool:
    return type(first) is type(second) and (not isinstance(first, trees.PLAIN) or first == second)


def remembered(snapshot: ModuleSnapshot, computed: Set[torch.Tensor] | None = None) -> list[AttributeChange]:
    """Attributes set since a snapshot that a later call may read; tensors count only if in ``computed``, None = all."""
    return [
        change
        for change in snapshot.diff()
        if change.name != "training"
        and change.name in attributes_read(type(change.module))
        and (computed is None or not (tensors := flat_tensors(change.now)) or not computed.isdisjoint(tensors))
    ]


def set_elsewhere(snapshot: ModuleSnapshot, leaf: nn.Module) -> str | None:
    """An attribute of a leaf that its class reads and that code of others has set since a snapshot, in words."""
    for change in snapshot.diff(leaf.modules()):
        is_state = change.name == "training" or isinstance(change.now, torch.Tensor)
        if not is_state and change.name in attributes_read(type(change.module)):
            return f"{type(change.module).__name__}.{change.name}"
    return None


Contents = dict[trees.Path, Any]
"""What the arguments of a call hold, by their paths."""


def contents_of(args: Any, kwargs: Any) -> Contents:
    """What arguments hold, in deques and sets too."""
    return dict(_leaves_of((args, kwargs), ()))


def _leaves_of(value: Any, path: trees.Path) -> Iterator[tuple[trees.Path, Any]]:
    if isinstance(value, (deque, set)):
        below = [(trees.Access("item", index), item) for index, item in enumerate(value)]
    else:
        below = trees.children(value) or []
        if not below:
            yield path, value
    if len(path) < trees.MAX_DEPTH:
        for step, child in below:
            yield from _leaves_of(child, (*path, step))


def containers_mutated(before: Contents, args: Any, kwargs: Any) -> bool:
    """Whether a call changed what its arguments hold."""
    after = contents_of(args, kwargs)
    return before.keys() != after.keys() or bool(trees.gained(before, after))


def gained_by(before: Contents, args: Any, kwargs: Any) -> list[trees.Path]:
    """Where a call has put something into its arguments; what it only took out does not count."""
    after = contents_of(args, kwargs)
    return [
        path
        for path in trees.gained(before, after)
        if not (
            isinstance(value := after[path], (Mapping, list, tuple, set, deque))
            and not value
            and any(other[: len(path)] == path for other in before)
        )
    ]
