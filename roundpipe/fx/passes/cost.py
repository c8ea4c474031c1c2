"""What each node of a traced model costs: bytes, FLOPs and, from a device profile, seconds.

Every node is run once by itself on fake tensors of the example's sizes: forward without autograd (FLOPs,
bytes moved, peak of live temporaries), forward with it (what is saved), backward. So nothing is
allocated, and the model may be on the meta device. Nodes that look alike (same class, parameter shapes
and argument shapes, such as the blocks of a transformer) are run once.

Invariant: the model is not touched; leaves run as shallow copies whose parameters are fakes. A node that
can't be run on fakes gets an estimate from its parameters and sizes and is marked as estimated.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.fx.node import map_arg

from roundpipe.core import trees
from roundpipe.core.layers import ESTIMATED_LINK_BYTES_PER_S
from roundpipe.effects.snapshot import python_restored
from roundpipe.fx.counting import Tally, Work, flop_counter
from roundpipe.fx.fakes import failures_unlogged, twin_of
from roundpipe.fx.graph.nodes import hint, is_accessor, modes_of, mutated_by, value_bytes, value_of
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.operations import call_leaf

logger = logging.getLogger(__name__)

GUESSED_SAVED_PER_BYTE = 4
"""Bytes kept for backward per byte of operands and result, where a node can't be run."""


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Speeds that turn FLOPs and bytes into seconds; only their ratios matter to a partition.

    The defaults are sustained bf16 figures of a data-centre GPU on PCIe 4 x16.
    """

    flops_per_s: float = 200e12
    bytes_per_s: float = 1.5e12
    """Device memory bandwidth."""
    link_bytes_per_s: float = ESTIMATED_LINK_BYTES_PER_S
    """Between host and device, one direction."""
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
    backward_bytes: int = 0
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
    """The cost of every node but the output, at the example's sizes.

    Args:
        traced: a linted graph whose values are fake tensors.
        profile: the device that seconds are for.
    """
    with python_restored(traced.model):
        return _Meter(traced, profile).measure()


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


class _Unrunnable(Exception):
    """A node can't be run on fakes."""


