"""Where the time of host threads goes that do no worker's work."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from roundpipe.core.contexts import contextmanager
from roundpipe.runtime.profiling.meter import Recorder


class HostLog:
    """A host thread's seconds by lane, and its spans, shown under ``device``, while a timeline is recorded."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.recorder: Recorder | None = None
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.last_s = 0.0
        """When the latest work was done, by ``time.perf_counter``."""
        self._asked_s = 0.0

    def asked(self) -> None:
        """Work is asked for, which begins once the present work is done."""
        self._asked_s = time.perf_counter()

    def begun(self, lane: str) -> None:
        """What was asked for begins: note what has passed in which it could have."""
        self.seconds[lane] += time.perf_counter() - max(self._asked_s, self.last_s)

    @contextmanager
    def doing(self, lane: str, name: str, **args: Any) -> Iterator[None]:
        """Time what is done inside."""
        recorder, start_s = self.recorder, time.perf_counter()
        try:
            yield
        finally:
            end_s = time.perf_counter()
            self.seconds[lane] += end_s - start_s
            self.last_s = end_s
            if recorder is not None:
                recorder.add_host(self.device, lane, name, start_s, end_s, args)
