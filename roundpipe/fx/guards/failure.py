"""Why a trace does not serve a call, and what is said of traces that follow one another for such reasons."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roundpipe.core.caller import warn
from roundpipe.fx.varying import Varying

RETRACES_BEFORE_WARNING = 5
FEW_MICROBATCHES = 64
"""A trace that served fewer than this before the next one counts as one after the other."""
OF_ARGUMENTS = "Keep it fixed (pad inputs, move it out of forward) to trace once"
OF_MODEL = "Each such change of the model needs a new trace, so make fewer of them"
OF_LOSS = "To trace it once, give the same function at every step, holding the same objects"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a trace does not serve a call."""

    message: str
    varying: tuple[Varying, ...] = ()
    """What varies and the trace has as plain numbers: dimensions of float inputs, and numbers of Python's."""
    number: str = ""
    """The Python number that is another one now, if that is why: in words."""
    fixed_read: str = ""
    """What reads a number of data that code needed itself, though it is an input of the graph; in words."""
    is_of_modes: bool = False
    """Whether it is only that the model or torch is in another mode now, for which there may be another trace."""
    to_fix: str = OF_ARGUMENTS
    """What to do if it comes up at every step and is no number."""

    def __str__(self) -> str:
        return self.message

    @property
    def advice(self) -> str:
        """What to do if it comes up at every step, as a sentence."""
        if not self.number:
            return self.to_fix
        return (
            f"{self.number} is a Python number, and a trace has one value of it where code does more than compute with "
            "it or compare it. Put it into a 0-dim tensor (a buffer of the model, or a tensor that the closure or the "
            "arguments have) and write that in place, as by fill_: "
            "each step reads it anew, without a new trace"
        )


def nearest(failure: Failure | None, other: Failure) -> Failure:
    """The failure of the trace that came nearest to serving a call: of the first in the call's modes, if there is.

    With what varies by any of them.
    """
    first = other if failure is None or (failure.is_of_modes and not other.is_of_modes) else failure
    varying = other.varying if failure is None else (*failure.varying, *other.varying)
    return replace(first, varying=varying)


class Retraces:
    """Counts traces of one thing that follow one another, and warns of them.

    Args:
        words: what is traced.
    """

    def __init__(self, words: str) -> None:
        self._words = words
        self.count = 1
        self.in_a_row = 0
        self._served = 0
        """Microbatches since the last trace."""

    def note_served(self, num_microbatches: int = 1) -> None:
        self._served += num_microbatches

    def note(self, failure: Failure) -> None:
        """It has to be traced again."""
        self.count += 1
        self.in_a_row = self.in_a_row + 1 if self._served < FEW_MICROBATCHES else 1
        self._served = 0
        if self.in_a_row == RETRACES_BEFORE_WARNING:
            warn(
                f"{self._words} was traced {self.count} times, the last {RETRACES_BEFORE_WARNING} one after the "
                f"other. What varies: {failure}. {failure.advice}"
            )
