"""What each node of a traced model costs: bytes, FLOPs and, from a device profile, seconds.

Each node is run by itself on fake tensors of the example's sizes: forward without autograd (FLOPs, bytes moved, peak of
temporaries), forward with it (what is saved), backward. Of nodes that look alike, such as a transformer's blocks, one
is run. A node that can't be run on fakes gets an estimate from its parameters and sizes, and is marked.

Invariant: the model, which may be on the meta device, is not touched; leaves run as copies whose parameters are fakes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.effects.snapshot import python_restored
from roundpipe.fx.counting import Tally, Work, flop_counter
from roundpipe.fx.fakes import failures_unlogged, make_twin
from roundpipe.fx.graph.interpreter import GraphInterpreter
from roundpipe.fx.graph.nodes import entered_modes, hint, is_accessor, mutated_by, value_bytes, value_of
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.operations import call_leaf
from roundpipe.fx.passes.lookalikes import Lookalikes

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
    """Device memory bandwidth."""
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
    """Bytes of the gradients of its trainable parameters."""
    forward_flops: int = 0
    backward_flops: int = 0
    forward_bytes: int = 0
    """Bytes that its kernels read and write in forward."""
    saved_bytes: int = 0
    """Bytes of what autograd keeps that no other node makes or names."""
    saved_values: tuple[Node, ...] = ()
    """Those of its operands and itself that autograd keeps for its backward."""
    workspace_bytes: int = 0
    """Peak of what its forward allocates without autograd, its result included."""
    value_bytes: int = 0
    """Bytes of its result."""
    forward_s: float = 0.0
    backward_s: float = 0.0
    estimated: bool = False
    """Whether it could not be run on fakes, so that its cost was guessed from its sizes."""


def measure(traced: TracedGraph, profile: DeviceProfile = DEFAULT_PROFILE) -> dict[Node, NodeCost]:
    """The cost of every node but the output, at the example's sizes; seconds are for the profile's device."""
    with python_restored(traced.model):
        return _CostRun(traced, profile).costs()


# ---------------------------------------------------------------------------------- running nodes


@dataclass(slots=True)
class _Reading:
    """What running one node showed, apart from which node it was."""

    forward: Work
    backward: Work
    saved_bytes: int
    saved_operands: tuple[int, ...]
    """Positions, among the tensors of the arguments, of those that are kept."""
    saves_result: bool
    workspace_bytes: int
    result: Any
    """The node's result on fakes, for nodes that take apart or read a structure."""


_NOTHING = _Reading(Work(), Work(), 0, (), False, 0, None)


class _Unrunnable(Exception):
    """A node can't be run on fakes."""


