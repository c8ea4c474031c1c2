"""A model whose own forwards run on the host, around parts that run on the devices.

HostTree   copies of the modules around the parts; their forwards run as they are
  `- Part  one module of the model on the devices
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from roundpipe.core.errors import ConfigError
from roundpipe.effects.places import REGISTERED
from roundpipe.runtime.weights.replica import Replica
from roundpipe.wrappers.lazy_outputs import materialize_all
from roundpipe.wrappers.part import IN_ONE_PIECE, CallOptions, Part
from roundpipe.wrappers.session import Session


class _LossFunction(nn.Module):
    """The loss function of a Hugging Face model, looked up when it is called."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.__dict__["owner"] = owner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["owner"].loss_function(*args, **kwargs)


def _children_of(module: nn.Module) -> list[tuple[str, nn.Module | None]]:
    return list(module._modules.items())


class HostTree(Replica):
    """Copies of a model's modules, with stand-ins for those that are parts, and those that are ``left`` themselves.

    Parameters and buffers are the model's own, so gradients arrive in their ``.grad`` by plain autograd.
    """

    def __init__(self, model: nn.Module, parts: Mapping[nn.Module, Part], left: Iterable[nn.Module]) -> None:
        self.parts = tuple(parts.values())
        self._in_place_of = {id(module): module for module in left}
        self._in_place_of.update((id(module), part.stand_in.module) for module, part in parts.items())
        self._loss_functions: dict[int, Part] = {}
        super().__init__(model, torch.device("cpu"))
        self._children = [_children_of(original) for original in self._originals]
        self._attributes: list[dict[str, Any]] = []
        """Those of each of its modules when a call began."""

    def _copy(self, original: nn.Module) -> nn.Module:
        other = self._in_place_of.get(id(original))
        if other is None and isinstance(original, torch.jit.ScriptModule):
            other = original  # a copy would have other parameters
        if other is None:
            return super()._copy(original)
        self._twins[id(original)] = other
        return other

    def attach_loss_functions(self, session: Session, options: CallOptions) -> None:
        """Send the loss functions of Hugging Face models to the devices: in one piece, a mean over all."""
        base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
        for original in self._originals:
            if base is not None and isinstance(original, base):
                name = f"loss function of {type(original).__name__}"
                part = Part(session, name, _LossFunction(original), IN_ONE_PIECE, options)
                self._loss_functions[id(original)] = part

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's outputs; what its forwards leave in attributes and buffers is left in the model."""
        self._take_over()
        try:
            return materialize_all(self.module(*args, **kwargs))
        finally:
            self._hand_back()

    def _take_over(self) -> None:
        self.refresh({})
        for part in self.parts:
            part.stand_in.take_over()
        configs: dict[int, Any] = {}
        for original, names in zip(self._originals, self._children, strict=True):
            if names != _children_of(original):
                raise ConfigError(
                    f"submodules of a {type(original).__name__} were replaced, added or removed since the model was "
                    "wrapped; wrap it again"
                )
            state = self.twin(original).__dict__
            state["_parameters"] = dict(original._parameters)
            state["_buffers"] = dict(original._buffers)
            config = state.get("config")
            if getattr(config, "use_cache", None):  # a cache that layers fill must not be filled by recomputation
                if id(config) not in configs:
                    configs[id(config)] = copy.copy(config)
                    configs[id(config)].use_cache = False
                state["config"] = configs[id(config)]
            if id(original) in self._loss_functions:
                state["_loss_function"] = self._loss_functions[id(original)]
        self._attributes = [dict(self.twin(original).__dict__) for original in self._originals]

    def _hand_back(self) -> None:
        for part in self.parts:
            part.stand_in.give_back()
        originals = {id(self.twin(original)): original for original in self._originals}
        originals |= {id(part.stand_in.module): part.module for part in self.parts}
        for original, before in zip(self._originals, self._attributes, strict=True):
            twin = self.twin(original)
            original._buffers.update(twin._buffers)
            for name, weight in twin._parameters.items():
                if original._parameters.get(name, before) is not weight:
                    original._parameters[name] = weight
            for name, value in twin.__dict__.items():
                if name not in REGISTERED and value is not before.get(name, before):
                    original.__dict__[name] = _pointing(materialize_all(value), originals)
            for name in before.keys() - twin.__dict__.keys():
                original.__dict__.pop(name, None)


def _pointing(value: Any, modules: Mapping[int, nn.Module]) -> Any:
    """A value with other modules in it, by the identity of those that they replace."""
    if isinstance(value, nn.Module):
        return modules.get(id(value), value)
    if isinstance(value, types.MethodType):
        owner = modules.get(id(value.__self__))
        return value if owner is None else types.MethodType(value.__func__, owner)
    if type(value) in (list, tuple):
        items = [_pointing(item, modules) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    if type(value) is dict:
        mapped = {key: _pointing(item, modules) for key, item in value.items()}
        return value if all(mapped[key] is value[key] for key in value) else mapped
    return value
