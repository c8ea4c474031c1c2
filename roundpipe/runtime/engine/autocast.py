"""The caller's autocast state, taken in the caller's thread and entered again in a worker's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch


def caller_ambient() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """What the calling thread has switched on, as a factory of contexts for other threads."""
    kinds = ["cpu"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        kinds.append(accelerator.type)
    enabled = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
    if not enabled:
        return contextlib.nullcontext
    cache_enabled = torch.is_autocast_cache_enabled()

    def enter() -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        for kind, dtype in enabled:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache_enabled))
        return stack

    return enter