class _Meter:
    """One pass over a graph."""

    def __init__(self, traced: TracedGraph, profile: DeviceProfile) -> None:
        self.traced = traced
        self.profile = profile
        self.mode = _fake_mode_of(traced)
        self.results: dict[Node, Any] = {}
        self.readings: dict[Any, _Reading | None] = {}
        self.module_keys: dict[str, Any] = {}

    def measure(self) -> dict[Node, NodeCost]:
        """Costs in graph order."""
        return {node: self._cost(node) for node in self.traced.graph.nodes if node.op != "output"}

    def _cost(self, node: Node) -> NodeCost:
        if node.op == "placeholder" or is_accessor(node):
            return NodeCost(value_bytes=value_bytes(node))
        if node.op == "get_attr":
            return _weights_of(self.traced, node)
        reading = self._read(node)
        weights = _weights_of(self.traced, node)
        if reading is None:
            return _estimate(node, weights, self.profile)
        operands = _tensor_operands(node)
        saved = [operands[position] for position in reading.saved_operands]
        if reading.saves_result and value_bytes(node):
            saved.append(node)
        forward, backward, seconds = reading.forward, reading.backward, self.profile.seconds
        return NodeCost(
            num_parameters=weights.num_parameters,
            parameter_bytes=weights.parameter_bytes,
            gradient_bytes=weights.gradient_bytes,
            forward_flops=forward.flops,
            backward_flops=backward.flops,
            forward_bytes=forward.num_bytes,
            backward_bytes=backward.num_bytes,
            saved_bytes=reading.saved_bytes,
            saved_values=tuple(dict.fromkeys(saved)),
            workspace_bytes=reading.workspace_bytes,
            value_bytes=value_bytes(node),
            forward_s=seconds(forward.flops, forward.num_bytes, forward.num_kernels),
            backward_s=seconds(backward.flops, backward.num_bytes, backward.num_kernels),
        )

    def _read(self, node: Node) -> _Reading | None:
        """The reading of the node or of one that looks alike; None if it can't be run."""
        if self.mode is None or not (_tensor_operands(node) or isinstance(value_of(node), torch.Tensor)):
            return _NOTHING if value_of(node) is not None else None
        key = self._key(node)
        if key not in self.readings:
            try:
                self.readings[key] = self._run(node)
            except Exception as error:  # whatever the user's code raises on fakes: fall back to an estimate
                kind = type(error).__name__
                logger.debug("cost of %s is estimated: %s: %s", node.format_node(), kind, error)
                self.readings[key] = None
        reading = self.readings[key]
        if reading is not None and value_of(node) is None:
            self.results[node] = reading.result
        return reading

    def _run(self, node: Node) -> _Reading:
        assert self.mode is not None
        function = self._callable(node)
        modes = modes_of(node)
        mutated = set(mutated_by(node))
        with failures_unlogged(), self.mode, torch.random.fork_rng(devices=[]):
            operands = _tensor_operands(node)
            leaves = {operand: self._fake(operand) for operand in operands}
            tally = Tally(leaves.values())
            with (
                torch.no_grad(),
                modes.enter() if modes else nullcontext(),
                tally,
                flop_counter() as flops,
            ):
                args, kwargs = self._arguments(node, leaves)
                result = _called(function, args, kwargs)
            forward = tally.work(flops)
            del args, kwargs
            with torch.enable_grad(), modes.enter() if modes else nullcontext():
                passed = {n: leaf.clone() if n in mutated else leaf for n, leaf in leaves.items()}
                args, kwargs = self._arguments(node, passed)
                kept: list[torch.Tensor] = []

                def keep(tensor: torch.Tensor) -> torch.Tensor:
                    kept.append(tensor)
                    return tensor

                with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept_tensor: kept_tensor):
                    output = _called(function, args, kwargs)
                del args, kwargs
            saved = _saved(kept, passed, operands, output, self._weight_storages(node, function))
            backward = _backward(function, node, leaves, self, modes)
        return _Reading(forward, backward, *saved, tally.peak_bytes, result)

    def _callable(self, node: Node) -> Callable[..., Any]:
        if node.op == "call_module":
            module = self.traced.attribute(str(node.target))
            return twin_of(module, {t: self._fake_weight(t) for t in (*module.parameters(), *module.buffers())})
        if node.op == "call_method":
            return lambda operand, *args, **kwargs: getattr(operand, str(node.target))(*args, **kwargs)
        return node.target  # type: ignore[return-value]

    def _arguments(self, node: Node, tensors: Mapping[Node, torch.Tensor]) -> tuple[Any, Any]:
        """Arguments with fakes for nodes and plain containers for fx's immutable ones."""

        def concrete(value: Any) -> Any:
            if isinstance(value, Node):
                return tensors[value] if value in tensors else self._untensored(value)
            if isinstance(value, dict):
                return {key: concrete(item) for key, item in value.items()}
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*map(concrete, value))
            if isinstance(value, (list, tuple)):
                return [*map(concrete, value)] if isinstance(value, list) else tuple(map(concrete, value))
            if isinstance(value, slice):
                return slice(concrete(value.start), concrete(value.stop), concrete(value.step))
            return value

        return concrete(node.args), concrete(node.kwargs)

    def _untensored(self, node: Node) -> Any:
        """The concrete value of a node that is no tensor."""
        value = value_of(node)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            known = value.node.hint
            if known is None:
                raise _Unrunnable(f"{node.name} depends on data")
            return known
        if value is not None:
            return value
        if node.op == "get_attr":
            return self.traced.attribute(str(node.target))
        if is_accessor(node):
            source, *keys = node.args
            assert isinstance(source, Node) and callable(node.target)
            return node.target(self._untensored(source), *keys)
        if node not in self.results:
            raise _Unrunnable(f"{node.name} was not run")
        return self.results[node]

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
        assert self.mode is not None
        with self.mode:
            fake = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype)
        if isinstance(weight, nn.Parameter):
            return nn.Parameter(fake, requires_grad=weight.requires_grad)
        return fake

    def _weight_storages(self, node: Node, function: Any) -> set[int]:
        """Storages of the fakes that stand for weights."""
        if not isinstance(function, nn.Module):
            return set()
        return {t.untyped_storage()._cdata for t in (*function.parameters(), *function.buffers())}

    def _key(self, node: Node) -> Any:
        """Equal for nodes that cost the same."""
        target: Any = node.target
        if node.op == "call_module":
            if target not in self.module_keys:
                self.module_keys[target] = _module_key(self.traced.attribute(target))
            target = self.module_keys[target]
        elif node.op == "call_function":
            target = (id(target), getattr(target, "__name__", ""))
        arguments = (_argument_key(node.args), _argument_key(node.kwargs))
        value, state = _value_key(node), id(modes_of(node))
        return node.op, target, arguments, _sharing(node), value, state, bool(mutated_by(node))


_NOTHING = _Reading(Work(), Work(), 0, (), False, 0, None)


def _backward(function: Any, node: Node, leaves: Mapping[Node, torch.Tensor], meter: _Meter, modes: Any) -> Work:
    """What a node's backward does, through parameters and differentiable operands."""
    mutated = set(mutated_by(node))
    with torch.enable_grad(), modes.enter() if modes else nullcontext():
        passed = {n: leaf.clone() if n in mutated else leaf for n, leaf in leaves.items()}
        args, kwargs = meter._arguments(node, passed)
        output = _called(function, args, kwargs)
    results = [tensor for tensor in trees.tensors(output) if tensor.requires_grad]
    results = [t for t in results if not any(t is leaf for leaf in leaves.values())]
    inputs = [leaf for leaf in leaves.values() if leaf.requires_grad]
    if isinstance(function, nn.Module):
        inputs += [parameter for parameter in function.parameters() if parameter.requires_grad]
    if not results or not inputs:
        return Work()
    gradients = [torch.empty_like(tensor) for tensor in results]
    tally = Tally(())
    with tally, flop_counter() as flops:
        torch.autograd.grad(results, inputs, gradients, allow_unused=True)
    return tally.work(flops)


