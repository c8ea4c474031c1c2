"""A time that only sleep moves on: what is measured by it does not depend on what else the machine does."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest


class Clock:
    """Stands in for the host's; one thread at a time may sleep by it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    with monkeypatch.context() as patched:
        patched.setattr(time, "perf_counter", clock.perf_counter)
        patched.setattr(time, "sleep", clock.sleep)
        yield clock
