"""A checkpoint's write in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass

from roundpipe.core.errors import said

logger = logging.getLogger(__name__)


class CheckpointWrite(Future[None]):
    """One save: done once its checkpoint is in place, or will never be.

    `result` and `exception` wait, and what they raise or return counts as seen: no later call raises it.
    """

    is_seen = False

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.is_seen = True
        return error

    def result(self, timeout: float | None = None) -> None:
        if (error := self.exception(timeout)) is not None:
            raise error


@dataclass(slots=True)
class BackgroundWriter:
    """The one write of a model that may be under way in a thread of its own.

    Waits are for the write's future: a ``Thread.join`` that Ctrl-C interrupts takes the thread for ended. The thread
    is not a daemon: the interpreter does not exit in the middle of a checkpoint.
    """

    _write: CheckpointWrite | None = None

    def start(self, write: Callable[[], None], name: str) -> CheckpointWrite:
        """Run ``write`` in a thread; `wait` comes before the next one."""
        assert self._write is None
        self._write = future = CheckpointWrite()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                write()
            except BaseException as error:  # raised again in the training thread
                future.set_exception(error)  # first, since a handler of the log may fail, and others wait for it
                logger.error("the checkpoint %s was not written: %s", name, said(error))
            else:
                future.set_result(None)

        try:
            threading.Thread(target=run, name="roundpipe-checkpoint").start()
        except BaseException:  # no more threads, or an interrupt, after which it may run
            if future.cancel():
                self._write = None
            raise
        return future

    def wait(self) -> None:
        """Return when nothing is being written; raise, once, what the last write raised."""
        if self._write is not None:
            wait_for([self._write])
            self.raise_pending()

    def raise_pending(self) -> None:
        """Raise, once, what the last write raised, if it is over and nobody has seen it; does not wait."""
        write = self._write
        if write is not None and write.done():
            self._write = None
            if not (write.is_seen or write.cancelled()):
                write.result()
