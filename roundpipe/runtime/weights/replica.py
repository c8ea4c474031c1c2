"""Shallow copies of a user's module tree, that a worker binds to device weights for one visit without touching it.

A replica has its own ``_parameters``, ``_buffers`` and ``_modules`` and shares all else: hooks, configuration, caches.
Attributes that point back into the tree (a bound method, a list of submodules, a partial) point into the replica.

Invariant: running a replica never changes the original's parameters, buffers or submodules. Attributes of
simple types that a forward sets (counters, flags) are handed back by `changed_attributes`.
"""

from __future__ import annotations

import copy
import functools
import operator
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from roundpipe.core.errors import ConfigError
from roundpipe.core.layers import EXECUTION_DEVICE
from roundpipe.core.module_tree import modules_in, parameters_in, structure_message
from roundpipe.runtime.weights.layer_weights import Habits, LayerWeights
from roundpipe.runtime.weights.residents import Stay
from roundpipe.runtime.weights.slots import Attribute, Slot, version_of

_OWN = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (dict, OrderedDict, list, tuple, set)
_CHANGED_IN_PLACE = (dict, list, OrderedDict)
"""Attributes that a module may change later; their own `copy` takes a tenth of the time of the module of this name."""
_PLAIN = (int, float, bool, str, type(None))


@dataclass(slots=True)
class FrozenLayers:
    """Modules of the user's as they were at one moment: attributes, and which parameters were trained."""

    attributes: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)
    trained: set[nn.Parameter] = field(default_factory=set)

    @classmethod
    def of(cls, layers: Iterable[nn.Module]) -> Self:
        frozen = cls()
        for layer in layers:
            for module in modules_in(layer):
                frozen.attributes[module] = {
                    name: value.copy() if type(value) in _CHANGED_IN_PLACE else value
                    for name, value in module.__dict__.items()
                }
            frozen.trained.update(parameter for parameter in parameters_in(layer) if parameter.requires_grad)
        return frozen

    def attributes_of(self, module: nn.Module) -> dict[str, Any]:
        """The attributes of a module; `ConfigError` if it was not in the model at that moment."""
        if (attributes := self.attributes.get(module)) is None:
            raise ConfigError(structure_message(module))
        return attributes


class Replica:
    """One worker's copy of one layer's module tree; ``device`` replaces the attribute `EXECUTION_DEVICE`."""

    def __init__(self, original: nn.Module, device: torch.device) -> None:
        self._device = device
        self._twins: dict[int, nn.Module] = {}
        self._originals: list[nn.Module] = []
        self.module = self._copy(original)
        self._plain: list[tuple[nn.Module, dict[str, Any]]] = []
        """By original, its attributes of simple types at the last `refresh`."""
        self._redirected: list[tuple[dict[str, Any], str]] = []

    def _copy(self, original: nn.Module) -> nn.Module:
        if (twin := self._twins.get(id(original))) is not None:
            return twin
        if isinstance(original, torch.jit.ScriptModule):
            twin = copy.deepcopy(original)  # a script module's state lives in C++
            self._twins.update(zip(map(id, original.modules()), twin.modules(), strict=True))
            self._originals += original.modules()
            return twin
        twin = self._twins[id(original)] = object.__new__(type(original))
        self._originals.append(original)
        state = twin.__dict__
        state.update(original.__dict__)
        state["_parameters"] = dict(original._parameters)
        state["_buffers"] = dict(original._buffers)
        state["_modules"] = {
            name: None if child is None else self._copy(child) for name, child in original._modules.items()
        }
        return twin

    def twin(self, original: nn.Module) -> nn.Module:
        """The copy of a module of the original tree; `ConfigError` if there is none."""
        if (twin := self._twins.get(id(original))) is None:
            raise ConfigError(structure_message(original))
        return twin

    def refresh(self, tensors: Mapping[int, torch.Tensor], frozen: FrozenLayers | None = None) -> None:
        """Take over the original's attributes (mode, hooks) of when it was ``frozen``; None: those of now.

        Attributes that name a parameter or buffer get what ``tensors`` has for its identity.
        """
        self._plain = []
        self._redirected = []
        for original in self._originals:
            twin = self._twins[id(original)]
            if isinstance(original, torch.jit.ScriptModule):
                twin.train(original.training)
                continue
            state = twin.__dict__
            attributes = original.__dict__ if frozen is None else frozen.attributes_of(original)
            plain = {}
            for name, value in attributes.items():
                if name in _OWN:
                    continue
                if type(value) in _PLAIN:
                    plain[name] = state[name] = value
                elif type(value) in _CONTAINERS and not value:
                    state[name] = value
                else:
                    state[name] = redirected = redirect(value, self._twins, tensors)
                    if redirected is not value:
                        self._redirected.append((state, name))
            if len(state) != len(attributes):  # set on the twin by a forward, or deleted since
                for name in [name for name in state if name not in attributes]:
                    del state[name]
            if EXECUTION_DEVICE in state:
                state[EXECUTION_DEVICE] = self._device
            self._plain.append((original, plain))

    def drop_tensors(self) -> None:
        """Drop the device tensors that attributes point to, until the next `refresh`."""
        for state, name in self._redirected:
            state[name] = None
        self._redirected.clear()

    def changed_attributes(self) -> list[tuple[nn.Module, str, Any]]:
        """Plain attributes that forward changed since `refresh`: original module, name, new value."""
        return [
            (original, name, value)
            for original, plain in self._plain
            for name, value in self._twins[id(original)].__dict__.items()
            if type(value) in _PLAIN and name not in _OWN and plain.get(name, plain) != value
        ]


