"""The user's modules as they were at one moment, for what runs of a step once the caller may change them again."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn

from roundpipe.core.errors import ConfigError
from roundpipe.core.inventory import Inventory, of_children
from roundpipe.core.module_tree import structure_message
from roundpipe.runtime.weights.module_copy import CHANGED_IN_PLACE, OWN, Attributes, ContainedItems


class FrozenLayers:
    """Attributes of some layers' modules, who was trained, and parameters' hooks; ``held`` is what the layers hold."""

    def __init__(self, held: Inventory) -> None:
        self._held = held
        self._parameters = [*chain.from_iterable(held.parameters)]
        self._requires_grad = [parameter.requires_grad for parameter in self._parameters]
        pairs = zip(self._parameters, self._requires_grad, strict=True)
        self.trained = {id(parameter) for parameter, is_trained in pairs if is_trained}
        """Identities of the parameters that were trained, which this keeps alive."""
        self._hooks = _hooks_of(self._parameters)
        self._copies: dict[int, Any] = {}
        self._attributes = {
            module: {
                name: self._copied(value) if type(value) in CHANGED_IN_PLACE and name not in OWN else value
                for name, value in module.__dict__.items()
            }
            for module in held.modules
        }
        self._compared: tuple[Attributes, ContainedItems] | None = None
        originals = Attributes(held.modules, CHANGED_IN_PLACE)
        if not originals.hold_tensors:  # which nobody expects to be kept beyond the step
            self._compared = originals, ContainedItems(self._copies.values())

    def _copied(self, value: Any) -> Any:
        """One copy for all modules that share a container."""
        if (copied := self._copies.get(id(value))) is None:
            copied = self._copies[id(value)] = value.copy()
        return copied

    def attributes_of(self, module: nn.Module) -> dict[str, Any]:
        """The attributes of a module; `ConfigError` if it was not in the model at that moment."""
        if (attributes := self._attributes.get(module)) is None:
            raise ConfigError(structure_message(module))
        return attributes

    def hooks_of(self, parameter: torch.Tensor) -> tuple[Any, ...]:
        """The hooks that a parameter's gradients go through."""
        return self._hooks.get(id(parameter), ())

    def with_hooks_now(self) -> FrozenLayers:
        """With the hooks that parameters have now: in a backward of its own, as in eager mode, these run."""
        if (now := _hooks_of(self._parameters)) == self._hooks:
            return self
        other = copy.copy(self)
        other._hooks = now
        return other

    def are_same(self, held: Inventory) -> bool:
        """Whether layers that hold this would be frozen to the same now, and nothing has changed this."""
        return (
            self._compared is not None
            and held is self._held
            and [parameter.requires_grad for parameter in self._parameters] == self._requires_grad
            and _hooks_of(self._parameters) == self._hooks
            and all(each.are_same() for each in self._compared)
        )


def hooks_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    """The hooks that its gradients go through now."""
    return tuple((parameter._backward_hooks or {}).values())


def _hooks_of(parameters: Iterable[torch.Tensor]) -> dict[int, tuple[Any, ...]]:
    """Of those that have some, by identity."""
    return {id(each): hooks_of(each) for each in parameters if each._backward_hooks}


class LatestFrozenLayers:
    """Freezes layers, and gives the same object again as long as nothing about them has changed.

    A replica that has taken it over need not look at each module again. And thousands of containers that come and go
    with each step would have Python's garbage collector look through all that the process holds.
    """

    def __init__(self) -> None:
        self._latest: FrozenLayers | None = None

    def of(self, layers: nn.Sequential) -> FrozenLayers:
        """The layers as they are now."""
        held = of_children(layers)
        if self._latest is None or not self._latest.are_same(held):
            self._latest = FrozenLayers(held)
        return self._latest
