"""What a function can look up."""

from __future__ import annotations

import functools
import gc
import textwrap
import weakref
from types import BuiltinFunctionType, FunctionType
from typing import Any

import pytest
import torch

from roundpipe.effects.uses import reached_by, uses_of_forward, variables_of

WANTED = object()


class Holder:
    def __init__(self) -> None:
        self.wanted = WANTED
        self.other = object()

    def method(self) -> Any:
        return self.wanted

    def blind(self) -> Any:
        return self.other

    def __call__(self) -> Any:
        return self.wanted


class Blind(Holder):
    def __call__(self) -> Any:
        return self.other


def by_global() -> Any:
    return WANTED


def calls_another() -> Any:
    return by_global()


def in_a_nested_function() -> Any:
    return lambda: WANTED


def by_default(one: Any = WANTED) -> Any:
    return one


def by_keyword_default(*, one: Any = WANTED) -> Any:
    return one


def nothing() -> Any:
    return len("nothing")


def closure(held: Any) -> Any:
    return lambda: held


def unfilled() -> Any:
    def inner() -> Any:
        return later

    function = inner
    if not function:
        later = 3
    return function


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (by_global, True),
        (calls_another, True),
        (in_a_nested_function, True),
        (by_default, True),
        (by_keyword_default, True),
        (closure(WANTED), True),
        (closure([1, WANTED]), True),
        (closure({"one": WANTED}), True),
        (functools.partial(nothing, WANTED), True),
        (functools.partial(by_global), True),
        (Holder().method, True),
        (Holder(), True),
        (Holder().blind, False),
        (Blind(), False),
        (nothing, False),
        (unfilled(), False),
        (len, False),
        (3, False),
    ],
)
def test_what_a_function_reaches(function: Any, expected: bool) -> None:
    assert any(one is WANTED for one in reached_by(function)) == expected


def of_a_module() -> Any:
    return textwrap.dedent("")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (by_global, {by_global}),
        (calls_another, {calls_another, by_global}),
        (closure(calls_another), {calls_another, by_global}),
        (closure(len), {len}),
        (of_a_module, set()),
        (3, set()),
    ],
)
def test_functions_that_a_function_names(function: Any, expected: set[Any]) -> None:
    functions = {value for value in reached_by(function) if isinstance(value, (FunctionType, BuiltinFunctionType))}
    assert functions - {function} == expected - {function}


def test_what_code_looks_up_is_known_of_each_function_and_keeps_none_alive() -> None:
    """Code objects that live one after the other may have one identity, and are told apart all the same."""
    for number in range(50):
        values: dict[str, Any] = {}
        exec(f"def looks_up():\n    return name_{number % 7}", values)
        code = values.pop("looks_up").__code__
        assert variables_of(code) == [f"name_{number % 7}"]
        assert variables_of(code) is variables_of(code)


def test_a_class_whose_uses_are_known_can_go() -> None:
    class Short(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.offset

    assert "offset" in uses_of_forward(Short).reads
    gone = weakref.ref(Short)
    del Short
    gc.collect()
    assert gone() is None
