"""The thread that writes a checkpoint while training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class BackgroundWriter:
    """The one write of a model that may be under way in a thread of its own.

    ``_error`` is set by the thread before it ends and read after the thread was seen to have ended. The thread is
    not a daemon: the interpreter does not exit in the middle of a checkpoint.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None], name: str) -> None:
        """Run ``write`` in a thread; `wait` comes before the next one."""
        assert self._thread is None

        def run() -> None:
            try:
                write()
            except BaseException as error:  # raised again in the training thread
                logger.error("the checkpoint %s was not written: %s", name, error)
                self._error = error

        self._thread = threading.Thread(target=run, name="roundpipe-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written; raise, once, what the last write raised."""
        if self._thread is not None:
            self._thread.join()
            self.raise_pending()

    def raise_pending(self) -> None:
        """Raise, once, what the last write raised, if it is over; does not wait."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            error, self._error = self._error, None
            if error is not None:
                raise error
