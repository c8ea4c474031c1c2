"""What this machine offers to training: versions, devices, memory, pinning, how fast copies are.

Invariant: a part that can't be asked or measured says so in its place; looking never fails, and holds at most a few
hundred megabytes, given back at the end.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from roundpipe.reports.quantities import format_bytes
from roundpipe.reports.tables import summary_table
from roundpipe.tools.device_data import EFFICIENCY

PACKAGES = ("roundpipe", "torch", "transformers", "peft", "safetensors")
COPY_BYTES = 128 * 2**20
NUM_COPIES = 5
PRODUCT_SIZE = 8192
"""Of the square matrices that are multiplied."""


@dataclass(frozen=True, slots=True)
class DeviceFound:
    """One accelerator that torch sees."""

    name: str
    kind: str
    free_bytes: int | None
    total_bytes: int | None
    upload_bytes_per_s: float | None
    """From pinned memory if there is any; None: the copy failed."""
    download_bytes_per_s: float | None
    flops_per_s: float | None = None
    """Sustained by a large bf16 matrix product; None: it failed."""
    bytes_per_s: float | None = None
    """Device memory, read and written by a copy on the device; None: it failed."""

    @property
    def plan_options(self) -> str | None:
        """This device as options of ``plan``, in peak figures as it takes them; None: not all is known."""
        if self.total_bytes is None or None in (self.flops_per_s, self.bytes_per_s, self.upload_bytes_per_s):
            return None
        assert self.flops_per_s is not None and self.bytes_per_s is not None and self.upload_bytes_per_s is not None
        return (
            f"--flops {self.flops_per_s / EFFICIENCY.compute:.3g} --memory {self.total_bytes} "
            f"--bandwidth {self.bytes_per_s / EFFICIENCY.bandwidth:.3g} "
            f"--link {self.upload_bytes_per_s / EFFICIENCY.link:.3g}"
        )


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that was found."""

    python: str
    system: str
    versions: dict[str, str | None]
    """None: not installed."""
    devices: list[DeviceFound]
    num_cpus: int
    num_threads: int
    """Of one operator; every CPU worker uses as many."""
    host_bytes: int | None
    host_available_bytes: int | None
    pinning: str
    """``"yes"``, or why not."""
    memcpy_bytes_per_s: float


def diagnose() -> Diagnosis:
    """Looks at the machine; takes about a second, and a few more per accelerator."""
    pinning = _pinning()
    return Diagnosis(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        versions={package: _version(package) for package in PACKAGES},
        devices=_devices(pinned=pinning == "yes"),
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        host_bytes=_pages("SC_PHYS_PAGES"),
        host_available_bytes=_pages("SC_AVPHYS_PAGES"),
        pinning=pinning,
        memcpy_bytes_per_s=_host_copy_rate(),
    )


def _version(package: str) -> str | None:
    if package == "torch":
        return str(torch.__version__)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pages(name: str) -> int | None:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not POSIX, or not this name
        return None


def _pinning() -> str:
    if not torch.accelerator.is_available():
        return "no: torch sees no accelerator to pin for"
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError as error:
        return f"no: {str(error).splitlines()[0]}"
    return "yes"


def _devices(*, pinned: bool) -> list[DeviceFound]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not torch.accelerator.is_available():
        return []
    return [_device(torch.device(accelerator.type, index), pinned) for index in range(torch.accelerator.device_count())]


def _device(device: torch.device, pinned: bool) -> DeviceFound:
    module = torch.get_device_module(device)
    kind, free_bytes, total_bytes, up, down = device.type, None, None, None, None
    try:
        kind = module.get_device_name(device)
        free_bytes, total_bytes = module.mem_get_info(device)
    except (AttributeError, RuntimeError):  # not every backend tells, and a device may be unusable
        pass
    try:
        here = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=pinned)
        there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)

        def wait() -> None:
            torch.accelerator.synchronize(device)

        up, down = _copy_rate(there, here, wait), _copy_rate(here, there, wait)
    except RuntimeError:
        return DeviceFound(str(device), kind, free_bytes, total_bytes, up, down)
    flops, bandwidth = None, None
    try:
        bandwidth = 2 * _copy_rate(torch.empty_like(there), there, wait)
        flops = _product_rate(device, wait)
    except RuntimeError:
        pass
    return DeviceFound(str(device), kind, free_bytes, total_bytes, up, down, flops, bandwidth)


def _product_rate(device: torch.device, wait: Callable[[], None], size: int = PRODUCT_SIZE) -> float:
    """FLOPs per second of the best of a few bf16 matrix products."""
    one = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    best_s = float("inf")
    for _ in range(NUM_COPIES):
        wait()
        since = time.perf_counter()
        one @ one
        wait()
        best_s = min(best_s, time.perf_counter() - since)
    return 2 * size**3 / best_s


def _host_copy_rate() -> float:
    return _copy_rate(torch.empty(COPY_BYTES, dtype=torch.uint8), torch.zeros(COPY_BYTES, dtype=torch.uint8))


def _copy_rate(target: torch.Tensor, source: torch.Tensor, wait: Callable[[], None] = lambda: None) -> float:
    """Bytes per second of the best of a few copies."""
    best_s = float("inf")
    for _ in range(NUM_COPIES):
        wait()
        since = time.perf_counter()
        target.copy_(source, non_blocking=True)
        wait()
        best_s = min(best_s, time.perf_counter() - since)
    return source.nbytes / best_s


def diagnosis_text(found: Diagnosis) -> str:
    """The findings, one per line."""
    rows = {"python": f"{found.python}, {found.system}"}
    rows |= {package: version or "not installed" for package, version in found.versions.items()}
    if not found.devices:
        rows["devices"] = "none; devices=None trains on the CPU"
    for device in found.devices:
        memory = "memory not known"
        if device.free_bytes is not None and device.total_bytes is not None:
            memory = f"{format_bytes(device.free_bytes)} free of {format_bytes(device.total_bytes)}"
        copies = f"up {_rate(device.upload_bytes_per_s)}, down {_rate(device.download_bytes_per_s)}"
        rows[device.name] = f"{device.kind}, {memory}; copies {copies}"
        if device.plan_options is not None:
            rows[f"{device.name} in a plan"] = device.plan_options
    rows["cpus"] = f"{found.num_cpus}, {found.num_threads} threads per operator"
    if found.host_bytes is not None:
        rows["host memory"] = format_bytes(found.host_bytes)
        if found.host_available_bytes is not None:
            rows["host memory"] += f", {format_bytes(found.host_available_bytes)} unused"
    rows["pinning"] = found.pinning
    rows["memcpy"] = f"{_rate(found.memcpy_bytes_per_s)} (measured on {format_bytes(COPY_BYTES)})"
    return summary_table(rows)


def _rate(bytes_per_s: float | None) -> str:
    return "not possible" if bytes_per_s is None else f"{bytes_per_s / 1e9:.1f} GB/s"
