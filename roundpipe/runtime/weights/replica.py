"""Shallow copies of a user's module tree, that a worker binds to device weights for one visit without touching it.

A replica has its own ``_parameters``, ``_buffers`` and ``_modules`` and shares all else: hooks, configuration, caches.
Modules of torch that compute nothing and hold nothing are shared as they are: adapters bring them by the thousand.
Attributes that point back into the tree (a bound method, a list of submodules, a partial) point into the replica.

Invariant: running a replica never changes the original's parameters, buffers or submodules. Attributes of
simple types that a forward sets (counters, flags) are handed back by `changed_attributes`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from roundpipe.core.errors import ConfigError
from roundpipe.core.layers import EXECUTION_DEVICE
from roundpipe.core.module_tree import structure_message
from roundpipe.core.storages import is_made_of_others
from roundpipe.core.watched import carry_attributes
from roundpipe.effects.places import has_hooks
from roundpipe.runtime.weights.frozen_layers import FrozenLayers, hooks_of
from roundpipe.runtime.weights.layer_weights import Habits, LayerWeights
from roundpipe.runtime.weights.module_copy import Attributes, ModuleCopy, Tensors
from roundpipe.runtime.weights.residents import Stay
from roundpipe.runtime.weights.slots import Attribute, Slot, TensorPlaces, version_of

_BARE = frozenset((nn.Identity, nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList))
"""Classes of modules that have no state of their own where they hold nothing."""


def _is_bare(module: nn.Module) -> bool:
    if type(module) not in _BARE or "forward" in module.__dict__ or EXECUTION_DEVICE in module.__dict__:
        return False
    return not (module._parameters or module._buffers or module._modules or has_hooks(module))


@dataclass(slots=True)
class _Refreshed:
    """What a refresh has left of a replica: the next one, if it is by the same attributes, has only to compare."""

    source: Attributes | FrozenLayers
    """What it went by; attributes are those of the user's modules."""
    copies: Attributes
    containers: list[tuple[dict[str, Any], dict[str, Any]]]
    """Of the copies: states, and what is filled in place of each, which are its own of frozen layers."""

    def is_of(self, frozen: FrozenLayers | None) -> bool:
        """Whether what to go by is as it was."""
        return self.source is frozen if isinstance(self.source, FrozenLayers) else self.source.are_same()

    def give_containers(self) -> None:
        for state, containers in self.containers:
            state.update(containers)


