"""What the modules and arguments of a call hold in Python, before it and after it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.errors import TraceError
from roundpipe.effects.python_state import attributes_read
from roundpipe.fx.flat import flat_tensors, flat_values

_PLAIN = trees.PLAIN
_CONTAINERS = (list, tuple, set, dict, OrderedDict, deque)


class Unread:
    """Stands in an attribute that must be set before anything is done with it, and tells whether anything was.

    Args:
        instead_of: what stood there, whose class it gives as its own to ``isinstance``.
    """

    def __init__(self, instead_of: Any = None) -> None:
        state = {"used": False, "kind": Unread if instead_of is None else type(instead_of)}
        object.__setattr__(self, "_state", state)

    def is_used(self) -> bool:
        """Whether anything was done with it."""
        return bool(object.__getattribute__(self, "_state")["used"])

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return object.__getattribute__(self, "_state")["kind"]
        if name == "is_used":
            return object.__getattribute__(self, name)
        return _refuse(self)


def _refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
    object.__getattribute__(self, "_state")["used"] = True
    raise LookupError("this attribute was to be set first")


_NOT_REFUSED = frozenset(
    "__class__ __new__ __init__ __getattribute__ __init_subclass__ __subclasshook__ __class_getitem__ __doc__".split()
)
_FURTHER = frozenset("__call__ __enter__ __exit__ __next__ __matmul__ __rmatmul__ __complex__ __fspath__".split())
for _name in {name for kind in (int, float, str, list, dict, set, tuple) for name in dir(kind)} | _FURTHER:
    if _name.startswith("__") and _name not in _NOT_REFUSED:
        setattr(Unread, _name, _refuse)


def sets_before_reading(places: list[tuple[nn.Module, str, Any]], call: Callable[[], Any]) -> bool:
    """Whether another call sets some attributes to the same again, and does nothing with what it finds there.

    Args:
        places: the attributes with their values after a first call, which they have afterwards.
        call: calls again.
    """
    for module, name, _ in places:
        module.__dict__[name] = Unread()
    try:
        call()
        return all(_same_kind(value, module.__dict__.get(name)) for module, name, value in places)
    except Exception:
        return False
    finally:
        for module, name, value in places:
            module.__dict__[name] = value


def _same_kind(was: Any, now: Any) -> bool:
    return type(was) is type(now) and (not isinstance(was, _PLAIN) or was == now)


class TreeState:
    """The attributes of a module tree at one moment.

    Args:
        modules: the modules to look at.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._attributes = [(module, dict(module.__dict__)) for module in modules]
        self._buffers = [(module, dict(module._buffers)) for module in modules]
        self._parameters = [(module, dict(module._parameters)) for module in modules]
        self._lengths = [
            (value, len(value))
            for _, attributes in self._attributes
            for value in attributes.values()
            if type(value) in _CONTAINERS and not isinstance(value, tuple)
        ]
        self._versions = [
            (buffer, buffer._version)
            for _, buffers in self._buffers
            for buffer in buffers.values()
            if buffer is not None
        ]

    def buffers_written(self) -> bool:
        """Whether a buffer was written or replaced since."""
        return any(buffer._version != version for buffer, version in self._versions) or any(
            module._buffers.get(name) is not buffer
            for module, buffers in self._buffers
            for name, buffer in buffers.items()
        )

    def parameters_replaced(self) -> bool:
        """Whether a parameter is another tensor since, gone or new."""
        return any(
            len(module._parameters) != len(parameters)
            or any(parameters.get(name) is not now for name, now in module._parameters.items())
            for module, parameters in self._parameters
        )

    def holds_new_values(self) -> bool:
        """Whether an attribute was set, or a container grew, since."""
        return any(len(value) != length for value, length in self._lengths) or any(
            attributes.get(name, attributes) is not value
            for module, attributes in self._attributes
            for name, value in module.__dict__.items()
        )

    def changed_attributes(self) -> list[tuple[nn.Module, str, Any]]:
        """Attributes set to something else since, with their values now."""
        return [
            (module, name, value)
            for module, attributes in self._attributes
            for name, value in module.__dict__.items()
            if attributes.get(name, attributes) is not value and not _equal(attributes.get(name), value)
        ]

    def remembered(self, computed: Collection[torch.Tensor] | None = None) -> list[tuple[nn.Module, str, Any]]:
        """Attributes that were set since to what a later call could find there, with their values.

        Args:
            computed: tensors that are more than tables made of sizes; None = all.
        """
        return [
            (module, name, value)
            for module, name, value in self.changed_attributes()
            if name not in ("_parameters", "_buffers", "_modules", "training")
            and name in attributes_read(type(module))
            and (computed is None or not flat_tensors(value) or any(one in computed for one in flat_tensors(value)))
        ]

    def restore_tensors(self, keep: Collection[tuple[nn.Module, str]] = ()) -> None:
        """Takes back every change that put a tensor into an attribute, but for those to ``keep``."""
        for (module, attributes), (_, buffers) in zip(self._attributes, self._buffers, strict=True):
            for name in list(module.__dict__):
                value = module.__dict__[name]
                if name in ("_parameters", "_buffers", "_modules") or attributes.get(name, module) is value:
                    continue
                if flat_values(value) and (module, name) not in keep:
                    del module.__dict__[name]
                    if name in attributes:
                        module.__dict__[name] = attributes[name]
            module._buffers.clear()
            module._buffers.update(buffers)


