"""Several chains of one model as one, so that microbatches that need different ones run in one round.

A model is traced once per decision of its own code: padded microbatches and others, those of one sample and larger
ones may have graphs of their own. As a rule these differ in little, and are cut into layers with the same weights. Then
one chain has them all: each of its layers has a layer of every chain, and runs the one of its microbatch.

    carry   VARIANT: which chain the microbatch runs by        "0.name": a value of the first chain, None elsewhere
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, cast

from torch import nn

from roundpipe.core.errors import OnlyWholeError, note_cut
from roundpipe.core.layers import (
    Carry,
    ChainSource,
    Glue,
    LayerChain,
    LayerCost,
    LayerSpec,
    MakesGlue,
    OwnLoss,
    Tail,
)
from roundpipe.core.module_tree import Renaming
from roundpipe.core.shared_weights import shared_weights
from roundpipe.fx.passes.codegen import ArgumentEntry
from roundpipe.runtime.engine.spec import Call
from roundpipe.runtime.microbatch.split import Split

logger = logging.getLogger(__name__)

MOST_JOINT_CHAINS = 8
"""Kept at once; each keeps the chains in it."""
MOST_MERGED = 2
"""Layers of one chain that may become one, where chains are not cut alike."""
VARIANT = "the chain"
"""Stands for the number of a microbatch's chain among names of carried values, and of keyword arguments."""


def common_layers(chains: Sequence[LayerChain]) -> list[list[range]] | None:
    """The layers of a chain that has several: of each chain, the positions that have the same weights as the others'.

    None if they are cut too differently: if more than `MOST_MERGED` layers would have to become one.
    """
    weights = [[_weights_of(layer) for layer in chain] for chain in chains]
    ends = [0] * len(chains)
    seen: list[set[int]] = [set() for _ in chains]
    groups: list[list[range]] = []

    def take(number: int) -> None:
        seen[number] |= weights[number][ends[number]]
        ends[number] += 1

    while any(end < len(chain) for end, chain in zip(ends, chains, strict=True)):
        starts = list(ends)
        behind = list(range(len(chains)))
        while behind:
            for number in behind:
                if ends[number] == len(chains[number]):
                    return None
                take(number)
            behind = [number for number, own in enumerate(seen) if own != set().union(*seen)]
        if any(end == len(chain) for end, chain in zip(ends, chains, strict=True)):
            for number, chain in enumerate(chains):
                while ends[number] < len(chain):
                    take(number)
            if any(own != seen[0] for own in seen):
                return None
        groups.append([range(start, end) for start, end in zip(starts, ends, strict=True)])
    return groups if all(len(own) <= MOST_MERGED for group in groups for own in group) else None


def _weights_of(layer: nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*layer.parameters(), *layer.buffers())}


