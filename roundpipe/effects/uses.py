"""What code may look up, by the names in it, and what it does to attributes, variables and items; no code is run.

An attribute counts as read where any code names it, of whatever object: this is too careful rather than too bold. It
misses what compiled code does, and names that code makes up, but for `CodeUses.reads_any_name`.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn

from roundpipe.core.attributes import stored_attribute
from roundpipe.effects.bytecode import (
    Methods,
    codes_of,
    instructions_in,
    methods_in,
    methods_of,
    names_by_instruction,
    names_in,
    with_nested,
)
from roundpipe.effects.places import is_library, is_of_packages, package_of


def reads_before_it_sets(kind: type, attribute: str) -> bool:
    """Whether a method of a class reads an attribute above where it sets it, as state from one call to the next."""
    for code in codes_of(kind):
        steps = [instruction for instruction, name in names_by_instruction(code) if name == attribute]
        if steps[:1] == ["LOAD_ATTR"] and "STORE_ATTR" in steps:
            return True
    return False


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
            attributes = stored_attribute(item, "__dict__", {})
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


def _has_code(function: Any) -> bool:
    return isinstance(function, types.FunctionType)


def function_of(function: Any) -> Any:
    """The function of a method, and whatever else can be called itself."""
    return function.__func__ if isinstance(function, types.MethodType) else function


def filled_cells(function: Any) -> Iterator[types.CellType]:
    """The cells of a function's or method's closure that hold something."""
    for cell in stored_attribute(function_of(function), "__closure__") or ():
        with contextlib.suppress(ValueError):
            cell.cell_contents  # noqa: B018 - raises if it is empty
            yield cell


GRADIENT_ATTRIBUTES = frozenset({"requires_grad", "is_leaf", "grad_fn"})
"""Attributes of a tensor that tell whether gradients are recorded."""
_ASKING = GRADIENT_ATTRIBUTES | {"is_grad_enabled", "register_hook", "retain_grad"}
"""Names of what gives another answer, or raises, where gradients are not recorded."""
_RESIZING = frozenset({"resize_", "resize_as_", "fused_moving_avg_obs_fake_quant"})
_CHANGING = frozenset("append extend update pop popleft setdefault add insert clear remove popitem".split())
OPERATORS = frozenset("__call__ __next__ __iter__ __getitem__ __len__ __enter__ __exit__ __float__ __int__".split())
"""Methods that code calls without naming them."""
_ALWAYS_RUN = ("forward", "__call__", "__getattr__", "__getattribute__")
_IS_GRAD_ENABLED = torch.is_grad_enabled
"""Torch's own: while a trace runs, a function around it stands in its place."""

_READS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
"""Instructions that read an attribute. The others with names look up globals, also from a class inside a function."""

_Result = TypeVar("_Result")


def _once_for_each(function: Callable[[Any], _Result]) -> Callable[[Any], _Result]:
    """Remembers the results of a function of a class, or of a code object, and keeps neither alive."""
    results: dict[int, tuple[_Result, weakref.ref[Any]]] = {}
    """By identity: the hash of a code object is that of all that is in it."""

    @functools.wraps(function)
    def remembered(subject: Any) -> _Result:
        key = id(subject)
        if (known := results.get(key)) is not None:
            return known[0]
        result = function(subject)
        results[key] = result, weakref.ref(subject, lambda _: results.pop(key, None))
        return result

    return remembered


