"""Gradients that a call's loss adds on the host by itself, put back before the call is run again.

A ``loss_fn`` may compute with weights, as for a penalty, or with tensors of its own that are trained. Its backward adds
to their ``.grad`` as it goes, so that an attempt that fails later would leave them for the next one to add to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from roundpipe.effects.uses import reached_by
from roundpipe.wrappers.model_view import ModelView


class HostGradients:
    """Those of what a loss function reaches; nothing if it reaches no tensor that is trained."""

    def __init__(self, loss_fn: Any) -> None:
        reached = () if loss_fn is None else tensors_reached_by(loss_fn)
        self._reached = {id(each): each for each in reached if each.is_leaf and each.requires_grad}
        self._before: list[tuple[torch.Tensor, torch.Tensor | None, int, torch.Tensor | None]] = []
        self.can_restore = False

    def note(self, parameters: Iterable[torch.Tensor] = (), *, keeps_values: bool) -> None:
        """Take note of them as they are now; with their values and those of a model's parameters, to put all back."""
        self.can_restore = keeps_values
        leaves = {**self._reached, **{id(leaf): leaf for leaf in parameters if self._reached}}
        for leaf in leaves.values():
            gradient = leaf.grad
            values = None if gradient is None or not keeps_values else gradient.detach().clone()
            self._before.append((leaf, gradient, -1 if gradient is None else gradient._version, values))

    @property
    def reaches_any(self) -> bool:
        """Whether the loss reaches tensors that are trained."""
        return bool(self._reached)

    @property
    def have_come(self) -> bool:
        """Whether something that the loss reaches has other gradients than before."""
        return any(
            leaf.grad is not gradient or (gradient is not None and gradient._version != version)
            for leaf, gradient, version, _ in self._before
            if id(leaf) in self._reached
        )

    def restore(self) -> None:
        """Put all back, those of the model's layers, too."""
        assert self.can_restore
        for leaf, gradient, _, values in self._before:
            if gradient is not None and values is not None:
                with torch.no_grad():
                    gradient.copy_(values)
            leaf.grad = gradient


def tensors_reached_by(function: Any) -> Iterator[torch.Tensor]:
    """Tensors that a function can look up, and the parameters of modules that it can, wrapped or not."""
    for value in reached_by(function):
        value = value.model if isinstance(value, ModelView) else value
        if isinstance(value, nn.Module):
            yield from value.parameters()
        elif isinstance(value, torch.Tensor):
            yield value
