"""Ctrl-C inside of what does not survive it, such as torch's modes: it comes at the next safe point."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from roundpipe.core.contexts import contextmanager

_Handler = Callable[[int, FrameType | None], Any]


class _Held:
    """The handler of SIGINT while interrupts are held back."""

    def __init__(self, handler: _Handler) -> None:
        self.handler = handler
        self.is_due = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_due:  # the user insists
            self.handler(number, frame)
        self.is_due = True

    def deliver(self) -> None:
        """Do now what the signal asked for, if one came."""
        if self.is_due:
            self.is_due = False
            self.handler(signal.SIGINT, None)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Inside, the first Ctrl-C waits for `safe_point` or the end; in the main thread, and unless it is ignored."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler) or isinstance(handler, _Held):
        yield
        return
    held = _Held(handler)
    try:
        signal.signal(signal.SIGINT, held)
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        held.deliver()


def safe_point() -> None:
    """Called where an exception may pass."""
    held = signal.getsignal(signal.SIGINT)
    if isinstance(held, _Held) and threading.current_thread() is threading.main_thread():
        held.deliver()
