"""Ends a campaign in which something hangs."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading

DEADLINE_S = 20.0
"""What a case may take."""


def watch(what: object) -> threading.Timer:
    """Ends the process, with the stacks of its threads, unless the timer is cancelled in time."""

    def hang() -> None:
        print(f"HANG: {what}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(3)

    timer = threading.Timer(DEADLINE_S, hang)
    timer.daemon = True
    timer.start()
    return timer