class _CostRun(GraphInterpreter):
    def __init__(self, traced: TracedGraph, profile: DeviceProfile) -> None:
        super().__init__()
        self._traced = traced
        self._profile = profile
        self._mode = _fake_mode_of(traced)
        self._lookalikes = Lookalikes(traced)
        self._readings: dict[Any, _Reading | None] = {}
        self._structures: dict[Node, Any] = {}
        """Results, on fakes, of nodes that give no tensor."""
        self._twin = nn.Module()
        """Stands for the leaf of the node that runs."""

    def costs(self) -> dict[Node, NodeCost]:
        return {node: self._cost(node) for node in self._traced.graph.nodes if node.op != "output"}

    def _cost(self, node: Node) -> NodeCost:
        weights = _weights_of(self._traced, node)
        if node.op in ("placeholder", "get_attr") or is_accessor(node):
            return weights
        reading = self._read(node)
        if reading is None:
            return _estimate(node, weights, self._profile)
        operands = _tensor_operands(node)
        saved = [operands[position] for position in reading.saved_operands]
        if reading.saves_result and value_bytes(node):
            saved.append(node)
        forward, backward, seconds = reading.forward, reading.backward, self._profile.seconds
        return replace(
            weights,
            forward_flops=forward.flops,
            backward_flops=backward.flops,
            forward_bytes=forward.num_bytes,
            saved_bytes=reading.saved_bytes,
            saved_values=tuple(dict.fromkeys(saved)),
            workspace_bytes=reading.workspace_bytes,
            forward_s=seconds(forward.flops, forward.num_bytes, forward.num_kernels),
            backward_s=seconds(backward.flops, backward.num_bytes, backward.num_kernels),
        )

    def _read(self, node: Node) -> _Reading | None:
        """The reading of the node or of one that looks alike; None if it can't be run."""
        if self._mode is None or not (_tensor_operands(node) or isinstance(value_of(node), torch.Tensor)):
            return _NOTHING if value_of(node) is not None else None
        key = self._lookalikes.key(node)
        if key not in self._readings:
            try:
                self._readings[key] = self._run(node)
            except Exception as error:  # whatever the user's code raises on fakes: fall back to an estimate
                kind = type(error).__name__
                logger.debug("cost of %s is estimated: %s: %s", node.format_node(), kind, error)
                self._readings[key] = None
        reading = self._readings[key]
        if reading is not None and value_of(node) is None:
            self._structures[node] = reading.result
        return reading

    def _run(self, node: Node) -> _Reading:
        assert self._mode is not None
        weights: list[torch.Tensor] = []
        if node.op == "call_module":
            leaf = self._traced.attribute(str(node.target))
            originals = (*leaf.parameters(), *leaf.buffers())
            self._twin, _ = make_twin(leaf, {weight: self._fake_weight(weight) for weight in originals})
            weights = [*self._twin.parameters(), *self._twin.buffers()]
        with failures_unlogged(), self._mode, torch.random.fork_rng(devices=[]):
            leaves = {operand: self._fake(operand) for operand in _tensor_operands(node)}
            self.values = leaves
            tally = Tally(leaves.values())
            with torch.no_grad(), tally, flop_counter() as flops:
                result = self.run_node(node)
            forward = tally.work(flops)
            tensors: list[torch.Tensor] = []

            def keep(tensor: torch.Tensor) -> torch.Tensor:
                tensors.append(tensor)
                return tensor

            with torch.enable_grad(), entered_modes(node):
                self.values = _passed(node, leaves)
                with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                    output = self.run_node(node)
            saved = _saved(tensors, self.values, output, weights)
            backward = self._backward(node, leaves)
        return _Reading(forward, backward, *saved, tally.peak_bytes, result)

    def _backward(self, node: Node, leaves: Mapping[Node, torch.Tensor]) -> Work:
        """What a node's backward does, through parameters and differentiable operands."""
        with torch.enable_grad(), entered_modes(node):
            self.values = _passed(node, leaves)
            output = self.run_node(node)
        results = [tensor for tensor in trees.tensors(output) if tensor.requires_grad]
        results = [t for t in results if not any(t is leaf for leaf in leaves.values())]
        inputs = [leaf for leaf in leaves.values() if leaf.requires_grad]
        if node.op == "call_module":
            inputs += [parameter for parameter in self._twin.parameters() if parameter.requires_grad]
        if not results or not inputs:
            return Work()
        gradients = [torch.empty_like(tensor) for tensor in results]
        tally = Tally(())
        with tally, flop_counter() as flops:
            torch.autograd.grad(results, inputs, gradients, allow_unused=True)
        return tally.work(flops)

    def call_module(self, node: Node, args: Any, kwargs: Any) -> Any:
        return call_leaf(self._twin, *args, **kwargs)

    def value(self, node: Node) -> Any:
        """A fake, or the concrete value of what is no tensor."""
        if node in self.values:
            return self.values[node]
        value = value_of(node)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            known = value.node.hint
            if known is None:
                raise _Unrunnable(f"{node.name} depends on data")
            return known
        if value is not None:
            return value
        if node.op == "get_attr":
            return self._traced.attribute(str(node.target))
        if is_accessor(node):
            source, *keys = node.args
            assert isinstance(source, Node) and callable(node.target)
            return node.target(self.value(source), *keys)
        if node not in self._structures:
            raise _Unrunnable(f"{node.name} was not run")
        return self._structures[node]

    def _fake(self, node: Node) -> torch.Tensor:
        """A fake of the node's concrete size, a leaf of autograd."""
        value = value_of(node)
        assert isinstance(value, torch.Tensor)
        if node.op == "get_attr":
            return self._fake_weight(value)
        fake = torch.empty_strided(
            [hint(size) for size in value.shape], [hint(step) for step in value.stride()], dtype=value.dtype
        )
        return fake.requires_grad_(value.requires_grad)

    def _fake_weight(self, weight: torch.Tensor) -> torch.Tensor:
        assert self._mode is not None
        with self._mode:
            fake = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype)
        if isinstance(weight, nn.Parameter):
            return nn.Parameter(fake, requires_grad=weight.requires_grad)
        return fake


