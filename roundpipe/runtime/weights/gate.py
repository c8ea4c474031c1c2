"""Who may touch a parameter on the host, and when: steps and updates, several of them under way at once.

After an asynchronous update was asked for, the next step begins while the one before is in its last backward stages and
the optimizer's thread hands over: new weights into the model, gradients out of it. Two gates keep them apart, one for
weights and one for gradients, by parameter and numbered: a closing concerns the steps that begin after it.

    closed by   the training thread, before the update is handed to the optimizer's thread
    opened by   the optimizer's thread, each parameter once, also after an error
    awaited by  the engine: before it uploads a parameter, and before it adds a gradient to one

The other way round the optimizer's thread waits for the steps that were running when the update was asked for
(`ParameterUse`): it writes a parameter after their last upload of it, and takes its gradient once they have added it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Protocol

import torch

from roundpipe.core.errors import DeadlockError
from roundpipe.runtime.device.backend import Event
from roundpipe.runtime.threads import DEADLINE_S, Board


class Gate:
    """Parameters that later steps must not touch yet; ``deadline_s`` is how long they wait for one."""

    def __init__(self, deadline_s: float = DEADLINE_S, board: Board | None = None) -> None:
        self._board = board or Board()
        self._deadline_s = deadline_s
        self._closed: dict[int, tuple[int, torch.Tensor]] = {}
        """By a parameter's identity, the number of the closing, and the parameter: to hash a tensor takes Python."""
        self.closings = 0
        """How often it was closed; a step that begins now waits for these closings and for no later ones."""

    def close(self, parameters: Iterable[torch.Tensor]) -> None:
        closed = list(parameters)
        with self._board.lock:
            self.closings += 1
            self._closed.update(zip(map(id, closed), zip(repeat(self.closings), closed, strict=False), strict=True))

    def open(self, parameters: Iterable[torch.Tensor]) -> None:
        with self._board.lock:
            for key in map(id, parameters):
                self._closed.pop(key, None)
            self._board.notify()

    @property
    def is_all_open(self) -> bool:
        """Whether nobody has to wait for any parameter."""
        return not self._closed

    def is_open(self, parameters: Iterable[torch.Tensor], closings: int | None = None) -> bool:
        """Whether `wait` would return at once."""
        last = self.closings if closings is None else closings
        numbers = (known[0] for key in map(id, parameters) if (known := self._closed.get(key)) is not None)
        return not self._closed or all(number > last for number in numbers)

    def wait(self, parameters: Iterable[torch.Tensor], waiter: str, closings: int | None = None) -> None:
        """Return when all closings of these up to a number, or all there are, were opened, or raise a DeadlockError."""
        if not self._closed:
            return
        awaited = list(parameters)
        what = "parameters that the optimizer's thread has"
        if not self._board.wait(lambda: self.is_open(awaited, closings), waiter, what, self._deadline_s):
            num_closed = sum(not self.is_open([parameter], closings) for parameter in awaited)
            raise DeadlockError(
                f"{waiter} waits for {num_closed} parameters that the optimizer's thread took "
                f"{self._deadline_s:.0f} s ago and did not give back"
            )


class Gates:
    """The gates of one model's parameters, and the board that its threads wait at."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.board = Board()
        self.weights = Gate(deadline_s, self.board)
        """Closed until the new weights are in the model."""
        self.gradients = Gate(deadline_s, self.board)
        """Closed until the update has taken the gradients."""
        self.is_writing = False
        """Whether the optimizer's thread writes weights, and steps may wait for them: other work on the host, which
        takes from the same memory bandwidth, waits. Changed with the board's lock held."""
        self.came: Callable[[Iterable[torch.Tensor]], None] = lambda parameters: None
        """Told of parameters to whose gradients a step has added, before `ParameterUse.has_added` says so."""

    def close(self, parameters: Sequence[torch.Tensor]) -> None:
        self.weights.close(parameters)
        self.gradients.close(parameters)

    def open(self, parameters: Sequence[torch.Tensor]) -> None:
        self.weights.open(parameters)
        self.gradients.open(parameters)

    def writes(self, is_writing: bool) -> None:
        """Weights are written from now on, or not for the time being."""
        if is_writing != self.is_writing:
            with self.board.lock:
                self.is_writing = is_writing
                self.board.notify()

    def wait_written(self, waiter: str) -> None:
        """Return when no weights are being written."""
        if self.is_writing:
            self.board.wait(lambda: not self.is_writing, waiter, "weights that are written first")


class ParameterUse(Protocol):
    """What a running step does to parameters, as the optimizer's thread sees it."""

    @property
    def failed(self) -> bool:
        """Whether an error ended the step, so that its gradients are not whole."""

    @property
    def is_under_way(self) -> bool:
        """Whether a device has been given all that its first stage does with a microbatch, or the step is over."""

    def turns(self, parameter: torch.Tensor) -> tuple[int, int, int]:
        """When the step first reads a parameter's weights, when it is done with them, and when with its gradient, as
        numbers to sort by.
        """

    def jobs_of(self, parameters: Iterable[torch.Tensor]) -> tuple[list[int], list[int]]:
        """The jobs that upload some of these, and those that add to their gradients."""

    def uploads(self, jobs: Sequence[int]) -> Sequence[Event] | None:
        """The events after which the weights of these jobs are up, none once it is over; None: not all were begun."""

    def has_added(self, jobs: Sequence[int]) -> bool:
        """Whether these jobs have added their gradients, or the step is over."""


class Steps:
    """The steps of one model; of this class itself, none."""

    def running(self) -> Sequence[ParameterUse]:
        """Those that are not over, in their order."""
        return ()

    @property
    def is_inside(self) -> bool:
        """Whether the calling code runs for one of them."""
        return False

    def refuse_inside(self, what: str) -> None:
        """Raise a `ConfigError` if code that runs for one of them called ``what``."""

    def raise_pending(self) -> None:
        """Raise what one that is over raised that nobody has seen yet."""

    @property
    def num_trained(self) -> int:
        """Training steps that have begun so far."""
        return 0

    def home_s(self) -> float:
        """Seconds in which gradients were added to the host's, and converted for the optimizer, so far."""
        return 0.0

    def wait_idle(self) -> None:
        """Wait until none is running."""

    def finish(self) -> None:
        """Wait until none is running; raises what one of them raised that nobody has seen yet."""
