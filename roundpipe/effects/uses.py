"""What code does to attributes, variables and items, as its bytecode tells; no code is run.

An attribute counts as read where any code names it, of whatever object: this is too careful rather than too bold. It
misses what compiled code does, and names that code makes up, but for `CodeUses.reads_any_name`.
"""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from roundpipe.effects.places import is_library
from roundpipe.effects.user_code import codes_of, names_in, reached_by

GRADIENT_ATTRIBUTES = frozenset({"requires_grad", "is_leaf", "grad_fn"})
"""Attributes of a tensor that tell whether gradients are recorded."""
_ASKING = GRADIENT_ATTRIBUTES | {"is_grad_enabled"}
_CHANGING = frozenset("append extend update pop popleft setdefault add insert clear remove popitem".split())
_OPERATORS = frozenset("__call__ __next__ __iter__ __getitem__ __len__ __enter__ __exit__ __float__ __int__".split())
_ALWAYS_RUN = ("forward", "__call__", "__getattr__", "__getattribute__")
_IS_GRAD_ENABLED = torch.is_grad_enabled
"""Torch's own: while a trace runs, a function around it stands in its place."""

_Result = TypeVar("_Result")


def _once_for_each(function: Callable[[Any], _Result]) -> Callable[[Any], _Result]:
    """Remembers the results of a function of a class, or of a code object, and keeps neither alive."""
    results: weakref.WeakKeyDictionary[Any, _Result] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def remembered(subject: Any) -> _Result:
        try:
            return results[subject]
        except KeyError:
            return results.setdefault(subject, function(subject))

    return remembered


@dataclass(frozen=True, slots=True)
class CodeUses:
    """What some code does to attributes, variables and items."""

    reads: frozenset[str] = frozenset()
    """Names of attributes."""
    sets: frozenset[str] = frozenset()
    """Names of attributes."""
    rebinds: bool = False
    """Whether it assigns to globals or to variables of an enclosing function."""
    changes_items: bool = False
    """Whether it assigns items or calls methods that change containers."""
    reads_any_name: bool = False
    """Whether it makes up names of attributes that it reads."""

    @staticmethod
    def of(codes: Iterable[types.CodeType]) -> CodeUses:
        pending = list(codes)
        parts = []
        while pending:
            code = pending.pop()
            pending += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
            parts.append(_uses_of_code(code))
        reads: frozenset[str] = frozenset().union(*(part.reads for part in parts))
        return CodeUses(
            reads,
            frozenset().union(*(part.sets for part in parts)),
            any(part.rebinds for part in parts),
            any(part.changes_items for part in parts),
            "__dict__" in reads or any(part.reads_any_name for part in parts),
        )


@_once_for_each  # a model's code is thousands of functions, and taking one apart is slow
def _uses_of_code(code: types.CodeType) -> CodeUses:
    """What one function does, without those inside it."""
    reads: set[str] = set()
    sets: set[str] = set()
    rebinds = items = False
    for instruction in dis.get_instructions(code):
        name = str(instruction.argval)
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            reads.add(name)
            items |= name in _CHANGING
        elif instruction.opname == "STORE_ATTR":
            sets.add(name)
        rebinds |= instruction.opname == "STORE_GLOBAL"
        rebinds |= instruction.opname == "STORE_DEREF" and name in code.co_freevars
        items |= instruction.opname == "STORE_SUBSCR"
    if "getattr" in code.co_names:
        reads.update(constant for constant in code.co_consts if isinstance(constant, str))
    asks_by_name = not {"getattr", "vars"}.isdisjoint((*code.co_names, *code.co_freevars, *code.co_cellvars))
    return CodeUses(frozenset(reads), frozenset(sets), rebinds, items, asks_by_name and _makes_up_names(code))


def _makes_up_names(code: types.CodeType) -> bool:
    """Whether code calls ``vars``, or ``getattr`` with anything but a literal."""
    skipped = ("CACHE", "EXTENDED_ARG", "PUSH_NULL")
    instructions = [instruction for instruction in dis.get_instructions(code) if instruction.opname not in skipped]
    for index, instruction in enumerate(instructions):
        is_name = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
        if not is_name or instruction.argval not in ("getattr", "vars"):
            continue
        rest = instructions[index + 1 :]
        while rest and rest[0].opname.startswith(("LOAD_FAST", "LOAD_ATTR", "LOAD_GLOBAL", "LOAD_DEREF")):
            rest = rest[1:]
        is_literal = bool(rest) and rest[0].opname == "LOAD_CONST" and isinstance(rest[0].argval, str)
        default = rest[2:] if len(rest) > 1 and rest[1].opname.startswith("LOAD_") else rest[1:]
        if instruction.argval == "vars" or not is_literal or not default or "CALL" not in default[0].opname:
            return True
    return False