def _saved(
    kept: Iterable[torch.Tensor],
    passed: Mapping[Node, torch.Tensor],
    operands: list[Node],
    output: Any,
    weights: set[int],
) -> tuple[int, tuple[int, ...], bool]:
    """Bytes of what only autograd holds, positions of the operands it keeps, whether it keeps the result."""
    where = {passed[operand].untyped_storage()._cdata: index for index, operand in enumerate(operands)}
    result = output.untyped_storage()._cdata if isinstance(output, torch.Tensor) else None
    unique = {tensor.untyped_storage()._cdata: tensor for tensor in kept}
    positions, saves_result, total = [], False, 0
    for key, tensor in unique.items():
        if key in weights:
            continue
        if key in where:
            positions.append(where[key])
        elif key == result:
            saves_result = True
        else:
            total += int(tensor.untyped_storage().nbytes())
    positions = [index for index in positions if operands[index].op != "get_attr"]
    return total, tuple(positions), saves_result


# ---------------------------------------------------------------------------------- looking alike


def _module_key(module: nn.Module) -> Any:
    weights = tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    )
    return tuple(map(type, module.modules())), weights, module.training


def _value_key(node: Node) -> Any:
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        return tuple(map(_size_key, value.shape)), value.dtype, value.requires_grad
    if value is None:
        return id(node) if node.op == "call_function" and not is_accessor(node) else None
    return _size_key(value)


def _size_key(size: Any) -> Any:
    return size.node.hint if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else size


def _argument_key(argument: Any) -> Any:
    if isinstance(argument, Node):
        return "node", argument.op == "get_attr", _value_key(argument)
    if isinstance(argument, dict):
        return tuple((key, _argument_key(item)) for key, item in argument.items())
    if isinstance(argument, (list, tuple)):
        return tuple(map(_argument_key, argument))
    if isinstance(argument, slice):
        return tuple(map(_argument_key, (argument.start, argument.stop, argument.step)))
    plain = (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.memory_format)
    return (type(argument), argument) if isinstance(argument, plain) else id(argument)


# ---------------------------------------------------------------------------------- fakes and weights


def _fake_mode_of(traced: TracedGraph) -> Any:
    """The fake tensor mode that the graph's values live in; None if they are no fakes."""
    for node in traced.graph.nodes:
        mode = getattr(node.meta.get("value"), "fake_mode", None)
        if mode is not None:
            return mode
    return None


def _tensor_operands(node: Node) -> list[Node]:
    """The operands that are tensors, each once, in order."""
    return [operand for operand in node.all_input_nodes if isinstance(value_of(operand), torch.Tensor)]


def _sharing(node: Node) -> tuple[int, ...]:
    """Which operands are one value."""
    first: dict[Node, int] = {}
    places: list[int] = []
    map_arg((node.args, node.kwargs), lambda one: places.append(first.setdefault(one, len(first))))
    return tuple(places)


def _called(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return call_leaf(function, *args, **kwargs) if isinstance(function, nn.Module) else function(*args, **kwargs)


def _weights_of(traced: TracedGraph, node: Node) -> NodeCost:
    """The part of a node's cost that its weights make up."""
    attribute = traced.attribute(str(node.target)) if node.op in ("get_attr", "call_module") else None
    if isinstance(attribute, nn.Module):
        parameters, buffers = list(attribute.parameters()), list(attribute.buffers())
    else:
        parameters = [attribute] if isinstance(attribute, nn.Parameter) else []
        is_buffer = isinstance(attribute, torch.Tensor) and not parameters
        buffers = [attribute] if is_buffer and isinstance(attribute, torch.Tensor) else []
    sizes = {id(t): t.numel() * t.element_size() for t in (*parameters, *buffers)}
    return NodeCost(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=sum(sizes.values()),
        gradient_bytes=sum(sizes[id(parameter)] for parameter in parameters if parameter.requires_grad),
        value_bytes=0 if node.op == "call_module" else value_bytes(node),
    )


def _estimate(node: Node, weights: NodeCost, profile: DeviceProfile) -> NodeCost:
    """A cost from sizes: every row of the first activation meets every parameter once."""
    operands = _tensor_operands(node)
    moved = sum(map(value_bytes, operands)) + value_bytes(node)
    rows = 0
    for operand in operands:
        value = value_of(operand)
        if isinstance(value, torch.Tensor) and operand.op != "get_attr" and value.ndim:
            rows = math.prod(hint(size) for size in value.shape[:-1])
            break
    flops = 2 * weights.num_parameters * rows
    num_bytes = 2 * moved + weights.parameter_bytes
    return NodeCost(
        num_parameters=weights.num_parameters,
        parameter_bytes=weights.parameter_bytes,
        gradient_bytes=weights.gradient_bytes,
        forward_flops=flops,
        backward_flops=2 * flops,
        forward_bytes=num_bytes,
        backward_bytes=2 * num_bytes,
        saved_bytes=GUESSED_SAVED_PER_BYTE * moved,
        workspace_bytes=2 * moved,
        value_bytes=value_bytes(node),
        forward_s=profile.seconds(flops, num_bytes, 1),
        backward_s=2 * profile.seconds(flops, num_bytes, 1),
        estimated=True,
    )
