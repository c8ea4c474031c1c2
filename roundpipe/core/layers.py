"""The contract between the compiler and the runtime: carries, layers, costs, chains.

What flows between layers is a *carry*: a dict from names to values, where no name is ever rebound. So a skip
connection is one name in the carry from its producer to its last reader, and a stage gets only what it reads.

    args, kwargs --bind--> carry --layer 0--> carry --layer 1--> ... --finish--> outputs

Every layer is a module ``forward(carry) -> carry``: it reads the values in its spec's ``reads``, returns those in
``makes`` and passes on what else is live. A chain is an ``nn.Sequential`` of layers and can be called as one; the
runtime calls each layer with exactly the values that it reads and keeps the rest where they are.

Tensors in a carry may sit inside a structure (a tuple, a dataclass); see `roundpipe.core.trees`.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import nn

from roundpipe.core.shared_weights import SharedWeight
from roundpipe.core.trees import Path

Carry = dict[str, Any]

ESTIMATED_LINK_BYTES_PER_S = 25e9
"""Between host and device, one direction, of the device that estimated seconds are for: PCIe 4 x16."""

EXECUTION_DEVICE = "execution_device"
"""Attribute of a generated layer that names the device it runs on; each worker sets it on its copy."""


@dataclass(frozen=True, slots=True)
class Glue:
    """A value that a layer makes of arguments and constants alone, such as a mask or a rotary table.

    Layers that need the same value have the same glue. A layer that is given it, in its carry, does not make it.
    """

    name: str
    reads: tuple[str, ...]
    """The arguments that it is made of."""
    sizes_of: frozenset[str] = frozenset()
    """Those of them of which only sizes matter."""


class MakesGlue(Protocol):
    """A layer whose spec names glue."""

    def make_glue(self, name: str, carry: Carry) -> Any:
        """A value of its glue, from a carry that has what it is made of."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What the runtime must know about one layer."""

    name: str
    """Short human name, such as ``model.layers.3``."""
    module_names: tuple[str, ...] = ()
    """Qualified names, in the original model, of the modules it covers, in order of execution."""
    reads: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    """Names of the values it creates that are read later (by a layer or by the outputs)."""
    differentiable: frozenset[str] | None = None
    """Those of ``makes`` through which a gradient can flow; None = every floating-point tensor."""
    draws_random: bool = True
    may_write_reads: bool = True
    """Whether its forward may write into the values it reads; generated layers clone such values first."""
    execution_device: bool = False
    """Whether it has the attribute `EXECUTION_DEVICE`."""
    asks_for_gradients: bool = False
    """Whether its forward asks if gradients are recorded, and is to be told what the caller's mode says."""
    glue: tuple[Glue, ...] = ()
    """What it can be given beside what it reads; it then is a `MakesGlue`."""


