"""What is said where a model can't run the pieces of a batch, to wrappers' and to integrations' users."""

from __future__ import annotations

from roundpipe.core.caller import warn
from roundpipe.core.errors import OnlyWholeError, said, shortened


def warn_of_whole(name: str, error: OnlyWholeError, advice: str, *, is_small: bool) -> None:
    """Say that batches run in one piece from now on, since a piece of one has raised this.

    ``is_small``: those that have such a piece, which has too few samples.
    """
    number, what, text = error.num_samples, "a batch", "batches are not cut from now on but run"
    if is_small:
        what = "1 sample" if number == 1 else f"{number} samples"
        text, advice = "a batch with such a piece is not cut but runs", ""
    words = f"the model can't run a piece of {what} by itself ({_words_of(error)}), but the whole batch"
    warn(f"{name}: {words}. So {text} as one microbatch{advice and f'. {advice}'}")


def _words_of(error: OnlyWholeError) -> str:
    return shortened(said(error).partition("\n")[0], 200)
