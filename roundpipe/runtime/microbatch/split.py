"""A batch of arguments in pieces: one (args, kwargs, label) per microbatch.

Pieces are views of the arguments, so gradients flow back into them. How many there are is decided once per call, by the
first of these that says it: a function of the user's, packed data among the inputs, the batch size (fewer samples than
asked for microbatches give fewer), the run config.

Invariant: `split` gives lists of one length and never changes its arguments.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.caller import warn
from roundpipe.core.errors import MicrobatchError, RaisedIn
from roundpipe.core.trees import Access, Path
from roundpipe.runtime.config import ResolvedConfig, RoundPipeRunConfig
from roundpipe.runtime.device.backend import Event
from roundpipe.runtime.microbatch.leaves import batched_leaf, input_name, packed_leaves
from roundpipe.runtime.microbatch.lists import Kind, are_of_samples, kind_of_samples
from roundpipe.runtime.microbatch.merge import (
    RoundPipePackedData,
    check_leaf_spec,
    checked_dim_size,
    holds_array,
    is_function,
    is_spec,
    is_spec_of,
    merge_value,
    shape_of,
    spec_children,
)
from roundpipe.runtime.microbatch.pieces import Inputs, call_split_input, checked_list, cut

logger = logging.getLogger(__name__)


_POSITIONAL: Path = (Access("item", 0),)
"""Of all positional arguments, which are as many as the samples now and then."""


@dataclass(frozen=True, slots=True)
class Split:
    """The arguments of each microbatch; all lists have one length."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    labels: list[Any]
    events: list[list[Event]]
    """What has to happen before a microbatch's arguments and labels may be read."""
    sizes: list[int] | None = None
    """Samples of each microbatch; None: not known."""
    batches: Sequence[Inputs] | None = None
    """By whose data code of the model decides about each microbatch; None: by its own."""
    others: Sequence[str] = ()
    """Tensors of another length that are as those that were cut otherwise, and that every microbatch gets all of."""
    lists: Sequence[str] = ()
    """What has an entry for each sample, as it seems, and every microbatch gets all of."""
    warn: Callable[[], None] = lambda: None
    """Warns of what may be meant in another way; for who did not have `split` do it."""

    @property
    def num_microbatches(self) -> int:
        return len(self.args)

    @property
    def shares(self) -> list[float] | None:
        """Each microbatch's share of all samples; None: not known."""
        if self.num_microbatches == 1:
            return [1.0]
        total = sum(self.sizes or ())
        return [size / total for size in self.sizes] if self.sizes and total else None

    def replay_options(self, call: RoundPipeRunConfig | None, resolved: ResolvedConfig) -> RoundPipeRunConfig:
        """Options for the same call again, without a second run of the user's functions that made these pieces."""
        options: dict[str, Any] = {}
        if is_function(resolved.split_input):
            options["split_input"] = lambda args, kwargs, number: (self.args, self.kwargs)
        if is_function(resolved.split_label) and any(label is not None for label in self.labels):
            options["split_label"] = lambda label, number: self.labels
        if options:
            options["num_microbatch"] = self.num_microbatches
        return dataclasses.replace(call or RoundPipeRunConfig(), **options)


@dataclass(slots=True)
class EarlierCalls:
    """What the calls of one model so far have shown."""

    shared: dict[str, set[int]] = field(default_factory=dict)
    """Lengths of tensors that every microbatch of a call got all of, by name: a table of classes is none of the
    samples' when a batch happens to be as long."""
    lists: dict[str, set[int]] = field(default_factory=dict)
    """Lengths of lists, by name, whose entries were none of the samples': batches had others."""
    told: set[str] = field(default_factory=set)
    """Of what was warned."""


