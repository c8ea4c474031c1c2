"""Attributes of users' objects, whose classes may answer for any name: with None, or with an error of any kind.

A dict whose items are attributes is one, as is anything that stands in for another object.
"""

from __future__ import annotations

from typing import Any


def stored_attribute(value: Any, name: str, default: Any = None) -> Any:
    """What Python itself finds under a name, in an object or its class: ``__getattr__`` of the class is not asked."""
    try:
        return object.__getattribute__(value, name)
    except Exception:  # a property may raise anything
        return default


def given_attribute(value: Any, name: str, default: Any = None) -> Any:
    """What an object gives under a name, in whichever way; the default also where its class raises another error."""
    try:
        return getattr(value, name, default)
    except Exception:  # a KeyError, often
        return default


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The dict in which an object has its attributes; None for one without, and for classes."""
    held = stored_attribute(value, "__dict__")
    return held if type(held) is dict else None
