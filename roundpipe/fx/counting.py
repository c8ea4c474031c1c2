"""Counts what runs on fake tensors: FLOPs, bytes moved, kernels, and the peak of live memory.

FLOPs are those that `torch.utils.flop_counter` counts, and those of kernels that it has no formula for.

Invariant: counting changes nothing; views cost nothing; memory given from outside is not counted as made.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from roundpipe.core import trees
from roundpipe.core.allocations import Allocations

GATHERING = frozenset({"embedding", "index_select", "gather", "index", "take_along_dim"})
"""Operators that read only as much of their source as they return."""

_DEVICE = torch.ops.prim.device.default
"""More than half of all that autograd asks fakes for."""
_WHOLE: set[Any] = set()
"""Operators that are known not to be made of others."""


class Tally(Allocations):
    """What kernels did: FLOPs, bytes moved, and the peak of the memory that they allocate."""

    def __init__(self, inputs: Iterable[torch.Tensor] = ()) -> None:
        super().__init__(inputs)
        self.flops = 0
        self.moved_bytes = 0
        self.num_kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and (device := getattr(args[0], "fake_device", None)) is not None:
            return device
        kwargs = kwargs or {}
        if func not in _WHOLE:
            if not _is_question(func):
                with self:
                    result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            _WHOLE.add(func)
        result = func(*args, **kwargs)
        if (formula := _formulas().get(func.overloadpacket)) is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        inputs = trees.tensors((args, kwargs))
        outputs = trees.tensors(result)
        if not outputs and not func._schema.is_mutable:
            return result
        storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        if all(tensor.untyped_storage()._cdata in storages for tensor in outputs):
            if func._schema.is_mutable:
                self.moved_bytes += sum(map(_bytes, inputs))
                self.num_kernels += 1
            return result
        sources = outputs if func._opname in GATHERING else inputs
        self.num_kernels += 1
        self.moved_bytes += sum(map(_bytes, (*sources, *outputs)))
        self.count(outputs, inputs)
        return result


def _is_question(func: Any) -> bool:
    """Whether an operator is no kernel: it gives a size or the like."""
    return not func._schema.is_mutable and not any("Tensor" in str(given.type) for given in func._schema.returns)


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes that a kernel touches: dimensions that an expand made cost nothing."""
    elements = math.prod(int(s) for s, step in zip(tensor.shape, tensor.stride(), strict=True) if step or s == 0)
    return elements * tensor.element_size()


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Two matrix products per head; ``query`` is a shape ``[B, H, S, D]``."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (width + value[-1])


def _attention_backward_flops(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Five matrix products, one of them the recomputed scores."""
    return _attention_flops(query, key, value) * 5 // 2


def _grouped_matmul_flops(left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    """Every row meets one group's matrix: ``[T, K] x [G, K, N]``."""
    return 2 * math.prod(left) * right[-1]


def extra_formulas() -> dict[Any, Callable[..., int]]:
    """Kernels that torch's counter has no formula for, where this torch has the kernel."""
    formulas: dict[str, Callable[..., int]] = {
        "_scaled_dot_product_flash_attention_for_cpu": _attention_flops,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward_flops,
        "_scaled_dot_product_fused_attention_overrideable": _attention_flops,
        "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward_flops,
        "_grouped_mm": _grouped_matmul_flops,
    }
    aten = torch.ops.aten
    return {getattr(aten, name): formula for name, formula in formulas.items() if hasattr(aten, name)}


@functools.cache
def _formulas() -> Mapping[Any, Callable[..., int]]:
    """Those of torch and ours. Torch's counter itself also follows modules and their gradients, which takes longer."""
    return FlopCounterMode(display=False, custom_mapping=extra_formulas()).flop_registry
