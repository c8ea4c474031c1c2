"""Generators that several workers share: drawing from a seed without disturbing anybody.

A generator is one object for a whole device, and for all CPU workers; whoever draws from a seed holds its lock.
"""

from __future__ import annotations

import random
import sys
import threading

import torch

_locks: dict[torch.device, threading.RLock] = {}
_locks_lock = threading.Lock()


def default_generator(device: torch.device) -> torch.Generator:
    """Torch's default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    generators: tuple[torch.Generator, ...] = torch.get_device_module(device).default_generators
    return generators[device.index or 0]


class drawing_from:
    """Draw from ``seed`` on a device inside; its default generator goes on afterwards as if nothing had been.

    On the CPU this holds for Python's and NumPy's module-level generators too.

    Args:
        seed: of everything drawn inside.
        device: whose default generator is meant.
    """

    __slots__ = ("_before", "_device", "_lock", "_seed")

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        with _locks_lock:
            self._lock = _locks.setdefault(device, threading.RLock())

    def __enter__(self) -> None:
        self._lock.acquire()
        generator = default_generator(self._device)
        numpy = sys.modules.get("numpy") if self._device.type == "cpu" else None
        self._before = generator.get_state(), random.getstate(), None if numpy is None else numpy.random.get_state()
        generator.manual_seed(self._seed)
        if self._device.type == "cpu":
            random.seed(self._seed)
        if numpy is not None:
            numpy.random.seed(self._seed & 0xFFFFFFFF)

    def __exit__(self, *exception: object) -> None:
        state, of_python, of_numpy = self._before
        default_generator(self._device).set_state(state)
        if self._device.type == "cpu":
            random.setstate(of_python)
        if of_numpy is not None:
            sys.modules["numpy"].random.set_state(of_numpy)
        self._lock.release()
