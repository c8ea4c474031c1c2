"""Modules of the user's as layers, as they are given: the chain of a model that is not traced."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.aliasing import overlapping
from roundpipe.core.caller import warn
from roundpipe.core.errors import ConfigError
from roundpipe.core.layers import Carry, FixedChain, LayerChain, LayerCost, LayerSpec
from roundpipe.core.module_tree import Structure, weight_bytes_of
from roundpipe.core.shared_weights import shared_weights
from roundpipe.effects.places import has_hooks
from roundpipe.effects.snapshot import ContentsSnapshot
from roundpipe.effects.uses import asks_for_gradients
from roundpipe.effects.versions import TensorVersions, WeightSnapshot
from roundpipe.fx.graph.traced import OutputValue
from roundpipe.fx.passes.codegen import OutputExit
from roundpipe.runtime.optimizer.reads import settle_reads_of


class StateWatch:
    """Finds what forwards of the copies of one layer keep for later calls; it looks at their first calls only."""

    CALLS = 8

    def __init__(self) -> None:
        self._calls_left = self.CALLS
        self._values: dict[tuple[int, str], Any] = {}
        """Simple values that a forward set."""
        self._arguments_share = False
        self._writes_arguments: str | None = None
        """The layer that does, once it has."""

    def note_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_first: bool) -> None:
        """Before a microbatch runs: whether a write into one of its arguments would be seen in another one."""
        tensors = [tensor for tensor in trees.tensors((args, kwargs)) if tensor.layout is torch.strided]
        self._arguments_share = any(overlapping(tensors)) or (self._arguments_share and not is_first)
        if self._writes_arguments:
            self._check_written()

    def note_written(self, layer: str) -> None:
        """A forward has written into an argument; a warning, or an error if that is the caller's own twice."""
        if self._writes_arguments is None:
            self._writes_arguments = layer
            self._check_written()
            warn(
                f"the forward of layer {layer} writes into its arguments, of which each microbatch has a copy: the "
                "caller's own stay as they were"
            )

    def _check_written(self) -> None:
        if self._arguments_share:
            raise ConfigError(
                f"two arguments share memory, and the forward of layer {self._writes_arguments} writes into one: each "
                "is split and moved by itself, so the other would not see it. Give it clones, or have it write into one"
            )

    def is_due(self) -> bool:
        self._calls_left -= 1
        return self._calls_left >= 0

    def kept_state(self, before: ContentsSnapshot) -> str | None:
        """What the forward that ran since then keeps for later ones, in words."""
        words = next(self._findings(before), None)
        if words is not None:
            self._calls_left = 0
        return words

    def _findings(self, before: ContentsSnapshot) -> Iterator[str]:
        if container := before.changed_container():
            yield f"changes the {type(container[1]).__name__} in attribute {container[0]!r}"
        if drawn := before.drawn():
            yield f"draws from the generator in attribute {drawn!r}"
        for change in before.diff():
            if change.is_torchs or change.is_cached_property:
                continue
            if trees.tensors(change.now):
                yield f"stores tensors in attribute {change.name!r}"
            elif isinstance(change.now, trees.PLAIN):
                key = change.position, change.name
                if key in self._values and trees.same(self._values[key], change.before):  # as a counter does
                    yield f"changes attribute {change.name!r} from call to call"
                self._values[key] = change.now


class _ModuleLayer(nn.Module):
    """A user's module as a layer: carried value ``reads`` in, carried value ``makes`` out.

    The module stands under its qualified name (which may have dots), so what is below it has its own names too.
    """

    def __init__(self, name: str, module: nn.Module, reads: str, makes: str, *, unpack: bool, watched: bool) -> None:
        super().__init__()
        self.reads = reads
        self.makes = makes
        self.unpack = unpack
        self.watch = StateWatch() if watched else None  # one for all copies
        self._modules[name] = module  # after the attributes, since a name may be one of theirs

    def forward(self, carry: Carry) -> Carry:
        value = carry[self.reads]
        ((layer, module),) = self._modules.items()
        assert module is not None
        args, kwargs = value if self.unpack else ((value,), {})
        if self.watch is None:
            return {self.makes: module(*args, **kwargs)}
        layer = layer or type(module).__name__
        is_due = self.watch.is_due()
        weights = WeightSnapshot(module, with_norms=is_due)
        given = TensorVersions(trees.tensors((args, kwargs)) if self.unpack else ())
        before = ContentsSnapshot(module.modules()) if is_due else None
        output = module(*args, **kwargs)
        if written := weights.diff():
            raise ConfigError(
                f"the forward of layer {layer} writes its parameter {written}, on a copy that "
                "is thrown away. Write weights between steps, from outside of forward, or use "
                "wrap_model_to_roundpipe(model), which runs such a module on the CPU"
            )
        if given.were_written():
            self.watch.note_written(layer)
        if before is not None and (words := self.watch.kept_state(before)):
            warn(
                f"the forward of layer {layer} {words}. Each worker runs a copy of the layer, and the backward runs "
                "its forward again, so what calls find there, and results that depend on it, may differ from eager "
                "mode. Use roundpipe.compile or wrap_model_to_roundpipe, which find out what such a layer needs, or "
                "keep it in a buffer"
            )
        return {self.makes: output}