class JointChain(LayerChain):
    """A chain for microbatches of any of some chains, which have `common_layers`; keyword arguments name theirs."""

    def __init__(self, chains: Sequence[LayerChain], groups: Sequence[Sequence[range]]) -> None:
        exit = _JointExit([chain.exit for chain in chains])
        self._groups = groups
        specs, layers = [], []
        for group in groups:
            own = [_merged_spec(chain, positions) for chain, positions in zip(chains, group, strict=True)]
            specs.append(_joint_spec(own))
            parts = [[chain[i] for i in positions] for chain, positions in zip(chains, group, strict=True)]
            glue = {
                f"{number}.{each.name}": f"{number}.{part}"
                for number, (chain, positions) in enumerate(zip(chains, group, strict=True))
                for part, position in enumerate(positions)
                for each in chain.specs[position].glue
            }
            layers.append(JointLayer(parts, specs[-1].makes, glue))
        self._shared = shared_weights(layers)
        costs = self.joint_costs({number: chain.costs for number, chain in enumerate(chains)})
        made = {name for spec in specs for name in spec.makes}
        read = dict.fromkeys(name for reads in (*(spec.reads for spec in specs), exit.reads) for name in reads)
        entry = _JointEntry([chain.entry for chain in chains], [name for name in read if name not in made])
        largest = max(chains, key=lambda chain: chain.example_elements)
        super().__init__(layers, specs, costs, entry, exit, largest.example_elements, largest.example_size)
        self.variants = tuple(chains)
        self.own_losses = tuple(_joint_losses(chains))
        self.mixing = {path: kind for chain in chains for path, kind in chain.mixing.items()}
        self.takes_samples_as_time = next((each for chain in chains if (each := chain.takes_samples_as_time)), "")
        self.changed_buffer = next((each for chain in chains if (each := chain.changed_buffer)), "")
        self.without_samples = {path: each for chain in chains for path, each in chain.without_samples.items()}
        self.odd_outputs = {path: why for chain in chains for path, why in chain.odd_outputs.items()}
        self.output_blocks = {path: each for chain in chains for path, each in chain.output_blocks.items()}
        self.output_sums = frozenset.intersection(*(chain.output_sums for chain in chains))
        self.output_dims = {path: dim for chain in chains for path, dim in chain.output_dims.items()}

    def calls(self, call: Call) -> dict[int, Call]:
        """By number of a chain, a call of those microbatches that run by it; one without a number runs by the first."""
        calls: dict[int, Call] = {}
        for args, kwargs, label in zip(call.args, call.kwargs, call.labels, strict=True):
            number = self.number_of(kwargs := dict(kwargs))
            kwargs.pop(VARIANT, None)
            if number not in calls:
                own = self.variants[number]
                unknown: dict[str, Any] = dict.fromkeys(("_tail", "_hooks", "_inventory", "_trained"))
                calls[number] = replace(call, chain=own, args=[], kwargs=[], labels=[], **unknown)
            calls[number].args.append(args)
            calls[number].kwargs.append(kwargs)
            calls[number].labels.append(label)
        return calls

    def number_of(self, kwargs: Mapping[str, Any]) -> int:
        """Of the chain that a microbatch runs by."""
        return int(kwargs.get(VARIANT, 0))

    def joint_costs(self, costs: Mapping[int, Sequence[LayerCost]]) -> list[LayerCost]:
        """Costs of its layers, from those of some of its chains, by their numbers: the most that one takes."""
        sums = [[_sum([own[i] for i in group[number]]) for number, own in costs.items()] for group in self._groups]
        most = [{name: max(getattr(each, name) for each in own) for name in _COSTS} for own in sums]
        return [LayerCost(**own, shared=shared) for own, shared in zip(most, self._shared, strict=True)]


def chains_of(source: ChainSource, pieces: Split, **ways: bool) -> tuple[list[LayerChain], list[dict[str, Any]]] | None:
    """A source's chain for each microbatch, with its keyword arguments; None if one has none.

    ``ways``: of `ChainSource.chain_for`.
    """
    chains: list[LayerChain] = []
    completed: list[dict[str, Any]] = []
    for index, (args, kwargs) in enumerate(zip(pieces.args, pieces.kwargs, strict=True)):
        batch = None if pieces.batches is None else pieces.batches[index]
        try:
            chain = source.chain_for(args, kwargs, chains[-1] if chains else None, batch, **ways)
        except Exception as error:
            if isinstance(error, OnlyWholeError) and error.__cause__ is not None:
                if not ways.get("or_whole") and (own := error.__cause__.__cause__) is not None:
                    note_cut(own, pieces.num_microbatches, runs_whole=True)
                    raise own from None
                error.num_samples = None if pieces.sizes is None else pieces.sizes[index]
            if pieces.num_microbatches > 1:
                note_cut(error, pieces.num_microbatches)
            raise
        if chain is None:
            return None
        chains.append(chain)
        entry = chain.entry
        completed.append(entry.completed(args, kwargs, batch) if isinstance(entry, ArgumentEntry) else kwargs)
    return chains, completed


