"""What the code of a model and its user may read or call, by the names in it; no code is run.

What is looked up under a name that is made up, or by compiled code, is missed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any


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


def words_in(code: types.CodeType) -> Iterator[str]:
    """Strings in a function's code, nested functions included: names of keyword arguments are among them."""
    pending = list(code.co_consts)
    while pending:
        constant = pending.pop()
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            pending += constant
        elif isinstance(constant, types.CodeType):
            pending += constant.co_consts


MAX_FUNCTIONS = 256
"""How many functions `reached_by` follows."""
_NOT_FOLLOWED = frozenset({"torch", *sys.stdlib_module_names}) - {"__main__"}


def reached_by(*functions: Any) -> Iterator[Any]:
    """What functions, and those that they name, can look up: closures, defaults, ``self``, globals, and functions.

    Of each also the attributes that the code names, such as those of Python modules, and the items of a list, tuple,
    set or dict. Functions of torch and of Python's own library are not followed.
    """
    pending = list(functions)
    seen: set[int] = set()
    while pending and len(seen) < MAX_FUNCTIONS:
        target = pending.pop()
        if id(target) in seen or _has_code(target) and package_of(target) in _NOT_FOLLOWED:
            continue
        seen.add(id(target))
        if _has_code(getattr(type(target), "__call__", None)):  # noqa: B004 - its code is asked for
            target = types.MethodType(type(target).__call__, target)
        elif isinstance(target, (types.FunctionType, types.BuiltinFunctionType)):
            yield target
        names, objects = _looked_up_by(target)
        for item in objects:
            attributes = getattr(item, "__dict__", {})
            for value in (item, *(attributes[name] for name in names if name in attributes)):
                if isinstance(value, (list, tuple, set, frozenset)):
                    yield from value
                elif isinstance(value, dict):
                    yield from value.values()
                elif isinstance(value, _FUNCTIONS):
                    pending.append(value)
                else:
                    yield value


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


def _looked_up_by(target: Any) -> tuple[set[str], list[Any]]:
    """Names in the code of something that can be called, and the objects that it holds or finds under them."""
    if isinstance(target, functools.partial):
        return set(), [target.func, *target.args, *target.keywords.values()]
    if isinstance(target, types.MethodType):
        names = set(names_in(target.__func__.__code__)) if _has_code(target.__func__) else set()
        return names, [target.__func__, target.__self__]
    if not _has_code(target):
        return set(), []
    names = set(names_in(target.__code__))
    variables = [target.__globals__[name] for name in names if name in target.__globals__]
    defaults = [*(target.__defaults__ or ()), *(target.__kwdefaults__ or {}).values()]
    return names, [*(cell.cell_contents for cell in filled_cells(target)), *defaults, *variables]


def package_of(owner: Any) -> str:
    """The first word of the Python module that a class or function is from."""
    return str(getattr(owner, "__module__", None) or "builtins").partition(".")[0]


def _has_code(function: Any) -> bool:
    return isinstance(function, types.FunctionType)


def filled_cells(function: Any) -> Iterator[types.CellType]:
    """The cells of a function's or method's closure that hold something."""
    for cell in getattr(getattr(function, "__func__", function), "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            cell.cell_contents  # noqa: B018 - raises if it is empty
            yield cell
