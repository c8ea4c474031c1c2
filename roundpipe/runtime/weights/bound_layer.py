"""A layer for one visit: a replica whose weights are views of an arena."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from roundpipe.runtime.weights.layer_weights import Habits, LayerWeights
from roundpipe.runtime.weights.layout import Attribute, Slot
from roundpipe.runtime.weights.replica import FrozenLayers, Replica


class _Buffer(NamedTuple):
    """A buffer as it was bound: where the layer has it, where its replica has it, and its value then."""

    originals: list[Attribute]
    twins: list[Attribute]
    tensor: torch.Tensor | None
    version: int


class BoundLayer:
    """A replica whose parameters and buffers are views of device memory, for one visit."""

    def __init__(self, weights: LayerWeights, replica: Replica) -> None:
        self.weights = weights
        self.replica = replica
        self.habits = Habits()
        self.parameters: list[tuple[Slot, nn.Parameter]] = []
        """Those that get gradients."""
        self._buffers: list[_Buffer] = []
        self._bound: list[tuple[dict[str, Any], str]] = []
        """Where the replica's modules have what was bound, to be emptied."""

    @property
    def module(self) -> nn.Module:
        return self.replica.module

    def bind(
        self,
        region: torch.Tensor,
        outside: dict[int, torch.Tensor | None],
        with_gradients: bool,
        frozen: FrozenLayers | None = None,
    ) -> None:
        """Point the replica at the weights in ``region``, and at those that lie ``outside`` of it, by slot index."""
        bound: list[tuple[Slot, torch.Tensor | None]] = []
        for index, slot in enumerate(self.weights.slots):
            tensor = outside[index] if index in outside else slot.view(region)
            if slot.is_parameter and tensor is not None:
                is_trained = slot.tensor.requires_grad if frozen is None else slot.tensor in frozen.trained
                tensor = self._as_parameter(tensor, slot, is_trained, with_gradients)
            bound.append((slot, tensor))
        tensors = {id(slot.tensor): tensor for slot, tensor in bound if tensor is not None and slot.fits}
        self.replica.refresh(tensors, frozen)
        is_training = any(module.training for module in self.replica.module.modules())
        self.habits = self.weights.habits[is_training]
        for slot, tensor in bound:
            twins = self._fill(slot.attributes, tensor)
            if not slot.is_parameter:
                self._buffers.append(_Buffer(slot.attributes, twins, tensor, _version(tensor)))
        for attribute in self.weights.empty_buffers:
            self._buffers.append(_Buffer([attribute], self._fill([attribute], None), None, -1))

    def _as_parameter(self, tensor: torch.Tensor, slot: Slot, is_trained: bool, with_gradients: bool) -> nn.Parameter:
        """The parameter to call with; it requires grad also where no backward follows, for code that asks."""
        if not isinstance(tensor, nn.Parameter) or tensor.requires_grad != is_trained:
            tensor = nn.Parameter(tensor.detach(), requires_grad=is_trained)
        if is_trained and with_gradients:
            self.parameters.append((slot, tensor))
            if tensor is not slot.tensor:
                for hook in (slot.tensor._backward_hooks or {}).values():
                    tensor.register_hook(hook)  # as on the original, once per microbatch
        return tensor

    def _fill(self, attributes: Iterable[Attribute], tensor: torch.Tensor | None) -> list[Attribute]:
        """Set, and return, the replica's counterparts of these attributes."""
        twins = [Attribute(self.replica.twin(module), table, name) for module, table, name in attributes]
        for module, table, name in twins:
            tensors = getattr(module, table)
            tensors[name] = tensor
            if not isinstance(module, torch.jit.ScriptModule):  # can't be without; has views of the arena
                self._bound.append((tensors, name))
        return twins

    @property
    def has_buffers(self) -> bool:
        return bool(self._buffers)

    @property
    def versions_tell(self) -> bool:
        """Whether no forward has written buffers so far, and their versions would tell if one did."""
        return self.habits.writes_buffers is False and not self.weights.may_write_unseen

    def buffer_values(self) -> list[torch.Tensor | None]:
        """The buffers as they are now, on the device."""
        return [buffer.twins[0].get() for buffer in self._buffers]

    def buffer_versions(self) -> list[tuple[int, int]]:
        return [(id(value), _version(value)) for value in self.buffer_values()]

    def buffers_on_host(self) -> list[torch.Tensor | None]:
        """Copies of the buffers as they were uploaded for this visit."""
        values = [buffer.originals[0].get() for buffer in self._buffers]
        return [None if value is None else value.detach().clone() for value in values]

    def set_buffers(self, values: Sequence[torch.Tensor | None]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            for twin in buffer.twins:
                twin.set(value)

    def changed_buffers(self) -> Iterator[tuple[list[Attribute], torch.Tensor | None]]:
        """Buffers written or replaced during the visit, with the original tree's attributes."""
        may_all_be_written = self.habits.writes_buffers is not False
        for buffer, value in zip(self._buffers, self.buffer_values(), strict=True):
            if value is None:
                if buffer.tensor is not None:
                    yield buffer.originals, None
            elif may_all_be_written or value is not buffer.tensor or value._version != buffer.version:
                yield buffer.originals, value

    def converted_parameters(self) -> Iterator[tuple[torch.Tensor, torch.dtype]]:
        """Parameters of the original tree that the forward gave another dtype, and that dtype."""
        for slot in self.weights.slots:
            if slot.is_parameter and not slot.is_loose and slot.fits:
                module, name = slot.attributes[0].module, slot.attributes[0].name
                parameter = self.replica.twin(module)._parameters[name]
                if parameter is not None and parameter.dtype != slot.dtype:
                    yield slot.tensor, parameter.dtype

    def unbind(self) -> None:
        """Drop every reference to device memory, also if `bind` did not come to its end."""
        for _, parameter in self.parameters:
            parameter.grad = None  # whoever still holds the parameter does not hold its gradient
        for tensors, name in self._bound:
            tensors[name] = None
        self._bound.clear()
        self.parameters.clear()
        self._buffers.clear()
        self.replica.drop_tensors()


def _version(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None else tensor._version
