"""A layer's parameters and buffers: which modules hold them, and where they lie in a region of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter, getitem
from typing import Literal, NamedTuple

import torch
from torch import nn

from roundpipe.core.errors import ConfigError
from roundpipe.core.module_tree import structure_message
from roundpipe.core.storages import is_made_of_others, is_plain, rebuilt, stored_tensors

ALIGNMENT = 64
_FORM = attrgetter("dtype", "shape")


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


class TensorPlaces:
    """Attributes that are asked for their tensors all at once: a step asks for those of hundreds, several times."""

    def __init__(self, attributes: Iterable[Attribute]) -> None:
        self._attributes = [*attributes]
        self._owners = [attribute.module.__dict__ for attribute in self._attributes]
        self._tables = [attribute.table for attribute in self._attributes]
        self._names = [attribute.name for attribute in self._attributes]
        self._is_scripted = any(isinstance(each.module, torch.jit.ScriptModule) for each in self._attributes)

    def get(self) -> list[torch.Tensor | None]:
        """As `Attribute.get`, of each."""
        if not self._is_scripted:
            try:
                return [*map(dict.get, map(getitem, self._owners, self._tables), self._names)]
            except (KeyError, TypeError):  # a table is no dict, or gone
                pass
        return [attribute.get() for attribute in self._attributes]


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


def version_of(tensor: torch.Tensor | None) -> int:
    """How often a tensor was written; -1 if there is none."""
    return -1 if tensor is None else tensor._version


def place_of(tensor: torch.Tensor | None) -> tuple[object, ...]:
    """Where a tensor lies, which a forward changes that gives a parameter other ``data``; that of others is not told.

    A view of a buffer is made for one visit, and its module's own.
    """
    if type(tensor) is not nn.Parameter:
        return ()
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def places_of(tensors: Iterable[torch.Tensor | None]) -> tuple[list[object], ...]:
    """As `place_of`, of many, to be compared with what it is later."""
    told = [tensor for tensor in tensors if type(tensor) is nn.Parameter]
    return [*map(torch.Tensor.data_ptr, told)], [*map(_FORM, told)], [*map(torch.Tensor.stride, told)]


class SlotSpan(NamedTuple):
    """Where a plain tensor lies in the bytes of a slot, which begin somewhere in a region."""

    offset: int
    num_bytes: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, offset: int) -> SlotSpan:
        strides = torch.empty_like(tensor, device="meta").stride()  # the same if it is dense
        return cls(offset, tensor.numel() * tensor.element_size(), tensor.shape, strides, tensor.dtype)

    def view(self, region: torch.Tensor, start: int) -> torch.Tensor:
        """The span's part of a byte region, with a version counter of its own."""
        start += self.offset
        flat = region[start : start + self.num_bytes].view(self.dtype)
        return torch.as_strided(flat, self.shape, self.strides, flat.storage_offset()).data

    def own_view(self, region: torch.Tensor, start: int) -> torch.Tensor:
        """The same, with a storage of its own too: what saves or copies a tensor takes the whole storage."""
        first = int(region.storage_offset()) + start + self.offset
        storage = region.untyped_storage()[first : first + self.num_bytes]
        return torch.empty(0, dtype=self.dtype).set_(storage, 0, self.shape, self.strides)


@dataclass(slots=True)
class Slot:
    """One parameter or buffer of a layer, and its spans in the layer's bytes: one, or those of what it is made of."""

    attributes: list[Attribute]
    """All that hold it, in modules of the original tree."""
    is_parameter: bool
    offset: int
    num_bytes: int
    shape: torch.Size
    dtype: torch.dtype
    is_plain: bool
    spans: list[SlotSpan]
    """None if it can't be taken apart: it is moved as a whole."""

    @classmethod
    def of(cls, tensor: torch.Tensor, attributes: list[Attribute], offset: int, *, as_a_whole: bool = False) -> Slot:
        spans: list[SlotSpan] = []
        num_bytes = 0
        for part in () if as_a_whole else stored_tensors(tensor):
            spans.append(span := SlotSpan.of(part, aligned(num_bytes)))
            num_bytes = span.offset + span.num_bytes
        is_parameter = attributes[0].table == "_parameters"
        return cls(attributes, is_parameter, offset, num_bytes, tensor.shape, tensor.dtype, is_plain(tensor), spans)

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
    def is_loose(self) -> bool:
        return not self.spans

    @property
    def fits(self) -> bool:
        """Whether the original module still has a tensor there that goes into the spans."""
        tensor = self.attributes[0].get()
        if tensor is None or tensor.shape != self.shape or tensor.dtype != self.dtype:
            return False
        if self.is_plain or self.is_loose:
            return self.is_loose or not is_made_of_others(tensor)
        forms = [(part.shape, part.dtype) for part in stored_tensors(tensor)]
        return forms == [(span.shape, span.dtype) for span in self.spans]

    @property
    def is_tied(self) -> bool:
        """Whether all modules that held it still hold one and the same tensor."""
        tensor = self.attributes[0].get()
        return all(attribute.get() is tensor for attribute in self.attributes[1:])

    def parts(self) -> Iterator[tuple[SlotSpan, torch.Tensor]]:
        """The spans, and what the original module has that lies in them."""
        return zip(self.spans, stored_tensors(self.tensor), strict=True)

    def view(self, region: torch.Tensor, offset: int) -> torch.Tensor:
        """The tensor in a byte region."""
        views = [span.view(region, offset) for span in self.spans]
        return views[0] if self.is_plain else rebuilt(self.tensor, views)
