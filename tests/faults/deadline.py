"""Ends a campaign in which something hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator

DEADLINE_S = 20.0
"""What a case may take."""
PATIENCE = 15
IDLE_S = 0.2
"""A process that computes less than this within the deadline hangs."""


@contextlib.contextmanager
def watched(what: object) -> Iterator[None]:
    """Ends the process, with the stacks of its threads, if what runs inside is not over in time.

    As long as the process computes, which takes longer on a busy machine, it waits up to `PATIENCE` times as long.
    """
    is_over = threading.Event()

    def wait() -> None:
        for _ in range(PATIENCE):
            used_s = time.process_time()
            if is_over.wait(DEADLINE_S):
                return
            if time.process_time() - used_s < IDLE_S:
                break
        print(f"HANG: {what}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(3)

    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
