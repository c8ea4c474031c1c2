"""What each node of a traced model costs: bytes, FLOPs and, from a device profile, seconds.

Each node is run by itself on fake tensors of the example's sizes: forward without autograd (FLOPs, bytes moved, peak of
temporaries), forward with it (what is saved), backward. Of nodes that look alike, such as a transformer's blocks, one
is run. A node that can't be run on fakes gets an estimate from its parameters and sizes, and is marked.

Invariant: the model, which may be on the meta device, is not touched; leaves run as copies whose parameters are fakes.
"""

from __future__ import annotations

import logging
import math
import operator
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.core.module_tree import buffers_in, modules_in, parameters_in
from roundpipe.core.storages import bytes_of
from roundpipe.effects.places import is_library
from roundpipe.effects.snapshot import python_restored
from roundpipe.fx.counting import Tally
from roundpipe.fx.fakes import code_on_fakes, fake_of, recalled
from roundpipe.fx.graph.nodes import (
    GraphInterpreter,
    entered_modes,
    hint,
    is_accessor,
    modes_of,
    mutated_by,
    value_bytes,
    value_of,
)
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.operations import NamedCall, call_leaf, is_operator
from roundpipe.fx.sizes import Symbolic
from roundpipe.fx.twin import make_twin

logger = logging.getLogger(__name__)

GUESSED_SAVED_PER_BYTE = 4
"""Bytes kept for backward per byte of operands and result, where a node can't be run."""


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Speeds that turn FLOPs and bytes into seconds; only their ratios matter to a partition.

    The defaults are sustained bf16 figures of a data-centre GPU.
    """

    flops_per_s: float = 200e12
    bytes_per_s: float = 1.5e12
    kernel_s: float = 3e-6
    """Least time of one kernel."""

    def seconds(self, flops: float, num_bytes: float, num_kernels: int) -> float:
        """Time of kernels that do ``flops`` and move ``num_bytes``, or to launch them if that is longer."""
        return max(flops / self.flops_per_s + num_bytes / self.bytes_per_s, num_kernels * self.kernel_s)


DEFAULT_PROFILE = DeviceProfile()


@dataclass(frozen=True, slots=True)
class NodeCost:
    """What one node costs at the example's sizes."""

    num_parameters: int = 0
    parameter_bytes: int = 0
    """Bytes of its parameters and buffers."""
    gradient_bytes: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    saved_bytes: int = 0
    """Bytes of what autograd keeps that no other node makes or names."""
    saved_values: tuple[Node, ...] = ()
    """Those of its operands and itself that autograd keeps for its backward."""
    workspace_bytes: int = 0
    """Peak of what its forward allocates without autograd, its result included."""
    forward_s: float = 0.0
    backward_s: float = 0.0
    estimated: bool = False
    """Whether it could not be run on fakes, so that its cost was guessed from its sizes."""


def measure(traced: TracedGraph, profile: DeviceProfile = DEFAULT_PROFILE) -> dict[Node, NodeCost]:
    """The cost of every node but the output, at the example's sizes; seconds are for the profile's device."""
    if not any(map(_may_run_users_code, traced.graph.nodes)):
        return _CostRun(traced, profile).costs()
    leaves = [traced.attribute(str(node.target)) for node in traced.graph.nodes if node.op == "call_module"]
    inside = {module for leaf in leaves for module in modules_in(leaf)}
    with python_restored(module for module in modules_in(traced.model) if module not in inside):
        return _CostRun(traced, profile).costs()


def _may_run_users_code(node: Node) -> bool:
    """Whether a node that is no leaf may run code that is not torch's or ours: its target, or one of its arguments."""
    if node.op != "call_function":
        arguments = (node.args, node.kwargs) if node.op == "call_method" else ()
        return not _is_data(arguments)
    target = node.target.function if isinstance(node.target, NamedCall) else node.target
    if is_operator(target):
        return True  # an operator of the user's has code of the user's for fakes
    is_known = is_library(target) or getattr(target, "__module__", None) == operator.getitem.__module__
    return not is_known or not _is_data((node.args, node.kwargs))


