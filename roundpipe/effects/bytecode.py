"""Which names the instructions of some code look up: read from its bytes, as `dis` documents them.

`dis` itself describes each instruction in full, which takes ten times as long: a model is thousands of functions.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterator

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
