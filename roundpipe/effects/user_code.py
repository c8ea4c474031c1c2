"""The Python that a model and its user bring: hooks, and code, whose names tell what it may read or call.

Code is looked at as code objects and never run here.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

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


MAX_FUNCTIONS = 64
"""How many functions `reached_by` follows."""


def reached_by(function: Any) -> Iterator[Any]:
    """What a function, and those of its user's that it names, can look up: closures, defaults, ``self``, globals.

    Of each also the attributes that the code names, and the items of a list, tuple, set or dict. Functions of torch
    are not followed.
    """
    pending = [function]
    seen: set[int] = set()
    while pending and len(seen) < MAX_FUNCTIONS:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, functools.partial):
            pending.append(one.func)
            held, names = [*one.args, *one.keywords.values()], set()
        elif isinstance(one, types.MethodType):
            pending.append(one.__func__)
            held, names = [one.__self__], set(names_in(one.__func__.__code__) if _has_code(one.__func__) else ())
        elif _has_code(one):
            names = set(names_in(one.__code__))
            cells = [cell.cell_contents for cell in one.__closure__ or () if _is_full(cell)]
            held = [*cells, *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
            held += [one.__globals__[name] for name in names if name in one.__globals__]
        elif _has_code(getattr(type(one), "__call__", None)):  # noqa: B004 - its code is wanted
            pending.append(types.MethodType(type(one).__call__, one))
            continue
        else:
            continue
        for found in held:
            of_found = getattr(found, "__dict__", {})
            within = [of_found[name] for name in names if name in of_found]
            for value in (found, *within):
                if isinstance(value, (list, tuple, set, frozenset)):
                    yield from value
                elif isinstance(value, dict):
                    yield from value.values()
                elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                    if not str(getattr(value, "__module__", "")).startswith("torch."):
                        pending.append(value)
                else:
                    yield value


MAX_HELPERS = 256
"""How many functions `functions_reached_by` follows."""


def functions_reached_by(*functions: Any) -> Iterator[Any]:
    """Some functions, and those that they name: globals, what closures hold, and functions of modules.

    Those that are not written in Python are given too; those of torch and of Python's own library are not followed.
    """
    pending = list(functions)
    seen: set[int] = set()
    while pending and len(seen) < MAX_HELPERS:
        one = pending.pop()
        if isinstance(one, types.BuiltinFunctionType):
            yield one
        if not _has_code(one) or id(one) in seen or str(one.__module__).partition(".")[0] in _NOT_FOLLOWED:
            continue
        seen.add(id(one))
        yield one
        names = dict.fromkeys(names_in(one.__code__))
        held = [one.__globals__[name] for name in names if name in one.__globals__]
        pending += [*held, *(cell.cell_contents for cell in one.__closure__ or () if _is_full(cell))]
        modules = [value.__dict__ for value in held if isinstance(value, types.ModuleType)]
        pending += [module[name] for module in modules for name in names if name in module]


_NOT_FOLLOWED = frozenset({"torch", *sys.stdlib_module_names}) - {"__main__"}


def _has_code(function: Any) -> bool:
    return isinstance(function, types.FunctionType)


def _is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises if it was not filled
    except ValueError:
        return False
    return True