def _take_all(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Carry:
    return {"value_0": (args, kwargs)}


_RANDOM_MODULES = ("Dropout", "RReLU", "FractionalMaxPool", "Transformer", "MultiheadAttention", "RNN", "LSTM", "GRU")


def may_draw_random(module: nn.Module) -> bool:
    """Whether a module's forward may draw random numbers: not, if it is made of torch.nn modules that don't."""
    return any(
        not type(part).__module__.startswith("torch.nn.")
        or any(word in type(part).__name__ for word in _RANDOM_MODULES)
        for part in module.modules()
    )


def chain_of_modules(modules: Sequence[tuple[str, nn.Module]], *, watched: bool = True) -> LayerChain:
    """The chain of modules, with qualified names (``""``: the model itself), called one after the other.

    The first gets all arguments, each other one the output before it. If ``watched``, a layer raises `ConfigError` when
    its forward writes its parameters, and warns when it changes attributes that later calls may read.
    """
    specs, costs, layers = [], [], []
    for index, (name, module) in enumerate(modules):
        reads, makes = f"value_{index}", f"value_{index + 1}"
        layers.append(_ModuleLayer(name, module, reads, makes, unpack=index == 0, watched=watched))
        name = name or type(module).__name__
        draws, asks = may_draw_random(module), any(asks_for_gradients(type(part)) for part in module.modules())
        specs.append(LayerSpec(name, (name,), (reads,), (makes,), draws_random=draws, asks_for_gradients=asks))
        weight_bytes = weight_bytes_of(module)
        costs.append(
            LayerCost(
                forward_s=max(weight_bytes, 1) * 1e-12,
                backward_s=max(weight_bytes, 1) * 2e-12,
                num_parameters=sum(p.numel() for p in module.parameters()),
                weight_bytes=weight_bytes,
                gradient_bytes=sum(p.nbytes for p in module.parameters() if p.requires_grad),
            )
        )
    costs = [replace(cost, shared=shared) for cost, shared in zip(costs, shared_weights(layers), strict=True)]
    return LayerChain(layers, specs, costs, _take_all, OutputExit(OutputValue(f"value_{len(modules)}")))


def layers_of(model: nn.Module) -> LayerChain:
    """A model as it is given: an ``nn.Sequential`` has one layer per child, any other module is one layer."""
    if isinstance(model, LayerChain):
        return model
    if type(model) is nn.Sequential and len(model):
        # By entry, not by object: a child that is there twice is two layers.
        children = [(name, child) for name, child in model._modules.items() if child is not None]
        _warn_of_shared_buffers(children)
        if has_hooks(model):
            warn(
                "the hooks of the nn.Sequential itself don't run, since its children are the layers: put them on its "
                "first or last child, or use roundpipe.compile"
            )
        return chain_of_modules(children)
    return chain_of_modules([("", model)])


def _warn_of_shared_buffers(children: Sequence[tuple[str, nn.Module]]) -> None:
    holders: dict[int, list[str]] = {}
    for name, child in children:
        for buffer in child.buffers():
            holders.setdefault(id(buffer), []).append(name)
    shared = {tuple(names) for names in holders.values() if len(names) > 1}
    for names in sorted(shared):
        warn(
            f"layers {', '.join(names)} share buffers, but each runs on a copy of its own: if their forward writes "
            "them (BatchNorm in training), what one writes is not seen by the others, and the last one's values stay. "
            "roundpipe.compile keeps such layers together"
        )


class ModuleSource(FixedChain):
    """The chain of a model's `layers_of`, for all arguments, until the model's structure changes."""

    def __init__(self, model: nn.Module) -> None:
        settle_reads_of(model.parameters())
        super().__init__(layers_of(model))
        self._model = model
        self._structure = Structure(model.modules())

    def chain_for(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: LayerChain | None = None,
        batch: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        *,
        or_whole: bool = False,
        or_parts: bool = False,
    ) -> LayerChain:
        if self._structure.changed() is not None:
            self.chain, self._structure = layers_of(self._model), Structure(self._model.modules())
        first = next(iter(self.chain), None)
        if isinstance(first, _ModuleLayer) and first.watch is not None:
            first.watch.note_arguments(args, kwargs, is_first=before is None)
        return self.chain

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleSource:
        return type(self)(copy.deepcopy(self._model, memo))
