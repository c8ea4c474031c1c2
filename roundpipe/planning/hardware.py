"""What the links, the memory and the optimizer of a machine can do, for the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from roundpipe.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """What a machine's links and memory can do; the default takes no time."""

    upload_bytes_per_s: float = inf
    """Host to device, per device."""
    download_bytes_per_s: float = inf
    """Device to host, per device."""
    host_bytes_per_s: float = inf
    """What all transfers and the optimizer together may take of host memory."""
    optimizer_bytes_per_s: float = inf
    """Host memory traffic of the optimizer alone."""
    optimizer_bytes_per_parameter: int = 0
    """Traffic of one update per trained parameter: 44 for copy, gradient and Adam in three passes, 28 in one; 0 = no
    optimizer."""
    prefetch_across_steps: bool = True
    """Whether a worker's first weights of a step come up while it still runs the step before."""
    gradients_stay: bool = True
    """Whether a visit's gradients take device memory until they are down; CPU workers give it back with the visit."""
    inputs_ahead: int = 1
    """Ops whose inputs may come up before their turn: an accelerator's queue runs ahead, a CPU worker has none."""

    @classmethod
    def of_devices(cls, are_accelerators: bool, **figures: Any) -> HardwareProfile:
        return cls(gradients_stay=are_accelerators, inputs_ahead=int(are_accelerators), **figures)

    def __post_init__(self) -> None:
        for name in ("upload_bytes_per_s", "download_bytes_per_s", "host_bytes_per_s", "optimizer_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; a bandwidth must be above 0 (inf: no limit)")
