"""What a run takes of its host and its device as it goes, and an end after some time with what there is by then."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from roundpipe.runtime.device.host_limit import available_bytes

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
OUT_OF_TIME = 3
"""The exit code of a run that was ended."""


@dataclass
class Sample:
    """Of one moment."""

    seconds: float
    """Since the watch began."""
    resident_bytes: int
    """Of the process, pinned memory included."""
    available_bytes: int | None
    """What the process may still take of the host."""
    device_bytes: int
    """Allocated on the accelerator."""

    def __str__(self) -> str:
        left = "?" if self.available_bytes is None else f"{self.available_bytes / 1e9:.1f}"
        return (
            f"{self.seconds:6.0f} s: {self.resident_bytes / 1e9:.1f} GB of the host, {left} GB left; "
            f"{self.device_bytes / 1e9:.1f} GB of the device"
        )


class Watch:
    """Says every so many seconds how far it is; after ``limit_s`` it calls ``write`` and ends the process."""

    def __init__(self, device: str, every_s: float, limit_s: float | None, write: Callable[[], None]) -> None:
        self.samples: list[Sample] = []
        self._device = device
        self._every_s = every_s
        self._limit_s = limit_s
        self._write = write
        self._begun_s = time.perf_counter()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._begun_s

    def sample(self) -> Sample:
        """How it is now, which is kept."""
        is_accelerator = self._device != "cpu" and torch.accelerator.is_available()
        device_bytes = torch.accelerator.memory_allocated(self._device) if is_accelerator else 0
        self.samples.append(Sample(self.seconds, resident_bytes(), available_bytes(), device_bytes))
        return self.samples[-1]

    def results(self) -> dict[str, object]:
        """All samples, and the most that the process had of the host."""
        peak_bytes = max((one.resident_bytes for one in self.samples), default=0)
        return {"peak_resident_bytes": peak_bytes, "samples": [asdict(one) for one in self.samples]}

    def _watch(self) -> None:
        wait_s = self._every_s
        while not self._stopped.wait(wait_s):
            print(self.sample(), flush=True)
            if self._limit_s is None:
                continue
            left_s = self._limit_s - self.seconds
            if left_s <= 0:
                print(f"ended after {self.seconds:.0f} s, as asked for", flush=True)
                self._write()
                os._exit(OUT_OF_TIME)
            wait_s = min(self._every_s, left_s)


def resident_bytes() -> int:
    """The process's memory in RAM; 0 where the system does not tell."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * PAGE_BYTES if path.exists() else 0
