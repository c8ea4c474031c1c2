"""The Python that a model brings itself: hooks, and the code of its classes, whose names tell what it may read or call.

Code is looked at as code objects and never run here.
"""

from __future__ import annotations

import types
from collections.abc import Iterator

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Names of attributes that hold the hooks of a module."""


def codes_of(kind: type) -> Iterator[tuple[str, types.CodeType]]:
    """Names and code of the methods of a class and of those it is made from, but for torch's; overriding ones later."""
    for owner in reversed(kind.__mro__):
        if owner.__module__ != "builtins" and not owner.__module__.startswith("torch."):
            for name, function in vars(owner).items():
                if isinstance(function, types.FunctionType):
                    yield name, function.__code__


def names_in(code: types.CodeType) -> Iterator[str]:
    """Names that a function's code may look up, nested functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)
