"""The contract between the compiler and the runtime: carries, layers, costs, chains.

A model becomes a chain of layers. What flows between them is a *carry*: a dict from value names to
values, each name given once and never rebound (so a skip connection is one name that stays in the
carry from its producer to its last reader, and the runtime moves only what a stage reads).

    args, kwargs --bind--> carry --layer 0--> carry --layer 1--> ... --finish--> outputs

Every layer, the first included, is a module ``forward(carry) -> carry``: it reads the values in its
spec's ``reads``, returns the values in ``makes`` and passes on what else is live. A chain is an
``nn.Sequential`` of such layers and can be called as one; the runtime instead calls each layer with
exactly the values that it reads and keeps the rest where they are.

Tensors in a carry may sit inside a structure (a tuple, a dataclass); see `roundpipe.structure`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from roundpipe import structure
from roundpipe.caller import warn
from roundpipe.effects import AttributesBefore, Noticed, WeightsBefore
from roundpipe.errors import ConfigError

Carry = dict[str, Any]

ESTIMATED_LINK_BYTES_PER_S = 25e9
"""Between host and device, one direction, of the device that estimated seconds are for."""

EXECUTION_DEVICE = "execution_device"
"""Attribute of a generated layer that names the device it runs on; each worker sets it on its copy."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What the runtime must know about one layer."""

    name: str
    """Short human name, such as ``model.layers.3``."""
    module_names: tuple[str, ...] = ()
    """Qualified names, in the original model, of the modules it covers, in order of execution."""
    reads: tuple[str, ...] = ()
    """Names of the carried values it uses."""
    makes: tuple[str, ...] = ()
    """Names of the values it creates that are read later (by a layer or by the outputs)."""
    differentiable: frozenset[str] | None = None
    """Those of ``makes`` through which a gradient can flow; None = every floating-point tensor."""
    draws_random: bool = True
    """Whether its forward may draw random numbers."""
    may_write_reads: bool = True
    """Whether its forward may write into the values it reads; generated layers clone such values first."""
    execution_device: bool = False
    """Whether it names its device through the attribute `EXECUTION_DEVICE`."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Cost of one layer for one microbatch of the example's size."""

    forward_s: float = 0.0
    """Seconds of its forward (estimated from FLOPs and bytes, or measured)."""
    backward_s: float = 0.0
    """Seconds of its backward alone, without recomputation."""
    forward_flops: int = 0
    backward_flops: int = 0
    num_parameters: int = 0
    weight_bytes: int = 0
    """Bytes of all parameters and buffers that an upload brings."""
    gradient_bytes: int = 0
    """Bytes of the gradients of its trainable parameters."""
    activation_bytes: int = 0
    """Bytes that autograd keeps between its forward and its backward, its weights not counted."""
    workspace_bytes: int = 0
    """Largest number of bytes that its forward holds at once without autograd, its inputs not counted."""
    carry_bytes: int = 0
    """Bytes of the values live at the cut behind it."""
    temporary_bytes: int = 0
    """Bytes that come and go while it runs with autograd, beside what is kept: 0 where no device accounts for them."""

    def scaled(self, factor: float) -> LayerCost:
        """The cost for a microbatch ``factor`` times the example's size; weights stay."""
        return replace(
            self,
            forward_s=self.forward_s * factor,
            backward_s=self.backward_s * factor,
            forward_flops=round(self.forward_flops * factor),
            backward_flops=round(self.backward_flops * factor),
            activation_bytes=round(self.activation_bytes * factor),
            workspace_bytes=round(self.workspace_bytes * factor),
            carry_bytes=round(self.carry_bytes * factor),
            temporary_bytes=round(self.temporary_bytes * factor),
        )


class Entry(Protocol):
    """Makes the first carry of a microbatch."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Carry: ...


class Exit(Protocol):
    """Makes the model's outputs from the last carry."""

    @property
    def reads(self) -> tuple[str, ...]: ...

    def __call__(self, carry: Carry) -> Any: ...


