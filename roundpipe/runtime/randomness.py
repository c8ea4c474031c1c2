"""Generators that several workers share: drawing from a seed without disturbing anybody.

A generator is one object for a whole device, and for all CPU workers; whoever draws from a seed holds its lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_locks: dict[torch.device, threading.RLock] = {}
_locks_lock = threading.Lock()


def default_generator(device: torch.device) -> torch.Generator:
    """Torch's default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    generators: tuple[torch.Generator, ...] = torch.get_device_module(device).default_generators
    return generators[device.index or 0]


@contextlib.contextmanager
def drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from ``seed`` on a device inside; its default generator goes on afterwards as if nothing had been."""
    with _locks_lock:
        lock = _locks.setdefault(device, threading.RLock())
    with lock:
        generator = default_generator(device)
        state = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(state)
