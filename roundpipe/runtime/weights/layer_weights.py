"""One layer's weights in host memory: laid out, packed, uploaded; and what its forward does to buffers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from roundpipe.core.errors import ConfigError
from roundpipe.core.module_tree import Structure, structure_message
from roundpipe.effects.user_code import codes_of, names_in
from roundpipe.runtime.device.backend import Backend, Lane
from roundpipe.runtime.device.host_memory import is_plain
from roundpipe.runtime.weights.layout import Slot, aligned, attributes_of, tensors_of

_UNSEEN_WRITES = frozenset({"data", "batch_norm", "instance_norm"})
"""What Python code calls or reads to write a tensor without a change of its version."""


@dataclass(slots=True)
class Habits:
    """What a layer's forward does, as far as it was seen; None: not known yet."""

    writes_buffers: bool | None = None
    """Whether it writes buffers; learned by comparing values, since some operators (batch_norm) write without a change
    of version."""
    has_side_effects: bool | None = None
    """Whether it leaves other buffers or attributes behind; learned at each release."""
    draws_python: bool | None = None
    """Whether it draws from Python's or NumPy's generators; learned at the first call."""


class LayerWeights:
    """One layer's weights on the host as they are now; those that ``may_pack`` allows come first.

    Raises:
        ConfigError: a tensor is on the meta device.
    """

    def __init__(self, name: str, layer: nn.Module, may_pack: Callable[[torch.Tensor], bool]) -> None:
        self.name = name
        self.layer = layer
        self.packed: torch.Tensor | None = None
        """The buffer that the first `num_packed` slots lie in."""
        self.slots: list[Slot] = []
        self.num_bytes = 0
        tensors = [(tensor, attributes, may_pack(tensor)) for tensor, attributes in tensors_of(layer)]
        self.num_packed = sum(is_packed for *_, is_packed in tensors)
        for tensor, attributes, _ in sorted(tensors, key=lambda item: not item[2]):
            if tensor.is_meta:
                raise ConfigError(
                    f"{name}.{attributes[0].name} is on the meta device, so it has no values to train or run with; "
                    "load the model's weights (model.to_empty, from_pretrained) before the first call"
                )
            slot = Slot.of(tensor, attributes, self.num_bytes)
            self.slots.append(slot)
            self.num_bytes += aligned(slot.num_bytes)
        self._tied = [slot for slot in self.slots if len(slot.attributes) > 1]
        empty = [attribute for attribute in attributes_of(layer) if attribute.get() is None]
        self.empty_buffers = [attribute for attribute in empty if attribute.table == "_buffers"]
        self._empty_parameters = [attribute for attribute in empty if attribute.table == "_parameters"]
        self._structure = Structure(layer.modules())
        self.habits: defaultdict[bool, Habits] = defaultdict(Habits)
        """By whether any module of the layer is in training mode."""
        self._writers: list[nn.Module] | None = None

    @property
    def may_write_unseen(self) -> bool:
        """Whether a forward may write buffers without a change of version on a way that it has not gone so far."""
        if self._writers is None:
            self._writers = [
                module for module in self.layer.modules() if _has_statistics(module) or _writes_data(type(module))
            ]
        return any(module.training or not _has_statistics(module) for module in self._writers)

    def check_structure(self) -> None:
        """Raise `ConfigError` if the layer has other modules, or parameters under other names, than as laid out."""
        changed = self._structure.changed()
        if changed is not None:
            raise ConfigError(structure_message(changed))
        removed = [slot.attributes[0] for slot in self.slots if slot.is_parameter and slot.current is None]
        added = [attribute for attribute in self._empty_parameters if attribute.get() is not None]
        for attribute in (*removed, *added):
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
        self.packed = buffer

    def is_packed(self) -> bool:
        """Whether the user's tensors still are the views that `pack` made."""
        if self.packed is None:
            return False
        base = self.packed.data_ptr()
        return all(
            slot.fits and (slot.tensor.data_ptr() == base + slot.offset or not slot.num_bytes)
            for slot in self.slots[: self.num_packed]
        )

    @property
    def packed_bytes(self) -> int:
        if self.num_packed == 0:
            return 0
        last = self.slots[self.num_packed - 1]
        return last.offset + last.num_bytes

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

    def upload(
        self, backend: Backend, region: torch.Tensor
    ) -> tuple[dict[int, torch.Tensor | None], list[torch.Tensor]]:
        """Copy all weights into a device region; returns those outside of it by slot (None: gone), and all copies."""
        start = 0
        copies = []
        if self.is_packed():
            assert self.packed is not None
            source, target = self.packed[: self.packed_bytes], region[: self.packed_bytes]
            copies.append(backend.upload(source, target, Lane.WEIGHTS))
            start = self.num_packed
        outside: dict[int, torch.Tensor | None] = {}
        for index, slot in enumerate(self.slots[start:], start):
            if slot.is_loose or not slot.fits:  # a buffer may get another shape while a step runs
                tensor = slot.tensor if slot.is_parameter else slot.current
                outside[index] = copy = None if tensor is None else backend.upload(tensor, lane=Lane.WEIGHTS)
                copies += [] if copy is None else [copy]
            elif slot.num_bytes:
                copies.append(backend.upload(slot.tensor.detach(), slot.view(region), Lane.WEIGHTS))
        return outside, copies


def _has_statistics(module: nn.Module) -> bool:
    return hasattr(module, "track_running_stats")


def _writes_data(kind: type) -> bool:
    """Whether a class has Python that may write tensors without a change of their version."""
    return any(not _UNSEEN_WRITES.isdisjoint(names_in(code)) for _, code in codes_of(kind))
