"""Which host weights may be read: closed while an optimizer step hands them over, opened one by one.

An asynchronous step copies new weights into the model, and takes gradients out of it, in the optimizer's
thread while the next round has begun. Uploads of a layer wait only for that layer's parameters.

    closed by   the training thread, before the step is handed to the optimizer's thread, between two rounds
    opened by   the optimizer's thread, each parameter once, also after an error
    awaited by  the engine's workers, before they read a layer's weights
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from roundpipe.errors import DeadlockError

DEADLINE_S = 1800.0


class WeightGate:
    """The gate of one model's parameters.

    Args:
        deadline_s: how long to wait for a parameter to be opened.
    """

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._condition = threading.Condition()
        self._closed: set[torch.Tensor] = set()
        self._deadline_s = deadline_s

    def close(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let later readers wait for these."""
        with self._condition:
            self._closed.update(parameters)

    def open(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let these be read."""
        with self._condition:
            self._closed.difference_update(parameters)
            self._condition.notify_all()

    def wait(self, parameters: Iterable[torch.Tensor], waiter: str) -> None:
        """Return when all of these are open.

        Raises:
            DeadlockError: one was not opened before the deadline.
        """
        if not self._closed:
            return
        awaited = set(parameters)
        with self._condition:
            if not self._condition.wait_for(lambda: self._closed.isdisjoint(awaited), self._deadline_s):
                raise DeadlockError(
                    f"{waiter} waits for {len(self._closed & awaited)} parameters that the optimizer's thread took "
                    f"{self._deadline_s:.0f} s ago and did not give back"
                )
