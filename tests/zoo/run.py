"""Runs rows one after the other in a process of their own, so that a crash or a hang costs one row.

The process reads row names from its standard input and answers each with a line of JSON. It is started again after a
crash, a row that took too long, and every so many rows (classes and caches of other packages pile up).

Invariant: every row asked for has a result when `results_of` ends; each is written down as soon as it is known.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROWS_PER_PROCESS = 60
START_S = 240.0
"""Time that a process gets to start and to list the rows."""


def results_of(keys: Iterable[str], written: Path | None, row_s: float) -> Iterator[dict[str, Any]]:
    """The result of each row, from ``written`` where it is there already.

    Args:
        keys: of the rows.
        written: a file with a line of JSON per finished row, read and appended to; None: keep nothing.
        row_s: seconds that a row may take.
    """
    known = read_results(written) if written is not None else {}
    examiner: _Examiner | None = None
    try:
        for key in keys:
            if key in known:
                yield known[key]
                continue
            if examiner is None or examiner.num_rows >= ROWS_PER_PROCESS:
                if examiner is not None:
                    examiner.stop()
                examiner = _Examiner()
            result = examiner.ask(key, row_s)
            if result is None:
                result = {"key": key, "kind": key.partition("/")[0], "status": "crashed", "cause": examiner.stop()}
                examiner = None
            if written is not None:
                with written.open("a") as file:
                    file.write(json.dumps(result) + "\n")
            yield result
    finally:
        if examiner is not None:
            examiner.stop()


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Row -> its latest result in a file of lines of JSON."""
    if not path.exists():
        return {}
    results = (json.loads(line) for line in path.read_text().splitlines() if line.strip())
    return {result["key"]: result for result in results}


class _Examiner:
    """A process that examines rows."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, "-W", "ignore", "-m", "tests.zoo", "--answer"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._selector = selectors.DefaultSelector()
        for stream in (self._process.stdout, self._process.stderr):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ)
        self._lines = b""
        self._errors = b""
        self._why = ""
        self.num_rows = 0

    def ask(self, key: str, row_s: float) -> dict[str, Any] | None:
        """A row's result; None if the process died or was too slow."""
        assert self._process.stdin is not None
        self.num_rows += 1
        try:
            self._process.stdin.write(f"{key}\n".encode())
            self._process.stdin.flush()
        except OSError:
            return None
        limit = row_s + (START_S if self.num_rows == 1 else 0.0)
        line = self._line(limit)
        return json.loads(line) if line else None

    def _line(self, limit_s: float) -> bytes:
        """The next line that is an answer."""
        stop = time.monotonic() + limit_s
        while b"\n" not in self._lines:
            ready = self._selector.select(max(stop - time.monotonic(), 0.0))
            if not ready:
                self._why = f"took more than {limit_s:.0f} s"
                return b""
            for event, _ in ready:
                data = os.read(event.fd, 65536)
                if not data:
                    self._selector.unregister(event.fileobj)
                if event.fileobj is self._process.stdout:
                    if not data:
                        return b""
                    self._lines += data
                else:
                    self._errors = (self._errors + data)[-2000:]
        line, _, self._lines = self._lines.partition(b"\n")
        return line

    def stop(self) -> str:
        """Ends the process; says why it gave no answer, if it did not."""
        self._selector.close()
        self._process.kill()
        self._process.wait()
        assert self._process.stderr is not None
        self._errors += self._process.stderr.read() or b""
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        last = self._errors.decode(errors="replace").strip().splitlines()
        return self._why or (last[-1] if last else f"exit code {self._process.returncode}")
