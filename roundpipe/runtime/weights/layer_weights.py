"""One layer's weights on the host: laid out in the layer's bytes, packed, uploaded."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import nn

from roundpipe.core.errors import ConfigError
from roundpipe.core.module_tree import Structure, structure_message
from roundpipe.core.storages import bytes_of, is_plain, unshare
from roundpipe.effects.bytecode import codes_of, names_in
from roundpipe.effects.uses import changes_sizes
from roundpipe.runtime.device.backend import Backend, Lane
from roundpipe.runtime.weights.slots import Slot, SlotSpan, TensorPlaces, aligned, attributes_of, tensors_of

_UNSEEN_WRITES = frozenset({"data", "batch_norm", "instance_norm"})
"""What Python code calls or reads to write a tensor without a change of its version."""


Views = dict[int, torch.Tensor]
"""Of device memory, by the slots that lie there."""


@dataclass(slots=True)
class Habits:
    """What a layer's forward does, as far as it was seen; None: not known yet."""

    writes_buffers: bool | None = None
    """Learned by comparing values, since some operators (batch_norm) write without a change of version."""
    has_side_effects: bool | None = None
    """Whether it leaves other buffers or attributes behind; learned at each release."""
    draws_python: bool | None = None
    """Whether it draws from Python's or NumPy's generators; learned at the first call."""
    draws: bool | None = None
    """Whether it, or one of its hooks, draws at all; learned at each call of a layer that only may."""


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
        # in the memory of others they would grow over what lies behind them
        growing = {
            id(buffer) for module in layer.modules() if changes_sizes(type(module)) for buffer in module.buffers()
        }
        tensors = [
            (id(tensor) in growing or not may_pack(tensor), tensor.requires_grad, tensor, attributes)
            for tensor, attributes in tensors_of(layer)
        ]
        for is_apart, _, tensor, attributes in sorted(tensors, key=itemgetter(0, 1)):
            if tensor.is_meta:
                raise ConfigError(
                    f"{name}.{attributes[0].name} is on the meta device, so it has no values to train or run with; "
                    "load the model's weights (model.to_empty, from_pretrained) before the first call"
                )
            slot = Slot.of(tensor, attributes, self.num_bytes, as_a_whole=id(tensor) in growing)
            self.slots.append(slot)
            self.num_bytes += aligned(slot.num_bytes)
            if not is_apart:
                self.num_packed, self.packed_bytes = len(self.slots), slot.offset + slot.num_bytes
        self._places = TensorPlaces(slot.attributes[0] for slot in self.slots)
        self.is_plain = all(slot.is_plain for slot in self.slots)
        """Whether no tensor is made of others."""
        self._tied = [slot for slot in self.slots if len(slot.attributes) > 1]
        empty = [attribute for attribute in attributes_of(layer) if attribute.get() is None]
        self.empty_buffers = [attribute for attribute in empty if attribute.table == "_buffers"]
        self._empty_parameters = [attribute for attribute in empty if attribute.table == "_parameters"]
        self.modules = list(layer.modules())
        self._structure = Structure(self.modules)
        self._habits: defaultdict[tuple[bool, ...], Habits] = defaultdict(Habits)
        """By which of its modules are in training mode."""

    @property
    def may_write_unseen(self) -> bool:
        """Whether a forward may write buffers without a change of version on a way that it has not gone so far.

        Modules write buffers of their own and of those inside them; what adapters do to weights is no matter.
        """
        return any(module.training or not _has_statistics(module) for module in self._writers)

    @functools.cached_property
    def _writers(self) -> list[nn.Module]:
        return [module for module in self.modules if _has_statistics(module) or _writes_buffers(module)]

    def tensors(self) -> list[torch.Tensor | None]:
        """What each slot holds now, as `Slot.current` tells of one."""
        return self._places.get()

    def tensors_at(self, indexes: Iterable[int]) -> list[torch.Tensor]:
        """What some slots hold now; `ConfigError` if one holds none."""
        held = self.tensors()
        return [self.slots[index].tensor if (tensor := held[index]) is None else tensor for index in indexes]

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
                unshare(slot.tensor)
                for span, part in slot.parts():
                    part.data = span.own_view(buffer, slot.offset).copy_(part)
        self.banks.append(buffer)

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
            yield slot.tensor, slot.spans[0].own_view(bank, start)
            start += aligned(slot.num_bytes)

    def is_packed(self) -> bool:
        """Whether the user's tensors still are the views that `pack` made."""
        if self.packed is None:
            return False
        base = self.packed.data_ptr()
        return all(
            slot.fits
            and all(
                part.data_ptr() - base == slot.offset + span.offset for span, part in slot.parts() if span.num_bytes
            )
            for slot in self.slots[: self.num_packed]
        )

    def parameters(self) -> list[torch.Tensor]:
        """The layer's parameters as the original modules have them now."""
        return [slot.tensor for slot in self.slots if slot.is_parameter and slot.fits]

    def may_have_side_effects(self) -> bool:
        """Whether a forward in the present mode leaves buffers or attributes changed, as far as is known."""
        return self.habits_of(self.modules).has_side_effects is not False

    def recomputation_inputs(self) -> Iterator[tuple[str, torch.Tensor, Callable[[], torch.Tensor | None]]]:
        """What a recomputation takes as it is by then: names, tensors, and a getter of the tensor of that time.

        Buffers of a layer that writes them are not among it: each of its forwards keeps what it saw.
        """
        saves_buffers = self.habits_of(self.modules).writes_buffers is not False
        names = {id(tensor): name for name, tensor in (*self.layer.named_buffers(), *self.layer.named_parameters())}
        for slot in self.slots:
            tensor = slot.current
            if tensor is not None and is_plain(tensor) and (slot.is_parameter or not saves_buffers):
                yield names[id(tensor)], tensor, slot.attributes[0].get

    def habits_of(self, modules: Iterable[nn.Module]) -> Habits:
        """The habits of the layer in the modes that these have: its `modules`, or their counterparts in a replica."""
        return self._habits[tuple([module.training for module in modules])]

    def frozen_slots(self) -> tuple[int, ...]:
        """What keeps its values from round to round: weights that are not trained, buffers that no forward writes."""
        untrained = (
            (index, slot)
            for index, slot in enumerate(self.slots)
            if slot.num_bytes and not (slot.is_parameter and (held := slot.current) is not None and held.requires_grad)
        )
        return tuple(self._steady(untrained))

    def trained_slots(self) -> tuple[int, ...]:
        """The parameters that are trained now."""
        return tuple(index for index, slot in enumerate(self.slots) if slot.is_parameter and slot.tensor.requires_grad)

    @property
    def has_loose(self) -> bool:
        """Whether some of it has memory of its own on a device."""
        return any(slot.is_loose or not slot.fits for slot in self.slots)

    def steady_slots(self) -> list[int]:
        """What has the host's values still after a visit, and lies in one piece of memory with the rest."""
        return self._steady(enumerate(self.slots))

    def _steady(self, slots: Iterable[tuple[int, Slot]]) -> list[int]:
        """Those of some slots."""
        writes_buffers = self.habits_of(self.modules).writes_buffers is not False or self.may_write_unseen
        return [
            index
            for index, slot in slots
            if not slot.is_loose and slot.fits and (slot.is_parameter or not writes_buffers)
        ]

    def bytes_of(self, indexes: Iterable[int]) -> int:
        """Device memory for some slots, one after the other."""
        return sum(aligned(self.slots[index].num_bytes) for index in indexes)

    def upload(
        self, backend: Backend, region: torch.Tensor, indexes: Sequence[int], known: Views | None = None
    ) -> tuple[dict[int, torch.Tensor | None], list[torch.Tensor]]:
        """Copy slots into a device region, one after the other; returns them (None: gone), and all copies.

        What can't lie in the region has memory of its own. ``known`` are views of the same region that were made at an
        earlier time, to be taken and added to.
        """
        views = {} if known is None else known
        pieces, apart = self.pieces(indexes)
        copies = [
            backend.upload(bank[start : start + size], region[to : to + size], Lane.WEIGHTS)
            for bank, start, to, size in pieces
        ]
        found: dict[int, torch.Tensor | None] = {}
        for index, offset in zip(indexes, self._offsets(indexes), strict=True):
            slot = self.slots[index]
            if slot.is_loose or (index in apart and not slot.fits):  # a buffer may get another shape while a step runs
                found[index] = tensor = slot.tensor if slot.is_parameter else slot.current
                if tensor is not None:
                    copies.append(backend.upload(tensor, lane=Lane.WEIGHTS))
                    found[index] = copies[-1]
                continue
            if index in apart:
                parts = [(span, part) for span, part in slot.parts() if span.num_bytes]
                copies += [
                    backend.upload(part.detach(), span.view(region, offset), Lane.WEIGHTS) for span, part in parts
                ]
            found[index] = view = views[index] if index in views else slot.view(region, offset)
            if slot.is_parameter and slot.is_plain:  # a buffer's view is the module's own, to do with as it likes
                if index not in views:
                    found[index] = views[index] = nn.Parameter(view, requires_grad=slot.tensor.requires_grad)
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
        for index, offset in zip(indexes, self._offsets(indexes), strict=True):
            slot = self.slots[index]
            is_here = index < self.num_packed and slot.fits
            found = [(span, self._in_bank(starts, span, part)) for span, part in slot.parts()] if is_here else []
            if not is_here or any(place is None for _, place in found):
                apart.add(index)
                continue
            for span, place in found:
                assert place is not None
                (bank, start), at, size = place, offset + span.offset, span.num_bytes
                if pieces and pieces[-1][0] is bank and pieces[-1][1] - pieces[-1][2] == start - at:
                    _, start, first, _ = pieces.pop()
                    at, size = first, size + at - first
                pieces.append((bank, start, at, size))
        return pieces, apart

    @staticmethod
    def _in_bank(
        banks: list[tuple[torch.Tensor, int]], span: SlotSpan, part: torch.Tensor
    ) -> tuple[torch.Tensor, int] | None:
        """The bank that a tensor lies in, of banks and their addresses, and where in it."""
        address = part.data_ptr()
        for bank, first in banks:
            if 0 <= address - first <= bank.numel() - span.num_bytes:
                return bank, address - first
        return None


def _has_statistics(module: nn.Module) -> bool:
    return hasattr(module, "track_running_stats")


def _writes_buffers(module: nn.Module) -> bool:
    writes_data = any(not _UNSEEN_WRITES.isdisjoint(names_in(code)) for code in codes_of(type(module)))
    return writes_data and any(each._buffers for each in module.modules())
