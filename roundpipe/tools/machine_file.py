"""What ``doctor --bench`` measured of a machine, as a JSON file that ``plan`` reads.

Invariant: a file is used whole or refused, but for figures that older ones lack; they are sustained ones, as measured.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from roundpipe.core.errors import ConfigError
from roundpipe.reports.tables import format_bytes, format_rate, summary_table
from roundpipe.tools.device_data import EFFICIENCY, DeviceSpec
from roundpipe.tools.doctor import Diagnosis, least_seconds
from roundpipe.tools.optimizer_side import COPY_ACCESSES
from roundpipe.tools.visit_bench import visit_seconds_on

UPDATED_PARAMETERS = 2**24
"""With gradients and two states each 256 MiB, more than caches hold."""
PRODUCT_SIZE = 1024
"""Of the square matrices that the CPU multiplies."""


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """One device of a machine, all of the same kind, and the host."""

    device: str
    memory_bytes: int
    """Of one device; the host's, where the CPU trains."""
    flops_per_s: float
    """A large bf16 matrix product."""
    bytes_per_s: float
    """Device memory, read and written."""
    link_bytes_per_s: float
    """From pinned host memory to a device, or back: the slower of both."""
    host_memory_bytes: int
    host_bytes_per_s: float
    """Host memory, read and written: the most that was reached."""
    update_bytes_per_s: float
    """Host memory, read and written by fused AdamW in float32."""
    conversion_bytes_per_s: float
    """Host memory, read and written on the way from float32 to bfloat16, as weights go into a model."""
    measured: str
    """When, and with which torch."""
    visit_s: float = 0.0
    """What a worker takes to begin a visit of a stage; 0: not measured, as in files before this was."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_text = field.name in ("device", "measured")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            may_be_zero = field.name == "visit_s"
            is_usable = is_number and 0 <= value < math.inf and (may_be_zero or value > 0)
            if isinstance(value, str) != is_text or not is_text and not is_usable:
                allowed = "a text" if is_text else "0 or more" if may_be_zero else "above 0"
                raise ConfigError(f"{field.name} is {value!r}; it must be {allowed}")

    @property
    def spec(self) -> DeviceSpec:
        """The device in peak figures, of which plans take the usual share."""
        return DeviceSpec(
            self.device,
            int(self.memory_bytes),
            self.flops_per_s / EFFICIENCY.compute,
            self.bytes_per_s / EFFICIENCY.bandwidth,
            self.link_bytes_per_s / EFFICIENCY.link,
            self.measured,
        )

    @classmethod
    def read(cls, path: Path) -> MeasuredMachine:
        """Raises a `ConfigError` for what ``doctor --bench`` has not written."""
        try:
            return cls(**json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError, ConfigError) as error:
            raise ConfigError(
                f"--machine {path}: {error}; python -m roundpipe doctor --bench writes such a file"
            ) from error

    def write(self, path: Path) -> None:
        """Raises a `ConfigError` if the file can't be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")
        except OSError as error:
            raise ConfigError(f"{path} can't be written: {error}; give another --machine FILE") from error


def default_path() -> Path:
    """``roundpipe/machine.json`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roundpipe" / "machine.json"


def measure_machine(diagnosis: Diagnosis) -> MeasuredMachine:
    """Measures what a diagnosis leaves out; takes a second.

    Raises:
        ConfigError: a figure could not be measured.
    """
    device, update_bytes_per_s = next(iter(diagnosis.devices), None), _update_bytes_per_s()
    host_bytes_per_s = max(2 * diagnosis.memcpy_bytes_per_s, update_bytes_per_s)
    if device is None:
        name, memory, flops = f"the CPU, {diagnosis.num_threads} threads", diagnosis.host_bytes, _cpu_flops_per_s()
        bandwidth, links = host_bytes_per_s, [diagnosis.memcpy_bytes_per_s]
    else:
        name, memory, bandwidth = device.kind, device.total_bytes, device.bytes_per_s or 0.0
        flops = device.flops_per_s or 0.0
        links = [device.upload_bytes_per_s or 0.0, device.download_bytes_per_s or 0.0]
    return MeasuredMachine(
        device=name,
        memory_bytes=memory or 0,
        flops_per_s=flops,
        bytes_per_s=bandwidth,
        link_bytes_per_s=min(links),
        host_memory_bytes=diagnosis.host_bytes or 0,
        host_bytes_per_s=host_bytes_per_s,
        update_bytes_per_s=update_bytes_per_s,
        conversion_bytes_per_s=_conversion_bytes_per_s(),
        measured=f"measured {time.strftime('%Y-%m-%d')}, torch {torch.__version__}",
        visit_s=visit_seconds_on("cpu" if device is None else device.name),
    )


def _cpu_flops_per_s() -> float:
    matrix = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16)
    return 2 * PRODUCT_SIZE**3 / least_seconds(lambda: matrix @ matrix)


def _update_bytes_per_s() -> float:
    parameter = torch.nn.Parameter(torch.zeros(UPDATED_PARAMETERS))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return UPDATED_PARAMETERS * COPY_ACCESSES["adamw"] * torch.float32.itemsize / least_seconds(optimizer.step)


def _conversion_bytes_per_s() -> float:
    copy, weight = torch.zeros(UPDATED_PARAMETERS), torch.zeros(UPDATED_PARAMETERS, dtype=torch.bfloat16)
    return (copy.nbytes + weight.nbytes) / least_seconds(lambda: weight.copy_(copy))


def measured_text(machine: MeasuredMachine) -> str:
    """The figures, one per line."""
    return summary_table(
        {
            "device": f"{machine.device}, {format_bytes(machine.memory_bytes)}",
            "compute": f"{machine.flops_per_s / 1e12:.3g} TFLOP/s",
            "device memory": format_rate(machine.bytes_per_s),
            "link": format_rate(machine.link_bytes_per_s),
            "host memory": f"{format_bytes(machine.host_memory_bytes)}, {format_rate(machine.host_bytes_per_s)}",
            "updates": f"{format_rate(machine.update_bytes_per_s)} (fused AdamW in float32)",
            "conversions": f"{format_rate(machine.conversion_bytes_per_s)} (float32 to bfloat16)",
            "visits": f"{machine.visit_s * 1e6:.0f} us to begin one" if machine.visit_s else "not measured",
        }
    )