class OutsideChanges:
    """Tells what other code sets on a leaf's modules, which the graph would not set, from what the leaf sets itself.

    Args:
        model: the modules before the first run.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = {module: dict(module.__dict__) for module in model.modules()}

    def on(self, leaf: nn.Module) -> str | None:
        """An attribute of a leaf that its class reads and that other code has set, in words."""
        for module in leaf.modules():
            held = self._held.get(module)
            if held is None:
                continue
            for name, value in module.__dict__.items():
                if held.get(name, held) is value or name in _TORCH_STATE or isinstance(value, torch.Tensor):
                    continue
                if not _equal(held.get(name), value) and name in attributes_read(type(module)):
                    return f"{type(module).__name__}.{name}"
        return None

    def note_own(self, leaf: nn.Module) -> None:
        """Whatever a leaf's modules hold now, it has set itself."""
        for module in leaf.modules():
            held = self._held.get(module)
            if held is not None and len(held) <= len(module.__dict__):
                held.update(module.__dict__)


_TORCH_STATE = ("_parameters", "_buffers", "_modules", "training")


def _equal(was: Any, now: Any) -> bool:
    return isinstance(was, _PLAIN) and type(was) is type(now) and was == now


Contents = dict[trees.Path, Any]
"""What the arguments of a call hold, by their paths."""


def contents_of(args: Any, kwargs: Any) -> Contents:
    """What arguments hold, that of deques and sets among it."""
    return dict(_walked((args, kwargs), ()))


def _walked(value: Any, path: trees.Path) -> Iterator[tuple[trees.Path, Any]]:
    if isinstance(value, (deque, set)):
        below = [(trees.Step("item", index), item) for index, item in enumerate(value)]
    else:
        below = trees.children(value) or []
        if not below:
            yield path, value
    if len(path) < trees.MAX_DEPTH:
        for step, child in below:
            yield from _walked(child, (*path, step))


def containers_mutated(before: Contents, args: Any, kwargs: Any) -> bool:
    """Whether a call changed what its arguments hold.

    Args:
        before: what they held before.
        args, kwargs: the arguments.
    """
    after = contents_of(args, kwargs)
    return before.keys() != after.keys() or bool(trees.gained(before, after))


def gained_by(before: Contents, args: Any, kwargs: Any) -> list[trees.Path]:
    """Where a call has put something into its arguments; what it only took out does not count."""
    after = contents_of(args, kwargs)
    return [
        path
        for path in trees.gained(before, after)
        if not (_is_empty(after[path]) and any(was[: len(path)] == path for was in before))
    ]


def _is_empty(value: Any) -> bool:
    return isinstance(value, (Mapping, *_CONTAINERS)) and not value


def left_behind(words: str) -> str:
    """Why an activation in an attribute, from where a loss function may take it, is refused."""
    return f"{words} is set to an activation in the forward, and would not be set when the graph runs"


def refuse_mutated(name: str) -> TraceError:
    """The error for a leaf that changes a container among its arguments."""
    return TraceError(f"{name} changes a list, dict or object that it takes as an argument")
