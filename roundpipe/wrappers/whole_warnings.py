"""What is said where a model, or a loss, can't run the pieces of a batch, to wrappers' and integrations' users."""

from __future__ import annotations

from roundpipe.core.caller import warn
from roundpipe.core.errors import OnlyWholeError, said, shortened


def warn_of_whole(name: str, error: OnlyWholeError, advice: str, *, is_small: bool) -> None:
    """Say that batches run in one piece from now on, since a piece of one has raised this.

    ``is_small``: those that have such a piece, which has too few samples.
    """
    what, text = _pieces_and_batches(error.num_samples if is_small else None, "batches")
    words = f"the model can't run a piece of {what} by itself ({_words_of(error)}), but the whole batch"
    warn(f"{name}: {words}. So {text} as one microbatch{f'. {advice}' if advice and not is_small else ''}")


def warn_of_loss(name: str, error: Exception, too_few: int | None) -> None:
    """The same of a model's loss function; ``too_few``: samples of the piece, if that is why."""
    what, text = _pieces_and_batches(too_few, "its batches")
    words = f"loss_fn can't run a piece of {what} by itself ({_words_of(error)}), but the whole batch"
    warn(
        f"{name}: {words}. So {text} as one microbatch. If the label can be cut in another way, split_label can say how"
    )


def _pieces_and_batches(too_few: int | None, batches: str) -> tuple[str, str]:
    """Of what a piece is, and what runs whole from now on."""
    if too_few is None:
        return "a batch", f"{batches} are not cut from now on but run"
    return "1 sample" if too_few == 1 else f"{too_few} samples", "a batch with such a piece is not cut but runs"


def _words_of(error: Exception) -> str:
    return shortened(said(error).partition("\n")[0], 200)
