"""Contexts made of generators, through which users' exceptions pass as they were raised."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class GeneratorContext(AbstractContextManager[T]):
    """What `contextmanager` makes: enters by the first step of a generator, leaves by the second."""

    __slots__ = ("_steps",)

    def __init__(self, steps: Generator[T, Any, Any]) -> None:
        self._steps = steps

    def __enter__(self) -> T:
        return next(self._steps)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if error is None:
            next(self._steps, None)
            return None
        try:
            self._steps.throw(error)
        except StopIteration:
            return True
        except BaseException as raised:
            # a StopIteration can't leave a generator
            if raised is not error and not (isinstance(error, StopIteration) and raised.__cause__ is error):
                raise
            BaseException.with_traceback(error, trace)
        return None


def contextmanager(function: Callable[P, Iterator[T]]) -> Callable[P, GeneratorContext[T]]:
    """`contextlib.contextmanager`, but that sets an attribute of exceptions that pass, which frozen ones refuse."""

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> GeneratorContext[T]:
        return GeneratorContext(cast("Generator[T, Any, Any]", function(*args, **kwargs)))

    return make


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Inside, no garbage is collected: objects by the hundred thousand, few of them garbage, make that slow."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def garbage_collected_behind() -> Iterator[None]:
    """The same, but at the end what was made inside and is garbage goes, without a look at all other objects."""
    with garbage_kept():
        yield
    if gc.isenabled():
        gc.collect(0)


@contextmanager
def interrupts_first() -> Iterator[None]:
    """An error that hides an interrupt gives way to it.

    Code that an interrupt cuts short between an action and its note, such as `shutil.rmtree` at a file that it has just
    closed, may fail as it cleans up: what arrives is that error, with the interrupt as its context.
    """
    before = sys.exception()  # what the caller is handling is no news
    try:
        yield
    except Exception as error:
        hidden = error.__context__
        while hidden is not None and hidden is not before:
            if not isinstance(hidden, Exception):
                raise hidden from None
            hidden = hidden.__context__
        raise
