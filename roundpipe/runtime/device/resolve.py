"""From ``devices=`` to backends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from roundpipe.core.errors import ConfigError
from roundpipe.planning import stage_costs
from roundpipe.runtime.device.accelerator import AcceleratorBackend, memory_budget_bytes
from roundpipe.runtime.device.backend import Backend, Device
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.device.pinning import Registrar

DeviceLike = str | int | torch.device | Device


def resolve_devices(given: Sequence[DeviceLike] | DeviceLike | None) -> tuple[Device, ...]:
    """The entries of the rotation.

    Args:
        given: None for every accelerator that torch sees, otherwise the CPU; or one entry; or a list, in which
            an entry may be repeated.

    Raises:
        ConfigError: the list is empty, or an entry is not a device that is there.
    """
    if given is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or not torch.accelerator.is_available():
            return (Device("cpu"),)
        return tuple(Device(f"{accelerator.type}:{i}") for i in range(torch.accelerator.device_count()))
    if isinstance(given, (str, int, torch.device, Device)):
        given = [given]
    if not isinstance(given, Iterable):
        given = [given]  # which the next line refuses
    entries = tuple(_resolve_one(one) for one in given)
    if not entries:
        raise ConfigError("devices=[] names no device; give at least one, or None for all accelerators")
    return entries


def _resolve_one(given: DeviceLike) -> Device:
    if isinstance(given, Device):
        entry = given
    elif isinstance(given, int) and not isinstance(given, bool):
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            raise ConfigError(f"devices: {given} is an accelerator's index, but torch sees no accelerator; use 'cpu'")
        entry = Device(f"{accelerator.type}:{given}")
    elif isinstance(given, (str, torch.device)):
        entry = Device(given)
    else:
        raise ConfigError(
            f"devices: {given!r} is {type(given).__name__}; give strings such as 'cuda:0' or 'cpu', torch.device, "
            "an index, or roundpipe.Device"
        )
    device = torch.device(entry.device)
    if device.type == "cpu":
        return entry
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        seen = "no accelerator" if accelerator is None else f"{torch.accelerator.device_count()} x {accelerator.type}"
        raise ConfigError(f"devices: {given!r} is not there; torch sees {seen}. 'cpu' always works")
    if device.index is not None and device.index >= torch.accelerator.device_count():
        raise ConfigError(f"devices: {given!r} is not there; torch sees {torch.accelerator.device_count()} devices")
    return entry


def largest_layer_bytes(given: Sequence[DeviceLike] | DeviceLike | None) -> int | None:
    """The most bytes of weights and gradients that a layer should have on the smallest of some devices.

    Args:
        given: as for `resolve_devices`.

    Returns:
        None if none of them has a limit.
    """
    entries = resolve_devices(given)
    sharing = Counter(torch.device(entry.device) for entry in entries)
    budgets_bytes = [
        entry.memory_bytes
        if torch.device(entry.device).type == "cpu"
        else memory_budget_bytes(entry, sharing[torch.device(entry.device)])
        for entry in entries
    ]
    limited = [one for one in budgets_bytes if one is not None]
    return stage_costs.largest_layer_bytes(min(limited)) if limited else None


def open_backends(entries: Sequence[Device]) -> list[Backend]:
    """One backend per entry."""
    backends: list[Backend] = []
    sharing = Counter(torch.device(entry.device) for entry in entries)
    for index, entry in enumerate(entries):
        name = f"{entry.device} (worker {index})"
        if torch.device(entry.device).type == "cpu":
            backends.append(CpuBackend(entry, name))
        else:
            backends.append(AcceleratorBackend(entry, name, sharing[torch.device(entry.device)]))
    return backends


def open_registrar(backends: Sequence[Backend]) -> Registrar:
    """What pins host memory in place for these devices.

    Raises:
        ConfigError: one of them is no CUDA device.
    """
    first = backends[0]
    if not isinstance(first, AcceleratorBackend) or any(one.device.type != "cuda" for one in backends):
        raise ConfigError(
            "pin_model='register' pins existing memory through CUDA, and devices are "
            f"{', '.join(str(one.device) for one in backends)}; use 'alloc' or 'off'"
        )
    return first.registrar()
