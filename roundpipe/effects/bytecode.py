"""The code of functions and methods, and which names its instructions look up, read from bytes as `dis` documents them.

`dis` itself describes each instruction in full, which takes ten times as long: a model is thousands of functions.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterable, Iterator, Mapping

_UNUSED_BITS = {
    "DELETE_GLOBAL": 0,
    "LOAD_ATTR": 1 if sys.version_info >= (3, 12) else 0,
    "LOAD_FROM_DICT_OR_GLOBALS": 0,
    "LOAD_GLOBAL": 1,
    "LOAD_METHOD": 0,
    "LOAD_NAME": 0,
    "LOAD_SUPER_ATTR": 2,
    "STORE_ATTR": 0,
    "STORE_GLOBAL": 0,
}
"""By instruction that names something: the low bits of its argument that say other things; the rest is an index."""
_NAMING = {dis.opmap[name]: (name, bits) for name, bits in _UNUSED_BITS.items() if name in dis.opmap}


def instructions_in(code: types.CodeType) -> set[str]:
    """The instructions that a function's code is made of, without those of functions inside it."""
    return {dis.opname[opcode] for opcode in {*code.co_code[::2]}}


def names_by_instruction(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """Instructions that look up or store an attribute or a global, in order, each with the name."""
    content, names = code.co_code, code.co_names
    extended = 0
    """What instructions before it add to an argument that has more than one byte."""
    for opcode, argument in zip(content[::2], content[1::2], strict=True):
        if opcode == dis.EXTENDED_ARG:
            extended = (extended | argument) << 8
            continue
        if (known := _NAMING.get(opcode)) is not None:
            instruction, bits = known
            yield instruction, names[(extended | argument) >> bits]
        extended = 0


Methods = Mapping[str, tuple[types.CodeType, ...]]
"""By name, the code of a method, and of what a decorator was put around."""


def codes_of(kind: type) -> Iterator[types.CodeType]:
    """The code of the methods of a class and of those it is made from, overridden ones too, but for torch's."""
    return (code for _, codes in methods_in(_but_torchs(kind)) for code in codes)


def methods_of(kind: type) -> Methods:
    """The methods of a class that nothing overrides, but for torch's."""
    return dict(methods_in(_but_torchs(kind)))


def _but_torchs(kind: type) -> list[type]:
    """The classes that a class is made from, its own last, but for torch's and Python's."""
    owners = reversed(kind.__mro__)
    return [each for each in owners if each.__module__ != "builtins" and not each.__module__.startswith("torch.")]


def methods_in(owners: Iterable[type]) -> Iterator[tuple[str, tuple[types.CodeType, ...]]]:
    """Names and code of all methods of some classes, as `Methods` have them."""
    for owner in owners:
        for name, function in vars(owner).items():
            if isinstance(function, types.FunctionType):
                yield name, _code_layers(function)


def _code_layers(function: types.FunctionType) -> tuple[types.CodeType, ...]:
    """The code of a function, and of what decorators were put around, the innermost last."""
    codes = {function.__code__: None}
    while isinstance(function := function.__dict__.get("__wrapped__"), types.FunctionType):  # type: ignore[assignment]
        if function.__code__ in codes:
            break
        codes[function.__code__] = None
    return tuple(codes)


def with_nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from with_nested(constant)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Names that a function's code may look up, nested functions included."""
    return (name for inner in with_nested(code) for name in inner.co_names)


def words_in(code: types.CodeType) -> Iterator[str]:
    """Strings in a function's code, nested functions included: names of keyword arguments are among them."""
    for inner in with_nested(code):
        for constant in inner.co_consts:
            words = constant if isinstance(constant, tuple) else (constant,)
            yield from (word for word in words if isinstance(word, str))
