"""One layer's weights on the host: who holds them, where they lie in the layer's bytes; packed, uploaded."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal, NamedTuple

import torch
from torch import nn

from roundpipe.core.errors import ConfigError
from roundpipe.core.module_tree import Structure, structure_message
from roundpipe.effects.uses import codes_of, names_in
from roundpipe.runtime.device.backend import Backend, Lane
from roundpipe.runtime.device.host_memory import bytes_of, is_plain

ALIGNMENT = 64
_UNSEEN_WRITES = frozenset({"data", "batch_norm", "instance_norm"})
"""What Python code calls or reads to write a tensor without a change of its version."""


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


def version_of(tensor: torch.Tensor | None) -> int:
    """How often a tensor was written; -1 if there is none."""
    return -1 if tensor is None else tensor._version


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
        strides = () if is_loose else torch.empty_like(tensor, device="meta").stride()  # the same if it is dense
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

    def view(self, region: torch.Tensor, offset: int) -> torch.Tensor:
        """The slot's part of a byte region, with a version counter of its own."""
        flat = region[offset : offset + self.num_bytes].view(self.dtype)
        return torch.as_strided(flat, self.shape, self.strides, flat.storage_offset()).data

    def own_view(self, region: torch.Tensor, offset: int | None = None) -> torch.Tensor:
        """The same, with a storage of its own too: what saves or copies a tensor takes the whole storage."""
        start = region.storage_offset() + (self.offset if offset is None else offset)
        storage = region.untyped_storage()[start : start + self.num_bytes]
        return torch.empty(0, dtype=self.dtype).set_(storage, 0, self.shape, self.strides)


@dataclass(slots=True)
class Habits:
    """What a layer's forward does, as far as it was seen; None: not known yet."""

    writes_buffers: bool | None = None
    """Learned by comparing values, since some operators (batch_norm) write without a change of version."""
    has_side_effects: bool | None = None
    """Whether it leaves other buffers or attributes behind; learned at each release."""
    draws_python: bool | None = None
    """Whether it draws from Python's or NumPy's generators; learned at the first call."""


