"""Runs a traced graph on fakes of other sizes, and compares every shape with the trace.

Operators ask about sizes to infer shapes (is this 1 and broadcast?), and a trace holds under the
answers it got. For sizes that give other answers the graph may be right all the same; a run tells.

Invariant: the run is in a world of its own: the user's model and the traced world are only read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.core.errors import said
from roundpipe.core.module_tree import modules_in
from roundpipe.effects.snapshot import ContentsSnapshot, python_restored
from roundpipe.fx.graph.nodes import GraphInterpreter, is_accessor, producer_of, value_of
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.operations import call_leaf
from roundpipe.fx.sizes import SizeSystem, expression_of, flat_tensors, is_data_dependent, size_function
from roundpipe.fx.trace.leaves import LeafRun, output_origins
from roundpipe.fx.trace.siblings import SiblingCache
from roundpipe.fx.varying import Varying
from roundpipe.fx.world import FakeWorld, sizes_in


@dataclass(frozen=True, slots=True)
class ShapeVerifier:
    """Verifies one trace at other sizes."""

    traced: TracedGraph
    symbols: Mapping[sympy.Symbol, tuple[int, int]]
    """Index and dimension of the input tensor that has each symbol as its size."""
    probed: Collection[Node]
    """Nodes that can't run on fakes; what the trace says of them is taken as given."""
    dynamic: Collection[Varying]
    origins: Mapping[Node, tuple[str, ...]]
    """Leaves that return an argument or a weight itself, see `roundpipe.fx.trace.leaves.output_origins`."""

    def __call__(self, arguments: Any) -> SizeSystem | str:
        """What a run at these arguments' sizes assumed, or which node's shape is not the traced one."""
        world = FakeWorld(self.traced.model, arguments, self.dynamic)
        try:
            with python_restored(modules_in(self.traced.model)), world.entered():
                problem = _ShapeRun(self, world).problem()
        except Exception as error:
            return f"the graph fails on fakes of these sizes: {type(error).__name__}: {said(error)}"
        return problem if problem is not None else SizeSystem(world.symbols(), world.shapes.size_assumptions())


class _ShapeRun(GraphInterpreter):
    """One run of the graph in a world."""

    def __init__(self, verifier: ShapeVerifier, world: FakeWorld) -> None:
        super().__init__()
        self._verifier = verifier
        self._traced = verifier.traced
        self._world = world
        self._other_memory: str | None = None
        self._siblings = SiblingCache()
        inputs = sizes_in(world.arguments, [each.path for each in world.numbers])
        self._sizes = [inputs[index][dim] for index, dim in verifier.symbols.values()]

    def problem(self) -> str | None:
        """The first node whose shape is not the traced one, in words."""
        for node in self._traced.graph.nodes:
            if node.op == "output":
                return None
            self.values[node] = (
                self._as_traced(node) if producer_of(node) in self._verifier.probed else self.run_node(node)
            )
            problem = self._other_memory or self._difference(node)
            if problem is not None:
                return problem
        return None

    def placeholder(self, node: Node) -> Any:
        return trees.get(self._world.arguments, self._traced.input_paths[node.name])

    def get_attr(self, node: Node) -> Any:
        target = str(node.target)
        return self._traced.constants[target] if target in self._traced.constants else self._world.fake(target)

    def call_module(self, node: Node, args: Any, kwargs: Any) -> Any:
        out = self._call_leaf(str(node.target), args, kwargs)
        origins = output_origins(out, args, kwargs, self._world.name_of)
        if (origins if any(origins) else None) != self._verifier.origins.get(node):
            self._other_memory = f"{node.name} does not return the same of its arguments as when it was traced"
        return out

    def _call_leaf(self, name: str, args: Any, kwargs: Any) -> Any:
        module = self._world.twin.get_submodule(name)
        known = self._siblings.find(module, args, kwargs, lambda: call_leaf(module, *args, **kwargs))
        if known is not None:
            return known.out
        versions = [(tensor, tensor._version) for tensor in flat_tensors(args, kwargs)]
        state = ContentsSnapshot(modules_in(module))
        out = call_leaf(module, *args, **kwargs)
        written = tuple(tensor for tensor, version in versions if tensor._version != version)
        if not state.holds_new_values():
            self._siblings.put(module, LeafRun(out, False, False, written), args, kwargs)
        return out

    def _as_traced(self, node: Node) -> Any:
        """A fake with the traced shape at this world's sizes."""
        traced = value_of(node)
        if not isinstance(traced, torch.Tensor):
            return None
        fake = torch.empty([self._expected(size) for size in traced.shape], dtype=traced.dtype)
        return fake.requires_grad_().clone() if traced.requires_grad else fake

    def _expected(self, size: Any) -> Any:
        expression = expression_of(size)
        if not isinstance(expression, sympy.Basic):
            return size
        return size_function(expression, self._verifier.symbols)(*self._sizes)

    def _difference(self, node: Node) -> str | None:
        traced, now = value_of(node), self.values[node]
        if node.op == "placeholder" and not isinstance(now, torch.Tensor):
            return None  # a number
        if not isinstance(traced, torch.Tensor) or (producer_of(node) in self._verifier.probed and is_accessor(node)):
            return None
        if not isinstance(now, torch.Tensor) or now.dtype != traced.dtype or now.dim() != traced.dim():
            return f"{node.name} is another kind of value"
        for dim, (traced_size, size) in enumerate(zip(traced.shape, now.shape, strict=True)):
            if is_data_dependent(expression_of(traced_size)) or is_data_dependent(expression_of(size)):
                continue
            if bool(self._expected(traced_size) != size):
                return f"dimension {dim} of {node.name} is {size}, traced as {traced_size}"
        return None