class JointChains:
    """The joint chains of one model that are in use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: list[JointChain] = []
        """The one used last first."""
        self._has_warned = False

    def join(
        self, chains: Sequence[LayerChain], kwargs: Sequence[dict[str, Any]]
    ) -> tuple[Sequence[LayerChain], Sequence[dict[str, Any]]]:
        """For each microbatch, from its own chain, the chain to run by, which is one for all if that can be; with its
        keyword arguments.
        """
        needed = list(dict.fromkeys(chains))
        if len(needed) == 1:
            return chains, kwargs
        joint = next((each for each in self._known if not set(needed).difference(each.variants)), None)
        if joint is None:
            groups = common_layers(needed)
            if groups is None:
                self._warn_of_rounds(chains)
                return chains, kwargs
            logger.info("%s: the microbatches of a call need %d traces, and run in one round", self._name, len(needed))
            joint = JointChain(needed, groups)
        joint.mixes_samples = next((each for chain in needed if (each := chain.mixes_samples)), "")
        self._known = [joint, *(each for each in self._known if each is not joint)][:MOST_JOINT_CHAINS]
        numbers = map(joint.variants.index, chains)
        return [joint] * len(chains), [{**own, VARIANT: number} for own, number in zip(kwargs, numbers, strict=True)]

    def _warn_of_rounds(self, chains: Sequence[LayerChain]) -> None:
        if not self._has_warned:
            self._has_warned = True
            rounds = 1 + sum(chain is not before for before, chain in pairwise(chains))
            logger.warning(
                "%s: one call runs as %d rounds, each of which brings up all weights: its microbatches take other ways "
                "through the model, with other weights. See the traces in the log for what they differ in",
                self._name,
                rounds,
            )


class JointLayer(Renaming):
    """Layers of each chain; modules have the names that they have in their own layer."""

    def __init__(self, parts: Sequence[Sequence[nn.Module]], makes: Sequence[str], glue: Mapping[str, str]) -> None:
        super().__init__()
        self._glue = dict(glue)
        """By name, which part makes it."""
        self._parts = [[f"{number}.{position}" for position in range(len(own))] for number, own in enumerate(parts)]
        self._modules.update(
            (name, layer)
            for names, own in zip(self._parts, parts, strict=True)
            for name, layer in zip(names, own, strict=True)
        )
        self.training = parts[0][0].training
        self._makes = tuple(makes)

    def forward(self, carry: Carry) -> Carry:
        last, own = self.up_to_last(carry)
        own.update(last(own))
        made = _inside(carry[VARIANT], own)
        return {name: made.get(name) for name in self._makes}

    def make_glue(self, name: str, carry: Carry) -> Any:
        """A value of glue of one of the chains."""
        number, _, own_name = name.partition(".")
        part = cast(MakesGlue, getattr(self, self._glue[name]))
        return part.make_glue(own_name, _outside(int(number), carry))

    def up_to_last(self, carry: Carry) -> tuple[nn.Module, Carry]:
        """Of the layers of a microbatch's own chain, the last one, and what the chain carries once the others ran."""
        number = carry[VARIANT]
        own = _outside(number, carry)
        *first, last = (getattr(self, name) for name in self._parts[number])
        for layer in first:
            own.update(layer(own))
        return last, own

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        if self not in memo:
            memo.add(self)
            yield prefix, self
        for layer in self._modules.values():
            assert layer is not None
            yield from layer.named_modules(memo, prefix, remove_duplicate)


class JointTail:
    """Tails of several chains, by their numbers, as one of their joint chain; their first losses are at one place."""

    def __init__(self, tails: Mapping[int, Tail]) -> None:
        self._tails = tails
        self.first_loss = next(iter(tails.values())).first_loss

    def __call__(self, layer: nn.Module, carry: Carry, label: Any, microbatch: int | None = None) -> Any:
        assert isinstance(layer, JointLayer)
        return self._tails[carry[VARIANT]](*layer.up_to_last(carry), label, microbatch)

    def is_of_loss(self, error: BaseException) -> bool:
        return any(tail.is_of_loss(error) for tail in self._tails.values())