class LayerWeights:
    """One layer's weights on the host as they are now; those that ``may_pack`` allows first, of these the frozen ones.

    Raises:
        ConfigError: a tensor is on the meta device.
    """

    def __init__(self, name: str, layer: nn.Module, may_pack: Callable[[torch.Tensor], bool]) -> None:
        self.name = name
        self.layer = layer
        self.banks: list[torch.Tensor] = []
        """The buffer that the first `num_packed` slots were packed into, and what `add_second_bank` made."""
        self.slots: list[Slot] = []
        self.num_packed = self.num_bytes = self.packed_bytes = 0
        tensors = [
            (not may_pack(tensor), tensor.requires_grad, tensor, attributes) for tensor, attributes in tensors_of(layer)
        ]
        for is_apart, _, tensor, attributes in sorted(tensors, key=itemgetter(0, 1)):
            if tensor.is_meta:
                raise ConfigError(
                    f"{name}.{attributes[0].name} is on the meta device, so it has no values to train or run with; "
                    "load the model's weights (model.to_empty, from_pretrained) before the first call"
                )
            slot = Slot.of(tensor, attributes, self.num_bytes)
            self.slots.append(slot)
            self.num_bytes += aligned(slot.num_bytes)
            if not is_apart:
                self.num_packed, self.packed_bytes = len(self.slots), slot.offset + slot.num_bytes
        self._tied = [slot for slot in self.slots if len(slot.attributes) > 1]
        empty = [attribute for attribute in attributes_of(layer) if attribute.get() is None]
        self.empty_buffers = [attribute for attribute in empty if attribute.table == "_buffers"]
        self._empty_parameters = [attribute for attribute in empty if attribute.table == "_parameters"]
        self._structure = Structure(layer.modules())
        self.habits: defaultdict[bool, Habits] = defaultdict(Habits)
        """By whether any module of the layer is in training mode."""

    @property
    def may_write_unseen(self) -> bool:
        """Whether a forward may write buffers without a change of version on a way that it has not gone so far."""
        return any(module.training or not _has_statistics(module) for module in self._writers)

    @functools.cached_property
    def _writers(self) -> list[nn.Module]:
        return [module for module in self.layer.modules() if _has_statistics(module) or _writes_data(type(module))]

    def check_structure(self) -> None:
        """Raise `ConfigError` if the layer has other modules, or parameters under other names, than as laid out."""
        if (changed := self._structure.changed()) is not None:
            raise ConfigError(structure_message(changed))
        removed = [slot.attributes[0] for slot in self.slots if slot.is_parameter and slot.current is None]
        for attribute in (*removed, *(each for each in self._empty_parameters if each.get() is not None)):
            raise ConfigError(structure_message(attribute.module, attribute.name))

    def is_current(self) -> bool:
        """Whether modules, classes, names, shapes, dtypes and ties are as laid out; values and memory may differ."""
        return (
            self._structure.changed() is None
            and all(attribute.is_none for attribute in (*self.empty_buffers, *self._empty_parameters))
            and all(slot.fits for slot in self.slots)
            and all(slot.is_tied for slot in self._tied)
        )

    def pack(self, buffer: torch.Tensor) -> None:
        """Move the packed tensors into ``buffer`` and make the user's objects views of it."""
        with torch.no_grad():
            for slot in self.slots[: self.num_packed]:
                tensor = slot.tensor
                tensor.data = slot.own_view(buffer).copy_(tensor)
        self.banks = [buffer]

    @property
    def packed(self) -> torch.Tensor | None:
        """The buffer of `pack`."""
        return self.banks[0] if self.banks else None

    @property
    def device_bytes(self) -> int:
        """What an upload takes, with tensors that have no span."""
        loose = (slot.tensor for slot in self.slots if slot.is_loose)
        return aligned(self.num_bytes) + sum(map(bytes_of, loose))

    def trained_bytes(self) -> int:
        """Bytes of a second bank."""
        return sum(aligned(slot.num_bytes) for slot in self._trained())

    def _trained(self) -> list[Slot]:
        return [slot for slot in self.slots[: self.num_packed] if slot.is_parameter and slot.tensor.requires_grad]

    def add_second_bank(self, allocate: Callable[[int], torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A second buffer for what is packed and trained now; gives these parameters, each with a view of it."""
        bank, start = allocate(self.trained_bytes()), 0
        self.banks.append(bank)
        for slot in self._trained():
            yield slot.tensor, slot.own_view(bank, start)
            start += aligned(slot.num_bytes)

    def is_packed(self) -> bool:
        """Whether the user's tensors still are the views that `pack` made."""
        if self.packed is None:
            return False
        base = self.packed.data_ptr()
        return all(
            slot.fits and (slot.tensor.data_ptr() == base + slot.offset or not slot.num_bytes)
            for slot in self.slots[: self.num_packed]
        )

    def parameters(self) -> list[torch.Tensor]:
        """The layer's parameters as the original modules have them now."""
        return [slot.tensor for slot in self.slots if slot.is_parameter and slot.fits]

    def may_have_side_effects(self) -> bool:
        """Whether a forward in the present mode leaves buffers or attributes changed, as far as is known."""
        return self._habits_now().has_side_effects is not False

    def recomputation_inputs(self) -> Iterator[tuple[str, torch.Tensor, Callable[[], torch.Tensor | None]]]:
        """What a recomputation takes as it is by then: names, tensors, and a getter of the tensor of that time.

        Buffers of a layer that writes them are not among it: each of its forwards keeps what it saw.
        """
        saves_buffers = self._habits_now().writes_buffers is not False
        names = {id(tensor): name for name, tensor in (*self.layer.named_buffers(), *self.layer.named_parameters())}
        for slot in self.slots:
            tensor = slot.current
            if tensor is not None and is_plain(tensor) and (slot.is_parameter or not saves_buffers):
                yield names[id(tensor)], tensor, slot.attributes[0].get

    def _habits_now(self) -> Habits:
        return self.habits[any(module.training for module in self.layer.modules())]

    def frozen_slots(self) -> tuple[int, ...]:
        """What keeps its values from round to round: weights that are not trained, buffers that no forward writes."""
        slots = ((index, self.slots[index]) for index in self.steady_slots())
        return tuple(
            index for index, slot in slots if slot.num_bytes and not (slot.is_parameter and slot.tensor.requires_grad)
        )

    @property
    def has_loose(self) -> bool:
        """Whether some of it has memory of its own on a device."""
        return any(slot.is_loose or not slot.fits for slot in self.slots)

    def steady_slots(self) -> list[int]:
        """What has the host's values still after a visit, and lies in one piece of memory with the rest."""
        writes_buffers = self._habits_now().writes_buffers is not False or self.may_write_unseen
        return [
            index
            for index, slot in enumerate(self.slots)
            if not slot.is_loose and slot.fits and (slot.is_parameter or not writes_buffers)
        ]

    def bytes_of(self, indexes: Iterable[int]) -> int:
        """Device memory for some slots, one after the other."""
        return sum(aligned(self.slots[index].num_bytes) for index in indexes)

    def upload(
        self, backend: Backend, region: torch.Tensor, indexes: Sequence[int]
    ) -> tuple[dict[int, torch.Tensor | None], list[torch.Tensor]]:
        """Copy slots into a device region, one after the other; returns them (None: gone), and all copies.

        What can't lie in the region has memory of its own.
        """
        pieces, apart = self.pieces(indexes)
        copies = [
            backend.upload(bank[start : start + size], region[to : to + size], Lane.WEIGHTS)
            for bank, start, to, size in pieces
        ]
        found: dict[int, torch.Tensor | None] = {}
        for index, offset in zip(indexes, self._offsets(indexes), strict=True):
            slot = self.slots[index]
            if slot.is_loose or not slot.fits:  # a buffer may get another shape while a step runs
                found[index] = tensor = slot.tensor if slot.is_parameter else slot.current
                if tensor is not None:
                    copies.append(backend.upload(tensor, lane=Lane.WEIGHTS))
                    found[index] = copies[-1]
                continue
            if slot.num_bytes and index in apart:
                copies.append(backend.upload(slot.tensor.detach(), slot.view(region, offset), Lane.WEIGHTS))
            found[index] = slot.view(region, offset)
        return found, copies

    def _offsets(self, indexes: Iterable[int]) -> Iterator[int]:
        """Where slots lie in a region that has them one after the other."""
        offset = 0
        for index in indexes:
            yield offset
            offset += aligned(self.slots[index].num_bytes)

    def pieces(self, indexes: Sequence[int]) -> tuple[list[tuple[torch.Tensor, int, int, int]], set[int]]:
        """What lies in a bank as it will on the device: bank, start there, start here, bytes; and all other slots."""
        pieces: list[tuple[torch.Tensor, int, int, int]] = []
        apart: set[int] = set()
        starts = [(bank, bank.data_ptr()) for bank in self.banks]
        for index, at in zip(indexes, self._offsets(indexes), strict=True):
            slot = self.slots[index]
            address = slot.tensor.data_ptr() if index < self.num_packed and slot.fits else -1
            bank, start = next(
                (
                    (bank, address - first)
                    for bank, first in starts
                    if 0 <= address - first <= bank.numel() - slot.num_bytes
                ),
                (None, 0),
            )
            if bank is None:
                apart.add(index)
                continue
            size = slot.num_bytes
            if pieces and pieces[-1][0] is bank and pieces[-1][1] - pieces[-1][2] == start - at:
                _, start, first, _ = pieces.pop()
                at, size = first, size + at - first
            pieces.append((bank, start, at, size))
        return pieces, apart


def _has_statistics(module: nn.Module) -> bool:
    return hasattr(module, "track_running_stats")


def _writes_data(kind: type) -> bool:
    return any(not _UNSEEN_WRITES.isdisjoint(names_in(code)) for _, code in codes_of(kind))
