"""How much host memory is left, and an error before more is taken than that: the system would just end the process.

What counts is the least of what the system has available and what the control groups that the process is in leave, as
those of containers and batch jobs do. Where neither can be read, nothing is checked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from roundpipe.core.errors import HostMemoryError
from roundpipe.reports.tables import format_bytes

RESERVE_BYTES = 128 * 1024**2
"""What is left to the rest of the process and to the system."""
READ_AFTER_BYTES = 1 << 30
"""Bytes that may be taken before it is read anew how much is left, which takes about 0.1 ms."""

_ROOT = Path("/")


def available_bytes(root: Path = _ROOT) -> int | None:
    """Host memory that this process may still take; None if the system does not say. ``root``: of its files."""
    return min(_limits(root), default=None)


def _limits(root: Path) -> Iterator[int]:
    meminfo = _table(root / "proc/meminfo")
    if "MemAvailable:" in meminfo:
        yield meminfo["MemAvailable:"] * 1024
    mounted = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2
            yield from _of_groups(mounted, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            yield from _of_groups(mounted / "memory", path, *names)


def _of_groups(mounted: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """What a group and those around it leave; a container may see its own as the root."""
    group = Path(path.lstrip("/"))
    for folder in dict.fromkeys([group, *group.parents, Path()]):
        most, used = (_number(mounted / folder / name) for name in (limit, usage))
        if most is not None and used is not None:
            yield most - used + _table(mounted / folder / "memory.stat").get(reclaimable, 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _table(path: Path) -> dict[str, int]:
    """Names and numbers, one pair in each line."""
    pairs = [line.split() for line in _lines(path)]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}


def _number(path: Path) -> int | None:
    """The number in a file; None if there is none, as where there is no limit."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


class HostLimit:
    """Checks host memory before it is taken, by whatever thread; reads seldom how much is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until_read_bytes = 0

    def check(self, terms: Mapping[str, int], cached_bytes: Callable[[], int] = lambda: 0) -> None:
        """Raise `HostMemoryError` if the terms' bytes are more than is left, beside what an allocator has cached."""
        needed_bytes = sum(terms.values())
        left_bytes = self._take(needed_bytes, cached_bytes)
        if left_bytes is not None:
            raise HostMemoryError(
                f"host memory is short of {format_bytes(needed_bytes - left_bytes)}: needed are "
                f"{', '.join(f'{format_bytes(size)} for {term}' for term, size in terms.items())}, and "
                f"{format_bytes(left_bytes)} are left (by /proc/meminfo and the control group's limit, less "
                f"{format_bytes(RESERVE_BYTES)}). Use fewer or smaller microbatches, a smaller optim_dtype, "
                "optimizer states of fewer bytes, pin_model='off' for weights that a checkpoint is mapped to, or a "
                "machine with more memory"
            )

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes are left, for what can be done without; then they count as taken."""
        return self._take(num_bytes) is None

    def _take(self, needed_bytes: int, cached_bytes: Callable[[], int] = lambda: 0) -> int | None:
        """None, or what is left if it is less."""
        with self._lock:
            self._until_read_bytes -= needed_bytes
            if self._until_read_bytes >= 0:
                return None
        left_bytes = available_bytes()
        if left_bytes is None:
            return None
        left_bytes = max(left_bytes - RESERVE_BYTES, 0) + cached_bytes()
        if needed_bytes > left_bytes:
            return left_bytes
        with self._lock:
            self._until_read_bytes = min(READ_AFTER_BYTES, (left_bytes - needed_bytes) // 2)
        return None


HOST_LIMIT = HostLimit()
"""The process's."""