class _JointEntry:
    def __init__(self, entries: Sequence[Any], names: Sequence[str]) -> None:
        self._entries = entries
        self._names = names
        """Those that layers read and none makes."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Carry:
        kwargs = dict(kwargs)
        number = kwargs.pop(VARIANT)
        own = _inside(number, self._entries[number](args, kwargs))
        return {**dict.fromkeys(self._names), **own, VARIANT: number}


class _JointExit:
    def __init__(self, exits: Sequence[Any]) -> None:
        self._exits = exits
        self.reads = (VARIANT, *_named(exit.reads for exit in exits))

    def __call__(self, carry: Carry) -> Any:
        number = carry[VARIANT]
        return self._exits[number](_outside(number, carry))


def _inside(number: int, values: Carry) -> Carry:
    return {f"{number}.{name}": value for name, value in values.items()}


def _outside(number: int, carry: Carry) -> Carry:
    prefix = f"{number}."
    return {name.removeprefix(prefix): value for name, value in carry.items() if name.startswith(prefix)}


def _named(names: Any) -> tuple[str, ...]:
    return tuple(name for number, each in enumerate(names) for name in _named_by(number, each))


def _named_by(number: int, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{number}.{name}" for name in names)


def _joint_spec(specs: Sequence[LayerSpec]) -> LayerSpec:
    differentiable = None
    if all(spec.differentiable is not None for spec in specs):
        differentiable = frozenset(_named(spec.differentiable for spec in specs))
    return LayerSpec(
        specs[0].name,
        tuple(dict.fromkeys(name for spec in specs for name in spec.module_names)),
        (VARIANT, *_named(spec.reads for spec in specs)),
        _named(spec.makes for spec in specs),
        differentiable,
        draws_random=any(spec.draws_random for spec in specs),
        may_write_reads=any(spec.may_write_reads for spec in specs),
        execution_device=any(spec.execution_device for spec in specs),
        glue=tuple(
            Glue(
                f"{number}.{each.name}",
                _named_by(number, each.reads),
                frozenset(_named_by(number, each.sizes_of)),
            )
            for number, spec in enumerate(specs)
            for each in spec.glue
        ),
    )


def _joint_losses(chains: Sequence[LayerChain]) -> Iterator[OwnLoss]:
    """The losses that are made alike in all chains."""
    for first in chains[0].own_losses:
        others = [loss for chain in chains for loss in chain.own_losses if loss.path == first.path]
        if len(others) == len(chains) and all(map(first.is_like, others)):
            weights = {name: _JointWeight([loss.weights[name] for loss in others]) for name in first.weights}
            yield OwnLoss(first.path, weights, first.has_terms)


class _JointWeight:
    def __init__(self, weights: Sequence[Any]) -> None:
        self._weights = weights

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        kwargs = dict(kwargs)
        return float(self._weights[kwargs.pop(VARIANT)](args, kwargs))


_COSTS = tuple(field.name for field in fields(LayerCost) if field.name not in ("shared", "values"))


def _sum(costs: Sequence[LayerCost]) -> LayerCost:
    """The cost of layers that have become one."""
    total = LayerCost(**{name: sum(getattr(cost, name) for cost in costs) for name in _COSTS})
    last = costs[-1]
    repeats, num_tiles = any(cost.repeats for cost in costs), max(cost.num_tiles for cost in costs)
    return replace(total, carry_bytes=last.carry_bytes, num_tiles=num_tiles, repeats=repeats, has_loss=last.has_loss)


def _merged_spec(chain: LayerChain, positions: range) -> LayerSpec:
    """The spec of layers of a chain that have become one."""
    specs = [chain.specs[position] for position in positions]
    made = {name for spec in specs for name in spec.makes}
    later = {name for spec in chain.specs[positions.stop :] for name in spec.reads} | set(chain.exit.reads)
    makes = tuple(name for spec in specs for name in spec.makes if name in later)
    differentiable = None
    if all(spec.differentiable is not None for spec in specs):
        differentiable = frozenset(name for spec in specs for name in spec.differentiable or ()).intersection(makes)
    return replace(
        specs[0],
        name=specs[0].name if len(specs) == 1 else f"{specs[0].name} .. {specs[-1].name}",
        module_names=tuple(name for spec in specs for name in spec.module_names),
        reads=tuple(dict.fromkeys(name for spec in specs for name in spec.reads if name not in made)),
        makes=makes,
        differentiable=differentiable,
        draws_random=any(spec.draws_random for spec in specs),
        may_write_reads=any(spec.may_write_reads for spec in specs),
        execution_device=any(spec.execution_device for spec in specs),
        glue=tuple(dict.fromkeys(glue for spec in specs for glue in spec.glue)),
    )
