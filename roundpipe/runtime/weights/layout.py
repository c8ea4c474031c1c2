"""A layer's parameters and buffers: the modules that hold them, and where they lie in the layer's bytes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

from roundpipe.core.errors import ConfigError
from roundpipe.core.module_tree import structure_message
from roundpipe.runtime.device.host_memory import is_plain

ALIGNMENT = 64


def aligned(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Attribute(NamedTuple):
    """A name under which a module holds a parameter or buffer."""

    module: nn.Module
    table: Literal["_parameters", "_buffers"]
    name: str

    def get(self) -> torch.Tensor | None:
        """The tensor there now; None if there is none, or no such name."""
        tensors: dict[str, torch.Tensor | None] = getattr(self.module, self.table)
        return tensors[self.name] if self.name in tensors else None  # script modules' have no get

    @property
    def is_none(self) -> bool:
        """Whether the module has the name, and no tensor under it."""
        tensors = getattr(self.module, self.table)
        return self.name in tensors and tensors[self.name] is None

    def set(self, tensor: torch.Tensor | None) -> None:
        getattr(self.module, self.table)[self.name] = tensor


def attributes_of(layer: nn.Module) -> list[Attribute]:
    """All parameters and buffers of a layer, also those that are None."""
    return [
        Attribute(module, table, name)
        for module in layer.modules()
        for table in ("_parameters", "_buffers")
        for name, _ in getattr(module, table).items()
    ]


def tensors_of(layer: nn.Module) -> list[tuple[torch.Tensor, list[Attribute]]]:
    """The tensors of a layer, tied ones once, each with all attributes that hold it."""
    by_id: dict[int, tuple[torch.Tensor, list[Attribute]]] = {}
    for attribute in attributes_of(layer):
        tensor = attribute.get()
        if tensor is not None:
            by_id.setdefault(id(tensor), (tensor, []))[1].append(attribute)
    return list(by_id.values())


@dataclass(slots=True)
class Slot:
    """One parameter or buffer of a layer, and its span in the layer's bytes."""

    attributes: list[Attribute]
    """All that hold it, in modules of the original tree."""
    is_parameter: bool
    offset: int
    num_bytes: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_loose: bool
    """A tensor subclass: has no span, is moved as a whole."""

    @classmethod
    def of(cls, tensor: torch.Tensor, attributes: list[Attribute], offset: int) -> Slot:
        is_parameter, is_loose = attributes[0].table == "_parameters", not is_plain(tensor)
        num_bytes = 0 if is_loose else tensor.numel() * tensor.element_size()
        strides = tensor.stride() if is_loose else _dense_strides(tensor)
        return cls(attributes, is_parameter, offset, num_bytes, tensor.shape, strides, tensor.dtype, is_loose)

    @property
    def current(self) -> torch.Tensor | None:
        return self.attributes[0].get()

    @property
    def tensor(self) -> torch.Tensor:
        """`current`; `ConfigError` if there is none."""
        tensor = self.attributes[0].get()
        if tensor is None:
            raise ConfigError(structure_message(self.attributes[0].module, self.attributes[0].name))
        return tensor

    @property
    def fits(self) -> bool:
        """Whether the original module still has a tensor there that goes into the span."""
        tensor = self.attributes[0].get()
        return tensor is not None and tensor.shape == self.shape and tensor.dtype == self.dtype

    @property
    def is_tied(self) -> bool:
        """Whether all modules that held it still hold one and the same tensor."""
        tensor = self.attributes[0].get()
        return all(attribute.get() is tensor for attribute in self.attributes[1:])

    def view(self, region: torch.Tensor) -> torch.Tensor:
        """The slot's part of a byte region, with a version counter of its own."""
        flat = region[self.offset : self.offset + self.num_bytes].view(self.dtype)
        return torch.as_strided(flat, self.shape, self.strides, flat.storage_offset()).data

    def own_view(self, region: torch.Tensor) -> torch.Tensor:
        """The same, with a storage of its own too: what saves or copies a tensor takes the whole storage."""
        if not self.num_bytes:
            return self.view(region)
        part = region[self.offset : self.offset + self.num_bytes]
        block = (ctypes.c_ubyte * self.num_bytes).from_address(part.data_ptr())
        block.memory = part  # type: ignore[attr-defined]  # keeps it
        return torch.as_strided(torch.frombuffer(block, dtype=torch.uint8).view(self.dtype), self.shape, self.strides)


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's strides if its memory is dense, else those of a contiguous copy."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return torch.empty(tensor.shape, device="meta").stride()
            expected *= size
    return tensor.stride()
