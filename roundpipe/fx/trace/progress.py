"""Shows on stderr, once a trace has taken a while, that it goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from roundpipe.core.contexts import contextmanager

SHOWN_AFTER_S = 2.0


class _Trace:
    def __init__(self, what: str) -> None:
        self.what = what
        self.began_s = time.monotonic()
        self.num_calls = 0
        self.bar: Any = None

    def advance(self) -> None:
        self.num_calls += 1
        if self.bar is not None:
            self.bar.update()
        elif time.monotonic() - self.began_s > SHOWN_AFTER_S:
            from tqdm import tqdm  # only now: it starts a thread

            words = f"roundpipe: tracing {self.what}"
            self.bar = tqdm(desc=words, unit=" calls", initial=self.num_calls, file=sys.stderr, leave=False)


_traces: list[_Trace] = []
"""Those that are under way, the innermost last."""


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Around a trace: counts the calls that `advance` is told of, in a bar if it takes long."""
    _traces.append(trace := _Trace(what))
    try:
        yield
    finally:
        _traces.remove(trace)
        if trace.bar is not None:
            trace.bar.close()


def advance() -> None:
    """One more call was recorded."""
    if _traces:
        _traces[-1].advance()
