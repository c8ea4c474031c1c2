"""State around a call that changes what the call does: grad mode, autocast, attention kernels, saved-tensor hooks.

A graph has no ``with``, and an enter in one layer with its exit in another could not be cut apart, so every node
carries the difference between its modes and those around the whole model, and enters it by itself.

Invariant: ``Modes.current()`` inside ``current.changes_from(base).enter()`` under ``base`` is ``current``.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe.core.contexts import contextmanager

_KERNELS = {
    "flash": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "memory-efficient": (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    "math": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "cuDNN": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
}
"""How torch is asked, and told, whether a kernel of attention is allowed."""
AttentionKernels = tuple[bool, ...]
"""Whether each of `_KERNELS` is allowed."""

_ATTENTION_LOCK = threading.RLock()
"""Torch has one setting of attention kernels for all threads: two that restore it crosswise would leave it changed."""


@dataclass(frozen=True, slots=True)
class AutocastState:
    """Autocast for one type of device."""

    device_type: str
    dtype: torch.dtype | None
    """What it casts to; None where it is off, whatever it would cast to."""

    @property
    def enabled(self) -> bool:
        return self.dtype is not None


@dataclass(frozen=True, slots=True)
class Modes:
    """All modes, or those that differ from others; None and ``()`` = no difference."""

    grad: bool | None = None
    autocast: tuple[AutocastState, ...] = ()
    attention_kernels: AttentionKernels | None = None

    @staticmethod
    def current() -> Modes:
        """All modes of this thread."""
        casts = [torch.get_autocast_dtype(k) if torch.is_autocast_enabled(k) else None for k in _device_types()]
        return _all_modes(torch.is_grad_enabled(), tuple(casts), _attention_kernels())

    def changes_from(self, base: Modes) -> Modes | None:
        """The modes that differ from ``base``, or None if none does; both must be complete."""
        if self == base:
            return None
        return Modes(
            self.grad if self.grad != base.grad else None,
            tuple(state for state in self.autocast if state not in base.autocast),
            self.attention_kernels if self.attention_kernels != base.attention_kernels else None,
        )

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Set the modes, and restore the previous ones on exit."""
        with contextlib.ExitStack() as stack:
            if self.grad is not None:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            for state in self._autocast_to_enter():
                stack.enter_context(torch.autocast(state.device_type, dtype=state.dtype, enabled=state.enabled))
            if self.attention_kernels is not None:
                stack.enter_context(_ATTENTION_LOCK)
                stack.callback(_allow_attention_kernels, _attention_kernels())
                _allow_attention_kernels(self.attention_kernels)
            yield

    def _autocast_to_enter(self) -> list[AutocastState]:
        """The autocast changes; one for the CPU, where models are traced, holds for the accelerator too."""
        changed = {state.device_type: state for state in self.autocast}
        accelerator = _accelerator_type()
        if accelerator is not None and "cpu" in changed and accelerator not in changed:
            changed[accelerator] = AutocastState(accelerator, changed["cpu"].dtype)
        return list(changed.values())

    def describe(self) -> str:
        """The modes in words, for messages."""
        words = [f"grad mode {'on' if self.grad else 'off'}"] if self.grad is not None else []
        words += [
            f"autocast on {state.device_type} {f'to {state.dtype}' if state.enabled else 'off'}"
            for state in self.autocast
        ]
        if self.attention_kernels is not None:
            allowed = [name for name, on in zip(_KERNELS, self.attention_kernels, strict=True) if on]
            words.append("attention kernels " + (", ".join(allowed) or "none"))
        return ", ".join(words) or "unchanged"


def autocast_as_on_accelerator() -> AbstractContextManager[object]:
    """On the CPU, where models are traced, the autocast that the caller has switched on for the accelerator."""
    accelerator = _accelerator_type()
    if accelerator is None or not torch.is_autocast_enabled(accelerator):
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.get_autocast_dtype(accelerator))


def caller_autocast() -> Callable[[], AbstractContextManager[object]]:
    """The calling thread's autocast, as a factory of contexts that other threads enter."""
    device_types = dict.fromkeys(["cpu", _accelerator_type() or "cpu"])
    enabled = [(kind, torch.get_autocast_dtype(kind)) for kind in device_types if torch.is_autocast_enabled(kind)]
    if not enabled:
        return contextlib.nullcontext
    cache_enabled = torch.is_autocast_cache_enabled()

    def enter() -> AbstractContextManager[object]:
        stack = contextlib.ExitStack()
        for kind, dtype in enabled:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache_enabled))
        return stack

    return enter


@contextmanager
def saved_tensor_hooks_aside(which: Callable[[Any], bool] = lambda _: True) -> Iterator[None]:
    """While open, this thread's innermost hooks for saved tensors, up to the first unpack hook that ``which`` denies,
    are not called.
    """
    autograd = torch._C._autograd
    aside = []
    while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None and which(hooks[1]):
        autograd._pop_saved_tensors_default_hooks()
        aside.append(hooks)
    try:
        yield
    finally:
        for hooks in reversed(aside):
            autograd._push_saved_tensors_default_hooks(*hooks)


def has_saved_tensor_hooks() -> bool:
    """Whether this thread has hooks for what autograd saves, as in a checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@functools.lru_cache  # asked for around each operator on fakes, and nearly always the same
def _all_modes(grad: bool, casts: tuple[torch.dtype | None, ...], kernels: AttentionKernels) -> Modes:
    autocast = tuple(AutocastState(kind, dtype) for kind, dtype in zip(_device_types(), casts, strict=True))
    return Modes(grad, autocast, kernels)


def _attention_kernels() -> AttentionKernels:
    return tuple([is_enabled() for is_enabled, _ in _KERNELS.values()])


def _allow_attention_kernels(kernels: AttentionKernels) -> None:
    for (_, enable), is_allowed in zip(_KERNELS.values(), kernels, strict=True):
        enable(is_allowed)


def _accelerator_type() -> str | None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


@functools.cache
def _device_types() -> tuple[str, ...]:
    """The types of device whose autocast is watched."""
    return tuple(dict.fromkeys(["cpu", "cuda", _accelerator_type() or "cpu"]))