class LayerChain(nn.Sequential):
    """A model as carry-to-carry layers, with what turns arguments into a carry and back.

    Args:
        layers: the carry-to-carry modules, in order.
        specs: one per layer.
        costs: one per layer, for a microbatch of ``example_elements``.
        entry: ``(args, kwargs) -> carry``.
        exit: ``carry -> outputs``; its ``reads`` are the names that it needs.
        example_elements: number of elements of the example's tensor inputs; costs scale with it.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        specs: Sequence[LayerSpec],
        costs: Sequence[LayerCost],
        entry: Entry,
        exit: Exit,
        example_elements: int = 0,
    ) -> None:
        if not len(layers) == len(specs) == len(costs):
            raise AssertionError(f"{len(layers)} layers, {len(specs)} specs, {len(costs)} costs")
        super().__init__(*layers)
        self.specs = tuple(specs)
        self.costs = tuple(costs)
        self.entry = entry
        self.exit = exit
        self.example_elements = example_elements

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, all layers run in turn where they are."""
        return self.exit(self(self.entry(args, kwargs)))


class ChainSource(Protocol):
    """Gives the chain that is valid for some arguments; may trace again when they differ."""

    trace_count: int

    @property
    def latest(self) -> LayerChain | None:
        """The chain to show: the one last given, or None if none is known before the first call."""
        ...

    def chain_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerChain | None:
        """The chain for these arguments of one microbatch (real tensors, wherever they are).

        None: there is none, the call must run another way.
        """
        ...


class _Writable(torch.autograd.Function):
    """The same memory as an autograd non-leaf, so that a module may write into its input as it would in eager."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _writable(tensor: torch.Tensor) -> Any:
    return _Writable.apply(tensor) if tensor.requires_grad and tensor.is_leaf else tensor


class _ModuleLayer(nn.Module):
    """A user's module as a layer: carried value ``reads`` in, carried value ``makes`` out.

    The module stands under its qualified name (which may have dots), so what is below it has its own names too.
    """

    def __init__(self, name: str, module: nn.Module, reads: str, makes: str, *, unpack: bool, watched: bool) -> None:
        super().__init__()
        self.reads = reads
        self.makes = makes
        self.unpack = unpack
        self.noticed = Noticed() if watched else None  # one for all copies
        self._modules[name] = module  # after the attributes, since a name may be one of theirs

    def forward(self, carry: Carry) -> Carry:
        value = structure.map_tensors(carry[self.reads], _writable)
        ((layer, module),) = self._modules.items()
        assert module is not None
        args, kwargs = value if self.unpack else ((value,), {})
        if self.noticed is None:
            return {self.makes: module(*args, **kwargs)}
        layer = layer or type(module).__name__
        weights = WeightsBefore(module)
        attributes = AttributesBefore(module) if self.noticed.looks_again() else None
        made = module(*args, **kwargs)
        written = weights.written()
        if written is not None:
            raise ConfigError(
                f"the forward of layer {layer} writes its parameter {written}, on a copy that "
                "is thrown away. Write weights between steps, from outside of forward, or use "
                "wrap_model_to_roundpipe(model), which runs such a module on the CPU"
            )
        kept = None if attributes is None else self.noticed.kept(attributes)
        if kept is not None:
            warn(
                f"the forward of layer {layer} {kept}. Each worker runs a copy of the layer, and the backward runs its "
                "forward again, so what calls find there, and results that depend on it, may differ from eager mode. "
                "Use roundpipe.compile or wrap_model_to_roundpipe, which find out what such a layer needs, or keep it "
                "in a buffer"
            )
        return {self.makes: made}


@dataclass(frozen=True, slots=True)
class _TakeAll:
    name: str

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Carry:
        return {self.name: (args, kwargs)}


@dataclass(frozen=True, slots=True)
class _GiveOne:
    reads: tuple[str, ...]

    def __call__(self, carry: Carry) -> Any:
        return carry[self.reads[0]]


def weight_bytes_of(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, shared ones once."""
    unique = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(t.numel() * t.element_size() for t in unique.values())


