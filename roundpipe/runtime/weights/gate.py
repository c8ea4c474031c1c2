"""Who may touch a parameter on the host, and when: rounds and optimizer steps, several of them under way at once.

After an asynchronous step the next round begins while the round before is still in its last backward stages and the
optimizer's thread hands over: new weights into the model, gradients out of it. Two gates keep them apart, one for
weights and one for gradients, both by parameter and both numbered: a closing concerns the rounds that are made
after it.

    closed by   the training thread, before the step is handed to the optimizer's thread
    opened by   the optimizer's thread, each parameter once, also after an error
    awaited by  the engine: before it uploads a parameter, and before it adds a gradient to one

The other way round the optimizer's thread waits for the rounds that were running when the step was made (`Uses`):
a parameter is written once these have uploaded it for the last time, and its gradient taken once they have added to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from roundpipe.core.errors import DeadlockError

DEADLINE_S = 1800.0


class Gate:
    """Parameters that later rounds must not touch yet.

    Args:
        deadline_s: how long to wait for a parameter to be opened.
    """

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._condition = threading.Condition()
        self._closed: dict[torch.Tensor, int] = {}
        """By parameter, the number of the closing."""
        self._deadline_s = deadline_s
        self.closings = 0
        """How often it was closed; a round that is made now waits for these closings and for no later ones."""

    def close(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let those who come later wait for these."""
        with self._condition:
            self.closings += 1
            self._closed.update((parameter, self.closings) for parameter in parameters)

    def open(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let these be touched."""
        with self._condition:
            for parameter in parameters:
                self._closed.pop(parameter, None)
            self._condition.notify_all()

    def is_open(self, parameters: Iterable[torch.Tensor], closings: int | None = None) -> bool:
        """Whether `wait` would return at once."""
        closed = self._closed
        if not closed:
            return True
        last = self.closings if closings is None else closings
        return all(closed.get(parameter, last + 1) > last for parameter in parameters)

    def wait(self, parameters: Iterable[torch.Tensor], waiter: str, closings: int | None = None) -> None:
        """Return when all of these are open.

        Args:
            parameters: of the model.
            waiter: who waits, for the message.
            closings: wait for closings up to this number; None: for all.

        Raises:
            DeadlockError: one was not opened before the deadline.
        """
        if not self._closed:
            return
        awaited = list(parameters)
        with self._condition:
            if not self._condition.wait_for(lambda: self.is_open(awaited, closings), self._deadline_s):
                shut = sum(not self.is_open([parameter], closings) for parameter in awaited)
                raise DeadlockError(
                    f"{waiter} waits for {shut} parameters that the optimizer's thread took "
                    f"{self._deadline_s:.0f} s ago and did not give back"
                )


class Gates:
    """The gates of one model's parameters."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.weights = Gate(deadline_s)
        """Closed until the new weights are in the model."""
        self.gradients = Gate(deadline_s)
        """Closed until the step has taken the gradients."""

    def close(self, parameters: Iterable[torch.Tensor]) -> None:
        """Close both."""
        parameters = list(parameters)
        self.weights.close(parameters)
        self.gradients.close(parameters)

    def open(self, parameters: Iterable[torch.Tensor]) -> None:
        """Open both."""
        parameters = list(parameters)
        self.weights.open(parameters)
        self.gradients.open(parameters)


Question = Callable[[], bool]
"""May be asked again and again; never waits."""


class Uses(Protocol):
    """What a running round does to parameters, as the optimizer's thread sees it."""

    def turns(self, parameter: torch.Tensor) -> tuple[int, int]:
        """When the round is done with a parameter's weights and with its gradient, as numbers to sort by."""

    def ask_uploaded(self, parameters: Iterable[torch.Tensor]) -> Question:
        """Asks whether the round has uploaded these for the last time, or is over."""

    def ask_added(self, parameters: Iterable[torch.Tensor]) -> Question:
        """Asks whether the round has added all it will to the gradients of these, or is over."""

    @property
    def failed(self) -> bool:
        """Whether an error ended the round, so that its gradients are not whole."""


class Rounds(Protocol):
    """The rounds of one model."""

    def running(self) -> Sequence[Uses]:
        """Those that are not over, in their order."""

    def refuse_inside(self, what: str) -> None:
        """Raise a `ConfigError` if code that runs for one of them called ``what``."""

    def raise_pending(self) -> None:
        """Raise what one that is over raised that nobody has seen yet."""

    def finish(self) -> None:
        """Wait until none is running; raises what one of them raised that nobody has seen yet."""
