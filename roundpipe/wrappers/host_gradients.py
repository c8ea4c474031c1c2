"""Gradients that a call's loss adds on the host by itself, put back before the call is run again.

A ``loss_fn`` may compute with weights, as for a penalty, or with tensors of its own that are trained. Its backward adds
to their ``.grad`` as it goes, so that an attempt that fails later would leave them for the next one to add to.

Invariant: ``.grad`` is read only while no step and no update runs: a read beside a thread that sets it, such as an
update that drops gradients, can end the process. That gradients have come is told by hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from roundpipe.core.module_tree import parameters_in
from roundpipe.effects.uses import reached_by
from roundpipe.runtime.optimizer.reads import settle_reads_of
from roundpipe.runtime.weights.gradient_counts import GradientCounts
from roundpipe.wrappers.model_view import ModelView
from roundpipe.wrappers.session import Session


class HostGradients:
    """Those of what a loss function reaches; nothing if it reaches no tensor that is trained.

    ``wait_idle`` returns when no step and no update is running.
    """

    def __init__(self, loss_fn: Any, counts: GradientCounts, wait_idle: Callable[[], None]) -> None:
        reached = () if loss_fn is None else tensors_reached_by(loss_fn)
        self._reached = {id(each): each for each in reached if each.is_leaf and each.requires_grad}
        self._counts, self._wait_idle = counts, wait_idle
        self._numbers: list[int] = []
        self._before: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = []
        self.can_restore = False

    def note(self, parameters: Iterable[torch.Tensor] = (), *, keeps_values: bool) -> None:
        """Take note of them as they are now; with their values and those of a model's parameters, to put all back."""
        if not self._reached:
            return
        self.can_restore = keeps_values
        self._numbers = self._counts.of(self._reached.values(), self._wait_idle)
        if keeps_values:
            self._wait_idle()  # what earlier calls add must be whole
            for leaf in {**self._reached, **{id(leaf): leaf for leaf in parameters}}.values():
                gradient = leaf.grad
                self._before.append((leaf, gradient, None if gradient is None else gradient.detach().clone()))

    @property
    def have_come(self) -> bool:
        """Whether something that the loss reaches has got gradients since, from a backward of its own."""
        return self._counts.of(self._reached.values(), self._wait_idle) != self._numbers

    def restore(self) -> None:
        """Put all back, those of the model's layers, too."""
        assert self.can_restore
        for leaf, gradient, values in self._before:
            if gradient is not None and values is not None:
                with torch.no_grad():
                    gradient.copy_(values)
            leaf.grad = gradient
        self._numbers = self._counts.of(self._reached.values(), self._wait_idle)


def wait_for_weights(session: Session, model: nn.Module, loss_fn: Any) -> bool:
    """Whether a ``loss_fn`` reads weights that an update may write, or trains others; returns when that is over.

    What else it trains, such as a critic or a learned temperature, the caller's own code and ``step_fn`` write, and so
    does the wrapper that this may have.
    """
    reached = {id(each): each for each in tensors_reached_by(loss_fn)}
    own = parameters_in(model) if reached else []
    of_model = reached.keys() & set(map(id, own))
    others = [each for key, each in reached.items() if key not in of_model and each.is_leaf and each.requires_grad]
    if others:
        settle_reads_of(others, trains=True)
    if not (session.optimizer.is_async and (others or of_model)):
        return False
    waiter = f"a loss_fn that reads weights of {session.name}, or trains others,"
    if others:
        session.optimizer.wait(waiter)
    for gate in (session.gates.weights, session.gates.gradients):
        gate.wait(own, waiter)
    return True


def reaches(function: Any, model: nn.Module) -> bool:
    """Whether a function may read some of a model's parameters on the host."""
    reached = set(map(id, tensors_reached_by(function)))
    return bool(reached) and not reached.isdisjoint(map(id, parameters_in(model)))


def tensors_reached_by(function: Any) -> Iterator[torch.Tensor]:
    """Tensors that a function can look up, and the parameters of modules that it can, wrapped or not."""
    for value in reached_by(function):
        value = value.model if isinstance(value, ModelView) else value
        if isinstance(value, nn.Module):
            yield from value.parameters()
        elif isinstance(value, torch.Tensor):
            yield value
