"""What the nodes of a graph find on its model, with copies in place of tensors: what runs on them writes nothing of the
user's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from roundpipe.fx.fakes import fake_of
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.twin import make_twin

Copy = Callable[[torch.Tensor], torch.Tensor]


class AttributeCopies:
    """Attributes of a traced model; ``copy`` makes the copy of a tensor, once for each."""

    def __init__(self, traced: TracedGraph, copy: Copy) -> None:
        self._traced = traced
        self._copy: Copy = functools.cache(copy)
        self._twins: dict[nn.Module, nn.Module] = {}

    def at(self, target: object) -> Any:
        """What is at a place: a tensor's copy, a module's twin, or the value itself."""
        value = self._traced.attribute(str(target))
        if isinstance(value, torch.Tensor):
            return self._copy(value)
        return self.twin(value) if isinstance(value, nn.Module) else value

    def twin(self, module: nn.Module) -> nn.Module:
        """A module with copies as its parameters and buffers, the same each time."""
        if module not in self._twins:
            copies = {tensor: self._copy(tensor) for tensor in (*module.parameters(), *module.buffers())}
            self._twins[module], _ = make_twin(module, copies)
        return self._twins[module]


def fakes_of(mode: Any) -> Copy:
    """Makes fakes of a mode's, on the CPU."""
    return lambda tensor: fake_of(mode, tensor, torch.device("cpu"))