def split(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    label: Any,
    config: ResolvedConfig,
    earlier: EarlierCalls | None = None,
    *,
    warns: bool = True,
) -> Split:
    """The microbatches of one call: views of its tensors (or themselves, where replicated), and what to wait for.

    Of the config, ``num_microbatch``, ``split_input`` and ``split_label`` are read. ``earlier`` takes in what this call
    shows. A `MicrobatchError` for an empty batch, a spec that does not fit, or a function that returns something
    unusable.
    """
    inputs = (tuple(args), dict(kwargs))
    batches: Sequence[Inputs] | None = None
    if is_function(config.split_input):
        for packed in packed_leaves(inputs):
            packed.synchronize()
        pieces, batches = call_split_input(config.split_input, inputs, config.num_microbatch)
        division = _division_of_pieces(pieces)
    else:
        specs = _specs_of(config)
        division = _divide(inputs, specs, config.num_microbatch)
        if earlier is not None:
            division.earlier = earlier
        pieces = division.split(inputs, specs, ())
        if len(pieces) > 1 and not packed_leaves(inputs):
            batches = [inputs] * len(pieces)
    if not config.is_number_given:
        division.num_missing = 0  # nobody has asked for them
    labels = division.split_labels(label, config.split_label)
    if warns:
        division.warn()
    others = [name for name, kind in division.kinds.items() if kind in division.cut_kinds]
    all_args, all_kwargs = [args for args, _ in pieces], [kwargs for _, kwargs in pieces]
    told = others, division.lists, division.warn
    return Split(all_args, all_kwargs, labels, division.events, division.sizes, batches, *told)


