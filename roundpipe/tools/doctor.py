"""``doctor``: what this machine offers to training: versions, devices, memory, pinning, how fast copies are.

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

from roundpipe.reports.tables import format_bytes, format_rate, summary_table
from roundpipe.tools.device_data import EFFICIENCY

PACKAGES = ("roundpipe", "torch", "transformers", "peft", "safetensors")
COPY_BYTES = 128 * 2**20
NUM_REPETITIONS = 5
PRODUCT_SIZE = 8192
"""Of the square matrices that are multiplied."""


@dataclass(frozen=True, slots=True)
class AcceleratorSpec:
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
        flops_per_s, bytes_per_s, link_bytes_per_s = self.flops_per_s, self.bytes_per_s, self.upload_bytes_per_s
        if self.total_bytes is None or flops_per_s is None or bytes_per_s is None or link_bytes_per_s is None:
            return None
        return (
            f"--flops {flops_per_s / EFFICIENCY.compute:.3g} --memory {self.total_bytes} "
            f"--bandwidth {bytes_per_s / EFFICIENCY.bandwidth:.3g} --link {link_bytes_per_s / EFFICIENCY.link:.3g}"
        )


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a machine offers."""

    python: str
    system: str
    versions: dict[str, str | None]
    """None: not installed."""
    devices: list[AcceleratorSpec]
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
        memcpy_bytes_per_s=_copy_rate(
            torch.empty(COPY_BYTES, dtype=torch.uint8), torch.zeros(COPY_BYTES, dtype=torch.uint8)
        ),
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


def _devices(*, pinned: bool) -> list[AcceleratorSpec]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not torch.accelerator.is_available():
        return []
    return [_device(torch.device(accelerator.type, index), pinned) for index in range(torch.accelerator.device_count())]


def _device(device: torch.device, pinned: bool) -> AcceleratorSpec:
    module = torch.get_device_module(device)
    kind, free_bytes, total_bytes, up, down, flops, bandwidth = device.type, None, None, None, None, None, None
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
        bandwidth = 2 * _copy_rate(torch.empty_like(there), there, wait)
        matrix = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=device, dtype=torch.bfloat16)
        flops = 2 * PRODUCT_SIZE**3 / least_seconds(lambda: matrix @ matrix, wait)
    except RuntimeError:  # what was measured until then counts
        pass
    return AcceleratorSpec(str(device), kind, free_bytes, total_bytes, up, down, flops, bandwidth)


def _copy_rate(target: torch.Tensor, source: torch.Tensor, wait: Callable[[], None] = lambda: None) -> float:
    return source.nbytes / least_seconds(lambda: target.copy_(source, non_blocking=True), wait)


def least_seconds(work: Callable[[], object], wait: Callable[[], None] = lambda: None) -> float:
    """The shortest of some repetitions."""
    best_s = float("inf")
    for _ in range(NUM_REPETITIONS):
        wait()
        since = time.perf_counter()
        work()
        wait()
        best_s = min(best_s, time.perf_counter() - since)
    return best_s


def diagnosis_text(diagnosis: Diagnosis) -> str:
    """The diagnosis, one part per line."""
    rows = {"python": f"{diagnosis.python}, {diagnosis.system}"}
    rows |= {package: version or "not installed" for package, version in diagnosis.versions.items()}
    if not diagnosis.devices:
        rows["devices"] = "none; devices=None trains on the CPU"
    for device in diagnosis.devices:
        memory = "memory not known"
        if device.free_bytes is not None and device.total_bytes is not None:
            memory = f"{format_bytes(device.free_bytes)} free of {format_bytes(device.total_bytes)}"
        copies = f"up {_rate(device.upload_bytes_per_s)}, down {_rate(device.download_bytes_per_s)}"
        rows[device.name] = f"{device.kind}, {memory}; copies {copies}"
        if device.plan_options is not None:
            rows[f"{device.name} in a plan"] = device.plan_options
    rows["cpus"] = f"{diagnosis.num_cpus}, {diagnosis.num_threads} threads per operator"
    if diagnosis.host_bytes is not None:
        rows["host memory"] = format_bytes(diagnosis.host_bytes)
        if diagnosis.host_available_bytes is not None:
            rows["host memory"] += f", {format_bytes(diagnosis.host_available_bytes)} unused"
    rows["pinning"] = diagnosis.pinning
    rows["memcpy"] = f"{_rate(diagnosis.memcpy_bytes_per_s)} (measured on {format_bytes(COPY_BYTES)})"
    return summary_table(rows)


def _rate(bytes_per_s: float | None) -> str:
    return "not possible" if bytes_per_s is None else format_rate(bytes_per_s)
