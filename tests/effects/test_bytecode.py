"""Names by instruction, against what `dis` makes of the same code."""

from __future__ import annotations

import argparse
import dis
import tarfile
import types
import typing
from collections.abc import Iterator

import pytest

from roundpipe.effects.bytecode import instructions_in, names_by_instruction

NAMING = set(
    "LOAD_ATTR LOAD_METHOD LOAD_SUPER_ATTR STORE_ATTR LOAD_GLOBAL STORE_GLOBAL DELETE_GLOBAL LOAD_NAME "
    "LOAD_FROM_DICT_OR_GLOBALS".split()
)


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def codes_of_module(module: types.ModuleType) -> list[types.CodeType]:
    assert module.__file__ is not None
    with open(module.__file__, encoding="utf-8") as file:
        return list(codes_in(compile(file.read(), module.__file__, "exec")))


def with_many_names() -> types.CodeType:
    """Of more names than an index of one byte tells, and of more than half as many."""
    lines = [f"    x.name_{index} = global_{index} + x.method_{index}()" for index in range(300)]
    source = "\n".join(["def run(x):", "    global global_7, global_8", *lines, "    global_7 = x", "    del global_8"])
    return next(code for code in codes_in(compile(source, "<many>", "exec")) if code.co_name == "run")


def with_a_class() -> types.CodeType:
    source = """
class Outer(Base):
    def run(self):
        value = self.one
        class Inner:
            two = value
            three = from_globals
            items = [self.four for self in three]
        self.kept[0] = super().run(Inner)
        return value
"""
    return compile(source, "<class>", "exec")


@pytest.mark.parametrize("module", [argparse, tarfile, typing], ids=lambda module: module.__name__)
def test_names_are_those_of_dis(module: types.ModuleType) -> None:
    for code in [*codes_of_module(module), with_many_names(), *codes_in(with_a_class())]:
        known = list(dis.get_instructions(code))
        assert list(names_by_instruction(code)) == [
            (each.opname, each.argval) for each in known if each.opname in NAMING
        ], code
        assert instructions_in(code) >= {each.opname for each in known}


def test_every_kind_of_instruction_is_seen() -> None:
    found = {instruction for code in codes_of_module(tarfile) for instruction, _ in names_by_instruction(code)}
    assert {"LOAD_ATTR", "STORE_ATTR", "LOAD_GLOBAL", "LOAD_NAME"} <= found
    found = {instruction for instruction, _ in names_by_instruction(with_many_names())}
    assert {"STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_GLOBAL"} <= found
