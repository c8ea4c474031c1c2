"""Random generators: drawing from a seed without disturbing anybody, saving states and putting them back.

A device has one generator, and all CPU workers share one; whoever draws from a seed holds its lock.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch

from roundpipe.core.contexts import contextmanager

_locks: dict[torch.device, threading.RLock] = {}
_locks_lock = threading.Lock()


def default_generator(device: torch.device) -> torch.Generator:
    """Torch's default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    generators: tuple[torch.Generator, ...] = torch.get_device_module(device).default_generators
    return generators[device.index or 0]


def _lock_of(device: torch.device) -> threading.RLock:
    with _locks_lock:
        return _locks.setdefault(device, threading.RLock())


@contextmanager
def generator_held(device: torch.device) -> Iterator[None]:
    """While open, nobody else draws from a seed on a device, or on the CPU: the default generators are as they were."""
    with _lock_of(torch.device("cpu")), _lock_of(device):
        yield


class SeededTorch:
    """While open, a device's default generator draws from a seed, or from a state; afterwards its own is as before."""

    __slots__ = ("_device", "_lock", "_seed", "_state")

    def __init__(self, seed: int | torch.Tensor, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._lock = _lock_of(device)

    def __enter__(self) -> None:
        self._lock.acquire()
        generator = default_generator(self._device)
        self._state = generator.get_state()
        if isinstance(self._seed, int):
            generator.manual_seed(self._seed)
        else:
            generator.set_state(self._seed)

    def __exit__(self, *exception: object) -> None:
        default_generator(self._device).set_state(self._state)
        self._lock.release()


def torch_random_states(device: torch.device) -> list[torch.Tensor]:
    """States of torch's default generators of the CPU and a device."""
    return [default_generator(each).get_state() for each in {torch.device("cpu"), device}]


class SeededPython:
    """The same for the module-level generators of Python and NumPy; open it inside the CPU's `SeededTorch`.

    It costs as much as a few small operators, so it is for code that is known to draw there, or may turn out to.
    """

    __slots__ = ("_numpy", "_seed", "_state", "drew")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.drew = False
        """Whether anything was drawn inside; known once the context is closed."""

    def __enter__(self) -> Self:
        self._numpy: Any = sys.modules.get("numpy")
        self._state = python_random_state()
        self._start()
        return self

    def __exit__(self, *exception: object) -> None:
        drawn = self._draw()
        self._start()
        self.drew = drawn != self._draw()
        set_python_random_state(self._state)

    def _start(self) -> None:
        random.seed(self._seed)
        if self._numpy is not None:
            self._numpy.random.seed(self._seed & 0xFFFFFFFF)

    def _draw(self) -> tuple[float, float | None]:
        return random.random(), None if self._numpy is None else self._numpy.random.random_sample()


def python_random_state() -> tuple[Any, ...]:
    """Of the module-level generators of Python and NumPy; can be compared."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), (kind, keys.tobytes(), *rest)


def set_python_random_state(state: tuple[Any, ...]) -> None:
    """Put back a state of `python_random_state`."""
    python, numpy_state = state
    random.setstate(python)
    if numpy_state is not None:
        numpy: Any = sys.modules["numpy"]
        kind, keys, *rest = numpy_state
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Put back Python's, NumPy's and torch's random state at the end."""
    python, cpu = python_random_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(cpu)
        set_python_random_state(python)


def _accelerator(kind: str | None = None) -> tuple[str, Any] | None:
    """The accelerator's type and torch's module for it, if it has been used or is of this type."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator(check_available=True)
    assert device is not None
    module = torch.get_device_module(device)
    if not hasattr(module, "is_initialized"):  # such as MPS, whose generator is asked in another way
        return None
    return (device.type, module) if device.type == kind or module.is_initialized() else None


def portable_random_state() -> dict[str, Any]:
    """State of all generators of torch, Python and, where it is imported, NumPy, as plain values and tensors."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if (accelerator := _accelerator()) is not None:
        kind, module = accelerator
        state["accelerator"] = kind, [module.get_rng_state(i) for i in range(module.device_count())]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _map_leaves(
            numpy.random.get_state(legacy=False),
            lambda leaf: torch.tensor(leaf.tolist()) if isinstance(leaf, numpy.ndarray) else leaf,
        )
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators of a `portable_random_state`, as far as they exist here."""
    torch.set_rng_state(state["torch"].clone())
    random.setstate(state["python"])
    kind, saved = state.get("accelerator", (None, []))
    accelerator = _accelerator(kind)
    if accelerator is not None and accelerator[0] == kind:
        module = accelerator[1]
        for index, state_of_device in enumerate(saved[: module.device_count()]):
            module.set_rng_state(state_of_device.clone(), index)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        kind = numpy.random.get_state(legacy=False)["bit_generator"]
        if kind == state["numpy"]["bit_generator"]:  # another one was installed: the user seeds it
            numpy.random.set_state(
                _map_leaves(
                    state["numpy"],
                    lambda leaf: numpy.array(leaf.tolist(), numpy.uint32) if isinstance(leaf, torch.Tensor) else leaf,
                )
            )


def _map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    return {k: _map_leaves(v, change) for k, v in value.items()} if isinstance(value, dict) else change(value)
