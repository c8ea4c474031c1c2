"""Contexts made of generators: as those of contextlib, but exceptions pass as they are."""

import dataclasses
import gc
import weakref
from pathlib import Path

import pytest

import roundpipe
from roundpipe.core.contexts import contextmanager, garbage_collected_behind, interrupts_first

PACKAGE = Path(roundpipe.__file__).parent


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


@contextmanager
def noted(log, catches=(), raises=None):
    log.append("enter")
    try:
        yield "value"
    except catches:
        log.append("caught")
        if raises is not None:
            raise raises from None
    finally:
        log.append("exit")


def test_the_value_and_the_end():
    log = []
    with noted(log) as value:
        log.append(value)
    assert log == ["enter", "value", "exit"]


@pytest.mark.parametrize("error", [Frozen(1), StopIteration(1), RuntimeError(1), KeyboardInterrupt(), GeneratorExit()])
def test_exceptions_pass(error):
    log = []
    with pytest.raises(type(error)) as caught, noted(log), noted(log):
        raise error
    assert caught.value is error and log == ["enter", "enter", "exit", "exit"]
    frames = [entry.name for entry in caught.traceback]
    assert frames == ["test_exceptions_pass"], "the context's own lines are no part of the story"


def test_a_context_may_catch_and_may_raise_another():
    log = []
    with noted(log, catches=Frozen):
        raise Frozen(1)
    assert log == ["enter", "caught", "exit"]
    with pytest.raises(ValueError, match="another"), noted(log, catches=Frozen, raises=ValueError("another")):
        raise Frozen(1)


def test_an_error_that_hides_an_interrupt_gives_way_to_it():
    interrupt = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as caught, interrupts_first():
        try:
            raise interrupt
        finally:
            try:
                raise ValueError("of cleaning up")
            except ValueError:
                raise OSError("of cleaning up after that")  # noqa: B904
    assert caught.value is interrupt


def test_an_error_that_hides_none_stays():
    with pytest.raises(KeyError), interrupts_first():
        try:
            raise ValueError
        except ValueError:
            raise KeyError  # noqa: B904
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:  # as a script that saves after Ctrl-C
        with pytest.raises(OSError), interrupts_first():
            raise OSError  # noqa: B904


def test_the_library_uses_no_other():
    users = [
        path.name
        for path in PACKAGE.rglob("*.py")
        if "contextlib" in (text := path.read_text())
        and ("contextlib.contextmanager\n" in text or "from contextlib import contextmanager" in text)
    ]
    assert not users


class Knot:
    """Garbage of the kind that only a collection finds, once nobody has it."""

    def __init__(self):
        self.itself = self


def test_garbage_that_was_made_inside_goes_at_the_end():
    gc.collect()
    gc.disable()
    try:
        with garbage_collected_behind():
            kept = weakref.ref(Knot())
        assert kept() is not None and not gc.isenabled(), "who has switched collections off wants none"
    finally:
        gc.enable()
    with garbage_collected_behind():
        made = weakref.ref(Knot())
        assert not gc.isenabled() and made() is not None
    assert made() is None and gc.isenabled()
