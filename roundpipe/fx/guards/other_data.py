"""When a model is not traced once more: its code does something else for each batch's data, so a trace serves one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roundpipe.core.errors import TraceCause, TraceError, TraceFacts
from roundpipe.fx.guards.failure import Failure, Retraces
from roundpipe.fx.guards.guards import Guards
from roundpipe.fx.guards.values import readers_of

MOST_TRACES = 1
"""In a row, behind the first, until batches with other data are no longer traced: each takes seconds to minutes."""


class DataTraces:
    """Says when a batch is left to the model's own Python, since one more trace would serve this batch alone.

    Args:
        retraces: counts the traces of the model.
        on_failure: told why, once; it may refuse by raising.
    """

    def __init__(self, retraces: Retraces, on_failure: Callable[[TraceError], None]) -> None:
        self._retraces = retraces
        self._on_failure = on_failure
        self._may_end: bool | None = None
        """Whether the model's own Python may run; None: nobody was asked yet."""
        self.seconds = 0.0
        """That all traces took, with their cuts."""

    def end_for(self, failure: Failure, guards: Guards, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether arguments that no trace serves are left untraced; the guards are those of the latest trace."""
        if self._may_end is False or self._retraces.in_a_row < MOST_TRACES:
            return False
        reads = failure.fixed_read or guards.reads_other_data(args, kwargs)
        if reads and self._may_end is None:
            number = self._retraces.count
            words = (
                f"{reads}, and does something else for each batch. It was traced {number} times, "
                f"{self.seconds / number:.1f} s each. Batches with data that were traced still run in layers"
            )
            try:
                facts = TraceFacts(reading=readers_of(guards.values.reads))
                self._on_failure(TraceError(words, TraceCause.ARGUMENT_DATA, facts))
            except (TraceError, NotImplementedError):
                self._may_end = False
                return False
            self._may_end = True
        return bool(reads)
