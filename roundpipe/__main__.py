"""``python -m roundpipe``."""

from __future__ import annotations

import os
import sys

from roundpipe.tools.command_line import main

INTERRUPTED = 130
"""As a shell reports a program that Ctrl-C ended."""

if __name__ == "__main__":
    try:
        try:
            code = main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has seen enough, as in ``| head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)