class Replica:
    """One worker's copy of one layer's module tree; ``device`` replaces the attribute `EXECUTION_DEVICE`."""

    _compiles = True
    """Whether modules that torch has compiled run compiled."""

    def __init__(self, original: nn.Module, device: torch.device) -> None:
        self._device = device
        self._twins: dict[int, nn.Module] = {}
        self._originals: list[nn.Module] = []
        self.module = self._copy(original)
        self._scripts = [original for original in self._originals if isinstance(original, torch.jit.ScriptModule)]
        self._copies = [
            (original, self._twins[id(original)], ModuleCopy(self._compiles))
            for original in self._originals
            if not isinstance(original, torch.jit.ScriptModule)
        ]
        self._redirected: list[tuple[dict[str, Any], str]] = []
        self._sources: dict[bool, FrozenLayers | None] = {}
        """What the latest refreshes went by, of frozen layers and of those of now (None)."""
        self._noted: dict[bool, _Refreshed] = {}
        """By whether layers were frozen, what the latest refresh has left, where the next may be the same."""
        self._latest: _Refreshed | None = None
        """What the copies are as."""
        self._has_run = False
        """Whether the copies may have attributes that `changed_attributes` has not seen."""
        self._counterparts: Counterparts | None = None

    def _copy(self, original: nn.Module) -> nn.Module:
        if (twin := self._twins.get(id(original))) is not None:
            return twin
        if self._originals and _is_bare(original):
            self._twins[id(original)] = original
            return original
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

    def counterparts(self, weights: LayerWeights) -> Counterparts:
        """Where its modules have what a layer's weights have in the modules of the original tree."""
        if (known := self._counterparts) is None or known.weights is not weights:
            self._counterparts = known = Counterparts.of(weights, self)
        return known

    def refresh(self, tensors: Tensors, frozen: FrozenLayers | None = None) -> None:
        """Take over the original's attributes (mode, hooks) of when it was ``frozen``; None: those of now.

        Attributes that name a parameter or buffer get what ``tensors`` has for its identity.
        """
        self._redirected = []
        for script in self._scripts:
            self._twins[id(script)].train(script.training)
        has_run, self._has_run = self._has_run, True
        is_frozen, latest = frozen is not None, self._latest
        noted = self._noted.get(is_frozen)
        if noted is not None and noted.is_of(frozen):
            if is_other := noted is not latest:
                noted.give_containers()
            self._latest = noted
            if not (has_run or is_other) or noted.copies.are_same():
                return
        for original, twin, copied in self._copies:
            attributes = original.__dict__ if frozen is None else frozen.attributes_of(original)
            state = twin.__dict__
            names = copied.take_over(attributes, state, self._twins, tensors, self._device)
            if names:
                self._redirected += [(state, name) for name in names]
        is_again = is_frozen in self._sources and self._sources[is_frozen] is frozen
        self._sources[is_frozen] = frozen
        self._noted.pop(is_frozen, None)
        self._latest = self._note(frozen) if is_again else None
        if self._latest is not None:
            self._noted[is_frozen] = self._latest

    def _note(self, frozen: FrozenLayers | None) -> _Refreshed | None:
        if self._redirected or any(copied.points for _, _, copied in self._copies):
            return None
        copies = Attributes(twin for _, twin, _ in self._copies)
        source = Attributes(original for original, _, _ in self._copies) if frozen is None else frozen
        if copies.may_point or (isinstance(source, Attributes) and source.may_point):
            return None
        states = [(twin.__dict__, copied.containers) for _, twin, copied in self._copies if copied.containers]
        return _Refreshed(source, copies, [(state, {name: state[name] for name in names}) for state, names in states])

    def drop_tensors(self) -> None:
        """Drop the device tensors that attributes point to, until the next `refresh`."""
        for state, name in self._redirected:
            state[name] = None
        self._redirected.clear()

    def changed_attributes(self) -> list[tuple[nn.Module, str, Any]]:
        """Plain attributes that forward changed since `refresh`: original module, name, new value."""
        if self._latest is not None and self._latest.copies.are_same():
            self._has_run = False
            return []
        return [
            (original, name, value)
            for original, twin, copied in self._copies
            for name, value in copied.changed(twin.__dict__)
        ]


@dataclass(slots=True)
class Counterparts:
    """Where a replica's modules have a layer's parameters and buffers."""

    weights: LayerWeights
    modules: list[nn.Module]
    parameters: list[int]
    """Slots of parameters."""
    places: list[tuple[int, Attribute]]
    """Where it has what is in a slot."""
    buffers: list[tuple[int, Slot, list[Attribute]]]
    empty_buffers: list[tuple[Attribute, Attribute]]
    """Of the original tree, and of the replica."""
    convertible: list[Slot]
    """Those of parameters that a forward may give another dtype."""
    converted: TensorPlaces
    """Where it has these."""
    dtypes: list[torch.dtype]
    """Theirs."""
    emptied: list[Attribute]
    """What is bound for a visit only."""

    @classmethod
    def of(cls, weights: LayerWeights, replica: Replica) -> Self:
        def counterpart(attribute: Attribute) -> Attribute:
            return attribute._replace(module=replica.twin(attribute.module))

        slots = [(index, slot, [*map(counterpart, slot.attributes)]) for index, slot in enumerate(weights.slots)]
        empty_buffers = [(attribute, counterpart(attribute)) for attribute in weights.empty_buffers]
        convertible = [(slot, twins[0]) for _, slot, twins in slots if slot.is_parameter and not slot.is_loose]
        places = [(index, twin) for index, _, twins in slots for twin in twins]
        twins = [twin for _, twin in places] + [twin for _, twin in empty_buffers]
        return cls(
            weights,
            modules=[*map(replica.twin, weights.modules)],
            parameters=[index for index, slot, _ in slots if slot.is_parameter],
            places=places,
            buffers=[each for each in slots if not each[1].is_parameter],
            empty_buffers=empty_buffers,
            convertible=[slot for slot, _ in convertible],
            converted=TensorPlaces(twin for _, twin in convertible),
            dtypes=[slot.dtype for slot, _ in convertible],
            emptied=[twin for twin in twins if not isinstance(twin.module, torch.jit.ScriptModule)],  # can't be without
        )


