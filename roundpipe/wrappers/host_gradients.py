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
    """Those of what a loss function reaches and of the model, as they are now, where it reaches any.

    Args:
        keeps_values: whether they are copied, so that they can be put back.
    """

    def __init__(self, loss_fn: Any, parameters: Iterable[torch.Tensor], *, keeps_values: bool) -> None:
        self._reached = {} if loss_fn is None else {id(leaf): leaf for leaf in _leaves_of(loss_fn)}
        self.can_restore = keeps_values
        leaves = {**self._reached, **{id(leaf): leaf for leaf in parameters if self._reached}}
        self._before: list[tuple[torch.Tensor, torch.Tensor | None, int, torch.Tensor | None]] = []
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


def _leaves_of(loss_fn: Any) -> Iterator[torch.Tensor]:
    for value in reached_by(loss_fn):
        value = value.model if isinstance(value, ModelView) else value
        found = value.parameters() if isinstance(value, nn.Module) else [value]
        for each in found:
            if isinstance(each, torch.Tensor) and each.is_leaf and each.requires_grad:
                yield each
