"""Device memory of each layer of a chain: the chain runs on fake tensors, and every allocation is followed.

Each layer runs once without autograd, and once with it and its backward; the last one with the loss behind it. Of
layers that are alike, such as a transformer's blocks, one runs, and once for each number of tiles. A parameter's
gradient is there already when the backward runs, as it is from the second microbatch on; what that takes more is noted.

Invariant: what the code of the model and of the loss changes in Python is put back; no fake is left behind.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.allocations import Allocations, uncounted
from roundpipe.core.backward import rooted
from roundpipe.core.layers import (
    EXECUTION_DEVICE,
    CarriedValue,
    Carry,
    LayerChain,
    LayerCost,
    LayerSpec,
    MakesGlue,
    Tail,
)
from roundpipe.core.modes import Modes, autocast_as_on_accelerator
from roundpipe.core.module_tree import modules_in
from roundpipe.core.storages import rebuilt, stored_tensors
from roundpipe.core.tiling import UNTILED, Tiles, TilesRun, in_tiles, num_tiles
from roundpipe.effects.snapshot import python_restored
from roundpipe.fx.fakes import code_on_fakes, fake_of, is_fake, static_mode
from roundpipe.fx.passes.alike import layer_key, value_key
from roundpipe.fx.passes.gradient_memory import BackwardAllocations
from roundpipe.fx.passes.tail import JoinedTail
from roundpipe.fx.passes.tiles import add_tiles
from roundpipe.fx.twin import make_twin

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
GUESSED_LOSS = 4
"""Bytes that a loss takes per byte of the model's outputs, where it can't be run."""
_RUN_TILES = 2
"""Tiles that run: the second finds what the first has left, as each further one would."""
_ROUNDING = 512
"""Allocators of devices give memory in multiples of this."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What a training call does with the model's outputs."""

    function: Callable[[Any, Any], Any]
    label: Any
    tail: Tail | None = None
    """What runs in place of the last layer and the function."""


@dataclass(frozen=True, slots=True)
class _RunBytes:
    """Bytes that one run allocates, its inputs and parameters not counted."""

    forward: int
    """The most at once without autograd."""
    kept: int
    """Between a forward with autograd and its backward, results included."""
    training: int
    """The most at once in both."""
    unmade: int
    """Of gradients of weights, what is not there at that peak if none were before."""
    tiles: TilesRun
    saves: _Saves


@dataclass(frozen=True, slots=True)
class _Saves:
    """What the graph of a run holds of values, once nobody else does."""

    reads: tuple[bool, ...]
    """Whether some of it, by value that it reads."""
    made: tuple[bool, ...]
    own_bytes: tuple[int, ...]
    """Of memory that is that of one value which it makes, and of nothing else."""


_known: WeakKeyDictionary[LayerChain, dict[Hashable, tuple[_RunBytes, list[Any]]]] = WeakKeyDictionary()
"""By chain, what a kind of layer takes from values of some sizes under some modes, and the values that it makes."""


def measure_memory(
    chain: LayerChain,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Loss | None = None,
    device: torch.device = _CPU,
    tiles: Tiles = UNTILED,
) -> list[LayerCost] | None:
    """The chain's costs, with the memory that its layers take, in tiles, for one microbatch with these arguments.

    The loss is part of the last layer; one that can't run on fakes is guessed. Kernels are chosen as on ``device``,
    which must be there if it is not the CPU. None if the code of a layer can't run on fakes.
    """
    try:
        code = python_restored(modules_in(chain), loss and loss.function)
        with code, code_on_fakes(), torch.random.fork_rng(devices=[]):
            if tiles != UNTILED:
                add_tiles(chain, args, kwargs, tiles)
            return _ChainRun(chain, device, tiles).costs(args, kwargs, loss)
    except Exception as error:  # whatever the user's code raises on fakes
        logger.info("memory of %s is estimated: %s: %s", chain.specs[0].name, type(error).__name__, error)
        return None


