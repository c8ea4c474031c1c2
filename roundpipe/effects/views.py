"""What objects hold that have no attributes to look at: random generators, arrays, and objects with slots.

A `View` of such an object gives what it holds as a plain value, and puts that back. Of iterators, and of objects that
compiled code of other packages makes, nothing can be told without changing it: those `is_closed`.
"""

from __future__ import annotations

import array
import copyreg
import io
import pickle
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_PACKAGES = frozenset((*sys.stdlib_module_names, "torch", "torchvision", "numpy", "sympy"))
"""Whose objects hold nothing that a forward changes, but for those of which there is a `View`."""


@dataclass(frozen=True, slots=True)
class View:
    """How to look at objects of one kind."""

    kind: str
    """``"random"``, ``"array"`` or ``"slots"``."""
    take: Callable[[Any], Any]
    """What an object holds: bytes, or a dict of its slots."""
    put: Callable[[Any, Any], None]
    """Gives an object back what it held."""


def view_of(value: Any, max_bytes: int) -> View | None:
    """How to look at an object; None if its attributes tell, or nothing does.

    Args:
        value: any object.
        max_bytes: of an array; a larger one is taken for a table that no forward changes.
    """
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else _PYTHON
    if isinstance(value, bytearray):
        return _BYTES if len(value) <= max_bytes else None
    if isinstance(value, array.array):
        return _ARRAY if len(value) * value.itemsize <= max_bytes else None
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and type(value).__module__.partition(".")[0] == "numpy":
        if isinstance(value, numpy.ndarray):
            is_data = not value.dtype.hasobject and value.flags.writeable and value.nbytes <= max_bytes
            return _NUMPY_ARRAY if is_data else None
        if isinstance(value, numpy.random.Generator):
            return _NUMPY_GENERATOR
        if isinstance(value, numpy.random.RandomState):
            return _NUMPY_RANDOM_STATE
        return _NUMPY_BITS if isinstance(value, numpy.random.BitGenerator) else None
    return _SLOTS if _has_slots(type(value)) else None


def is_closed(value: Any) -> bool:
    """Whether nothing tells what an object that may change holds: an iterator, or made by compiled code."""
    kind = type(value)
    if isinstance(value, random.SystemRandom):
        return True
    tells = hasattr(value, "__dict__") or any("__slots__" in vars(base) for base in kind.__mro__)
    if hasattr(kind, "__next__"):
        return not isinstance(value, io.IOBase) and (_is_of_python(kind) or not tells)
    return not (tells or _is_of_python(kind) or isinstance(value, type) or callable(value))


def _is_of_python(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _PACKAGES


def _has_slots(kind: type) -> bool:
    return bool(copyreg._slotnames(kind)) and not _is_of_python(kind)  # type: ignore[attr-defined]


def _slots(value: Any) -> dict[str, Any]:
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _put_slots(value: Any, held: dict[str, Any]) -> None:
    for name in _slots(value).keys() - held.keys():
        object.__delattr__(value, name)
    for name, item in held.items():
        object.__setattr__(value, name, item)


def _put_array(value: Any, held: bytes) -> None:
    del value[:]
    value.frombytes(held)


def _put_numpy_array(value: Any, held: bytes) -> None:
    value[...] = sys.modules["numpy"].frombuffer(held, value.dtype).reshape(value.shape)


def _put_numpy_bits(value: Any, held: bytes) -> None:
    value.state = pickle.loads(held)


_PYTHON = View("random", lambda v: pickle.dumps(v.getstate()), lambda v, held: v.setstate(pickle.loads(held)))
_NUMPY_BITS = View("random", lambda v: pickle.dumps(v.state), _put_numpy_bits)
_NUMPY_GENERATOR = View(
    "random", lambda v: pickle.dumps(v.bit_generator.state), lambda v, held: _put_numpy_bits(v.bit_generator, held)
)
_NUMPY_RANDOM_STATE = View(
    "random", lambda v: pickle.dumps(v.get_state(legacy=False)), lambda v, held: v.set_state(pickle.loads(held))
)
_BYTES = View("array", bytes, lambda v, held: v.__setitem__(slice(None), held))
_ARRAY = View("array", lambda v: v.tobytes(), _put_array)
_NUMPY_ARRAY = View("array", lambda v: v.tobytes(), _put_numpy_array)
_SLOTS = View("slots", _slots, _put_slots)
