"""State around a call that changes what the call does: grad mode, autocast, attention kernels.

Python code sets such state with context managers. A graph has no ``with``, and an enter in one layer
with its exit in another could not be cut apart, so every node carries the difference between its
state and the state around the whole model, and enters it by itself.

Invariant: ``Ambient.current()`` inside ``current.changes_from(base).enter()`` under ``base`` is ``current``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

AttentionKernels = tuple[bool, bool, bool, bool]
"""Whether flash, memory-efficient, math and cuDNN attention are allowed."""


_ONE_AT_A_TIME = threading.RLock()
"""Torch has one setting of attention kernels for all threads: two that restore it crosswise would leave it changed."""


@dataclass(frozen=True, slots=True)
class AutocastState:
    """Autocast for one type of device."""

    device_type: str
    dtype: torch.dtype | None
    """What it casts to; None where it is off, whatever it would cast to."""

    @property
    def enabled(self) -> bool:
        """Whether it is on."""
        return self.dtype is not None


def _attention_kernels() -> AttentionKernels:
    flags = torch.backends.cuda
    return (
        flags.flash_sdp_enabled(),
        flags.mem_efficient_sdp_enabled(),
        flags.math_sdp_enabled(),
        flags.cudnn_sdp_enabled(),
    )


def _allow_attention_kernels(kernels: AttentionKernels) -> None:
    flash, efficient, math, cudnn = kernels
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_mem_efficient_sdp(efficient)
    torch.backends.cuda.enable_math_sdp(math)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


def _accelerator_type() -> str | None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


_DEVICE_TYPES: list[str] = []


def _device_types() -> list[str]:
    """The types of device whose autocast is watched; asked for once, at first use."""
    if not _DEVICE_TYPES:
        _DEVICE_TYPES.extend(dict.fromkeys(["cpu", "cuda", _accelerator_type() or "cpu"]))
    return _DEVICE_TYPES


def autocast_as_on_accelerator() -> AbstractContextManager[object]:
    """On the CPU, where models are traced, the autocast that the caller has switched on for the accelerator."""
    accelerator = _accelerator_type()
    if accelerator is None or not torch.is_autocast_enabled(accelerator):
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.get_autocast_dtype(accelerator))


@dataclass(frozen=True, slots=True)
class Ambient:
    """A state, or the part of one that differs from another; None and ``()`` = no difference."""

    grad: bool | None = None
    """Whether gradients are recorded."""
    autocast: tuple[AutocastState, ...] = ()
    attention_kernels: AttentionKernels | None = None

    @staticmethod
    def current() -> Ambient:
        """The whole state of this thread."""
        autocast = tuple(
            AutocastState(kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)
            for kind in _device_types()
        )
        return Ambient(torch.is_grad_enabled(), autocast, _attention_kernels())

    def changes_from(self, base: Ambient) -> Ambient | None:
        """What of this whole state differs from ``base``, or None."""
        if self == base:
            return None
        return Ambient(
            self.grad if self.grad != base.grad else None,
            tuple(state for state in self.autocast if state not in base.autocast),
            self.attention_kernels if self.attention_kernels != base.attention_kernels else None,
        )

    def enter(self) -> AbstractContextManager[None]:
        """Sets the state, and restores what it was on exit."""
        return self._entered()

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.grad is not None:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            for state in self._autocast_to_enter():
                stack.enter_context(torch.autocast(state.device_type, dtype=state.dtype, enabled=state.enabled))
            if self.attention_kernels is not None:
                stack.enter_context(_ONE_AT_A_TIME)
                stack.callback(_allow_attention_kernels, _attention_kernels())
                _allow_attention_kernels(self.attention_kernels)
            yield

    def _autocast_to_enter(self) -> list[AutocastState]:
        """The autocast changes; one for the CPU, where models are traced, holds for the accelerator too."""
        changed = {state.device_type: state for state in self.autocast}
        accelerator = _accelerator_type()
        if accelerator is not None and "cpu" in changed and accelerator not in changed:
            state = changed["cpu"]
            changed[accelerator] = AutocastState(accelerator, state.dtype)
        return list(changed.values())

    def describe(self) -> str:
        """The state in words, for messages."""
        words = [f"grad mode {'on' if self.grad else 'off'}"] if self.grad is not None else []
        words += [
            f"autocast on {state.device_type} {f'to {state.dtype}' if state.enabled else 'off'}"
            for state in self.autocast
        ]
        if self.attention_kernels is not None:
            names = ("flash", "memory-efficient", "math", "cuDNN")
            allowed = [n for n, on in zip(names, self.attention_kernels, strict=True) if on]
            words.append("attention kernels " + (", ".join(allowed) or "none"))
        return ", ".join(words) or "unchanged"