def training_bytes_of(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers and of the gradients of those that are trained, shared ones once."""
    return weight_bytes_of(module) + sum(t.numel() * t.element_size() for t in module.parameters() if t.requires_grad)


_RANDOM_MODULES = ("Dropout", "RReLU", "FractionalMaxPool", "Transformer", "MultiheadAttention", "RNN", "LSTM", "GRU")


def may_draw_random(module: nn.Module) -> bool:
    """Whether a module's forward may draw random numbers: not, if it is made of torch.nn modules that don't."""
    return any(
        not type(part).__module__.startswith("torch.nn.")
        or any(word in type(part).__name__ for word in _RANDOM_MODULES)
        for part in module.modules()
    )


def chain_of_modules(modules: Sequence[tuple[str, nn.Module]], *, watched: bool = True) -> LayerChain:
    """The chain of modules called one after the other, each taking the one before's output.

    Args:
        modules: qualified name (``""``: the model itself) and module; the first gets all arguments, the others
            one value.
        watched: whether a layer raises `ConfigError` when its forward writes its parameters, and warns when it
            changes attributes that later calls may read.
    """
    specs, costs, layers = [], [], []
    for index, (name, module) in enumerate(modules):
        reads, makes = f"value_{index}", f"value_{index + 1}"
        layers.append(_ModuleLayer(name, module, reads, makes, unpack=index == 0, watched=watched))
        name = name or type(module).__name__
        specs.append(
            LayerSpec(
                name=name,
                module_names=(name,),
                reads=(reads,),
                makes=(makes,),
                draws_random=may_draw_random(module),
            )
        )
        gradient_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        weight_bytes = weight_bytes_of(module)
        costs.append(
            LayerCost(
                forward_s=max(weight_bytes, 1) * 1e-12,
                backward_s=max(weight_bytes, 1) * 2e-12,
                num_parameters=sum(p.numel() for p in module.parameters()),
                weight_bytes=weight_bytes,
                gradient_bytes=gradient_bytes,
            )
        )
    return LayerChain(layers, specs, costs, _TakeAll("value_0"), _GiveOne((f"value_{len(modules)}",)))


@dataclass(slots=True)
class FixedChain:
    """A source with one chain for all arguments."""

    chain: LayerChain
    trace_count: int = 0

    @property
    def latest(self) -> LayerChain:
        """The chain."""
        return self.chain

    def chain_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerChain:
        return self.chain


class Structure:
    """Which modules some modules hold, of which classes, and how much each holds.

    Args:
        modules: all of them, such as ``model.modules()``.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._seen = [
            (module, type(module), len(module._parameters), len(module._buffers), list(module._modules.items()))
            for module in modules
            if not isinstance(module, torch.jit.ScriptModule)  # can't be changed
        ]

    def changed(self) -> nn.Module | None:
        """A module that has another class, other submodules, or more or fewer names by now; None: there is none."""
        for module, kind, num_parameters, num_buffers, children in self._seen:
            now = module._modules
            if (
                type(module) is not kind
                or len(module._parameters) != num_parameters
                or len(module._buffers) != num_buffers
                or (list(now.items()) != children if now else children)
            ):
                return module
        return None


def changed_in_a_round(module: nn.Module, name: str = "") -> str:
    """The message about a module whose place, or whose parameter of a name, was changed while a round needed it."""
    what = f"parameter {name!r} of a {type(module).__name__}" if name else f"a {type(module).__name__}"
    return (
        f"{what} was put into the model, or taken out of it, while a round was running that needs the model as it was. "
        "Change the structure of a model after synchronize(), and call backward on what forward gave before"
    )


class ModuleSource(FixedChain):
    """A source for a model that is given as it is: one chain for all arguments, until the model's structure changes.

    Args:
        model: has the layers.
        make: makes them.
    """

    def __init__(self, model: nn.Module, make: Callable[[nn.Module], LayerChain]) -> None:
        super().__init__(make(model))
        self._model = model
        self._make = make
        self._structure = Structure(model.modules())

    def chain_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerChain:
        if self._structure.changed() is not None:
            self.chain = self._make(self._model)
            self._structure = Structure(self._model.modules())
        return self.chain

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleSource:
        return type(self)(copy.deepcopy(self._model, memo), self._make)


BalanceFunction = Callable[[nn.Module], float]


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's dtype can carry a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()
