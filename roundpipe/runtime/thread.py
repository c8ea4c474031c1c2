"""Threads that run what they are handed: one thread, one inbox.

Invariant: a worker's thread holds no reference to what it works for between two jobs, so that the
owner can be garbage collected; its finalizer then closes the inbox and the thread ends. Nothing else ends it: others
may wait for what is in the inbox.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from roundpipe.core.errors import ClosedError

logger = logging.getLogger(__name__)


class TaskThread:
    """One thread that runs callables in the order given.

    Callables must not raise; whoever hands one in catches inside it. If one does, the thread goes on with the next.
    The thread starts at the first one.

    Args:
        name: of the thread.
        on_error: a method that is told, in the thread, what a callable raised; held weakly. None: it is logged.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None] | None = None) -> None:
        self.name = name
        self._on_error = None if on_error is None else weakref.WeakMethod(on_error)
        self._inbox: queue.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._finalizer = weakref.finalize(self, self._inbox.put, None)

    @property
    def is_current(self) -> bool:
        """Whether the calling code runs in this thread."""
        return self._thread is threading.current_thread()

    def submit(self, work: Callable[..., object], *args: Any) -> None:
        """Run ``work(*args)`` in the thread after all that was submitted before.

        Raises:
            ClosedError: the worker was closed.
        """
        if self._closed:
            raise ClosedError(f"worker {self.name} is closed")
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._inbox, self._on_error), name=self.name, daemon=True
            )
            self._thread.start()
        self._inbox.put((work, args))

    def close(self) -> None:
        """End the thread once it has run all that was submitted; safe to call twice."""
        self._closed = True
        self._finalizer()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _serve(
    inbox: queue.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None],
    on_error: weakref.WeakMethod[Callable[[BaseException], None]] | None,
) -> None:
    while True:
        try:
            if (item := inbox.get()) is None:
                return
            item[0](*item[1])
        except BaseException as error:
            _tell(error, on_error)
        finally:
            item = None


def _tell(error: BaseException, on_error: weakref.WeakMethod[Callable[[BaseException], None]] | None) -> None:
    """Say that a callable raised, which it must not."""
    told = None if on_error is None else on_error()
    try:
        if told is not None:
            told(error)
    except BaseException:
        told = None
    if told is None:
        logger.error("%s: an error that nobody was told of", threading.current_thread().name, exc_info=error)
