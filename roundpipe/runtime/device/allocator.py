"""Settings of torch's caching allocators of CUDA, for which torch has no public function.

On the device, pieces of memory grow, so that what is free can be put together. Without it each piece keeps the size it
was asked for: a small tensor in a piece that was made for logits keeps the rest from being used for logits again, and
gigabytes are reserved that nobody can have. Where the driver has no virtual memory management, that stays as it was.

On the host, pages are taken from the system by several threads before the driver pins them, which is 3 to 7 times as
fast as to leave both to the driver: 8 to 10 GB/s with 16 threads.

Invariant: a choice that the user has made, in the environment or in code, stays.
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
MAX_PINNING_THREADS = 16
PAGE_BYTES = 20 * 1024**2
"""What a segment that can grow grows by, in a stream's pool of large tensors; what is left of it is the stream's."""


@functools.cache
def expand_segments(device: torch.device) -> bool:
    """Whether segments grow on a CUDA device; asked once per process, and set then if nobody has decided anything."""
    if device.type != "cuda" or torch.version.cuda is None or sys.platform != "linux":
        return False
    if torch.cuda.get_allocator_backend() != "native":
        return False
    chosen = " ".join(filter(None, [*map(os.environ.get, VARIABLES), code_settings()]))
    if chosen:
        return f"{SETTING}:true" in chosen.lower().replace(" ", "")
    try:
        change(f"{SETTING}:True,{pinning()}")
        was_used = torch.cuda.max_memory_allocated(device)
        with torch.cuda.stream(torch.cuda.Stream(device)):  # its pool is empty: the driver is asked
            torch.empty(1, device=device)
        if not was_used:
            torch.cuda.reset_peak_memory_stats(device)
    except (RuntimeError, AttributeError) as error:
        logger.info("memory of %s is in fixed segments: %s", device, str(error).partition("\n")[0])
        with contextlib.suppress(RuntimeError, AttributeError):
            change(f"{SETTING}:False,{pinning()}")
        return False
    return True


def pinning() -> str:
    """How host memory is pinned: by as many threads as there are cores, a power of two."""
    num_threads = 1 << min(os.cpu_count() or 1, MAX_PINNING_THREADS).bit_length() - 1
    return f"pinned_use_cuda_host_register:True,pinned_num_register_threads:{num_threads}"


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
