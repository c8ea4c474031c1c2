"""Threads that run what they are handed: one thread, one inbox.

Invariant: between two jobs a thread holds no reference to what it works for, so that the owner can be garbage
collected; its finalizer then closes the inbox and the thread ends. Nothing else ends it: others may wait for what is in
the inbox.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from roundpipe.core.errors import ClosedError

logger = logging.getLogger(__name__)

_Inbox = queue.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None]
_OnError = weakref.WeakMethod[Callable[[BaseException], None]] | None


class TaskThread:
    """One thread that runs callables in the order given; it starts at the first one.

    Callables must not raise; whoever hands one in catches inside it. If one does, ``on_error``, a method held weakly,
    is told in the thread, or it is logged; the thread goes on with the next.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None] | None = None) -> None:
        self.name = name
        self._on_error = None if on_error is None else weakref.WeakMethod(on_error)
        self._inbox: _Inbox = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._finalizer = weakref.finalize(self, self._inbox.put, None)

    @property
    def is_current(self) -> bool:
        """Whether the calling code runs in this thread."""
        return self._thread is threading.current_thread()

    def submit(self, work: Callable[..., object], *args: Any) -> None:
        """Run ``work(*args)`` in the thread after all that was submitted before."""
        if self._closed:
            raise ClosedError(f"worker {self.name} is closed")
        if self._thread is None:
            thread = threading.Thread(target=_serve, args=(self._inbox, self._on_error), name=self.name, daemon=True)
            self._thread = thread
            try:
                thread.start()
            except BaseException:
                if not thread.is_alive():  # the system has no more of them; after an interrupt it may run
                    self._thread = None
                raise
        self._inbox.put((work, args))

    def close(self) -> None:
        """End the thread once it has run all that was submitted; safe to call twice."""
        self._closed = True
        self._finalizer()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _serve(inbox: _Inbox, on_error: _OnError) -> None:
    while True:
        try:
            if (item := inbox.get()) is None:
                return
            item[0](*item[1])
        except BaseException as error:
            _tell(error, on_error)
        finally:
            item = None


def _tell(error: BaseException, on_error: _OnError) -> None:
    handler = None if on_error is None else on_error()
    if handler is not None:
        with contextlib.suppress(BaseException):
            return handler(error)
    logger.error("%s: an error that nobody was told of", threading.current_thread().name, exc_info=error)