def _is_data(arguments: Any) -> bool:
    if isinstance(arguments, (tuple, list)):
        return all(map(_is_data, arguments))
    if isinstance(arguments, dict):
        return all(map(_is_data, arguments.values()))
    if isinstance(arguments, slice):
        return _is_data((arguments.start, arguments.stop, arguments.step))
    return isinstance(arguments, (Node, *trees.PLAIN, type(Ellipsis), torch.layout, torch.memory_format))


@dataclass(frozen=True, slots=True)
class _Reading:
    """What running one node showed, apart from which node it was."""

    cost: NodeCost
    saved: tuple[int, ...] = ()
    """Positions of those values that are kept for backward, among the node's tensor operands and, last, itself."""
    result: Any = None
    """The node's result on fakes, for nodes that take apart or read a structure."""


class _CostRun(GraphInterpreter):
    def __init__(self, traced: TracedGraph, profile: DeviceProfile) -> None:
        super().__init__()
        self._traced = traced
        self._profile = profile
        modes = (getattr(value_of(node), "fake_mode", None) for node in traced.graph.nodes)
        self._mode: Any = next((mode for mode in modes if mode is not None), None)
        self._readings: dict[Any, _Reading] = {}
        self._forwards: dict[Any, tuple[Any, Tally]] = {}
        """Results without autograd, for nodes that differ in nothing else than which operands require grad."""
        self._structures: dict[Node, Any] = {}
        """Results, on fakes, of nodes that give no tensor."""
        self._twin = nn.Module()
        """Stands for the leaf of the node that runs."""

    def costs(self) -> dict[Node, NodeCost]:
        with recalled(self._mode) if self._mode is not None else nullcontext():
            return {node: self._cost(node) for node in self._traced.graph.nodes if node.op != "output"}

    def _cost(self, node: Node) -> NodeCost:
        if node.op in ("placeholder", "get_attr") or is_accessor(node):
            return _weights_of(self._traced, node)
        operands = _tensor_operands(node)
        if not operands and not isinstance(value_of(node), torch.Tensor) and value_of(node) is not None:
            return NodeCost()  # arithmetic of sizes
        key = _node_key(self._traced, node)
        reading = self._readings.get(key) or self._readings.setdefault(key, self._read(node))
        if value_of(node) is None and not reading.cost.estimated:
            self._structures[node] = reading.result
        values = [[*operands, node][position] for position in reading.saved]
        return replace(reading.cost, saved_values=tuple(value for value in values if value.op != "get_attr"))

    def _read(self, node: Node) -> _Reading:
        weights = _weights_of(self._traced, node)
        leaf = self._traced.attribute(str(node.target)) if node.op == "call_module" else None
        try:
            with python_restored(modules_in(leaf)) if leaf is not None else nullcontext():
                return self._run(node, weights)
        except Exception as error:  # whatever the user's code raises on fakes
            logger.debug("cost of %s is estimated: %s: %s", node.format_node(), type(error).__name__, error)
            return _Reading(_estimate(node, weights, self._profile))

    def _run(self, node: Node, cost: NodeCost) -> _Reading:
        """Runs a node without autograd, then with it and back, and adds what that costs to its weights' costs."""
        weights: list[torch.Tensor] = []
        if node.op == "call_module":
            leaf = self._traced.attribute(str(node.target))
            originals = (*parameters_in(leaf), *buffers_in(leaf))
            self._twin, _ = make_twin(leaf, {weight: self._fake_weight(weight) for weight in originals})
            for inner in modules_in(self._twin):
                if not isinstance(inner, torch.jit.ScriptModule):  # what a hook notes is for the user's own backwards
                    inner._backward_hooks, inner._backward_pre_hooks = OrderedDict(), OrderedDict()
            weights = [*parameters_in(self._twin), *buffers_in(self._twin)]
        with code_on_fakes(), self._mode, torch.random.fork_rng(devices=[]):
            leaves = self.values = {operand: self._fake(operand) for operand in _tensor_operands(node)}
            key = _node_key(self._traced, node, with_gradients=False)
            if key not in self._forwards:
                with torch.no_grad(), Tally(leaves.values()) as forward:
                    self._forwards[key] = self.run_node(node), forward
            result, forward = self._forwards[key]
            kept: list[torch.Tensor] = []

            def keep(tensor: torch.Tensor) -> torch.Tensor:
                kept.append(tensor)
                return tensor

            mutated = mutated_by(node)  # with autograd, leaves can't be written in place
            self.values = {operand: leaf.clone() if operand in mutated else leaf for operand, leaf in leaves.items()}
            with torch.enable_grad(), entered_modes(node):
                with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                    output = self.run_node(node)
            saved_bytes, saved = self._saved(kept, output, weights)
            backward = _backward(output, [*leaves.values(), *weights])
        cost = replace(
            cost,
            forward_flops=forward.flops,
            backward_flops=backward.flops,
            saved_bytes=saved_bytes,
            workspace_bytes=forward.peak_bytes,
            forward_s=self._seconds(forward),
            backward_s=self._seconds(backward),
        )
        return _Reading(cost, saved, result)

    def _seconds(self, tally: Tally) -> float:
        return self._profile.seconds(tally.flops, tally.moved_bytes, tally.num_kernels)

    def _saved(
        self, kept: Iterable[torch.Tensor], output: Any, weights: Iterable[torch.Tensor]
    ) -> tuple[int, tuple[int, ...]]:
        """Bytes of what only autograd holds, and the positions of the operands, and of the result, that it keeps."""
        position_of = {_storage(output): len(self.values)} if isinstance(output, torch.Tensor) else {}
        position_of.update((_storage(tensor), index) for index, tensor in enumerate(self.values.values()))
        storages = {_storage(tensor): tensor.untyped_storage() for tensor in kept}
        for weight in weights:
            storages.pop(_storage(weight), None)
        num_bytes = sum(int(storage.nbytes()) for key, storage in storages.items() if key not in position_of)
        return num_bytes, tuple(position_of[key] for key in storages if key in position_of)

    def call_module(self, node: Node, args: Any, kwargs: Any) -> Any:
        return call_leaf(self._twin, *args, **kwargs)

    def value(self, node: Node) -> Any:
        """A fake, or the concrete value of what is no tensor."""
        if node in self.values:
            return self.values[node]
        value = value_of(node)
        if isinstance(value, Symbolic):
            if value.node.hint is None:
                raise LookupError(f"{node.name} depends on data")
            return value.node.hint
        if value is not None:
            return value
        if node.op == "get_attr":
            return self._traced.attribute(str(node.target))
        if is_accessor(node):
            source, *keys = node.args
            assert isinstance(source, Node) and callable(node.target)
            return node.target(self.value(source), *keys)
        if node not in self._structures:
            raise LookupError(f"{node.name} was not run")
        return self._structures[node]

    def _fake(self, node: Node) -> torch.Tensor:
        """A fake of the node's concrete size, a leaf of autograd."""
        value = value_of(node)
        assert isinstance(value, torch.Tensor)
        if node.op == "get_attr":
            return self._fake_weight(value)
        sizes, strides = (list(map(hint, numbers)) for numbers in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype).requires_grad_(value.requires_grad)

    def _fake_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return fake_of(self._mode, weight, torch.device("cpu"))


