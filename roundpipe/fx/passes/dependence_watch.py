"""Follows through operators which tensors are made of several samples; see `sample_dependence`.

What each operator does is in `dependence_rules`, and in `sample_blocks` in which order it leaves samples.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch

from roundpipe.core.allocations import TorchDispatchMode
from roundpipe.fx.fakes import is_fake, is_of_no_world, real_world
from roundpipe.fx.locations import model_location, with_source
from roundpipe.fx.passes.assumed_sizes import with_assumed_size
from roundpipe.fx.passes.dependence_rules import DependenceCall, is_float, is_place
from roundpipe.fx.passes.sample_blocks import Blocks, blocks_made
from roundpipe.fx.passes.ways_made import WaysMade
from roundpipe.fx.sizes import flat_tensors

SUMS, ROWS, DEEP = 1, 2, 3
SEVERAL = -1
_LEAST_TOLD = 60
"""A number of samples that is no other number."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a tensor."""

    level: int = 0
    """`SUMS`: it is made of several samples; `ROWS`: so is what it has for each; `DEEP`: and went through weights."""
    where: str = ""
    """What mixed them."""
    of_floats: bool = False
    """Whether they were no integers."""
    is_weight: bool = False
    is_stored: bool = False
    """Whether it is a weight, a buffer or another tensor that is there before a call, or made of such alone."""
    is_shuffle: bool = False
    """Whether it is another order of samples, a random one or from the last."""
    is_found: bool = False
    """Whether it has places of those samples that a mask tells, one after the other."""
    is_picked: bool = False
    """Whether it has some of these, by where they are among the others."""
    is_learned: bool = False
    """Whether weights have made it of something else."""
    sums_learned: bool = False
    """Whether it has sums over samples of what weights have made, and not of their places, say."""
    is_bent: bool = False
    """Whether it is no linear function of sums over samples that weights have made."""
    blocks: Blocks = ()
    """How the rows of its samples are ordered, if not side by side."""
    sample: int | None = None
    """The only sample that it is made of; `SEVERAL` if it has some beside each other."""
    states: frozenset[str] = frozenset()
    """Buffers of the model's of whose values it is made."""


NOTHING, STORED = Known(), Known(is_stored=True)


