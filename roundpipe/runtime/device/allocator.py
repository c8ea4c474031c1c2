"""Lets torch's caching allocator of CUDA grow its pieces of memory, so that what is free can be put together.

Without it each piece keeps the size it was asked for: a small tensor in a piece that was made for logits keeps the rest
from being used for logits again, and gigabytes are reserved that nobody can have. Torch has no public function for it.

Invariant: a choice that the user has made, in the environment or in code, stays. Where the driver has no virtual memory
management, everything stays as it was.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys

import torch

logger = logging.getLogger(__name__)

SETTING = "expandable_segments"
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
PAGE_BYTES = 20 * 1024**2
"""What a segment that can grow grows by, in a stream's pool of large tensors; what is left of it is the stream's."""


@functools.cache
def expand_segments(device: torch.device) -> bool:
    """Whether segments grow on a CUDA device; asked once per process, and allowed then if nobody has decided."""
    if device.type != "cuda" or torch.version.cuda is None or sys.platform != "linux":
        return False
    if torch.cuda.get_allocator_backend() != "native":
        return False
    chosen = " ".join(filter(None, [*map(os.environ.get, VARIABLES), code_settings()]))
    if chosen:
        return f"{SETTING}:true" in chosen.lower().replace(" ", "")
    try:
        change(f"{SETTING}:True")
        was_used = torch.cuda.max_memory_allocated(device)
        with torch.cuda.stream(torch.cuda.Stream(device)):  # its pool is empty: the driver is asked
            torch.empty(1, device=device)
        if not was_used:
            torch.cuda.reset_peak_memory_stats(device)
    except (RuntimeError, AttributeError) as error:
        logger.info("memory of %s is in fixed segments: %s", device, str(error).partition("\n")[0])
        with contextlib.suppress(RuntimeError, AttributeError):
            change(f"{SETTING}:False")
        return False
    return True


def code_settings() -> str:
    """What code has set; empty where torch can't tell."""
    get = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return "" if get is None else str(get())


def change(setting: str) -> None:
    """Set one of the allocator's settings; raises a RuntimeError where that can't be."""
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if setter is None:  # before torch 2.10
        setter = torch.cuda.memory._set_allocator_settings
    setter(setting)
