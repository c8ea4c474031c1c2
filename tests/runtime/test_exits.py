"""A process ends whenever it is told to; the long run is ``python -m tests.campaigns exits``."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.timeout(300)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_signals_at_any_moment_end_a_process_cleanly() -> None:
    command = [sys.executable, "-m", "tests.campaigns", "exits", "--cases", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "'as promised': 3" in done.stdout, done.stdout + done.stderr