@dataclass(frozen=True, slots=True)
class CodeUses:
    """What some code does to attributes, given by their names, to variables and to items."""

    reads: frozenset[str] = frozenset()
    sets: frozenset[str] = frozenset()
    rebinds: bool = False
    """Whether it assigns to globals or to variables of an enclosing function."""
    changes_items: bool = False
    """Whether it assigns items or calls methods that change containers."""
    reads_any_name: bool = False
    """Whether it makes up names of attributes that it reads."""
    variables: frozenset[str] = frozenset()
    """Names that it looks up among globals, and not as attributes."""

    @staticmethod
    def of(codes: Iterable[types.CodeType]) -> CodeUses:
        parts = [_uses_of_code(inner) for code in codes for inner in with_nested(code)]
        reads: frozenset[str] = frozenset().union(*(part.reads for part in parts))
        return CodeUses(
            reads,
            frozenset().union(*(part.sets for part in parts)),
            any(part.rebinds for part in parts),
            any(part.changes_items for part in parts),
            "__dict__" in reads or any(part.reads_any_name for part in parts),
            frozenset().union(*(part.variables for part in parts)),
        )


@_once_for_each
def variables_of(code: types.CodeType) -> list[str]:
    """`CodeUses.variables` of one function alone, sorted."""
    return sorted(frozenset[str]().union(*(_uses_of_code(inner).variables for inner in with_nested(code))))


@_once_for_each  # a model's code is thousands of functions, and taking one apart is slow
def _uses_of_code(code: types.CodeType) -> CodeUses:
    """What one function does, without those inside it."""
    reads: set[str] = set()
    sets: set[str] = set()
    variables: set[str] = set()
    items = False
    for instruction, name in names_by_instruction(code):
        if instruction in _READS:
            reads.add(name)
            items |= name in _CHANGING
        elif instruction == "STORE_ATTR":
            sets.add(name)
        else:
            variables.add(name)
    instructions = instructions_in(code)
    items |= "STORE_SUBSCR" in instructions
    rebinds = "STORE_GLOBAL" in instructions or "STORE_DEREF" in instructions and _rebinds_outer(code)
    if "getattr" in code.co_names:
        reads.update(constant for constant in code.co_consts if isinstance(constant, str))
    asks_by_name = not {"getattr", "vars"}.isdisjoint((*code.co_names, *code.co_freevars, *code.co_cellvars))
    makes_up_names = asks_by_name and _makes_up_names(code)
    return CodeUses(frozenset(reads), frozenset(sets), rebinds, items, makes_up_names, frozenset(variables))


def _rebinds_outer(code: types.CodeType) -> bool:
    """Whether code assigns to variables of an enclosing function."""
    stored = (each.argval for each in dis.get_instructions(code) if each.opname == "STORE_DEREF")
    return bool(code.co_freevars) and not frozenset(code.co_freevars).isdisjoint(stored)


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
    methods = methods_of(kind)
    return CodeUses.of(code for name, codes in methods.items() if name != "__init__" for code in codes).reads


@_once_for_each
def uses_of_forward(kind: type) -> CodeUses:
    """What the forward of a class does, with those of its methods that it may call."""
    return CodeUses.of(codes_of_forward(kind))


def codes_of_forward(kind: type) -> Iterator[types.CodeType]:
    """The code of `methods_of_forward`."""
    return chain.from_iterable(methods_of_forward(kind).values())


_TYPE_TESTS = frozenset({"type", "__class__", "isscalar"})
_NUMPY_KINDS = frozenset({"floating", "inexact", "generic", "float64", "double"})
"""Names of the classes of NumPy's numbers of double precision."""


def asks_for_types(kinds: Iterable[type], functions: Iterable[types.FunctionType], *, of_numpy: bool) -> bool:
    """Whether a user's code may ask which class a value is of, otherwise than by ``isinstance`` and Python's classes.

    ``of_numpy``: whether there are numbers of NumPy's.
    """
    own = (kind for kind in kinds if not is_of_packages(kind))
    codes = chain(*map(codes_of_forward, own), (each.__code__ for each in functions if not is_of_packages(each)))
    tests = _TYPE_TESTS | _NUMPY_KINDS if of_numpy else _TYPE_TESTS
    return any(not tests.isdisjoint(names_in(code)) for code in codes)


def methods_of_forward(kind: type) -> Methods:
    """The methods of a class that its forward may call, and those that run whatever it does."""
    return _called(methods_of(kind), _ALWAYS_RUN)


