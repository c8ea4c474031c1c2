"""The state of all random numbers that a model's Python may draw while it is traced."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def python_random_state() -> tuple[Any, ...]:
    """Of the module-level generators of Python and NumPy; can be compared."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), (kind, keys.tobytes(), *rest)


def set_python_random_state(state: tuple[Any, ...]) -> None:
    """Puts the state back that `python_random_state` gave."""
    python, numpy_state = state
    random.setstate(python)
    if numpy_state is not None:
        numpy: Any = sys.modules["numpy"]
        kind, keys, *rest = numpy_state
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Puts back Python's, NumPy's and torch's random state."""
    python, cpu = python_random_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(cpu)
        set_python_random_state(python)