@dataclass(slots=True)
class Division:
    """Into which pieces the samples of one call are cut; cuts values into them."""

    num_microbatches: int
    sizes: list[int] | None
    """Samples of each microbatch; None where the batch size is not known."""
    num_missing: int = 0
    """Microbatches asked for but not there, since there are fewer samples."""
    labels_decide: bool = False
    """Whether the inputs don't tell the batch size for sure, so that the labels' own is taken for them."""
    events: list[list[Event]] = field(init=False)
    """What each microbatch has to wait for."""
    whole: list[str] = field(init=False, default_factory=list)
    """Leaves that the automatic rule could not split though they have a dim 0."""
    earlier: EarlierCalls = field(init=False, default_factory=EarlierCalls)
    lists: list[str] = field(init=False, default_factory=list)
    """Lists with an entry for each sample, as it seems, which every microbatch gets all of."""
    kinds: dict[str, Kind] = field(init=False, default_factory=dict)
    """By name, of tensors that every microbatch gets all of and that may be other samples."""
    cut_kinds: set[Kind] = field(init=False, default_factory=set)
    """Of tensors that were cut."""

    def __post_init__(self) -> None:
        self.events = [[] for _ in range(self.num_microbatches)]

    def sizes_for(self, size: int) -> list[int]:
        """Sizes of the pieces of a dimension: those of the batch if it is as long, else even ones."""
        if self.sizes is not None and size == sum(self.sizes):
            return self.sizes
        return _even_sizes(size, self.num_microbatches)

    def split(self, value: Any, spec: Any, path: Path) -> list[Any]:
        if isinstance(value, RoundPipePackedData):
            return self._split_packed(value, spec, path)
        below = trees.children(value) if len(path) < trees.MAX_DEPTH else None
        if below is None:
            return self._split_leaf(value, spec, path)
        if spec is None:
            self._note_list(value, path)
        if (spec is None or is_spec_of(spec, "_Replicate")) and not holds_array(value):
            for access, child in below if spec is None else ():
                self.split(child, None, (*path, access))  # for lists in it
            return [value] * self.num_microbatches
        specs = spec_children(spec, below, input_name(path))
        columns = [
            self.split(child, child_spec, (*path, access))
            for (access, child), child_spec in zip(below, specs, strict=True)
        ]
        rows = zip(*columns, strict=True) if columns else [()] * self.num_microbatches
        return [trees.with_children(value, list(row)) for row in rows]

    def _note_list(self, value: Any, path: Path) -> None:
        """Note a list that may be of samples, such as a dict for each image, a tuple of texts, or NumPy's array."""
        if self.sizes is None or self.num_microbatches == 1 or path == _POSITIONAL:
            return
        is_array = type(value).__module__ == "numpy" and getattr(value, "ndim", 0) > 0
        if not (is_array or type(value) in (list, tuple)):
            return
        name, length, size = input_name(path), len(value), sum(self.sizes)
        others = self.earlier.lists.setdefault(name, set())
        if length != size:
            others.add(length)
        elif length in others:
            return
        elif is_array or are_of_samples(value, size, in_object=any(access.kind != "item" for access in path[1:])):
            self.lists.append(name)

    def _split_leaf(self, value: Any, spec: Any, path: Path) -> list[Any]:
        name, number = input_name(path), self.num_microbatches
        check_leaf_spec(spec, name, ("TensorChunkSpec", "_Replicate"))
        if not isinstance(value, torch.Tensor) or is_spec_of(spec, "_Replicate"):
            if spec is None:
                self._note_list(value, path)
            return [value] * number
        if spec is not None:
            size = checked_dim_size(value, spec, name)
            if size < number:
                raise MicrobatchError(
                    f"{name} has only {size} samples along dim {spec.split_dim} "
                    f"for {number} microbatches; set num_microbatch lower"
                )
            return cut(value, self.sizes_for(size), spec.split_dim, name)
        if value.ndim == 0 or number == 1:
            return [value] * number
        length, known = value.size(0), self.earlier.shared.get(name, ())
        if self.sizes is None or length != sum(self.sizes) or length in known:
            self.whole.append(name)
            if path[0].key != "label" and (kind := kind_of_samples(value)) is not None:
                self.kinds[name] = kind
            if self.sizes is not None:
                self.earlier.shared.setdefault(name, set()).add(length)
            return [value] * number
        self.cut_kinds.add(kind_of_samples(value))
        return cut(value, self.sizes, 0, name)

    def _split_packed(self, packed: RoundPipePackedData, spec: Any, path: Path) -> list[Any]:
        """Packed data as it is, or put together and cut anew where it is in another number of pieces."""
        number = self.num_microbatches
        if len(packed) == number:
            for events, event in zip(self.events, packed.events, strict=True):
                if event is not None:
                    events.append(event)
            return list(packed)
        name = input_name(path)
        if not packed:
            raise MicrobatchError(f"{name} is packed data of no microbatches; it has nothing to run on")
        if len(packed) > 1:
            logger.info("%s comes in %d pieces, is merged and cut into %d", name, len(packed), number)
        packed.synchronize()
        return self.split(merge_value(list(packed), None, path), spec, path)

    def split_labels(self, label: Any, rule: Any) -> list[Any]:
        """The labels of each microbatch; call it behind `split`."""
        number = self.num_microbatches
        if label is None:
            return [None] * number
        if is_function(rule):
            for packed in packed_leaves(label):
                packed.synchronize()
            with RaisedIn("code on the host, phase split_label"):
                result = rule(label, number)
            return checked_list(result, number, "split_label(label, num_microbatch)", "labels")
        trees.refuse_endless("label has", label)
        first = batched_leaf(label)
        if self.labels_decide and isinstance(first, torch.Tensor) and first.shape[0] >= number:
            self.sizes = self.sizes_for(first.shape[0])
        return self.split(label, rule, (Access("attribute", "label"),))

    def warn(self) -> None:
        number = self.num_microbatches
        if self.num_missing and "few samples" not in self.earlier.told:
            self.earlier.told.add("few samples")
            has, runs = ("1 sample", "1 microbatch") if number == 1 else (f"{number} samples", f"{number} microbatches")
            warn(f"the batch has {has}, so it runs as {runs} instead of {number + self.num_missing}")
        if self.whole:
            warn(
                f"{', '.join(self.whole)}: dim 0 is not as long as the batch, so every microbatch "
                "gets the whole tensor; say with split_input or split_label how it is split, if it is"
            )
        if self.lists:
            names = ", ".join(self.lists)
            warn(
                f"{names}: a list or array of as many entries as the batch has samples, but only tensors are split, so "
                "every microbatch gets all entries; if they belong to the samples, give split_input or split_label a "
                "function that splits it"
            )