@dataclass(frozen=True, slots=True)
class CarriedValue:
    """A value that goes from one layer to others, which are named by their positions in the chain."""

    maker: int
    """-1: it is made of the call's arguments."""
    readers: tuple[int, ...]
    """Ascending; the number of layers stands for the model's outputs."""
    num_bytes: int
    gradient_bytes: int = 0
    """Of its gradient; 0: it has none."""
    own_bytes: int = 0
    """Of memory that no other value has, and that is given back where no graph holds it."""
    savers: tuple[int, ...] = ()
    """Its maker and readers whose graphs hold some of it, ascending."""

    @property
    def last_reader(self) -> int:
        return self.readers[-1]

    def is_read(self, start: int, stop: int) -> bool:
        """Whether one of these layers reads it."""
        position = bisect_left(self.readers, start)
        return position < len(self.readers) and self.readers[position] < stop

    def scaled(self, factor: float) -> CarriedValue:
        """The value of a microbatch ``factor`` times as large."""
        return replace(self, **{name: round(getattr(self, name) * factor) for name in _OF_VALUES})

    def between(self, other: CarriedValue, share: float) -> CarriedValue:
        """The value of a microbatch a share of the way from this one's size to another's."""
        return replace(self, **_mixed(self, other, share, _OF_VALUES))


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
    activation_bytes: int = 0
    """Bytes between its forward and its backward: its results, and what autograd keeps, weights not counted."""
    workspace_bytes: int = 0
    """Largest number of bytes that its forward holds at once without autograd, its inputs not counted."""
    carry_bytes: int = 0
    """Bytes of the values live at the cut behind it."""
    label_bytes: int = 0
    """Of the last layer: bytes that come up for the loss behind it."""
    temporary_bytes: int = 0
    """Largest number of bytes that come and go while it and its backward run, beside what is kept."""
    unmade_bytes: int = 0
    """Of its gradients, what is not there at the peak of its first run in a visit, in which they only come."""
    num_tiles: int = 0
    """In how many tiles it runs, where some of it does; what is known of its memory is that in tiles."""
    repeats: bool = False
    """Whether its backward runs its forward again, tile by tile."""
    has_loss: bool = False
    """Whether its memory is that with the loss."""
    forward_excess_bytes: int = 0
    """What measured peaks of forward stages with it showed beside what was computed; negative: less."""
    fused_excess_bytes: int = 0
    backward_excess_bytes: int = 0
    shared: tuple[SharedWeight, ...] = ()
    """Of its weights, those that other layers of the chain have too."""
    values: tuple[CarriedValue, ...] = ()
    """Those that it makes, and of the first layer those in front of it; empty in all layers: they are not known, and
    each is taken to make what is live behind it."""

    @property
    def training_bytes(self) -> int:
        """Largest number of bytes that its forward with autograd and its backward hold at once."""
        return self.activation_bytes + self.temporary_bytes

    def figures(self) -> dict[str, Any]:
        """All that is a number, by name."""
        return {name: value for name, value in asdict(self).items() if name not in ("shared", "values")}

    def with_memory_of(self, other: LayerCost) -> LayerCost:
        """The cost with activations, memory in use and values at the cut of another, computed and measured."""
        return replace(
            self,
            activation_bytes=other.activation_bytes,
            workspace_bytes=other.workspace_bytes,
            carry_bytes=other.carry_bytes,
            label_bytes=other.label_bytes,
            temporary_bytes=other.temporary_bytes,
            unmade_bytes=other.unmade_bytes,
            num_tiles=other.num_tiles,
            repeats=other.repeats,
            has_loss=other.has_loss,
            forward_excess_bytes=other.forward_excess_bytes,
            fused_excess_bytes=other.fused_excess_bytes,
            backward_excess_bytes=other.backward_excess_bytes,
            values=other.values,
        )

    def scaled(self, factor: float) -> LayerCost:
        """The cost for a microbatch ``factor`` times the example's size; weights stay."""
        return replace(
            self,
            forward_s=self.forward_s * factor,
            backward_s=self.backward_s * factor,
            unmade_bytes=round(self.unmade_bytes * min(factor, 1.0)),
            values=tuple(value.scaled(factor) for value in self.values),
            **{name: round(getattr(self, name) * factor) for name in _OF_MICROBATCHES},
        )

    def between(self, other: LayerCost, share: float) -> LayerCost:
        """The cost for a microbatch a share of the way from this one's size to another's; weights stay.

        What grows faster than a microbatch, as attention does, takes less than that.
        """
        return replace(
            self,
            forward_s=self.forward_s + share * (other.forward_s - self.forward_s),
            backward_s=self.backward_s + share * (other.backward_s - self.backward_s),
            values=tuple(one.between(two, share) for one, two in zip(self.values, other.values, strict=True)),
            **_mixed(self, other, share, (*_OF_MICROBATCHES, "unmade_bytes")),
        )


_OF_VALUES = ("num_bytes", "gradient_bytes", "own_bytes")
_OF_MICROBATCHES = (
    "forward_flops",
    "backward_flops",
    "activation_bytes",
    "workspace_bytes",
    "carry_bytes",
    "label_bytes",
    "temporary_bytes",
    "forward_excess_bytes",
    "fused_excess_bytes",
    "backward_excess_bytes",
)
"""Whole numbers that grow with a microbatch."""


def _mixed(one: Any, two: Any, share: float, names: Iterable[str]) -> dict[str, Any]:
    """Whole numbers a share of the way from those of one object to those of another, by name."""
    pairs = ((name, getattr(one, name), getattr(two, name)) for name in names)
    return {name: round(first + share * (second - first)) for name, first, second in pairs}


Mixing = Literal["has state", "compares samples", "not linear", "sum", "differs"]
"""How a loss mixes samples, so that a mean of microbatches' is not that of the batch; or that numbers say so."""

OwnKind = Literal["mean", "sum", "unknown", "has state", "compares samples", "not linear", "differs"]
"""What is known of a loss that a model computes itself."""


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """A scalar among a model's outputs of which it is known how it comes from the samples."""

    path: Path
    """Where it is in the output."""
    weights: Mapping[str, Callable[[tuple[Any, ...], dict[str, Any]], float]]
    """By name of a mean that it adds up, from a microbatch's arguments, what that counts for; none: it is a sum."""
    has_terms: bool = False
    """Whether the graph weighs its terms (`roundpipe.core.term_shares`); else it is a sum or one mean."""

    def is_like(self, other: OwnLoss) -> bool:
        """Whether it has as many means, weighed in the same way."""
        return self.has_terms is other.has_terms and self.weights.keys() == other.weights.keys()

    def counts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, float]:
        """What a microbatch counts for in each mean."""
        return {name: weight(args, kwargs) for name, weight in self.weights.items()}


