"""What the nodes of a graph find on its model, with fakes in place of tensors: what runs on them writes nothing of the
user's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from roundpipe.fx.fakes import fake_of, static_mode
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.twin import make_twin

_CPU = torch.device("cpu")


class FakeAttributes:
    """Attributes of a traced model, on the CPU; ``note`` is called with each tensor and its fake, when that is made."""

    def __init__(
        self,
        traced: TracedGraph,
        note: Callable[[torch.Tensor, torch.Tensor], object] = lambda tensor, fake: None,
    ) -> None:
        self._traced, self._note = traced, note
        self.mode = static_mode()
        """That of the fakes, which code on them runs in."""
        self._fakes: dict[torch.Tensor, torch.Tensor] = {}
        self._twins: dict[nn.Module, nn.Module] = {}

    def at(self, target: object) -> Any:
        """What is at a place: a tensor's fake, a module's twin, or the value itself."""
        value = self._traced.attribute(str(target))
        if isinstance(value, torch.Tensor):
            return self._fake(value)
        return self.twin(value) if isinstance(value, nn.Module) else value

    def twin(self, module: nn.Module) -> nn.Module:
        """A module with fakes as its parameters and buffers, the same each time."""
        if module not in self._twins:
            fakes = {tensor: self._fake(tensor) for tensor in (*module.parameters(), *module.buffers())}
            self._twins[module], _ = make_twin(module, fakes)
        return self._twins[module]

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in self._fakes:
            self._fakes[tensor] = fake_of(self.mode, tensor, _CPU)
            self._note(tensor, self._fakes[tensor])
        return self._fakes[tensor]