class DependenceWatch(TorchDispatchMode):
    """Follows through operators what is made of several samples."""

    supports_higher_order_operators = True

    def __init__(
        self, prime: int, number: int, *, has_others: bool = False, is_of_loss: bool = False, has_lists: bool = False
    ) -> None:
        super().__init__()
        self.prime = prime
        self.number = number
        self.has_others = has_others
        """Whether there are arguments with another number of something than there are samples, such as of images."""
        self.is_of_loss = is_of_loss
        """Whether what is computed is a loss, so that a sum over all may be added to each, or divide it."""
        self._ways = None if has_lists or is_of_loss else WaysMade(self.sample_of)
        """Not where lists have something of its own for each sample."""
        self._known: dict[int, Known] = {}
        self._alive: list[torch.Tensor] = []
        self.place = ""
        """What runs, in words."""
        self.caller: CodeType | None = None
        """What calls the model's own code while it runs, so that its line can be told."""
        self.decision = ""
        """What mixes samples before Python asks for a number that comes of it."""
        self._buffer_at: dict[int, str] = {}
        """Names of the model's buffers, by their memory."""
        self._torchs: set[str] = set()
        """Those in modules of torch's own."""
        self._written: set[str] = set()
        """Those that a forward changes in another way for each microbatch than once for the batch."""
        self._left_otherwise: set[str] = set()
        """Those of them that end with another value."""

    def put(self, tensor: torch.Tensor, known: Known) -> None:
        self._known[id(tensor)] = known
        self._alive.append(tensor)

    def put_buffer(self, tensor: torch.Tensor, name: str, *, is_torchs: bool) -> None:
        """Follow what becomes of a buffer, which may be one that code of torch's own has put into a module."""
        self.put(tensor, replace(STORED, states=frozenset({name})))
        self._buffer_at[tensor.untyped_storage()._cdata] = name
        if is_torchs:
            self._torchs.add(name)

    def note_written(self, name: str, values: Sequence[torch.Tensor], *, adds_up: bool = False) -> None:
        """A buffer gets a value made of these. What torch makes of weights alone converges, as in a spectral norm.

        ``adds_up``: those of microbatches leave it with the value that the batch would.
        """
        known = list(map(self.known, values))
        of_samples = any(each.level or self.dims(value) for each, value in zip(known, values, strict=True))
        of_weights = any(each.is_weight or each.is_learned for each in known)
        if of_samples or not (of_weights and name in self._torchs):
            self._written.add(name)
            if not adds_up:
                self._left_otherwise.add(name)

    def put_state(self, output: torch.Tensor, buffers: Collection[str]) -> None:
        """An output is of a module that writes these and could not be followed: it may read them as well."""
        if buffers:
            self.put(output, replace(self.known(output), states=self.known(output).states.union(buffers)))
            self._written.update(buffers)
            self._left_otherwise.update(buffers)

    def known(self, tensor: torch.Tensor) -> Known:
        return self._known.get(id(tensor)) or (NOTHING if is_fake(tensor) else STORED)

    def sample_of(self, tensor: torch.Tensor) -> int | None:
        """The one sample that a tensor is made of; None if there are several, or none."""
        sample = self.known(tensor).sample
        return None if sample == SEVERAL else sample

    def counts_samples(self, size: int) -> bool:
        return size > 0 and size % self.prime == 0

    def dims(self, tensor: torch.Tensor) -> list[int]:
        """Those that count samples, or samples and something else."""
        return [dim for dim, size in enumerate(tensor.shape) if self.counts_samples(size)]

    def is_sum(self, tensor: torch.Tensor) -> bool:
        """Whether it is made of several samples, and has nothing for each of them."""
        return self.known(tensor).level == SUMS

    def is_learned(self, tensor: torch.Tensor) -> bool:
        """Whether weights have made it of something else."""
        return self.known(tensor).is_learned

    def is_shuffle(self, tensor: torch.Tensor) -> bool:
        """Whether it is another order of samples."""
        return self.known(tensor).is_shuffle

    def is_found(self, tensor: torch.Tensor) -> bool:
        """Whether it has places of those samples that a mask tells."""
        return self.known(tensor).is_found

    def is_picked(self, tensor: torch.Tensor) -> bool:
        """Whether it has some of these, by where they are among the others."""
        return self.known(tensor).is_picked

    def is_torchs(self, tensor: Any) -> bool:
        """Whether it is a buffer of a module of torch's."""
        return isinstance(tensor, torch.Tensor) and not self._torchs.isdisjoint(self.known(tensor).states)

    def is_stored(self, tensor: torch.Tensor) -> bool:
        """Whether it was there before the call, or is made of such tensors alone."""
        return self.known(tensor).is_stored

    def is_their_number(self, value: Any) -> bool:
        """Whether a number is that of the samples, or that to some power; small ones may be anything."""
        if type(value) not in (int, float) or not value or not math.isfinite(value) or self.number < _LEAST_TOLD:
            return False
        powers = (abs(value) ** power for power in (1, -1, 2, -2))
        whole = [round(each) for each in powers if each < 1e9 and math.isclose(each, round(each), rel_tol=1e-9)]
        return any(map(self.counts_samples, whole))

    def compares(self, tensor: torch.Tensor) -> bool:
        """Whether it is made of a comparison of samples."""
        known = self.known(tensor)
        return known.level >= SUMS and known.of_floats

    def is_learned_sum(self, tensor: torch.Tensor) -> bool:
        """Whether it is a sum over samples that weights have made, and not one for each of them."""
        known = self.known(tensor)
        return known.level >= SUMS and known.sums_learned and not self.dims(tensor)

    def is_bent(self, tensor: torch.Tensor) -> bool:
        """Whether it is a scalar that is no linear function of such sums."""
        return not tensor.ndim and self.known(tensor).is_bent

    def mixed_in(self, output: torch.Tensor) -> str:
        """What mixes samples in an output: in one with a row for each of them, or in a scalar behind weights."""
        known, dims = self.known(output), self.dims(output)
        if 0 in dims and known.level >= ROWS or not output.ndim and known.level == DEEP:
            return known.where
        if (dims or not output.ndim) and (states := sorted(known.states & self._written)):
            return f"the buffer {states[0]}, which the forward reads, changes with each batch"
        return ""

    @property
    def changed_buffer(self) -> str:
        """See `SampleDependence`."""
        return next(iter(sorted(self._left_otherwise - self._torchs)), "")

    def blocks(self, output: torch.Tensor) -> Blocks:
        """How the rows of an output are ordered along its first dimension."""
        blocks = self.known(output).blocks
        return blocks if self.dims(output) == [0] and self._fits(output.shape[0], blocks) else ()

    def _fits(self, size: int, blocks: Blocks) -> bool:
        return bool(blocks) and size > 0 and size % (self.number * sum(blocks)) == 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            self.note_decision(args[0])
        out = with_assumed_size(func, args, self.counts_samples)
        if out is None:
            out = func(*args, **kwargs)
        if outputs := flat_tensors(out):
            inputs = flat_tensors(args, kwargs)
            if not hasattr(func, "_schema"):
                self.carry(inputs, outputs)
            elif func is torch.ops.aten.lift_fresh.default and is_of_no_world(args[0]):
                self._note_made(outputs[0], args[0])
            else:
                self._note(DependenceCall(self, func, args, kwargs, outputs))
        return out

    def note_decision(self, tensor: torch.Tensor) -> None:
        """Python asks for a number made of several samples. How many there are of something each piece may ask for."""
        known = self.known(tensor)
        if known.level and known.of_floats:
            self.decision = self.decision or f"{known.where}, on which a decision depends"

    def _note_made(self, made: torch.Tensor, data: torch.Tensor) -> None:
        """Python makes a tensor of numbers, which may be others for each sample, or be how many there are."""
        with real_world():
            rows = [data.movedim(dim, 0) for dim in self.dims(made)]
            differ = any(bool((each != each[:1]).any()) for each in rows)
            is_number = data.numel() > 0 and any(map(self.is_their_number, data.flatten()[:1].tolist()))
            if differ or is_number:
                self.put(made, Known(SUMS, f"a tensor of numbers in {self._where()}", of_floats=is_float(data)))
            if self._ways is not None:
                self._ways.note_made(made, data)

    def _note(self, call: DependenceCall) -> None:
        is_reversed = call.name == "arange" and (call.values.get("step") or 1) < 0
        is_order = call.name in ("randperm", "tril_indices", "triu_indices") or is_reversed
        if is_order and self.dims(call.output):
            self.put(call.output, Known(is_shuffle=True))
            return
        mixes = False
        blocks: Blocks = ()
        with suppress(LookupError, TypeError, AttributeError, ValueError):  # arguments of another kind
            mixes = call.mixes()
            blocks = blocks_made(call, self.number, lambda tensor: self.known(tensor).blocks)
        mixes = mixes or self._meet(call.sources, joins=call.name in ("cat", "stack"))
        mixes = self._differ(call) or mixes
        found = Known(SUMS, f"{call.name} in {self._where()}", of_floats=call.of_floats) if mixes else NOTHING
        mixed = {id(tensor) for tensor in call.mixed}
        for tensor in call.outputs:
            does = found if id(tensor) in mixed else NOTHING
            self.carry(
                call.sources, [tensor], does, takes_integers=call.takes_integers, bends=call.bends(), blocks=blocks
            )
        if call.func._schema.is_mutable:
            self._note_writes(call, found)
        with suppress(LookupError, TypeError, AttributeError, ValueError):
            for tensor, sample in zip(call.outputs, call.samples_taken, strict=True):
                if sample is not None:
                    self.put(tensor, replace(self.known(tensor), sample=sample))
            picks = call.picks()
            for tensor in call.outputs if picks or call.finds() else ():
                self.put(tensor, replace(self.known(tensor), is_picked=picks, is_found=not picks))
        if call.checks and (known := self.known(call.output)).of_floats:
            self.put(call.output, replace(known, of_floats=False))

    def _meet(self, tensors: Sequence[torch.Tensor], *, joins: bool) -> bool:
        """Whether some are made of one sample each and of different ones; or of one, and others have all.

        Where an operator ``joins`` them, different ones stay apart, and one beside all moves these to other places.
        """
        known = {id(tensor): self.known(tensor) for tensor in tensors}
        single = [each for each in known.values() if each.sample is not None]
        if self.is_of_loss or not single:
            return False
        has_others = any(known[id(tensor)].sample is None and self.dims(tensor) for tensor in tensors)
        if len({each.sample for each in single}) > 1 and not joins:
            return True
        return has_others and any(each.is_learned and each.sample != SEVERAL for each in single)

    def _differ(self, call: DependenceCall) -> bool:
        """Whether it joins samples of which something else was made of each."""
        if self._ways is None:
            return False
        taken: list[int | None] = [None] * len(call.outputs)
        with suppress(LookupError, TypeError, AttributeError, ValueError):
            taken = call.samples_taken
        is_mutable = call.func._schema.is_mutable
        target = self.sample_of(call.inputs[0]) if is_mutable and call.inputs else None
        return self._ways.note(call, taken, target)

    def _note_writes(self, call: DependenceCall, found: Known) -> None:
        for tensor in call.written:
            if (base := tensor._base) is not None and base is not tensor:
                sample = self.known(base).sample  # others are beside the one that is written
                self.carry([base, *call.sources], [base], found, takes_integers=True)
                self.put(base, replace(self.known(base), sample=sample))
            places = (each.untyped_storage()._cdata for each in (tensor, base) if each is not None)
            if name := next((name for place in places if (name := self._buffer_at.get(place))), ""):
                values = [value for value in call.inputs if value is not tensor]
                self.note_written(name, values, adds_up=self._adds_up(call, values))

    def _adds_up(self, call: DependenceCall, values: Sequence[torch.Tensor]) -> bool:
        """Whether a write adds a count, or puts in what is the same each time."""
        if call.name in ("copy", "fill", "zero"):
            return not any(self.known(each).level or self.known(each).states or self.dims(each) for each in values)
        if call.name != "add":
            return False
        counts = all(self.is_sum(each) and not is_float(each) for each in values)
        return counts if values else self.is_their_number(call.values.get("other"))

    def carry(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        found: Known = NOTHING,
        *,
        takes_integers: bool = False,
        bends: bool = False,
        blocks: Blocks = (),
    ) -> None:
        """Results are made of what the inputs are.

        Args:
            found: what an operator does.
            takes_integers: whether its floats are made of integers' values.
            bends: whether it is no linear function.
            blocks: how it orders the rows of samples.
        """
        known = [(tensor, self.known(tensor)) for tensor in inputs]
        has_weight = any(each.is_weight for _, each in known)
        are_weights = bool(known) and all(each.is_weight for _, each in known)
        are_shuffles = bool(known) and all(each.is_shuffle for _, each in known)
        of_all = any(each.sample is None and self.dims(tensor) for tensor, each in known)
        samples = {each.sample for _, each in known if each.sample is not None and not of_all}
        states = frozenset().union(*(each.states for _, each in known))
        ordered = [blocks, *(each.blocks for _, each in known if each.blocks)]
        for tensor in outputs:
            takes = takes_integers or not is_float(tensor)
            each = [own for one, own in known if own.level and (takes or is_float(one))]
            result = max([found, *each], key=lambda own: own.level)
            if result.level and self.dims(tensor):
                level = DEEP if has_weight and result.level >= ROWS else ROWS
                result = replace(result, level=max(level, result.level))
            is_learned = any(own.is_learned for _, own in known) or has_weight and not are_weights
            result = replace(
                result,
                is_weight=are_weights,
                is_stored=bool(known) and all(each.is_stored for _, each in known),
                is_shuffle=are_shuffles,
                is_found=is_place(tensor) and any(own.is_found for _, own in known),
                is_picked=is_place(tensor) and any(own.is_picked for _, own in known),
                is_learned=is_learned,
                sums_learned=any(own.sums_learned for _, own in known)
                or found != NOTHING
                and is_learned
                and not self.dims(tensor),
                is_bent=bends or any(own.is_bent for _, own in known),
                states=states,
                sample=self._one_of(samples, tensor),
                blocks=next((each for each in ordered if any(self._fits(size, each) for size in tensor.shape)), ()),
            )
            if result != NOTHING or self.known(tensor) != NOTHING:
                self.put(tensor, result)

    def _one_of(self, samples: set[int], made: torch.Tensor) -> int | None:
        """The sample that something is made of, if it is one; `SEVERAL` are fewer than all."""
        if len(samples) > 1:
            return None if any(size and size % self.number == 0 for size in made.shape) else SEVERAL
        return next(iter(samples), None)

    def _where(self) -> str:
        line = "unknown" if self.caller is None else model_location(self.caller)
        return self.place if line == "unknown" else with_source(line)