class _ChainRun:
    def __init__(self, chain: LayerChain, device: torch.device, tiles: Tiles) -> None:
        self._chain = chain
        self._tiles = tiles
        self._device = device
        self._rounding = 1 if device.type == "cpu" else _ROUNDING
        self._mode = static_mode()
        self._known = _known.setdefault(chain, {})
        self._modes = device, Modes.current()
        self._glue: Carry = {}
        """Values that layers make of arguments and constants alone, and share."""
        self._glue_bytes = self._glue_peak_bytes = 0

    def costs(self, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Loss | None) -> list[LayerCost]:
        chain = self._chain
        carry = chain.entry(*self._faked((args, kwargs)))
        last_reader = {name: index for index, spec in enumerate(chain.specs) for name in spec.reads}
        last_reader.update(dict.fromkeys(chain.exit.reads, len(chain.specs)))
        costs: list[LayerCost] = []
        runs: list[tuple[Sequence[str], Sequence[str], _Saves]] = []
        values = {name: (-1, value) for name, value in carry.items()}
        last_reads: Sequence[str] = chain.exit.reads
        for index, (spec, layer, cost) in enumerate(zip(chain.specs, chain, chain.costs, strict=True)):
            number = self._tiles.of(index, len(chain))
            with in_tiles(number, most=_RUN_TILES, at_once=self._tiles.at_once) as ran:
                to_loss = self._to_loss(loss, carry, ran) if loss is not None and index == len(chain) - 1 else None
                if to_loss is not None:  # nothing goes on from there: what comes in is what is carried
                    costs.append(_with_memory(replace(cost, carry_bytes=_bytes_of(carry), has_loss=True), to_loss))
                    runs.append((tuple(carry), (), to_loss.saves))
                    last_reads = ()
                    break
                reads = self._given(layer, spec, {name: carry[name] for name in spec.reads})
                memory, results = self._layer(layer, spec, reads, ran)
            runs.append((tuple(reads), spec.makes, memory.saves))
            carry = {name: value for name, value in (carry | results).items() if last_reader.get(name, -1) > index}
            carry_bytes = _bytes_of(carry)
            values.update((name, (index, carry[name])) for name in spec.makes if name in carry)
            if loss is not None and index == len(chain) - 1:
                memory, cost = _with_guessed_loss(memory, carry_bytes), replace(cost, has_loss=True)
            costs.append(_with_memory(replace(cost, carry_bytes=carry_bytes), memory))
        carried = _carried(runs, values, last_reads)
        costs = [replace(cost, values=each) for cost, each in zip(costs, carried, strict=True)]
        if loss is not None:
            costs[-1] = replace(costs[-1], label_bytes=_bytes_of({"label": loss.label}))
        return [*map(self._with_glue, costs)]

    def _given(self, layer: nn.Module, spec: LayerSpec, reads: Carry) -> Carry:
        """What a layer reads, with the glue that it is given: it is made once for all layers."""
        missing = [glue.name for glue in spec.glue if glue.name not in self._glue]
        if missing:
            twin = cast(MakesGlue, self._twin(layer, spec))
            memory = Allocations(trees.tensors(reads), self._rounding)
            with self._entered(), torch.enable_grad(), memory:
                self._glue.update((name, twin.make_glue(name, reads)) for name in missing)
            self._glue_peak_bytes = max(self._glue_peak_bytes, self._glue_bytes + memory.peak_bytes)
            self._glue_bytes += memory.live_bytes
        given = {glue.name: self._glue[glue.name] for glue in spec.glue}
        return reads | {
            name: value for name, value in given.items() if not any(t.requires_grad for t in trees.tensors(value))
        }

    def _with_glue(self, cost: LayerCost) -> LayerCost:
        """A layer's cost with the glue that is there while it runs, made by itself or another layer of its stage."""
        if not self._glue:
            return cost
        num_bytes, peak_bytes = self._glue_bytes, self._glue_peak_bytes
        return replace(
            cost,
            workspace_bytes=max(cost.workspace_bytes + num_bytes, peak_bytes),
            temporary_bytes=max(cost.temporary_bytes + num_bytes, peak_bytes),
        )

    def _faked(self, value: Any) -> Any:
        return trees.map_tensors(value, lambda tensor: fake_of(self._mode, tensor, self._device))

    def _layer(self, layer: nn.Module, spec: LayerSpec, reads: Carry, ran: TilesRun) -> tuple[_RunBytes, Carry]:
        """What a layer takes, and the values that it makes, from those that it reads."""
        number = num_tiles()
        at_once = self._tiles.at_once or number == 1  # whole, nothing differs by it
        key = layer_key(layer, spec), tuple(map(value_key, reads.values())), number, at_once, self._modes
        if key not in self._known:
            twin = self._twin(layer, spec)
            forward = functools.partial(_forward, twin, spec)
            peak_bytes = self._without_autograd(forward, reads)
            memory, made = self._with_autograd(forward, reads, ran, peak_bytes)
            self._known[key] = memory, list(made.values())
        memory, values = self._known[key]
        return memory, {name: self._faked(value) for name, value in zip(spec.makes, values, strict=True)}

    def _twin(self, layer: nn.Module, spec: LayerSpec | None = None) -> nn.Module:
        """A copy of a layer with fakes as weights, which have gradients."""
        fakes = {tensor: self._weight(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
        with self._mode:
            for fake in fakes.values():
                fake.grad = torch.empty_like(fake) if fake.requires_grad else None
        twin, _ = make_twin(layer, fakes)
        if spec is not None and spec.execution_device:
            setattr(twin, EXECUTION_DEVICE, self._device)
        return twin

    def _weight(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake weight; a packed one is of its own class, since what its operators unpack takes memory too."""
        parts = [] if tensor.requires_grad or not hasattr(tensor, "__tensor_flatten__") else stored_tensors(tensor)
        if not parts:
            return fake_of(self._mode, tensor, self._device)
        packed = rebuilt(tensor, [fake_of(self._mode, part, self._device) for part in parts])
        return nn.Parameter(packed, requires_grad=False) if isinstance(tensor, nn.Parameter) else packed

    def _to_loss(self, loss: Loss, reads: Carry, ran: TilesRun) -> _RunBytes | None:
        """What the last layer and the loss behind it take; None if that can't run."""
        chain, spec, label = self._chain, self._chain.specs[-1], self._faked(loss.label)
        twin, tail = self._twin(chain[-1], spec), loss.tail
        if isinstance(tail, JoinedTail):
            tail = tail.with_loss(self._twin)

        def run(carry: Carry) -> Carry:
            if tail is not None:
                return {"loss": tail(twin, carry, label)}
            outputs = chain.exit({**carry, **_forward(twin, spec, {name: carry[name] for name in spec.reads})})
            return {"loss": loss.function(outputs, label)}

        try:
            memory, _ = self._with_autograd(run, reads, ran)
            return replace(memory, forward=self._without_autograd(run, reads))
        except Exception as error:  # whatever the user's code raises on fakes
            logger.info("memory of the loss is estimated: %s: %s", type(error).__name__, error)
            return None

    def _entered(self) -> ExitStack:
        """In the world of fakes, under the caller's autocast."""
        stack = ExitStack()
        stack.enter_context(self._mode)
        if self._device.type == "cpu":
            stack.enter_context(autocast_as_on_accelerator())
        return stack

    def _without_autograd(self, function: Callable[[Carry], Carry], reads: Carry) -> int:
        """The most bytes that a forward holds at once."""
        memory = Allocations(trees.tensors(reads), self._rounding)
        with self._entered(), torch.no_grad(), memory:
            function(dict(reads))
        return memory.peak_bytes

    def _with_autograd(
        self, function: Callable[[Carry], Carry], reads: Carry, ran: TilesRun, forward_bytes: int = 0
    ) -> tuple[_RunBytes, Carry]:
        """What a forward and its backward take, beside what is known of the forward without autograd; the results."""
        with self._entered(), torch.enable_grad():
            leaves = trees.map_tensors(reads, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))
            memory = BackwardAllocations(trees.tensors(leaves), self._rounding)
            taken = trees.map_tensors(leaves, torch.clone)  # a graph holds its leaves in any case
            memory.leave_out(trees.tensors(taken))
            with memory:
                made = function(dict(taken))
                kept_bytes = memory.live_bytes
                roots = [tensor for tensor in trees.tensors(made) if tensor.requires_grad and tensor.grad_fn]
                with uncounted():
                    results = self._faked(made)
                inputs = _fake_leaves(roots)
                gradients = [torch.empty_like(root) for root in roots] if inputs else []
                watched = _Watched(taken, made)
                graph = [root.grad_fn for root in roots]
                del taken, made
                if inputs:
                    root = rooted(roots, gradients)
                roots.clear()
                saves = watched.saves()
                del graph
                if inputs:
                    with memory.gradients_followed(inputs):
                        torch.autograd.backward([root], inputs=inputs)
        return _RunBytes(forward_bytes, kept_bytes, memory.peak_bytes, memory.unmade_bytes, ran, saves), results


class _Watched:
    """Memory of what a run reads and makes; keeps none of it."""

    def __init__(self, reads: Carry, made: Carry) -> None:
        of_reads, of_made = ([_storages(value) for value in values.values()] for values in (reads, made))
        keys = Counter(storage._cdata for each in (*of_reads, *of_made) for storage in each)
        self._own_bytes = tuple(sum(each.nbytes() for each in of if keys[each._cdata] == 1) for of in of_made)
        self._reads, self._made = ([[weakref.ref(each) for each in of] for of in ofs] for ofs in (of_reads, of_made))

    def saves(self) -> _Saves:
        """What is still there, held by the graph alone."""
        reads, made = (tuple(any(ref() is not None for ref in each) for each in of) for of in (self._reads, self._made))
        return _Saves(reads, made, self._own_bytes)


def _fake_leaves(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves of a graph without real ones, such as weights that a loss reads: those must get no fake gradient."""
    pending, seen = [root.grad_fn for root in roots], set()
    leaves = []
    while pending:
        if (node := pending.pop()) is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None and is_fake(leaf):
            leaves.append(leaf)
        pending += [following for following, _ in node.next_functions]
    return leaves


def _storages(value: Any) -> list[torch.UntypedStorage]:
    tensors = (tensor for tensor in trees.tensors(value) if tensor.layout is torch.strided)
    return list({(storage := tensor.untyped_storage())._cdata: storage for tensor in tensors}.values())


def _carried(
    runs: Sequence[tuple[Sequence[str], Sequence[str], _Saves]],
    values: Mapping[str, tuple[int, Any]],
    last_reads: Sequence[str],
) -> list[tuple[CarriedValue, ...]]:
    """Per run, the values that it makes and others read.

    Args:
        runs: of each what it reads and makes, by name, and what its graph holds of these.
        values: by name, with the run that makes it; those in front of the first one have -1.
        last_reads: what is read behind the last run.
    """
    readers: defaultdict[str, list[int]] = defaultdict(list)
    savers: defaultdict[str, list[int]] = defaultdict(list)
    own_bytes: dict[str, int] = {}
    for index, (reads, makes, saves) in enumerate(runs):
        for name, is_saved in (*zip(reads, saves.reads, strict=True), *zip(makes, saves.made, strict=False)):
            if is_saved:
                savers[name].append(index)
        for name in reads:
            readers[name].append(index)
        own_bytes.update(zip(makes, saves.own_bytes, strict=False))
    for name in last_reads:
        readers[name].append(len(runs))
    found: list[list[CarriedValue]] = [[] for _ in runs]
    for name, (maker, value) in values.items():
        if readers[name]:
            flowing = [tensor for tensor in trees.tensors(value) if tensor.requires_grad]
            found[max(maker, 0)].append(
                CarriedValue(
                    maker,
                    tuple(readers[name]),
                    _bytes_of({name: value}),
                    _bytes_of({name: flowing}),
                    own_bytes.get(name, 0),
                    tuple(savers[name]),
                )
            )
    return [*map(tuple, found)]


def _forward(layer: nn.Module, spec: LayerSpec, carry: Carry) -> Carry:
    """What a layer makes."""
    made = layer(carry)
    return {name: made[name] for name in spec.makes}


def _bytes_of(carry: Carry) -> int:
    return sum(tensor.nbytes for tensor in {id(t): t for t in trees.tensors(carry)}.values())


def _with_guessed_loss(last: _RunBytes, output_bytes: int) -> _RunBytes:
    """What the last layer and a loss take, where the loss can't run."""
    kept_bytes = last.kept + GUESSED_LOSS * output_bytes
    return replace(last, kept=kept_bytes, training=max(last.training, kept_bytes))


def _with_memory(cost: LayerCost, memory: _RunBytes) -> LayerCost:
    return replace(
        cost,
        workspace_bytes=memory.forward,
        activation_bytes=memory.kept,
        temporary_bytes=max(memory.training - memory.kept, 0),
        unmade_bytes=memory.unmade,
        num_tiles=memory.tiles.number,
        repeats=memory.tiles.repeats,
    )
