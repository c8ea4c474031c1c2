"""Every error that roundpipe raises on its own behalf.

A message says what is wrong, what is allowed and what to do. Exceptions of a user's own code (a layer's forward,
``loss_fn``, ``step_fn``) are never wrapped: whatever their type, they arrive as they were raised, with a note on where
in the pipeline that was, which only those that refuse notes do without.
"""

from __future__ import annotations

import contextlib
import enum
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def enumerated(names: Sequence[str], most: int = 4) -> str:
    """The first names, for a message, and how many more there are."""
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


def shown(value: Any, most: int = 80) -> str:
    """A value, for a message; what is longer than ``most`` characters is cut."""
    try:
        text = repr(value)
    except Exception:  # a number of more digits than Python writes, a repr of the user's that fails
        text = object.__repr__(value)
    return shortened(text, most)


def shortened(text: str, most: int) -> str:
    """A text, of which what is longer than ``most`` characters is cut."""
    return text if len(text) <= most else text[: most - 3] + "..."


def quoted(value: Any, most: int = 80) -> str:
    """A value and its type, for a message; what is longer than ``most`` characters is cut."""
    return f"{shown(value, most)} ({type(value).__name__})"


def said(error: BaseException) -> str:
    """An exception's text, for a message; a user's own may have none to give."""
    try:
        return str(error)
    except Exception:
        return f"a {type(error).__name__} whose text can't be had"


GRADIENTS_ADDED = "roundpipe: some gradients of this call may have been added; call zero_grad() before trying again"
_RAISED_IN = "roundpipe: raised in "


def add_note(error: BaseException, note: str, unless: str | None = None) -> None:
    """Add a note, unless one begins so already; an exception that refuses it, as frozen ones do, stays as it is."""
    with contextlib.suppress(Exception):
        if not any(other.startswith(unless or note) for other in getattr(error, "__notes__", ())):
            error.add_note(note)


def note_place(error: BaseException, where: str) -> None:
    """Add the note on where an exception was raised, unless code further inside has done so."""
    add_note(error, _RAISED_IN + where, unless=_RAISED_IN)


def is_of_loss(error: BaseException, microbatch: int | None = None) -> bool:
    """Whether an exception was raised in a loss function, as its notes say; for this microbatch, if one is given."""
    end = "phase loss_fn" if microbatch is None else f"microbatch {microbatch}, phase loss_fn"
    notes = (str(note) for note in getattr(error, "__notes__", ()))
    return any(note.startswith(_RAISED_IN) and note.endswith(end) for note in notes)


_OF_SIZES = (
    *("out of range", "out of bounds", "offsets", "must match", "not match", "invalid for input of size"),
    *("cannot reshape", "number of ones in mask", "Expected target size", "to match target batch_size"),
)
"""In errors that a batch may raise that was cut where its tensors belong together."""


def note_cut(
    error: BaseException, number: int | None = None, *, is_of_loss: bool = False, runs_whole: bool = False
) -> None:
    """Say of some errors that the model or ``loss_fn`` was called with one of so many pieces of a batch: maybe why.

    Those are torch's, where it wants several samples for a norm in training, and those about sizes and indices; and
    assertions, which are of sizes more often than not. And all where the model is known to run the whole batch.
    """
    text = said(error)
    if "more than 1 value per channel" in text:
        add_note(
            error,
            "roundpipe: the batch was split into microbatches, and this one has one sample left; plain PyTorch takes "
            "the batch as a whole. Set num_microbatch in RoundPipeRunConfig to at most half the number of samples",
        )
    elif runs_whole or isinstance(error, IndexError | AssertionError) or any(words in text for words in _OF_SIZES):
        cut = f"was called with one of the {number or 'several'} microbatches that the batch was cut into"
        of_loss = 'If it takes samples together, such as groups of answers, use loss_scope="batch" or num_microbatch=1'
        of_model = (
            "along dimension 0, and can run the whole batch: use num_microbatch=1, or say by split_input how it is cut"
            if runs_whole
            else "along dimension 0. If it takes the batch as a whole, its arguments belong together, such as a "
            "graph's nodes and edges: use num_microbatch=1, or say by split_input how they are cut"
        )
        add_note(error, f"roundpipe: {f'loss_fn {cut}. {of_loss}' if is_of_loss else f'the model {cut}, {of_model}'}")


class RaisedIn:
    """A context that notes, at exceptions of users' code, where they were raised.

    ``num_pieces``: how many pieces of a batch a loss function is given, one by one.
    """

    __slots__ = ("_num_pieces", "_where")

    def __init__(self, where: str | Callable[[BaseException], str], num_pieces: int = 1) -> None:
        self._where = where
        self._num_pieces = num_pieces

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            note_place(error, self._where if isinstance(self._where, str) else self._where(error))
            if self._num_pieces > 1 and isinstance(error, Exception):
                note_cut(error, self._num_pieces, is_of_loss=True)


class GradientNote:
    """A context that notes, at exceptions, that gradients of the call may be there, from when ``added`` is set."""

    __slots__ = ("added",)

    def __init__(self, added: bool = True) -> None:
        self.added = added

    def __enter__(self) -> GradientNote:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.added:
            add_note(error, GRADIENTS_ADDED)


def innermost(error: BaseException, names: Mapping[int, str]) -> str | None:
    """The name, by id, of the innermost object whose method raised; None if no method of any did."""
    name = None
    # Not the caller's own frame: reading its variables would make a cycle of frame and error.
    trace = error.__traceback__ and error.__traceback__.tb_next
    while trace is not None:
        name = names.get(id(trace.tb_frame.f_locals.get("self")), name)
        trace = trace.tb_next
    return name


