"""Devices to plan for, as data: what vendors print, and how much of it training reaches.

Figures are those of the named documents: dense bf16 with float32 accumulation (never the sparse figure), memory
bandwidth, and one direction of the host link. Vendors' "GB" of device memory are binary here, as drivers report them;
of the H200's 141 GB that is 140 GiB (143,771 MiB).

Invariant: the figures are the vendors'; what is expected of them in practice is `EFFICIENCY`, and only that.
"""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe.errors import ConfigError

_GIB = 2**30
PCIE_4_X16 = 31.5e9
"""16 GT/s, 16 lanes, 128b/130b; one direction."""
PCIE_5_X16 = 63.0e9


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a datasheet's figures that a training step sustains."""

    compute: float
    bandwidth: float
    link: float


EFFICIENCY = Efficiency(compute=0.8, bandwidth=0.8, link=0.8)
"""For microbatches of a few thousand tokens and pinned host memory. Compute and device memory add up, each kernel's
reads and writes counted; so blocks of Llama 8B and Qwen3 32B take up to a quarter longer than published on RTX 4090."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One kind of device.

    Raises:
        ConfigError: a figure is not above zero.
    """

    name: str
    memory_bytes: int
    flops_per_s: float
    """Dense bf16 peak."""
    bytes_per_s: float
    """Device memory bandwidth, peak."""
    link_bytes_per_s: float
    """Between host and device, one direction, peak."""
    source: str
    """Where the figures are from."""

    def __post_init__(self) -> None:
        for field in ("memory_bytes", "flops_per_s", "bytes_per_s", "link_bytes_per_s"):
            if not getattr(self, field) > 0:
                raise ConfigError(f"{self.name}: {field} is {getattr(self, field)}; it must be above 0")


_GA102 = (
    "NVIDIA Ampere GA102 GPU Architecture whitepaper v2.1, "
    "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf"
)
_ADA = (
    "NVIDIA Ada GPU Architecture whitepaper, "
    "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
)
_BLACKWELL = (
    "NVIDIA RTX Blackwell GPU Architecture whitepaper, "
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)
_A100 = (
    "NVIDIA A100 datasheet, SXM, https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_H100 = "NVIDIA H100 datasheet, SXM, half of the sparse figure, https://www.nvidia.com/en-us/data-center/h100/"
_H200 = "NVIDIA H200 datasheet, SXM, half of the sparse figure, https://www.nvidia.com/en-us/data-center/h200/"
_MI300X = (
    "AMD Instinct MI300X data sheet, https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/"
    "data-sheets/amd-instinct-mi300x-data-sheet.pdf"
)

DEVICES = (
    DeviceSpec("RTX-3090", 24 * _GIB, 71e12, 936e9, PCIE_4_X16, _GA102),
    DeviceSpec("RTX-4090", 24 * _GIB, 165.2e12, 1008e9, PCIE_4_X16, _ADA),
    DeviceSpec("RTX-5090", 32 * _GIB, 209.5e12, 1792e9, PCIE_5_X16, _BLACKWELL),
    DeviceSpec("A6000", 48 * _GIB, 154.8e12, 768e9, PCIE_4_X16, _GA102),
    DeviceSpec("A100-80G", 80 * _GIB, 312e12, 2039e9, PCIE_4_X16, _A100),
    DeviceSpec("H100", 80 * _GIB, 989e12, 3350e9, PCIE_5_X16, _H100),
    DeviceSpec("H200", 140 * _GIB, 989e12, 4800e9, PCIE_5_X16, _H200),
    DeviceSpec("MI300X", 192 * _GIB, 1307.4e12, 5300e9, PCIE_5_X16, _MI300X),
)


def find_device(name: str) -> DeviceSpec:
    """The device of a name; case, spaces, dashes and a leading RTX don't matter.

    Raises:
        ConfigError: there is none; the message lists those that there are.
    """
    for device in DEVICES:
        if _key(name) == _key(device.name):
            return device
    raise ConfigError(
        f"there is no device profile {name!r}; there are {', '.join(one.name for one in DEVICES)}. "
        "For another device give --flops, --memory and --link"
    )


def _key(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower().removeprefix("rtx")