class _TensorsOf:
    """What stands for the original tree's tensors, looked at if an attribute names one."""

    def __init__(self, weights: LayerWeights, bound: Sequence[torch.Tensor | None]) -> None:
        self._weights = weights
        self._bound = bound

    def get(self, key: int, default: torch.Tensor) -> torch.Tensor:
        return self._by_id.get(key, default)

    @functools.cached_property
    def _by_id(self) -> dict[int, torch.Tensor]:
        pairs = zip(self._weights.slots, self._bound, strict=True)
        return {id(slot.tensor): tensor for slot, tensor in pairs if tensor is not None and slot.fits}


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
        self._holds_tensors = False
        self.parameters: dict[int, nn.Parameter] = {}
        """Those that get gradients, by slot."""
        self._buffers: list[_Buffer] = []

    def bind(
        self, tensors: Sequence[torch.Tensor | None], with_gradients: bool, frozen: FrozenLayers | None = None
    ) -> None:
        """Point the replica at the weights on the device, in the order of slots.

        Parameters that are among them are used as they are, by one bound layer after another.
        """
        weights, there = self.weights, self.replica.counterparts(self.weights)
        bound = [*tensors]
        indexes = [index for index in there.parameters if bound[index] is not None]
        for index, original in zip(indexes, weights.tensors_at(indexes), strict=True):
            tensor: Any = bound[index]
            is_trained = original.requires_grad if frozen is None else id(original) in frozen.trained
            gets_gradient = is_trained and with_gradients
            hooks: tuple[Any, ...] = ()
            if gets_gradient and tensor is not original:
                hooks = hooks_of(original) if frozen is None else frozen.hooks_of(original)
            if hooks or type(tensor) is not nn.Parameter or tensor.requires_grad != is_trained:
                bound[index] = tensor = _as_parameter(tensor, is_trained, hooks)
            if original.__dict__ and tensor is not original and not is_made_of_others(original):
                carry_attributes(original, tensor)
            if gets_gradient:
                self.parameters[index] = tensor
        self.replica.refresh(_TensorsOf(weights, bound), frozen)
        self.habits = weights.habits_of(there.modules)
        self._holds_tensors = True
        for index, (module, table, name) in there.places:
            getattr(module, table)[name] = bound[index]
        for index, slot, twins in there.buffers:
            self._buffers.append(_Buffer(slot.attributes, twins, bound[index], version_of(bound[index])))
        for original_buffer, twin in there.empty_buffers:
            twin.set(None)
            self._buffers.append(_Buffer([original_buffer], [twin], None, version_of(None)))
        self.is_bound = True

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
        there = self.replica.counterparts(self.weights)
        for slot, tensor, dtype in zip(there.convertible, there.converted.get(), there.dtypes, strict=True):
            if tensor is not None and tensor.dtype != dtype and slot.fits:
                yield slot.tensor, tensor.dtype

    def unbind(self) -> None:
        """Drop every reference to device memory, also if `bind` did not come to its end."""
        self.is_bound = False
        for parameter in self.parameters.values():
            parameter.grad = None  # whoever still holds the parameter does not hold its gradient
        if self._holds_tensors:
            for module, table, name in self.replica.counterparts(self.weights).emptied:
                getattr(module, table)[name] = None
        self._holds_tensors = False
        self.parameters.clear()
        self._buffers.clear()
        self.replica.drop_tensors()


def _as_parameter(tensor: torch.Tensor, is_trained: bool, hooks: Sequence[Any]) -> nn.Parameter:
    """The parameter to call with; it requires grad also where no backward follows, for code that asks."""
    if hooks or not isinstance(tensor, nn.Parameter):
        tensor = nn.Parameter(tensor.detach(), requires_grad=is_trained)
    elif tensor.requires_grad != is_trained:
        tensor.requires_grad_(is_trained)
    for hook in hooks:
        tensor.register_hook(hook)  # as on the original, once per microbatch
    return tensor
