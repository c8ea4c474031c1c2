"""Shallow copies of a user's module tree, so that a worker can bind device weights without touching it.

A replica has its own ``_parameters``, ``_buffers`` and ``_modules`` and shares all else: hooks, configuration, caches.
Attributes that point back into the tree (a bound method, a list of submodules, a partial) point into the replica.

Invariant: running a replica never changes the original's parameters, buffers or submodules. Attributes of
simple types that a forward sets (counters, flags) are handed back by `changed_attributes`.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn

from roundpipe.core.errors import ConfigError
from roundpipe.core.layers import EXECUTION_DEVICE
from roundpipe.core.module_tree import structure_message

_OWN = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (dict, OrderedDict, list, tuple, set)
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
            for module in layer.modules():
                frozen.attributes[module] = {
                    name: copy.copy(value) if type(value) in (dict, list) else value  # the module may change it
                    for name, value in module.__dict__.items()
                }
            frozen.trained.update(parameter for parameter in layer.parameters() if parameter.requires_grad)
        return frozen

    def attributes_of(self, module: nn.Module) -> dict[str, Any]:
        """The attributes of a module; `ConfigError` if it was not in the model at that moment."""
        attributes = self.attributes.get(module)
        if attributes is None:
            raise ConfigError(structure_message(module))
        return attributes


class Replica:
    """One worker's copy of one layer's module tree; ``device`` replaces the attribute `EXECUTION_DEVICE`."""

    def __init__(self, original: nn.Module, device: torch.device) -> None:
        self._device = device
        self._twins: dict[int, nn.Module] = {}
        self._originals: list[nn.Module] = []
        self.module = self._copy(original)
        self._plain: list[dict[str, Any]] = []
        self._tensors: Mapping[int, torch.Tensor] = {}
        self._redirected: list[tuple[dict[str, Any], str]] = []

    def _copy(self, original: nn.Module) -> nn.Module:
        twin = self._twins.get(id(original))
        if twin is not None:
            return twin
        if isinstance(original, torch.jit.ScriptModule):
            twin = copy.deepcopy(original)  # a script module's state lives in C++
            self._twins.update(zip(map(id, original.modules()), twin.modules(), strict=True))
            self._originals += original.modules()
            return twin
        twin = object.__new__(type(original))
        self._twins[id(original)] = twin
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
        twin = self._twins.get(id(original))
        if twin is None:
            raise ConfigError(structure_message(original))
        return twin

    def refresh(self, tensors: Mapping[int, torch.Tensor], frozen: FrozenLayers | None = None) -> None:
        """Take over the original's attributes (mode, hooks) of when it was ``frozen``; None: those of now.

        Attributes that name a parameter or buffer get what ``tensors`` has for its identity.
        """
        self._plain = []
        self._tensors = tensors
        self._redirected = []
        for original in self._originals:
            twin = self._twins[id(original)]
            if isinstance(original, torch.jit.ScriptModule):
                twin.train(original.training)
                self._plain.append({})
                continue
            state = twin.__dict__
            attributes = original.__dict__ if frozen is None else frozen.attributes_of(original)
            plain = {}
            for name, value in attributes.items():
                if name in _OWN:
                    continue
                if type(value) in _PLAIN:
                    plain[name] = value
                    state[name] = value
                elif type(value) in _CONTAINERS and not value:
                    state[name] = value
                else:
                    state[name] = redirected = self._redirect(value)
                    if redirected is not value:
                        self._redirected.append((state, name))
            if len(state) != len(attributes):  # set on the twin by a forward, or deleted since
                for name in [name for name in state if name not in attributes]:
                    del state[name]
            if EXECUTION_DEVICE in state:
                state[EXECUTION_DEVICE] = self._device
            self._plain.append(plain)

    def drop_tensors(self) -> None:
        """Drop the device tensors that attributes point to, until the next `refresh`."""
        self._tensors = {}
        for state, name in self._redirected:
            state[name] = None
        self._redirected.clear()

    def changed_attributes(self) -> list[tuple[nn.Module, str, Any]]:
        """Plain attributes that forward changed since `refresh`: original module, name, new value."""
        changed = []
        for original, plain in zip(self._originals, self._plain, strict=True):
            if isinstance(original, torch.jit.ScriptModule):
                continue
            state = self._twins[id(original)].__dict__
            for name, value in state.items():
                if type(value) in _PLAIN and name not in _OWN and plain.get(name, state) != value:
                    changed.append((original, name, value))
        return changed

    def _redirect(self, value: Any) -> Any:
        """The value, with modules and weights of the original tree inside it replaced by their copies."""
        twins = self._twins
        if isinstance(value, torch.Tensor):
            return self._tensors.get(id(value), value)
        if isinstance(value, nn.Module):
            return twins.get(id(value), value)
        if isinstance(value, types.MethodType):
            twin = twins.get(id(value.__self__))
            return value if twin is None else types.MethodType(value.__func__, twin)
        if isinstance(value, functools.partial):
            function, args = self._redirect(value.func), tuple(map(self._redirect, value.args))
            if function is value.func and all(a is b for a, b in zip(args, value.args, strict=True)):
                return value
            return functools.partial(function, *args, **value.keywords)
        if type(value) in (list, tuple):
            items = [self._redirect(item) for item in value]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
        if type(value) is dict and value:
            mapped = {key: self._redirect(item) for key, item in value.items()}
            return value if all(mapped[key] is value[key] for key in value) else mapped
        return value
