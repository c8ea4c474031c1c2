"""An imported file, as a script's settings are; and classes whose attributes are settings."""

from __future__ import annotations

import collections
import itertools
from typing import Any

SCALE = 1.0


class Settings:
    scale = 1.0
    table = {"scale": 1.0}
    is_on = False

    @classmethod
    def of_class(cls) -> float:
        return cls.scale

    @staticmethod
    def fixed() -> float:
        return 1.0

    @property
    def first(self) -> float:
        return self.table["scale"]


class Below(Settings):
    """Has all from the class above."""


class Slotted:
    __slots__ = ()
    scale = 1.0


class Pairs(collections.namedtuple("Pairs", "one other")):
    scale = 1.0


class Once:
    """The only one of its class."""

    instance: Any = None
    scale = 1.0

    @classmethod
    def get(cls) -> Once:
        if cls.instance is None:
            cls.instance = cls()
        return cls.instance


class FromGlobal:
    def __call__(self) -> float:
        return SCALE


class Kind(type):
    level = 1.0

    @property
    def scale(cls) -> float:
        return cls.level


class Numbered:
    numbers = itertools.count()
    calls = 0


class OfKind(metaclass=Kind):
    pass


class AttributeDict(dict):
    """Raises a KeyError for attributes that it does not have."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class DotDict(dict):
    """Has None for any attribute."""

    __getattr__ = dict.get
    __setattr__ = dict.__setitem__
    __delattr__ = dict.__delitem__


class Passing:
    """Asks a dict that it holds for all that it does not have."""

    def __init__(self, **items: Any) -> None:
        self.__dict__["items"] = items

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["items"][name]
