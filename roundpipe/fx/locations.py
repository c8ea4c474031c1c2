"""Which code is the model's, and which line of it runs or has raised."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
import traceback
import types

import torch

_TORCH = os.path.dirname(torch.__file__)
_OUR_FILES = (_TORCH + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_TYPED_IN = ("<stdin>", "<ipython-input", "<console>")

_PYTHONS = sys.stdlib_module_names - {"__main__"}

_ANSWERING_FILES = (
    os.path.join(_TORCH, "__init__.py"),
    os.path.join(_TORCH, "fx", "experimental"),
    os.path.dirname(__file__) + os.sep,
)
"""Where a question about a size passes through."""


def is_model_file(filename: str) -> bool:
    """Whether code in a file belongs to the model rather than to torch or to the tracer."""
    if filename.startswith("<"):  # generated code is nobody's, what a user typed in is the user's
        return filename.startswith(_TYPED_IN)
    return not filename.startswith(_OUR_FILES) and f"{os.sep}sympy{os.sep}" not in filename


def model_location(below: types.CodeType | None = None) -> str:
    """``file:line`` of the model's code that is running, or ``"unknown"``; ``below``: no further out than this code."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not below:
        if is_model_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


def is_within(kinds: tuple[type, ...]) -> bool:
    """Whether the forward of a module of one of these kinds runs."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("self"), kinds):
            return True
        frame = frame.f_back
    return False


def raised_at(error: BaseException | None) -> str:
    """``file:line`` of the innermost line of the model's code in an error's traceback, or nothing."""
    location = ""
    while error is not None and not location:
        for frame, line in traceback.walk_tb(error.__traceback__):
            if is_model_file(frame.f_code.co_filename):
                location = f"{frame.f_code.co_filename}:{line}"
        error = error.__cause__
    return location


def asked_by_operator() -> bool:
    """Whether the question about a size that is being answered comes from torch's code, not a model's."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in ("guard_bool", "guard_int", "guard_float") and frame.f_locals.get("file"):
            return True  # compiled code names its own file
        if not frame.f_code.co_filename.startswith(_ANSWERING_FILES):
            return not is_model_file(frame.f_code.co_filename)
        frame = frame.f_back
    return False


def asking_frame() -> types.FrameType | None:
    """The frame of a model's code that calls the caller, maybe through Python's own library or generated code."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and _is_between(frame):
        frame = frame.f_back
    return frame if frame is not None and is_model_file(frame.f_code.co_filename) else None


_FOR_PEOPLE = frozenset(
    "assert check critical debug error exception info log message print require warn warning".split()
)
"""Words in names of functions that show a text, or raise it as an error."""


def makes_text_for_people(frame: types.FrameType) -> bool:
    """Whether a frame's present statement only calls a function that shows texts or raises them, by its name."""
    innermost = None
    for first, last, name in _calls_in(frame.f_code.co_filename):
        if first <= frame.f_lineno <= last:
            innermost = name  # they are in order
    return innermost is not None and not _FOR_PEOPLE.isdisjoint(innermost.lower().split("_"))


@functools.lru_cache(maxsize=64)
def _calls_in(file: str) -> list[tuple[int, int, str]]:
    """The first and last line of each statement of a file, in order, and what it calls if that is all it does."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # such as a notebook's cell with commands
        return []
    found = []
    for each in (node for node in ast.walk(tree) if isinstance(node, ast.stmt)):
        called = each.value.func if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call) else None
        name = getattr(called, "attr", getattr(called, "id", ""))
        found.append((each.lineno, each.end_lineno or each.lineno, name))
    return sorted(found, key=lambda each: each[0])


def _is_between(frame: types.FrameType) -> bool:
    if frame.f_code.co_filename.startswith("<"):
        return not is_model_file(frame.f_code.co_filename)
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _PYTHONS


def source_at(location: str) -> str:
    """The text of the line at ``file:line``, or nothing."""
    file, _, line = location.rpartition(":")
    return linecache.getline(file, int(line)).strip() if line.isdigit() else ""


def with_source(location: str) -> str:
    """A location with the line's text behind it."""
    source = source_at(location)
    return f"{location} ({source})" if source else location
