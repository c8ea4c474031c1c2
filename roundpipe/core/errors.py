"""Every error that roundpipe raises on its own behalf.

A message says what was given, what is allowed and what to do. Exceptions raised by a user's own
code (a layer's forward, ``loss_fn``, ``step_fn``) are never wrapped: they keep their type and gain
a note that says where in the pipeline they were raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def enumerated(names: Sequence[str], most: int = 4) -> str:
    """The first names, for a message, and how many more there are."""
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


def quoted(value: Any, most: int = 80) -> str:
    """A value and its type, for a message; what is longer than ``most`` characters is cut."""
    text = repr(value)
    return f"{text if len(text) <= most else text[: most - 3] + '...'} ({type(value).__name__})"


class RoundPipeError(Exception):
    """Base of all errors raised by roundpipe."""


class ConfigError(RoundPipeError, ValueError):
    """An option or argument can't be used as given."""


class TraceError(RoundPipeError, RuntimeError):
    """A model's Python code can't be captured as a graph."""

    stateful: tuple[str, ...] = ()
    """Names of submodules whose forward changes Python state, so that running it again for a backward is wrong."""
    is_the_models: bool = False
    """Whether the model's forward raises its cause without a trace, too."""
    changes: tuple[str, ...] = ()
    """What the forward changes and computes with, in words."""


class PartitionError(RoundPipeError, ValueError):
    """A graph or chain can't be cut as asked."""


class ScheduleError(RoundPipeError, ValueError):
    """A plan or schedule breaks the rules of rotation."""


class DeviceMemoryError(RoundPipeError, RuntimeError):
    """A device's memory budget can't hold what must be on it at once."""


class DeadlockError(RoundPipeError, RuntimeError):
    """A hand-off between threads did not happen before its deadline."""


class SynchronizationError(RoundPipeError, RuntimeError):
    """A tensor was used on a stream that had not waited for the transfer that fills it."""


class MicrobatchError(RoundPipeError, ValueError):
    """Inputs, labels or outputs can't be split into, or merged from, microbatches."""


class LossError(RoundPipeError, TypeError, RuntimeError):
    """What ``loss_fn`` returned is no loss; eager raises a TypeError for some of it, a RuntimeError for the rest."""


class BackwardError(RoundPipeError, RuntimeError):
    """A backward through a forward's outputs can't be done as asked, or not a second time."""


class NotCopyableError(RoundPipeError, TypeError):
    """A wrapper, which holds threads and device memory, can't be pickled or copied as asked."""


class CheckpointError(RoundPipeError, OSError):
    """A checkpoint can't be written, or what is there can't be read."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint; one that is damaged is another error, so that nobody starts anew over it."""


class ClosedError(RoundPipeError, RuntimeError):
    """A call into a model whose workers were released by ``close()``."""
