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


class DrawingFrom:
    """While open, a device's default generator draws from a seed; afterwards it goes on as if nothing had been.

    Args:
        seed: of everything drawn inside.
        device: whose default generator is meant.
    """

    __slots__ = ("_device", "_lock", "_seed", "_state")

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        with _locks_lock:
            self._lock = _locks.setdefault(device, threading.RLock())

    def __enter__(self) -> None:
        self._lock.acquire()
        generator = default_generator(self._device)
        self._state = generator.get_state()
        generator.manual_seed(self._seed)

    def __exit__(self, *exception: object) -> None:
        default_generator(self._device).set_state(self._state)
        self._lock.release()


class PythonDrawingFrom:
    """The same for the module-level generators of Python and NumPy; open it inside the CPU's `DrawingFrom`.

    It costs as much as a few small operators, so it is for code that is known, or may turn out, to draw there.

    Args:
        seed: of everything drawn inside.
    """

    __slots__ = ("_numpy", "_of_numpy", "_of_python", "_seed", "drew")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.drew = False
        """Whether anything was drawn inside; known once the context is closed."""

    def __enter__(self) -> PythonDrawingFrom:
        self._of_python = random.getstate()
        random.seed(self._seed)
        self._numpy = sys.modules.get("numpy")
        if self._numpy is not None:
            self._of_numpy = self._numpy.random.get_state()
            self._numpy.random.seed(self._seed & 0xFFFFFFFF)
        return self

    def __exit__(self, *exception: object) -> None:
        drawn = random.random()
        random.seed(self._seed)
        self.drew = drawn != random.random()
        random.setstate(self._of_python)
        if self._numpy is not None:
            drawn = self._numpy.random.random_sample()
            self._numpy.random.seed(self._seed & 0xFFFFFFFF)
            self.drew = self.drew or drawn != self._numpy.random.random_sample()
            self._numpy.random.set_state(self._of_numpy)
