"""Devices to plan for: the vendors' figures from ``devices.toml``, and how much of them training reaches.

Invariant: the figures are the vendors'; what is expected of them in practice is `EFFICIENCY`, and only that.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from roundpipe.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a datasheet's figures that a training step sustains."""

    compute: float
    bandwidth: float
    link: float


EFFICIENCY = Efficiency(compute=0.8, bandwidth=0.8, link=0.8)
"""For microbatches of a few thousand tokens and pinned host memory. Compute and device memory add up, each kernel's
reads and writes counted; so blocks of Llama 8B and Qwen3 32B take up to a quarter longer than published on RTX 4090."""


FIGURES = ("memory_bytes", "flops_per_s", "bytes_per_s", "link_bytes_per_s")
"""Of a `DeviceSpec`."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One kind of device; all figures are above zero."""

    name: str
    memory_bytes: int
    flops_per_s: float
    """Dense bf16 peak."""
    bytes_per_s: float
    link_bytes_per_s: float
    """Between host and device, one direction, peak."""
    source: str
    checked: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """By the name of a figure: where else it was found, or what it follows from."""

    def __post_init__(self) -> None:
        for name in FIGURES:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{self.name}: {name} is {getattr(self, name)}; it must be above 0")


_FILE = Path(__file__).with_name("devices.toml")
DEVICES = tuple(DeviceSpec(name, **figures) for name, figures in tomllib.loads(_FILE.read_text("utf-8")).items())


def find_device(name: str) -> DeviceSpec:
    """The device of a name; case, spaces, dashes and a leading RTX don't matter; a `ConfigError` if there is none."""
    for device in DEVICES:
        if _key(name) == _key(device.name):
            return device
    raise ConfigError(
        f"there is no device profile {name!r}; there are {', '.join(device.name for device in DEVICES)}. "
        "For another device give --flops, --memory and --link"
    )


def _key(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower().removeprefix("rtx")
