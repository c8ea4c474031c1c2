"""Which tensors were written, by their versions: cheap enough for every call."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from roundpipe.core.module_tree import modules_in


class WeightSnapshot:
    """The parameters of a module and those below it, by version: cheap enough for every call."""

    __slots__ = ("_module", "_weights")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._weights = [
            (owner, name, weight, version_of(weight))
            for owner in modules_in(module)
            for name, weight in owner._parameters.items()
        ]

    def diff(self) -> str | None:
        """The qualified name of a parameter that was written, or has another in its place."""
        for owner, name, weight, version in self._weights:
            parameters = owner._parameters  # those of script modules have no get
            now = parameters[name] if name in parameters else None
            if now is not weight or version_of(weight) != version:
                prefix = next((prefix for prefix, other in self._module.named_modules() if other is owner), "")
                return f"{prefix}.{name}".lstrip(".")
        return None


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
