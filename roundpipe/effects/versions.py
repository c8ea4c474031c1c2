"""Which tensors were written, by their versions: cheap enough for every call."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from roundpipe.core.module_tree import modules_in
from roundpipe.core.storages import is_plain


class WeightSnapshot:
    """The parameters of a module and those below it, by version and memory: cheap enough for every call.

    One that has another dtype afterwards was converted, which is no write.

    Args:
        with_norms: whether writes by way of ``.data``, of which a version tells nothing, are seen as well. Reads all.
    """

    __slots__ = ("_module", "_norms", "_weights")

    def __init__(self, module: nn.Module, *, with_norms: bool = False) -> None:
        self._module = module
        self._weights = [
            (owner, name, weight, version_of(weight), _memory_of(weight), None if weight is None else weight.dtype)
            for owner in modules_in(module)
            for name, weight in owner._parameters.items()
        ]
        self._norms = self._norms_now() if with_norms else None

    def diff(self) -> str | None:
        """The qualified name of a parameter that was written, or has another in its place."""
        norms = [(0.0, 0.0)] * len(self._weights)
        if self._norms is not None:
            norms = list(zip(self._norms, self._norms_now(), strict=True))
        for (owner, name, weight, version, memory, dtype), (norm, norm_now) in zip(self._weights, norms, strict=True):
            parameters = owner._parameters  # those of script modules have no get
            now = parameters[name] if name in parameters else None
            if now is not weight or version_of(weight) != version:
                return self._name(owner, name)
            is_other = _memory_of(weight) != memory or norm != norm_now and not math.isnan(norm)
            if is_other and weight is not None and weight.dtype == dtype:
                return self._name(owner, name)
        return None

    def _name(self, owner: nn.Module, name: str) -> str:
        prefix = next((prefix for prefix, other in self._module.named_modules() if other is owner), "")
        return f"{prefix}.{name}".lstrip(".")

    def _norms_now(self) -> list[float]:
        """The norm of each; 0 where there is nothing to look at."""
        found: dict[torch.device, dict[int, torch.Tensor]] = {}
        for index, (_, _, weight, *_) in enumerate(self._weights):
            if _memory_of(weight) and weight is not None and weight.dtype in _WITH_NORMS and not weight.is_meta:
                norm = torch.linalg.vector_norm(weight.detach(), dtype=torch.float64)
                found.setdefault(weight.device, {})[index] = norm
        norms = [0.0] * len(self._weights)
        for of_device in found.values():
            for index, value in zip(of_device, torch.stack([*of_device.values()]).tolist(), strict=True):
                norms[index] = value
        return norms


_WITH_NORMS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _memory_of(weight: torch.Tensor | None) -> int:
    """Another one if a parameter's ``.data`` was set; 0 where there is none."""
    return weight.untyped_storage()._cdata if weight is not None and is_plain(weight) else 0


def version_of(tensor: torch.Tensor | None) -> int:
    """How often a tensor was written; 0 if there is none, or nothing tells."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


class TensorVersions:
    """Tensors that code is given, by version."""

    __slots__ = ("_versions",)

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._versions = [(tensor, version_of(tensor)) for tensor in tensors]

    def were_written(self) -> bool:
        return any(version_of(tensor) != version for tensor, version in self._versions)
