"""What traced code asks about data, answered from the example where inputs and buffers alone determine it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import Node

from roundpipe.fx.fakes import FakeWorld, real_world
from roundpipe.fx.flat import flat_tensors
from roundpipe.fx.guards.values import UNKNOWN, ValueReader
from roundpipe.fx.locations import model_location
from roundpipe.fx.sizes import expression_of, is_data_dependent
from roundpipe.fx.trace.builder import GraphBuilder


class ExampleData:
    """The example's data, for the values of one attempt; inside ``pause`` nothing is recorded."""

    def __init__(
        self, world: FakeWorld, builder: GraphBuilder, pause: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._world = world
        self._builder = builder
        self._pause = pause
        self.reader = ValueReader(
            builder.graph, world.model, builder.constants, world.real_arguments, builder.input_paths
        )

    def answer(self, function: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call if only inputs and buffers determine it, else `UNKNOWN`; the guards ask again."""
        nodes = [self._node(tensor) for tensor in flat_tensors(args, kwargs)]
        if not nodes or not all(node is not None and self.reader.depends_on_inputs_only(node) for node in nodes):
            return UNKNOWN
        with self._pause(), real_world():
            node_args, node_kwargs = self._builder.arguments(tuple(args), kwargs)
            return self.reader.read(function, node_args, node_kwargs, model_location())

    def fake_of_answer(self, function: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """The same as a fake of the example's sizes; None if the result is no tensor or can't be known."""
        answer = self.answer(function, args, kwargs)
        return self._world.static_fake(answer) if isinstance(answer, torch.Tensor) else None

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self.reader.value(self._builder.node_of[tensor]) if self.determines(tensor) else None

    def determines(self, tensor: torch.Tensor) -> bool:
        """Whether inputs and buffers alone determine an activation."""
        node = self._builder.node_of.get(tensor)
        return node is not None and self.reader.depends_on_inputs_only(node)

    def determines_sizes(self) -> bool:
        """Whether some size follows from the inputs' data."""
        return any(
            is_data_dependent(expression_of(size))
            for tensor, node in self._builder.node_of.items()
            for size in tensor.shape
            if self.reader.depends_on_inputs_only(node)
        )

    def _node(self, tensor: torch.Tensor) -> Node | None:
        node = self._builder.node_of.get(tensor)
        name = self._world.name_of.get(tensor)
        return node or (None if name is None else self._builder.attribute(name, tensor))
