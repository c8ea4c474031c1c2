"""Devices to plan for, as data: what vendors print, and how much of it training reaches.

Figures are those of the named documents: dense bf16 with float32 accumulation (never the sparse figure), memory
bandwidth, and one direction of the host link. Vendors' "GB" of device memory are binary here, as drivers report them;
of the H200's 141 GB that is 140 GiB (143,771 MiB).

GeForce cards run tensor cores at half their rate when they accumulate in float32, which is what training does: theirs
are the halves. The figures were compared with a second source each (`DeviceSpec.checked`), and peak compute with cores
times clock.

Invariant: the figures are the vendors'; what is expected of them in practice is `EFFICIENCY`, and only that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from roundpipe.core.errors import ConfigError

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


FIGURES = ("memory_bytes", "flops_per_s", "bytes_per_s", "link_bytes_per_s")
"""Of a `DeviceSpec`."""


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
    checked: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """By the name of a figure: where else it was found, or what it follows from."""

    def __post_init__(self) -> None:
        for name in FIGURES:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{self.name}: {name} is {getattr(self, name)}; it must be above 0")


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

_TABLE_OF_CARDS = (
    "PCIe 4.0 x16, gpu_specs.csv of the Lambda LLM Calculator, "
    "https://huggingface.co/spaces/lambdabrendan/Lambda-LLM-Calculator/blame/main/data/gpu_specs.csv"
)
_SPECS_3090 = (
    "Nvidia GeForce RTX 3090 Specifications, "
    "https://holynerdvana.blogspot.com/2022/10/nvidia-geforce-rtx-3090-specifications.html"
)
_SPECS_4090 = "NVIDIA GeForce RTX 4090, https://waredb.com/processor/nvidia-geforce-rtx-4090"
_SPECS_5090 = "NVIDIA RTX 5090 Specs, https://www.spheron.network/blog/nvidia-rtx-5090-specs/"
_SPECS_A6000 = (
    "NVIDIA RTX A6000 48GB GPU Drops Quadro Designation, "
    "https://servethehome.com/nvidia-rtx-a6000-48gb-gpu-drops-quadro-designation"
)
_SPECS_A100 = "A100, https://glennklockwood.com/garden/processors/A100"
_SPECS_H100 = "NVIDIA H100, https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html"
_SPECS_H200 = (
    "NVIDIA H200 vs B300: precisions, cores, and what the datasheet numbers mean, "
    "https://itkb.uw.cz/2026/06/nvidia-h200-vs-b300-precisions-cores.html"
)
_SPECS_MI300X = "AMD Instinct MI300X, https://aiwiki.ai/wiki/amd_instinct_mi300x"


def _checked(memory: str, flops: str, bandwidth: str, link: str) -> Mapping[str, str]:
    return dict(zip(FIGURES, (memory, flops, bandwidth, link), strict=True))


DEVICES = (
    DeviceSpec(
        name="RTX-3090",
        memory_bytes=24 * _GIB,
        flops_per_s=71e12,
        bytes_per_s=936e9,
        link_bytes_per_s=PCIE_4_X16,
        source=_GA102,
        checked=_checked(
            memory=_SPECS_3090,
            flops=f"half of 142 TFLOP/s with float16 accumulation, {_SPECS_3090}",
            bandwidth=_SPECS_3090,
            link=_TABLE_OF_CARDS,
        ),
    ),
    DeviceSpec(
        name="RTX-4090",
        memory_bytes=24 * _GIB,
        flops_per_s=165.2e12,
        bytes_per_s=1008e9,
        link_bytes_per_s=PCIE_4_X16,
        source=_ADA,
        checked=_checked(
            memory=_SPECS_4090,
            flops=f"165.15 TFLOP/s, {_SPECS_4090}",
            bandwidth=_SPECS_4090,
            link="PCI Express 4.0, GIGABYTE GeForce RTX 4090, http://item.wiki/en/item/2912854",
        ),
    ),
    DeviceSpec(
        name="RTX-5090",
        memory_bytes=32 * _GIB,
        flops_per_s=209.5e12,
        bytes_per_s=1792e9,
        link_bytes_per_s=PCIE_5_X16,
        source=_BLACKWELL,
        checked=_checked(
            memory=_SPECS_5090,
            flops=f"a quarter of 838 TFLOP/s, sparse and with float16 accumulation, {_SPECS_5090}",
            bandwidth=_SPECS_5090,
            link=f"Gen 5 x16, {_SPECS_5090}",
        ),
    ),
    DeviceSpec(
        name="A6000",
        memory_bytes=48 * _GIB,
        flops_per_s=154.8e12,
        bytes_per_s=768e9,
        link_bytes_per_s=PCIE_4_X16,
        source=_GA102,
        checked=_checked(
            memory=_SPECS_A6000,
            flops="NVIDIA RTX A6000, https://llmperf.net/categories/gpu/Nvidia-A6000-GPUs",
            bandwidth=_SPECS_A6000,
            link=f"PCI Express 4.0 x16, {_SPECS_A6000}",
        ),
    ),
    DeviceSpec(
        name="A100-80G",
        memory_bytes=80 * _GIB,
        flops_per_s=312e12,
        bytes_per_s=2039e9,
        link_bytes_per_s=PCIE_4_X16,
        source=_A100,
        checked=_checked(
            memory=_SPECS_A100,
            flops=_SPECS_A100,
            bandwidth=_SPECS_A100,
            link=f"32 GB/s each way, PCIe Gen4, {_SPECS_A100}",
        ),
    ),
    DeviceSpec(
        name="H100",
        memory_bytes=80 * _GIB,
        flops_per_s=989e12,
        bytes_per_s=3350e9,
        link_bytes_per_s=PCIE_5_X16,
        source=_H100,
        checked=_checked(
            memory=_SPECS_H100,
            flops=f"half of 1,979 TFLOP/s, sparse, {_SPECS_H100}",
            bandwidth=_SPECS_H100,
            link=f"PCIe Gen5, 128 GB/s both ways together, {_SPECS_H100}",
        ),
    ),
    DeviceSpec(
        name="H200",
        memory_bytes=140 * _GIB,
        flops_per_s=989e12,
        bytes_per_s=4800e9,
        link_bytes_per_s=PCIE_5_X16,
        source=_H200,
        checked=_checked(
            memory=f"141 GB, {_SPECS_H200}",
            flops=_SPECS_H200,
            bandwidth=_SPECS_H200,
            link=f"PCIe Gen5, {_SPECS_H200}",
        ),
    ),
    DeviceSpec(
        name="MI300X",
        memory_bytes=192 * _GIB,
        flops_per_s=1307.4e12,
        bytes_per_s=5300e9,
        link_bytes_per_s=PCIE_5_X16,
        source=_MI300X,
        checked=_checked(
            memory=_SPECS_MI300X,
            flops="1.3 PFLOP/s, AMD Instinct MI300 Series, "
            "https://www.jaredwatkins.com/research/ai-accelerators/amd-instinct/mi300-series/",
            bandwidth=_SPECS_MI300X,
            link="PCIe Gen5 x16, 8xMI300X of MLPerf Inference v4.1, https://raw.githubusercontent.com/mlcommons/"
            "inference_results_v4.1/main/closed/AMD/systems/8xMI300X_2xEPYC-9374F.json",
        ),
    ),
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
