"""Packs the frozen weights below adapters: int8 by torchao, four bits (NF4) by bitsandbytes."""

from __future__ import annotations

import importlib

from torch import nn

PACKAGES = {"int8": "torchao.quantization", "nf4": "bitsandbytes.nn"}
KINDS = tuple(PACKAGES)


def check_installed(kind: str | None) -> None:
    """Raises an `ImportError` if a package is missing, before anything is trained."""
    if kind is not None:
        importlib.import_module(PACKAGES[kind])


def quantize(adapted: nn.Module, kind: str) -> None:
    """Quantize, in place, the linear layers of a model that adapters of PEFT have as their base layers."""
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(adapted, Int8WeightOnlyConfig(), filter_fn=lambda _, name: name.endswith(".base_layer"))
        return
    for name, module in list(adapted.named_modules()):
        if name.endswith(".base_layer") and isinstance(module, nn.Linear):
            adapted.get_submodule(name.removesuffix(".base_layer")).base_layer = in_nf4(module)


def in_nf4(linear: nn.Linear) -> nn.Module:
    """A linear layer with four bits per weight, and a scale per 64 weights that is quantized too."""
    from bitsandbytes.nn import Linear4bit

    packed = Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=linear.weight.dtype,
        quant_type="nf4",
    )
    packed.support_avx512bf16_for_cpu = False  # else some CPUs repack it in eval mode, and it passes no gradients then
    packed.load_state_dict(linear.state_dict())
    return packed.requires_grad_(False).to(linear.weight.device)  # which packs it
