"""Whether code acts on what nobody looks at: it prints, writes a file, asks for the time, uses an optimizer.

A graph would do none of that again. It is seen while the code runs, by the functions that it calls.
"""

from __future__ import annotations

import builtins
import functools
import gc
import io
import socket
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from roundpipe.core.contexts import contextmanager

_BUILTINS = (builtins.print, builtins.input, builtins.open)
_OWNERS = (io.IOBase, socket.socket)
_MODULES = frozenset({"datetime", "nt", "os", "posix", "time", "_io", "_socket", "_thread"})
_MAY_ACT = frozenset({"torch", "sympy", "roundpipe", "importlib"})
"""Packages that do so for themselves, such as to import a module."""
_NOT_LOOKED_INTO = frozenset({"torch", "roundpipe"})
"""Packages of whose objects, other than modules and tensors, no guard knows the state."""
_WITHOUT_STATE = (nn.Module, torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Modules and tensors, whose state guards know, and sizes, which have none."""
_WATCHING = threading.local()
"""Per thread: what watches its code inside `refused_outside`."""


class OutsideEffect(Exception):
    """Code acts on what is outside, or asks about it."""


@contextmanager
def refused_outside() -> Iterator[None]:
    """Inside, what this thread does of that raises `OutsideEffect`; at the end again, if the code took that.

    No garbage is collected inside: what is called for it, such as a hook of a profiler, is not the code's doing.
    A profiler of the user's stands aside.
    """
    refused: list[str] = []
    used: list[weakref.ref[Any]] = []

    def watch(frame: types.FrameType, event: str, function: Any) -> None:
        if event != "c_call" and event != "call":
            return
        caller = frame if event == "c_call" else frame.f_back
        if caller is not None and _may_act(str(caller.f_globals.get("__name__", ""))):  # most calls
            return
        if event == "c_call":
            if _acts_outside(function) and _is_of_users(frame):
                refused.append(f"it calls {function.__qualname__}, which a graph would not")
                raise OutsideEffect(refused[0])
        elif _is_of_users(caller):
            if _package(frame) == "os":  # such as its environment
                refused.append(f"it calls os.{frame.f_code.co_qualname}, which a graph would not")
                raise OutsideEffect(refused[0])
            if (owner := _stateful_owner(frame)) is not None:
                with suppress(TypeError):  # of a class without weak references
                    used.append(weakref.ref(owner))

    before: Any = sys.getprofile()
    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(watch)
    _WATCHING.watch = watch
    try:
        yield
    finally:
        _WATCHING.watch = None
        sys.setprofile(None)
        if hasattr(before, "enable"):  # one written in C, which can't be called
            before.enable()
        elif before is not None:
            sys.setprofile(before)
        if collects:
            gc.enable()
        left = [owner for reference in used if (owner := reference()) is not None]  # not made inside
        refused += [f"it uses a {type(owner).__name__}, whose state is not known beforehand" for owner in left]
        if refused:
            raise OutsideEffect(refused[0])


@contextmanager
def nobody_watched(arguments: Iterable[Any]) -> Iterator[None]:
    """Inside run torch and the package alone, which nobody need watch: that makes them take three times as long.

    Args:
        arguments: of torch's function that runs. It may call a function among them, which then is watched.
    """
    watch = getattr(_WATCHING, "watch", None)
    if watch is None or any(map(callable, arguments)):
        yield
        return
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(watch)


def _stateful_owner(frame: types.FrameType) -> Any:
    """The object, of a package that is not looked into, whose method begins to run."""
    code = frame.f_code
    if _package(frame) not in _NOT_LOOKED_INTO or code.co_name.startswith("__torch_"):  # a mode sees a call
        return None
    owner = frame.f_locals.get("self") if code.co_argcount and code.co_varnames[0] == "self" else None
    return owner if hasattr(owner, "__dict__") and not isinstance(owner, _WITHOUT_STATE) else None


def _acts_outside(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, types.ModuleType):
        return function in _BUILTINS if owner is builtins else owner.__name__ in _MODULES
    return isinstance(owner, _OWNERS) or isinstance(owner, type) and owner.__module__ in _MODULES


def _is_of_users(frame: types.FrameType | None) -> bool:
    """Whether it is a user's code that runs, or Python's own library called by it; a log is written by who logs."""
    origin = frame
    while frame is not None and (package := _package(frame)) not in _MAY_ACT:
        frame = frame.f_back
        if package == "logging":
            origin = frame
    while origin is not None:
        package = _package(origin)
        if package in _MAY_ACT:
            return False
        if package == "__main__" or package not in sys.stdlib_module_names:
            return True
        origin = origin.f_back
    return True


def _package(frame: types.FrameType) -> str:
    return _package_of(str(frame.f_globals.get("__name__", "")))


@functools.cache
def _may_act(module: str) -> bool:
    return _package_of(module) in _MAY_ACT


@functools.cache
def _package_of(module: str) -> str:
    return module.partition(".")[0]