def redirect(value: Any, modules: Mapping[int, nn.Module], tensors: Mapping[int, torch.Tensor]) -> Any:
    """A value with other modules and tensors in it, by the identities of those that they replace."""
    if isinstance(value, torch.Tensor):
        return tensors.get(id(value), value)
    if isinstance(value, nn.Module):
        return modules.get(id(value), value)
    if isinstance(value, types.MethodType):
        owner = modules.get(id(value.__self__))
        return value if owner is None else types.MethodType(value.__func__, owner)
    if isinstance(value, functools.partial):
        function, *args = new = [redirect(item, modules, tensors) for item in (value.func, *value.args)]
        unchanged = all(map(operator.is_, new, (value.func, *value.args)))
        return value if unchanged else functools.partial(function, *args, **value.keywords)
    if type(value) in (list, tuple):
        items = [redirect(item, modules, tensors) for item in value]
        return value if all(map(operator.is_, items, value)) else type(value)(items)
    if type(value) is dict:
        mapped = {key: redirect(item, modules, tensors) for key, item in value.items()}
        return value if all(map(operator.is_, mapped.values(), value.values())) else mapped
    return value


class _Buffer(NamedTuple):
    """A buffer as it was bound."""

    originals: list[Attribute]
    twins: list[Attribute]
    """Where the replica has it."""
    tensor: torch.Tensor | None
    version: int


class BoundLayer:
    """A replica whose parameters and buffers are views of device memory, for one visit."""

    def __init__(self, weights: LayerWeights, replica: Replica, stay: Stay | None = None) -> None:
        self.weights = weights
        self.replica = replica
        self.stay = stay or Stay.of(weights)
        self.module = replica.module
        self.habits = Habits()
        self.is_bound = False
        """Whether `bind` has come to its end; a visit whose step fails may end before."""
        self.parameters: list[tuple[Slot, nn.Parameter]] = []
        """Those that get gradients."""
        self._buffers: list[_Buffer] = []
        self._bound: list[tuple[dict[str, Any], str]] = []
        """Where the replica's modules have what was bound, to be emptied."""

    def bind(
        self, tensors: Mapping[int, torch.Tensor | None], with_gradients: bool, frozen: FrozenLayers | None = None
    ) -> None:
        """Point the replica at the weights on the device, by slot index."""
        bound: list[tuple[Slot, torch.Tensor | None]] = []
        for index, slot in enumerate(self.weights.slots):
            tensor = tensors[index]
            if slot.is_parameter and tensor is not None:
                is_trained = slot.tensor.requires_grad if frozen is None else slot.tensor in frozen.trained
                tensor = self._as_parameter(tensor, slot, is_trained, with_gradients)
            bound.append((slot, tensor))
        self.replica.refresh(
            {id(slot.tensor): tensor for slot, tensor in bound if tensor is not None and slot.fits}, frozen
        )
        self.habits = self.weights.habits_of(map(self.replica.twin, self.weights.modules))
        filled = [(slot.attributes, tensor) for slot, tensor in bound]
        filled += [([attribute], None) for attribute in self.weights.empty_buffers]
        for attributes, tensor in filled:
            twins = self._fill(attributes, tensor)
            if attributes[0].table == "_buffers":
                self._buffers.append(_Buffer(attributes, twins, tensor, version_of(tensor)))
        self.is_bound = True

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
        return [(id(value), version_of(value)) for value in self.buffer_values()]

    def buffers_on_host(self) -> list[torch.Tensor | None]:
        """Copies of the buffers as they were uploaded for this visit."""
        values = (buffer.originals[0].get() for buffer in self._buffers)
        return [None if value is None else value.detach().clone() for value in values]

    def set_buffers(self, values: Sequence[torch.Tensor | None]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            for twin in buffer.twins:
                twin.set(value)

    def changed_buffers(self) -> Iterator[tuple[list[Attribute], torch.Tensor | None]]:
        """Buffers written or replaced during the visit, with the original tree's attributes."""
        may_all_be_written = self.habits.writes_buffers is not False
        for buffer, value in zip(self._buffers, self.buffer_values(), strict=True):
            is_other = value is not buffer.tensor or version_of(value) != buffer.version
            if is_other or (may_all_be_written and value is not None):
                yield buffer.originals, value

    def converted_parameters(self) -> Iterator[tuple[torch.Tensor, torch.dtype]]:
        """Parameters of the original tree that the forward gave another dtype, and that dtype."""
        for slot in self.weights.slots:
            if slot.is_parameter and not slot.is_loose:
                module, _, name = slot.attributes[0]
                parameter = self.replica.twin(module)._parameters[name]
                if parameter is not None and parameter.dtype != slot.dtype and slot.fits:
                    yield slot.tensor, parameter.dtype

    def unbind(self) -> None:
        """Drop every reference to device memory, also if `bind` did not come to its end."""
        self.is_bound = False
        for _, parameter in self.parameters:
            parameter.grad = None  # whoever still holds the parameter does not hold its gradient
        for tensors, name in self._bound:
            tensors[name] = None
        self._bound.clear()
        self.parameters.clear()
        self._buffers.clear()
        self.replica.drop_tensors()
