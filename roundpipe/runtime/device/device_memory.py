"""How much of an accelerator's memory plans may count with, and the most that was in use."""

from __future__ import annotations

from collections.abc import Callable

import torch

from roundpipe.runtime.device.backend import Device

PLANNED_SHARE = 0.9
"""Share of a device's memory that plans are made for; the rest is for libraries and for transfers in flight."""
_MOST_LOOKS = 4
"""At what is free, while the allocator takes memory or gives it back."""


def memory_budget_bytes(
    entry: Device, num_sharing: int = 1, others_bytes: int | None = None, fragmentation_bytes: int = 0
) -> int:
    """The memory to plan for: a share of what this process may take of the device now, and of the entry's limit.

    ``others_bytes`` of what the process has allocated are not the runtime's; None: all of it. Where fragmentation is
    known to take more than the plans leave, they leave that.
    """
    device = torch.device(entry.device)
    module = torch.get_device_module(device)
    found_bytes, total_bytes = obtainable_bytes(device)
    taken_bytes = allocated_bytes(device) if others_bytes is None else others_bytes
    usable_bytes = found_bytes - taken_bytes
    if hasattr(module, "get_per_process_memory_fraction"):
        fraction = module.get_per_process_memory_fraction(device.index)
        usable_bytes = min(usable_bytes, int(fraction * total_bytes) - taken_bytes)
    usable_bytes //= num_sharing
    if entry.memory_bytes is not None:
        usable_bytes = min(usable_bytes, entry.memory_bytes)
    return min(int(usable_bytes * PLANNED_SHARE), max(usable_bytes - fragmentation_bytes, 0))


def obtainable_bytes(device: torch.device) -> tuple[int, int]:
    """What torch's allocator has of a device or could have, and all that there is.

    A worker's allocations may move memory from the one to the other between two looks: it is looked again then.
    """
    for _ in range(_MOST_LOOKS):
        reserved_bytes = _reserved_bytes(device)
        free_bytes, total_bytes = torch.get_device_module(device).mem_get_info(device.index)
        if _reserved_bytes(device) == reserved_bytes:
            break
    return free_bytes + reserved_bytes, total_bytes


def peak_allocated_bytes(device: torch.device) -> int:
    """The most that was allocated since torch's mark was last reset."""
    return _figure(device, "allocated_bytes", "peak", torch.accelerator.max_memory_allocated)


def allocated_bytes(device: torch.device) -> int:
    """What is allocated now."""
    return _figure(device, "allocated_bytes", "current", torch.accelerator.memory_allocated)


def _reserved_bytes(device: torch.device) -> int:
    return _figure(device, "reserved_bytes", "current", torch.accelerator.memory_reserved)


def _figure(device: torch.device, name: str, moment: str, otherwise: Callable[[torch.device], int]) -> int:
    """One of the allocator's figures, for pools of all sizes together; 0 before it has any.

    Asked at each call and each visit, and many times for a token of `generate`: torch's own functions for single
    figures, which are asked ``otherwise``, sort a hundred first.
    """
    statistics = getattr(torch.get_device_module(device), "memory_stats_as_nested_dict", None)
    if statistics is None:
        return otherwise(device)
    found = statistics(device)
    return int(found[name]["all"][moment]) if found else 0