def _backward(output: Any, leaves: list[torch.Tensor]) -> Tally:
    """What a node's backward does, through parameters and differentiable operands."""
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    results = [tensor for tensor in trees.tensors(output) if tensor.requires_grad]
    results = [tensor for tensor in results if not any(tensor is leaf for leaf in leaves)]
    gradients = [torch.empty_like(tensor) for tensor in results]
    with Tally() as tally:
        if results and inputs:
            torch.autograd.grad(results, inputs, gradients, allow_unused=True)
    return tally


def _tensor_operands(node: Node) -> list[Node]:
    """The operands that are tensors, each once, in order."""
    return [operand for operand in node.all_input_nodes if isinstance(value_of(operand), torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


# ---------------------------------------------------------------------------------- nodes that look alike


def _node_key(traced: TracedGraph, node: Node, with_gradients: bool = True) -> Hashable:
    """Equal for nodes that do the same to values of the same kind, and so cost the same.

    What can't be compared (an argument of a class unknown here, a structure's maker) is equal to itself alone.
    """
    target: Any = node.target
    if node.op == "call_module":
        target = _module_key(traced.attribute(target))
    elif node.op == "call_function":
        target = (id(target), getattr(target, "__name__", ""))
    arguments = _argument_key((node.args, node.kwargs), {}, with_gradients)
    return node.op, target, arguments, _value_key(node, with_gradients), id(modes_of(node)), bool(mutated_by(node))


def _module_key(module: nn.Module) -> Hashable:
    inside = modules_in(module)
    numbers: dict[torch.Tensor, int] = {}
    weights = tuple(
        (position, name, tensor.shape, tensor.dtype, tensor.requires_grad, numbers.setdefault(tensor, len(numbers)))
        for position, inner in enumerate(inside)
        for name, tensor in (*inner._parameters.items(), *inner._buffers.items())
        if tensor is not None
    )
    return tuple((type(inner), *inner._modules.keys()) for inner in inside), weights, module.training


def _value_key(node: Node, with_gradients: bool) -> Hashable:
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        return tuple(map(_size_key, value.shape)), value.dtype, with_gradients and value.requires_grad
    if value is None:
        return id(node) if node.op == "call_function" and not is_accessor(node) else None
    return _size_key(value)


def _size_key(size: Any) -> Hashable:
    return size.node.hint if isinstance(size, Symbolic) else size


def _argument_key(argument: Any, seen: dict[Node, int], with_gradients: bool) -> Hashable:
    """An argument without names; of nodes, their kind of value and which of them are one."""
    if isinstance(argument, Node):
        return argument.op == "get_attr", _value_key(argument, with_gradients), seen.setdefault(argument, len(seen))
    if isinstance(argument, (*trees.PLAIN, torch.Size, torch.memory_format)):
        return type(argument), argument
    if isinstance(argument, (list, tuple, dict, slice)):
        return tuple((step, _argument_key(item, seen, with_gradients)) for step, item in trees.children(argument) or ())
    return id(argument)


# ---------------------------------------------------------------------------------- weights and estimates


def _weights_of(traced: TracedGraph, node: Node) -> NodeCost:
    """The part of a node's cost that its weights make up."""
    attribute = traced.attribute(str(node.target)) if node.op in ("get_attr", "call_module") else None
    weights: list[torch.Tensor] = []
    if isinstance(attribute, nn.Module):
        weights = [*parameters_in(attribute), *buffers_in(attribute)]
    elif isinstance(attribute, torch.Tensor):
        weights = [attribute]
    sizes = {weight: bytes_of(weight) for weight in weights}
    parameters = [weight for weight in weights if isinstance(weight, nn.Parameter)]
    return NodeCost(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=sum(sizes.values()),
        gradient_bytes=sum(sizes[parameter] for parameter in parameters if parameter.requires_grad),
    )


def _estimate(node: Node, weights: NodeCost, profile: DeviceProfile) -> NodeCost:
    """A cost from sizes: every row of the first activation meets every parameter once."""
    operands = _tensor_operands(node)
    moved = sum(map(value_bytes, operands)) + value_bytes(node)
    values = [value_of(operand) for operand in operands if operand.op != "get_attr"]
    shape = next((value.shape for value in values if isinstance(value, torch.Tensor) and value.ndim), None)
    rows = 0 if shape is None else math.prod(map(hint, shape[:-1]))
    flops = 2 * weights.num_parameters * rows
    num_bytes = 2 * moved + weights.parameter_bytes
    return replace(
        weights,
        forward_flops=flops,
        backward_flops=2 * flops,
        saved_bytes=GUESSED_SAVED_PER_BYTE * moved,
        workspace_bytes=2 * moved,
        forward_s=profile.seconds(flops, num_bytes, 1),
        backward_s=2 * profile.seconds(flops, num_bytes, 1),
        estimated=True,
    )
