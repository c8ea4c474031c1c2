"""What comes before a model's second round: seconds by part, each logged as it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping

from roundpipe.core.contexts import contextmanager

logger = logging.getLogger(__name__)

LOGGED_S = 0.1
"""Parts that took less, such as those of a small model, are logged for debugging only."""


class StartLog:
    """Seconds by part, in order, until the first round with gradients is over; later rounds are not timed."""

    def __init__(self, name: str) -> None:
        self.seconds: dict[str, float] = {}
        self._name = name
        self._is_over = False

    @contextmanager
    def part(self, part: str) -> Iterator[None]:
        """Time what is done inside."""
        if self._is_over:
            yield
            return
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._add(part, time.perf_counter() - began_s)
            self._log(part)

    def take_in(self, earlier: Mapping[str, float]) -> None:
        """Count what was timed, and logged, elsewhere."""
        if not self._is_over:
            for part, spent_s in earlier.items():
                self._add(part, spent_s)

    def end(self) -> None:
        """The first round with gradients is over."""
        self._is_over = True

    def _add(self, part: str, spent_s: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + spent_s

    def _log(self, part: str) -> None:
        spent_s = self.seconds[part]
        level = logging.INFO if spent_s >= LOGGED_S else logging.DEBUG
        logger.log(level, "%s, before the second round: %s %.2f s", self._name, part, spent_s)