def uses_of_methods(kind: type, names: Iterable[str]) -> CodeUses:
    """What methods of a class do that code with some names in it may call; operators are taken for called."""
    own = [owner for owner in reversed(kind.__mro__) if not is_library(owner)]
    return CodeUses.of(chain.from_iterable(_called(dict(methods_in(own)), (*names, *OPERATORS)).values()))


def uses_of_properties(kinds: Iterable[type], names: frozenset[str]) -> CodeUses:
    """What those properties of some classes do that have some names."""
    owners = {owner for kind in kinds for owner in kind.__mro__ if not is_library(owner)}
    properties = [value for owner in owners for name, value in vars(owner).items() if name in names]
    getters = [value.fget for value in properties if isinstance(value, property)]
    return CodeUses.of(getter.__code__ for getter in getters if isinstance(getter, types.FunctionType))


def _called(methods: Methods, names: Iterable[str]) -> Methods:
    """Those methods that have some names, and those that they may call."""
    reached: dict[str, tuple[types.CodeType, ...]] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in methods and name not in reached:
            reached[name] = methods[name]
            pending += chain.from_iterable(map(names_in, methods[name]))
    return reached


def uses_of_functions(codes: Iterable[types.CodeType], kinds: Iterable[type]) -> CodeUses:
    """What those functions do that are no methods of some classes."""
    methods = {code for kind in kinds for codes in methods_of(kind).values() for code in codes}
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
    if stored_attribute(function, "__wrapped__", function) is _IS_GRAD_ENABLED:
        return True
    if not isinstance(function, types.FunctionType):
        return False
    code = function.__code__
    return not _ASKING.isdisjoint({*CodeUses.of([code]).reads, *names_in(code)})


@_once_for_each
def changes_sizes(kind: type) -> bool:
    """Whether code of a class, torch's own and that in closures as well, gives a tensor another size in place."""
    for owner in kind.__mro__:
        methods = [each for each in vars(owner).values() if isinstance(each, types.FunctionType)]
        inner = (cell.cell_contents for method in methods for cell in filled_cells(method))
        functions = [*methods, *(each for each in inner if isinstance(each, types.FunctionType))]
        if any(not _RESIZING.isdisjoint(names_in(each.__code__)) for each in functions):
            return True
    return False


def uses_of_hook(hook: Any) -> CodeUses:
    """What a hook does; of an object, its call."""
    function = hook.func if isinstance(hook, functools.partial) else hook
    function = function_of(function)
    if not isinstance(function, types.FunctionType):
        function = vars(type(function)).get("__call__")
    return CodeUses.of([function.__code__] if isinstance(function, types.FunctionType) else [])


def forward_hooks(module: Any) -> Iterator[Any]:
    """The hooks that run before and after a module's forward."""
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()


def hooked_modules(root: nn.Module) -> Iterator[nn.Module]:
    """Modules of a tree that have forward hooks, in order; a quick walk, since every call takes it."""
    pending, seen = [root], {root}
    while pending:
        module = pending.pop()
        if module._forward_hooks or module._forward_pre_hooks:
            yield module
        children = [child for child in module._modules.values() if child is not None and child not in seen]
        seen.update(children)
        pending += reversed(children)


@_once_for_each
def compares_arguments(kind: type) -> bool:
    """Whether the forward of a class, or a method that it may call, asks if two of its arguments are one object."""
    for code in codes_of_forward(kind):
        own = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        names = [each.argval if each.opname == "LOAD_FAST" else None for each in dis.get_instructions(code)]
        for position, instruction in enumerate(dis.get_instructions(code)):
            if instruction.opname == "IS_OP" and {*names[position - 2 : position]} <= {*own}:
                return True
    return False


@_once_for_each
def asks_for_inference_mode(kind: type) -> bool:
    """Whether the forward of a class, or a method that it may call, asks if `torch.inference_mode` is on."""
    return any("is_inference_mode_enabled" in names_in(code) for code in codes_of_forward(kind))