def _fake_mode_of(traced: TracedGraph) -> Any:
    """The fake tensor mode that the graph's values live in; None if they are no fakes."""
    modes = (getattr(value_of(node), "fake_mode", None) for node in traced.graph.nodes)
    return next((mode for mode in modes if mode is not None), None)


def _tensor_operands(node: Node) -> list[Node]:
    """The operands that are tensors, each once, in order."""
    return [operand for operand in node.all_input_nodes if isinstance(value_of(operand), torch.Tensor)]


def _passed(node: Node, leaves: Mapping[Node, torch.Tensor]) -> dict[Node, torch.Tensor]:
    """The operands of a call with autograd, which can't write leaves in place."""
    mutated = set(mutated_by(node))
    return {operand: leaf.clone() if operand in mutated else leaf for operand, leaf in leaves.items()}


def _saved(
    tensors: Iterable[torch.Tensor], passed: Mapping[Node, torch.Tensor], output: Any, weights: Iterable[torch.Tensor]
) -> tuple[int, tuple[int, ...], bool]:
    """Bytes of what only autograd holds, positions of the operands it keeps, whether it keeps the result."""
    operands = list(passed)
    position_of = {_storage(tensor): index for index, tensor in enumerate(passed.values())}
    result = _storage(output) if isinstance(output, torch.Tensor) else None
    elsewhere = set(map(_storage, weights))
    positions, saves_result, total = [], False, 0
    for key, tensor in {_storage(tensor): tensor for tensor in tensors}.items():
        if key in elsewhere:
            continue
        if key in position_of:
            positions.append(position_of[key])
        elif key == result:
            saves_result = True
        else:
            total += int(tensor.untyped_storage().nbytes())
    positions = [index for index in positions if operands[index].op != "get_attr"]
    return total, tuple(positions), saves_result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


# ---------------------------------------------------------------------------------- weights and estimates


def _weights_of(traced: TracedGraph, node: Node) -> NodeCost:
    """The part of a node's cost that its weights and its result make up."""
    attribute = traced.attribute(str(node.target)) if node.op in ("get_attr", "call_module") else None
    weights: list[torch.Tensor] = []
    if isinstance(attribute, nn.Module):
        weights = [*attribute.parameters(), *attribute.buffers()]
    elif isinstance(attribute, torch.Tensor):
        weights = [attribute]
    sizes = {weight: weight.numel() * weight.element_size() for weight in weights}
    parameters = [weight for weight in weights if isinstance(weight, nn.Parameter)]
    return NodeCost(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=sum(sizes.values()),
        gradient_bytes=sum(sizes[parameter] for parameter in parameters if parameter.requires_grad),
        value_bytes=value_bytes(node),
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
        forward_bytes=num_bytes,
        saved_bytes=GUESSED_SAVED_PER_BYTE * moved,
        workspace_bytes=2 * moved,
        forward_s=profile.seconds(flops, num_bytes, 1),
        backward_s=2 * profile.seconds(flops, num_bytes, 1),
        estimated=True,
    )
