"""From ``devices=`` to backends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from roundpipe.core.checks import items_of
from roundpipe.core.errors import ConfigError
from roundpipe.planning import stage_costs
from roundpipe.runtime.device.accelerator import AcceleratorBackend
from roundpipe.runtime.device.backend import Backend, Device
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.device.device_memory import memory_budget_bytes
from roundpipe.runtime.device.host_memory import Registrar

DeviceLike = str | int | torch.device | Device


def resolve_devices(devices: Sequence[DeviceLike] | DeviceLike | None) -> tuple[Device, ...]:
    """The entries of the rotation.

    Args:
        devices: one entry or a list, in which an entry may be repeated; None: all accelerators, or else the CPU.

    Raises:
        ConfigError: the list is empty, or an entry is not a device that is there.
    """
    if devices is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or not torch.accelerator.is_available():
            return (Device("cpu"),)
        return tuple(Device(f"{accelerator.type}:{i}") for i in range(torch.accelerator.device_count()))
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        devices = [devices]
    entries = tuple(map(_resolve_entry, items_of("devices", devices, "a list of names, such as ['cuda:0', 'cuda:1']")))
    if not entries:
        raise ConfigError("devices=[] names no device; give at least one, or None for all accelerators")
    return entries


def _resolve_entry(entry: DeviceLike) -> Device:
    if isinstance(entry, Device):
        resolved = entry
    elif isinstance(entry, int) and not isinstance(entry, bool):
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            raise ConfigError(f"devices: {entry} is an accelerator's index, but torch sees no accelerator; use 'cpu'")
        resolved = Device(f"{accelerator.type}:{entry}")
    elif isinstance(entry, (str, torch.device)):
        try:
            resolved = Device(entry)
        except ConfigError as error:
            raise ConfigError(f"devices: {error}") from None
    else:
        raise ConfigError(
            f"devices: {entry!r} is {type(entry).__name__}; give strings such as 'cuda:0' or 'cpu', torch.device, "
            "an index, or roundpipe.Device"
        )
    device = torch.device(resolved.device)
    if device.type == "cpu":
        return resolved
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if accelerator is None else torch.accelerator.device_count()
    if accelerator is None or accelerator.type != device.type or (device.index or 0) >= count:
        seen = "no accelerator" if accelerator is None else f"{count} x {accelerator.type}"
        raise ConfigError(f"devices: {entry!r} is not there; torch sees {seen}. 'cpu' always works")
    return resolved


def _with_sharing(entries: Sequence[Device]) -> list[tuple[Device, torch.device, int]]:
    """Each entry with its device and the number of entries for that device."""
    devices = [torch.device(entry.device) for entry in entries]
    counts = Counter(devices)
    return [(entry, device, counts[device]) for entry, device in zip(entries, devices, strict=True)]


def largest_layer_bytes(devices: Sequence[DeviceLike] | DeviceLike | None) -> int | None:
    """The most bytes of weights and gradients for a layer on the smallest device; None if no device has a limit."""
    budgets_bytes = [
        entry.memory_bytes if device.type == "cpu" else memory_budget_bytes(entry, num_sharing)
        for entry, device, num_sharing in _with_sharing(resolve_devices(devices))
    ]
    limits_bytes = [budget for budget in budgets_bytes if budget is not None]
    return stage_costs.largest_layer_bytes(min(limits_bytes)) if limits_bytes else None


def open_backends(entries: Sequence[Device]) -> list[Backend]:
    """One backend per entry."""
    return [
        CpuBackend(entry, f"{entry.device} (worker {index})", num_sharing)
        if device.type == "cpu"
        else AcceleratorBackend(entry, f"{entry.device} (worker {index})", num_sharing)
        for index, (entry, device, num_sharing) in enumerate(_with_sharing(entries))
    ]


def open_registrar(backends: Sequence[Backend]) -> Registrar:
    """What pins host memory in place for these devices; `ConfigError` if one of them is no CUDA device."""
    first = backends[0]
    if not isinstance(first, AcceleratorBackend) or any(backend.device.type != "cuda" for backend in backends):
        raise ConfigError(
            "pin_model='register' pins existing memory through CUDA, and devices are "
            f"{', '.join(str(backend.device) for backend in backends)}; use 'alloc' or 'off'"
        )
    return first.registrar()
