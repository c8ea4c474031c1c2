"""What traced code asks about data, answered from the example."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch.fx import Node

from roundpipe.core.errors import TraceCause, TraceError, TraceFacts
from roundpipe.fx.fakes import real_world
from roundpipe.fx.guards.value_reader import UNKNOWN, ValueReader
from roundpipe.fx.guards.values import readers_of
from roundpipe.fx.locations import model_location
from roundpipe.fx.sizes import expression_of, flat_sizes, flat_tensors, is_data_dependent
from roundpipe.fx.trace.builder import GraphBuilder
from roundpipe.fx.trace.decisions import Need, Retry
from roundpipe.fx.world import FakeWorld

MOST_CALLS = 10_000
"""In a graph whose code takes steps by data: it takes minutes to make, and would serve one batch's data."""


class ExampleData:
    """What traced code asks about data, answered from the example where inputs and buffers alone determine it.

    Inside ``pause`` nothing is recorded. ``module`` gives the name of the one whose code runs.
    """

    def __init__(
        self,
        world: FakeWorld,
        builder: GraphBuilder,
        pause: Callable[[], AbstractContextManager[None]],
        module: Callable[[], str],
        needs: Collection[Need],
    ) -> None:
        self._world = world
        self._builder = builder
        self._pause = pause
        self._module = module
        self.reader = ValueReader(
            builder.traced,
            world.real_arguments,
            world.batch,
            takes_numbers={Need.OWN_NUMBERS, Need.OWN_RATIOS}.isdisjoint(needs),
            open_input=builder.open_number,
            refuse=_refuse_ratio,
            varying=world.dynamic,
        )

    def answer(self, function: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call if only inputs and buffers determine it, else `UNKNOWN`; the guards ask again."""
        nodes = [self._node(tensor) for tensor in flat_tensors(args, kwargs)]
        if not nodes or not all(node is not None and self.reader.depends_on_inputs_only(node) for node in nodes):
            return UNKNOWN
        with self._pause(), real_world():
            node_args, node_kwargs = self._builder.arguments(tuple(args), kwargs)
            answer = self.reader.read(function, node_args, node_kwargs, model_location(), self._module())
        if isinstance(answer, list) and len(self._builder.traced.graph.nodes) > MOST_CALLS:
            words = f"its code takes steps by data, and the graph of this batch would have over {MOST_CALLS:,} calls"
            raise Retry(TraceError(words, TraceCause.ARGUMENT_DATA, TraceFacts(reading=readers_of(self.reader.reads))))
        return answer

    def with_bounds(self, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments in which slices of an index have numbers in place of tensors that the example tells."""
        if getattr(function, "__name__", "") not in ("__getitem__", "__setitem__"):
            return args
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if not any(isinstance(part, slice) and flat_tensors(part.start, part.stop, part.step) for part in index):
            return args
        plain = tuple(
            slice(*map(self._bound, (part.start, part.stop, part.step))) if isinstance(part, slice) else part
            for part in index
        )
        return (args[0], plain, *args[2:])

    def _bound(self, bound: Any) -> Any:
        known = self.answer(torch.Tensor.__index__, (bound,), {}) if isinstance(bound, torch.Tensor) else UNKNOWN
        return bound if known is UNKNOWN else known

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
        known = [tensor for tensor in self._builder.node_of if self.determines(tensor)]
        return any(is_data_dependent(expression_of(size)) for size in flat_sizes(known))

    def _node(self, tensor: torch.Tensor) -> Node | None:
        node = self._builder.node_of.get(tensor)
        name = self._world.name_of.get(tensor)
        return node or (None if name is None else self._builder.attribute(name, tensor))


def _refuse_ratio() -> NoReturn:
    raise Retry(need=Need.OWN_RATIOS)