class Entry(Protocol):
    """Makes the first carry of a microbatch."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Carry: ...


class Exit(Protocol):
    """Makes the model's outputs from the last carry."""

    @property
    def reads(self) -> tuple[str, ...]: ...

    def __call__(self, carry: Carry) -> Any: ...


class Tail(Protocol):
    """The last layer, the chain's exit and the loss function as one; it can run in tiles (`roundpipe.core.tiling`)."""

    @property
    def first_loss(self) -> Collection[Path]:
        """Where the first loss is among the model's outputs, cast or copied at most; empty: it is none of them."""

    def __call__(self, layer: nn.Module, carry: Carry, label: Any, microbatch: int | None = None) -> Any:
        """What the loss function returns, for a layer and what it reads; values are kept if ``microbatch`` is told."""

    def is_of_loss(self, error: BaseException) -> bool:
        """Whether what raised an error in a call is a part of the loss function."""


class LayerChain(nn.Sequential):
    """A model as carry-to-carry layers, in order, with what turns arguments into a carry and back.

    Each layer has a spec, and a cost for a microbatch whose tensors have ``example_elements``; ``example_size`` says it
    in words.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        specs: Sequence[LayerSpec],
        costs: Sequence[LayerCost],
        entry: Entry,
        exit: Exit,
        example_elements: int = 0,
        example_size: str = "",
    ) -> None:
        if not len(layers) == len(specs) == len(costs):
            raise AssertionError(f"{len(layers)} layers, {len(specs)} specs, {len(costs)} costs")
        super().__init__(*layers)
        self.specs = tuple(specs)
        self.costs = tuple(costs)
        self.entry = entry
        self.exit = exit
        self.example_elements, self.example_size = example_elements, example_size
        self.own_losses: tuple[OwnLoss, ...] = ()
        self.without_samples: Mapping[Path, bool] = {}  # see `outputs_without_samples`
        self.output_sums: frozenset[Path] = frozenset()  # see `output_sums`
        self.odd_outputs: Mapping[Path, str] = {}
        """Tensors among the outputs that the pieces of a batch don't make up by concatenation, and why."""
        self.output_blocks: Mapping[Path, tuple[int, ...]] = {}
        """Tensors among the outputs that have rows of all samples several times over: rows per sample each time."""
        self.takes_samples_as_time = ""  # the module, in words, for which a batch must stay whole; empty: there is none
        self.mixes_samples, self.changed_buffer = "", ""
        """Where the forward mixes the samples of a batch, in words, and a buffer that it changes; empty: nowhere."""
        self.output_dims: Mapping[Path, int] = {}  # see `dims_of_samples`
        self.mixing: Mapping[Path, Mixing] = {}  # where the outputs have scalars that mix samples, and how
        self.made_in_s: dict[str, float] = {}
        """Seconds that it took to make it, by part, until a call takes them for its report."""

    @functools.cached_property
    def operator_flops(self) -> float:
        """Forward FLOPs for the example per parameter: about those of an operator with weights; 0: not known."""
        return sum(cost.forward_flops for cost in self.costs) / max(sum(1 for _ in self.parameters()), 1)

    def kind_of_loss(self, path: Path) -> OwnKind:
        """What is known of the scalar at some place in the model's outputs."""
        if (mixing := self.mixing.get(path)) is not None:
            return mixing
        found = next((own for own in self.own_losses if own.path == path), None)
        return "unknown" if found is None else "mean" if found.weights else "sum"

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, all layers run in turn where they are."""
        return self.exit(self(self.entry(args, kwargs)))


class ChainSource(Protocol):
    """Gives the chain that is valid for some arguments; may trace again when they differ."""

    trace_count: int

    @property
    def latest(self) -> LayerChain | None:
        """The latest chain, for reports; None if none is known before the first call."""

    def chain_for(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: LayerChain | None = None,
        batch: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        *,
        or_whole: bool = False,
        or_parts: bool = False,
    ) -> LayerChain | None:
        """The chain for the arguments of one microbatch (real tensors); None: the call must run another way.

        ``before``: that of the microbatch before in the same call; since then nothing has touched the model. ``batch``:
        arguments of which these are a piece, by which the model's code decides. ``or_whole``: raise an `OnlyWholeError`
        where only the batch has a chain, else only if code raises. ``or_parts``: None if a trace would serve it alone.
        """

    def others(self) -> Iterable[ChainSource]:
        """Sources that cut the model into other layers, for calls that no plan fits."""


@dataclass(slots=True)
class FixedChain:
    """A source with one chain for all arguments."""

    chain: LayerChain
    trace_count: int = 0

    @property
    def latest(self) -> LayerChain:
        return self.chain

    def chain_for(self, *_: Any, **__: Any) -> LayerChain:
        return self.chain

    def others(self) -> Iterable[ChainSource]:
        return ()


BalanceFunction = Callable[[nn.Module], float]


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's dtype can carry a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()