def _divide(inputs: Inputs, specs: Inputs, num_microbatch: int) -> Division:
    """The division of inputs that the automatic rule or specs split."""
    size = _batch_size(inputs, specs)
    packed = [leaf for leaf in packed_leaves(inputs) if len(leaf) > 1]
    if packed:
        number = len(packed[0])
        if number != num_microbatch:
            logger.debug("packed inputs run as %d microbatches, not %d", number, num_microbatch)
        alike = [leaf for leaf in packed if len(leaf) == number and batched_leaf(leaf) is leaf]
        candidates = [[part.shape[0] for part in leaf] for leaf in alike]
        even = None if size is None else _even_sizes(size, number)
        return Division(number, next((sizes for sizes in candidates if sum(sizes) == size), even))
    if size is None:
        return Division(1 if specs == (None, None) else num_microbatch, None, labels_decide=True)
    number = min(num_microbatch, size)
    return Division(number, _even_sizes(size, number), num_missing=num_microbatch - number)


def _division_of_pieces(pieces: Sequence[Inputs]) -> Division:
    """The division that the user's own pieces follow, for the labels beside them."""
    leaves = [leaf for piece in pieces if isinstance(leaf := batched_leaf(piece), torch.Tensor)]
    sizes = [leaf.shape[0] for leaf in leaves] if len(leaves) == len(pieces) else None
    return Division(len(pieces), sizes, labels_decide=True)


def batch_size(args: tuple[Any, ...], kwargs: Mapping[str, Any], config: ResolvedConfig) -> int | None:
    """Samples in a batch, if its number of microbatches is free to choose; None if it is not, or not known."""
    inputs = (tuple(args), dict(kwargs))
    if is_function(config.split_input) or packed_leaves(inputs):
        return None
    return _batch_size(inputs, _specs_of(config))


def is_empty(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the first tensor of a call that has a dim 0 has no samples."""
    first = batched_leaf((tuple(args), dict(kwargs)))
    return isinstance(first, torch.Tensor) and first.shape[0] == 0


def automatic_sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any], config: ResolvedConfig) -> list[int] | None:
    """Samples of each microbatch that the automatic rule makes of tensors; None if others decide, or nothing tells."""
    if config.split_input is not None or "num_microbatch" in config.auto:
        return None
    size = batch_size(args, kwargs, config)
    return None if size is None else _even_sizes(size, min(config.num_microbatch, size))


def _specs_of(config: ResolvedConfig) -> Inputs:
    """The specs of args and kwargs where no function splits them; None stands for the automatic rule."""
    rule = config.split_input
    if is_spec(rule):
        raise MicrobatchError(
            f"split_input is {rule!r}; give a pair (args_spec, kwargs_spec), such as ((TensorChunkSpec(0),), None)"
        )
    assert not callable(rule)
    args_spec, kwargs_spec = rule or (None, None)
    return args_spec, kwargs_spec


def _even_sizes(size: int, num_pieces: int) -> list[int]:
    """Sizes that differ by at most one, larger ones first."""
    return [size // num_pieces + (index < size % num_pieces) for index in range(num_pieces)]


def _batch_size(inputs: Inputs, specs: Inputs) -> int | None:
    """Number of samples of a call; None if nothing tells; an error if there are none."""
    first = batched_leaf(inputs)
    size, where = None, "dim 0 of the first tensor given"
    if first is not None:
        size = sum(part.shape[0] for part in first) if isinstance(first, list) else first.shape[0]
    size, where = min(_chunked_sizes(inputs, specs, ()), default=(size, where))
    if size == 0:
        shape = "" if first is None else f" (shape {shape_of(first)})"
        raise MicrobatchError(f"the batch is empty: {where}{shape} has no samples; give at least one")
    return size


def _chunked_sizes(value: Any, spec: Any, path: Path) -> Iterator[tuple[int, str]]:
    """Length along the dimension to split, and name, of each tensor that a spec says to split."""
    where = input_name(path)
    if is_spec_of(spec, "TensorChunkSpec"):
        if isinstance(value, torch.Tensor):
            yield checked_dim_size(value, spec, where), where
    elif spec is not None and not isinstance(value, RoundPipePackedData):
        below = trees.children(value) or []
        for (access, child), child_spec in zip(below, spec_children(spec, below, where) if below else (), strict=True):
            yield from _chunked_sizes(child, child_spec, (*path, access))
