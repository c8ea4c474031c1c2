"""Where the threads of one model wait for each other: one lock, and a list of who waits for what.

Invariant: whatever threads wait for is changed with `Board.lock` held, and followed by `Board.notify`, which wakes
those whose condition holds now and nobody else. Nothing polls. Device events are not on the board, since nobody tells
when one is done: a thread waits for the event itself, once the board has told it that the event exists.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from roundpipe.core.errors import DeadlockError

DEADLINE_S = 1800.0
"""How long the longest waits take before they are given up: for parameters, and for an update."""


@dataclass(slots=True, eq=False)
class _Wait:
    who: str
    what: str
    condition: Callable[[], bool]
    wake: threading.Condition


class Board:
    """The waits of one model's threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held to change what others may wait for; never held while anything else is waited for."""
        self._waits: list[_Wait] = []

    def notify(self) -> None:
        """Wake whoever can go on; called with the lock held."""
        for wait in self._waits:
            if wait.condition():
                wait.wake.notify()

    def wait(
        self,
        condition: Callable[[], bool],
        who: str,
        what: str,
        timeout_s: float | None = None,
        is_stuck: Callable[[], bool] | None = None,
    ) -> bool:
        """Return once a condition holds, or False after ``timeout_s``.

        The condition must be cheap and never wait: it is called with the lock held, in any thread. With ``is_stuck``
        the wait does not end after that time, but asks it, with the lock held; True raises a `DeadlockError`.
        """
        with self.lock:
            if condition():
                return True
            wait = _Wait(who, what, condition, threading.Condition(self.lock))
            self._waits.append(wait)
            try:
                while not wait.wake.wait_for(condition, timeout_s):
                    if is_stuck is None:
                        return False
                    if is_stuck():
                        waits = "; ".join(f"{each.who} waits for {each.what}" for each in self._waits)
                        raise DeadlockError(f"nobody can go on: {waits}. This is a bug in roundpipe, please report it")
                return True
            finally:
                self._waits.remove(wait)