def release_frames(error: BaseException) -> None:
    """Let go of the values in the frames that an error and those behind it passed: they may be on a device."""
    seen: set[BaseException] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        each = errors.pop()
        if each is not None and each not in seen:
            seen.add(each)
            for frame, _ in traceback.walk_tb(each.__traceback__):
                try:
                    frame.clear()
                except RuntimeError:  # it is running, and a copy of its values would outlive the error among them
                    continue
                _ = frame.f_locals  # before Python 3.13 a copy that lives on once it was read; reading renews it
            errors += [each.__cause__, each.__context__]


class RoundPipeError(Exception):
    """Base of all errors raised by roundpipe."""


class ConfigError(RoundPipeError, ValueError):
    """An option or argument can't be used as given."""


class OptionError(ConfigError, TypeError):
    """There is no option of this name here."""


class TraceCause(enum.Enum):
    """What in a model's code stands in the way of a graph."""

    ACTIVATION_DATA = "needs the data of an activation"
    ACTIVATION_LEFT = "leaves an activation where others may take it"
    ACTIVATION_HOOKED = "has a forward hook that keeps an activation"
    ARGUMENT_CHANGED = "puts something into an argument"
    ARGUMENT_DATA = "does something else for each batch's data, so that each has a graph of its own"
    AUTOGRAD = "makes gradients in the forward"
    BUFFER_CREATED = "creates a buffer in the forward"
    BUFFER_DATA = "decides by a buffer that it changes"
    FORWARD_RAISES = "raises an exception on fake tensors"
    LAYOUT = "asks how an activation lies in memory"
    MODEL_ERROR = "raises the same exception without a trace"
    OPAQUE_STATE = "uses an object whose changes can't be seen"
    OTHER = "does something else that a graph can't express"
    PACKED_SEQUENCE = "packs sequences, so that their lengths, which are data, give sizes"
    PARAMETER_REPLACED = "puts another parameter in the place of one"
    RANDOM = "draws random numbers that a graph would repeat"
    STATE = "changes Python state that it computes with"
    UNTRACED_VALUE = "uses a value that nothing recorded"
    WEIGHT_WRITTEN = "writes a parameter or a tensor from outside"


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """Where the cause of a `TraceError` is, and the names it is about; empty where unknown or not applicable."""

    file: str = ""
    """Of the line that can't be recorded."""
    line: int = 0
    """Its number."""
    source: str = ""
    """Its text."""
    module: str = ""
    """Qualified name of the module whose code it is."""
    function: str = ""
    """The function that the line calls."""
    attribute: str = ""
    """The attribute that the forward sets, or the parameter that it writes."""
    changes: tuple[str, ...] = ()
    """What the forward changes and computes with, in words."""
    reading: tuple[str, ...] = ()
    """Qualified names of the modules whose code reads data of the arguments, if that is why."""
    stateful: tuple[str, ...] = ()
    """Names of submodules whose forward changes Python state, so that running it again for a backward is wrong."""


class TraceError(RoundPipeError, RuntimeError):
    """A model's Python code can't be captured as a graph: the cause is what stands in the way, the facts say where."""

    def __init__(
        self, message: str = "", cause: TraceCause = TraceCause.OTHER, facts: TraceFacts | None = None
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.facts = facts or TraceFacts()


class OnlyWholeError(RoundPipeError, RuntimeError):
    """The model can't run one of the pieces that a batch was cut into by itself, and can run the whole.

    Its cause is what the piece raises. Wrappers run the whole then, so only integrations that cut batches
    themselves see it.
    """

    num_samples: int | None = None
    """Of the piece; None where it is not for their number that it can't run, or that is not known."""


class PartitionError(RoundPipeError, ValueError):
    """A graph or chain can't be cut as asked."""


class ScheduleError(RoundPipeError, ValueError):
    """A plan or schedule breaks the rules of rotation."""


OUT_OF_MEMORY_TEXT = " out of memory."


class DeviceMemoryError(RoundPipeError, RuntimeError):
    """A device's memory budget can't hold what must be on it at once.

    The message has the words by which ``accelerate`` knows that a smaller batch may help.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message if OUT_OF_MEMORY_TEXT in message else f"The device is{OUT_OF_MEMORY_TEXT} {message}")


class HostMemoryError(RoundPipeError, MemoryError):
    """The host can't hold what a call is about to take."""


class DeadlockError(RoundPipeError, RuntimeError):
    """A hand-off between threads did not happen before its deadline."""


class RankError(RoundPipeError, RuntimeError):
    """Ranks that train one model can't go on together: one has ended or failed, or is elsewhere in its program."""


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


class ForkError(RoundPipeError, RuntimeError):
    """A wrapper was used in a process that was forked from its own."""


class NonFiniteError(RoundPipeError, FloatingPointError):
    """A NaN or an Inf arose in a call with ``check_finite=True``; says in which layer, microbatch and phase."""


class CheckpointError(RoundPipeError, OSError):
    """A checkpoint can't be written, or what is there can't be read."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint; one that is damaged is another error, so that nobody starts anew over it."""


class CheckpointMisfitError(CheckpointError, ConfigError):
    """A checkpoint is whole, and is not one of this model, optimizer, scheduler or scaler."""


class ClosedError(RoundPipeError, RuntimeError):
    """A call into a model whose workers were released by ``close()``."""