@_once_for_each
def attributes_read(kind: type) -> frozenset[str]:
    """Names of attributes that the methods of a class read, of whatever object."""
    return CodeUses.of(code for name, code in dict(codes_of(kind)).items() if name != "__init__").reads


@_once_for_each
def uses_of_forward(kind: type) -> CodeUses:
    """What the forward of a class does, with those of its methods that it may call."""
    return CodeUses.of(methods_of_forward(kind).values())


def methods_of_forward(kind: type) -> dict[str, types.CodeType]:
    """The methods of a class that its forward may call, and those that run whatever it does."""
    return _called(dict(codes_of(kind)), _ALWAYS_RUN)


def uses_of_methods(kind: type, names: Iterable[str]) -> CodeUses:
    """What methods of a class do that code with some names in it may call; operators are taken for called."""
    own = [owner for owner in reversed(kind.__mro__) if not is_library(owner)]
    methods = {
        name: method.__code__ for owner in own for name, method in vars(owner).items() if hasattr(method, "__code__")
    }
    return CodeUses.of(_called(methods, (*names, *_OPERATORS)).values())


def uses_of_properties(kinds: Iterable[type], names: frozenset[str]) -> CodeUses:
    """What those properties of some classes do that have some names."""
    owners = {owner for kind in kinds for owner in kind.__mro__ if not is_library(owner)}
    properties = [value for owner in owners for name, value in vars(owner).items() if name in names]
    getters = [value.fget for value in properties if isinstance(value, property)]
    return CodeUses.of(getter.__code__ for getter in getters if isinstance(getter, types.FunctionType))


def _called(methods: Mapping[str, types.CodeType], names: Iterable[str]) -> dict[str, types.CodeType]:
    """Those methods that have some names, and those that they may call."""
    reached: dict[str, types.CodeType] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in methods and name not in reached:
            reached[name] = methods[name]
            pending += names_in(methods[name])
    return reached


def uses_of_functions(codes: Iterable[types.CodeType], kinds: Iterable[type]) -> CodeUses:
    """What those functions do that are no methods of some classes."""
    methods = {code for kind in kinds for code in dict(codes_of(kind)).values()}
    return CodeUses.of(code for code in codes if code not in methods)


class Readers:
    """Tells which attributes of a module some other code, classes of modules and functions, reads by their names."""

    def __init__(self, kinds: Iterable[type], functions: Iterable[types.CodeType]) -> None:
        self._kinds = set(kinds)
        self._functions = uses_of_functions(functions, self._kinds).reads

    def beside(self, kind: type) -> frozenset[str]:
        """Names that code outside of a class reads."""
        return self._functions.union(*(attributes_read(other) for other in self._kinds if other is not kind))


@_once_for_each
def asks_for_gradients(kind: type) -> bool:
    """Whether the forward of a class, or a function that it calls, asks if gradients are recorded, as code tells."""
    if not _ASKING.isdisjoint(uses_of_forward(kind).reads):
        return True
    methods = [getattr(kind, name, None) for name in methods_of_forward(kind)]
    return any(map(_asks, reached_by(*methods)))


def _asks(function: Any) -> bool:
    if getattr(function, "__wrapped__", function) is _IS_GRAD_ENABLED:
        return True
    if not isinstance(function, types.FunctionType):
        return False
    return not _ASKING.isdisjoint(CodeUses.of([function.__code__]).reads) or "is_grad_enabled" in names_in(
        function.__code__
    )


def uses_of_hook(hook: Any) -> CodeUses:
    """What a hook does; of an object, its call."""
    function = hook.func if isinstance(hook, functools.partial) else hook
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        function = vars(type(function)).get("__call__")
    return CodeUses.of([function.__code__] if isinstance(function, types.FunctionType) else [])


def forward_hooks(module: Any) -> Iterator[Any]:
    """The hooks that run before and after a module's forward."""
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()
