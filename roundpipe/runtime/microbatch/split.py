"""Microbatches: a batch of arguments in pieces, and the pieces of the outputs as one again.

    args, kwargs, label --split--> one (args, kwargs, label) per microbatch
    one output per microbatch --merge--> output

Pieces are views of what was given, so gradients flow back into it. How many there are is decided here,
once per call, by the first of these that says it: a function of the user's, packed data among the
inputs, the batch size (fewer samples than asked for microbatches give fewer), the run config.

Invariant: `split` gives lists of one length, `merge` takes a list of that length; neither changes what it
is given.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.caller import warn
from roundpipe.core.errors import MicrobatchError
from roundpipe.core.trees import Path, Step
from roundpipe.runtime.config import ResolvedConfig, RoundPipeRunConfig, microbatch_count, num_microbatches
from roundpipe.runtime.device.backend import Event
from roundpipe.runtime.microbatch.merge import merge, merge_value
from roundpipe.runtime.microbatch.spec import (
    RoundPipePackedData,
    check_leaf_spec,
    checked_dim_size,
    described,
    holds_tensor,
    is_spec,
    is_spec_of,
    shape_of,
    spec_children,
    with_children,
)

__all__ = ["RoundPipePackedData", "Split", "merge", "microbatch_count", "num_microbatches", "split"]

logger = logging.getLogger(__name__)

_INPUT_NAMES = ("args", "kwargs")


@dataclass(slots=True)
class Split:
    """The arguments of each microbatch; all lists have one length."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    labels: list[Any]
    events: list[tuple[Event, ...]]
    """What has to happen before a microbatch's arguments and labels may be read."""

    @property
    def num_microbatches(self) -> int:
        """The actual number, which may be less than asked for."""
        return len(self.args)

    def kept_in(self, call: RoundPipeRunConfig, resolved: ResolvedConfig) -> RoundPipeRunConfig:
        """Options for the same call once more, in which functions of the user's that made these pieces don't run again.

        Args:
            call: options given for the call.
            resolved: what these, and those of the model, came to.
        """
        given: dict[str, Any] = {}
        if _is_function(resolved.split_input):
            given["split_input"] = lambda args, kwargs, number: (self.args, self.kwargs)
        if _is_function(resolved.split_label) and any(label is not None for label in self.labels):
            given["split_label"] = lambda label, number: self.labels
        if given:
            given["num_microbatch"] = self.num_microbatches
        return dataclasses.replace(call, **given)


def split(args: tuple[Any, ...], kwargs: Mapping[str, Any], label: Any, config: ResolvedConfig) -> Split:
    """The microbatches of one call.

    Args:
        args: positional arguments of the model; tensors anywhere in them, on any device.
        kwargs: keyword arguments of the model.
        label: what ``loss_fn`` gets beside the output; None stays None.
        config: ``num_microbatch``, ``split_input`` and ``split_label`` are read.

    Returns:
        Views of the tensors given (replicated ones are the objects given), and what to wait for.

    Raises:
        MicrobatchError: an empty batch, a spec that does not fit, or a function that returns something else
            than asked; also a `ValueError`.
    """
    inputs = (tuple(args), dict(kwargs))
    rule = config.split_input
    if _is_function(rule):
        args_list, kwargs_list = _call_split_input(rule, inputs, config.num_microbatch)
        plan = _plan_of(list(zip(args_list, kwargs_list, strict=True)))
    else:
        specs = (None, None) if rule is None else _checked_pair(rule)
        plan = _make_plan(inputs, specs, config.num_microbatch)
        pieces = _split_value(inputs, specs, (), plan)
        args_list, kwargs_list = [piece[0] for piece in pieces], [piece[1] for piece in pieces]
    labels = _split_labels(label, config.split_label, plan)
    plan.warn()
    return Split(args_list, kwargs_list, labels, [tuple(events) for events in plan.events])


def batch_size(args: tuple[Any, ...], kwargs: Mapping[str, Any], config: ResolvedConfig) -> int | None:
    """Samples in a batch, if its number of microbatches is free to choose; None if it is not, or not known."""
    rule = config.split_input
    inputs = (tuple(args), dict(kwargs))
    if _is_function(rule) or next(iter(_packed_leaves(inputs)), None) is not None:
        return None
    return _batch_size(inputs, (None, None) if rule is None else _checked_pair(rule))


def is_empty(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the first tensor of a call that has a dim 0 has no samples."""
    first = _batched_leaf((tuple(args), dict(kwargs)))
    return isinstance(first, torch.Tensor) and first.shape[0] == 0


def _is_function(rule: Any) -> bool:
    return callable(rule) and not is_spec(rule)


def automatic_sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any], config: ResolvedConfig) -> list[int] | None:
    """Samples of each microbatch that the automatic rule makes of tensors; None if others decide, or nothing tells."""
    if config.split_input is not None or "num_microbatch" in config.auto:
        return None
    size = batch_size(args, kwargs, config)
    return None if size is None else _even_sizes(size, min(config.num_microbatch, size))


def _checked_pair(rule: Any) -> tuple[Any, Any]:
    if is_spec(rule):
        raise MicrobatchError(
            f"split_input is {rule!r}; give a pair (args_spec, kwargs_spec), such as ((TensorChunkSpec(0),), None)"
        )
    args_spec, kwargs_spec = rule
    return args_spec, kwargs_spec


@dataclass(slots=True)
class _Plan:
    """Into which pieces the leaves of one call are cut."""

    num_microbatches: int
    sizes: list[int] | None
    """Samples of each microbatch; None where the batch size is not known."""
    replicated: list[str] = field(default_factory=list)
    """Leaves that the automatic rule could not split though they have a dim 0."""
    asked: int = 0
    """Microbatches asked for, where that is more than there are samples."""
    events: list[list[Event]] = field(default_factory=list)
    """What each microbatch has to wait for."""
    labels_decide: bool = False
    """Whether the inputs don't tell the batch size for sure, so that the labels' own is taken for them."""

    def __post_init__(self) -> None:
        self.events = [[] for _ in range(self.num_microbatches)]

    @property
    def batch_size(self) -> int | None:
        return None if self.sizes is None else sum(self.sizes)

    def sizes_for(self, size: int) -> list[int]:
        """Sizes of the pieces of a dimension: those of the batch if it is as long, else even ones."""
        if self.sizes is not None and size == sum(self.sizes):
            return self.sizes
        return _even_sizes(size, self.num_microbatches)

    def warn(self) -> None:
        """Say once what the user may not expect."""
        if self.asked:
            warn(
                f"the batch has {self.num_microbatches} samples, so it runs as {self.num_microbatches} "
                f"microbatches instead of {self.asked}"
            )
        if self.replicated:
            warn(
                f"{', '.join(self.replicated)}: dim 0 is not as long as the batch, so every microbatch "
                "gets the whole tensor; say with split_input or split_label how it is split, if it is"
            )


def _even_sizes(size: int, num_pieces: int) -> list[int]:
    """Sizes that differ by at most one, larger ones first."""
    return [size // num_pieces + (index < size % num_pieces) for index in range(num_pieces)]


def _array_leaves(value: Any, depth: int = 0) -> Iterator[torch.Tensor | RoundPipePackedData]:
    """The tensors and packed data of a structure, in order."""
    if isinstance(value, torch.Tensor | RoundPipePackedData):
        yield value
    elif depth < trees.MAX_DEPTH:
        for _, child in trees.children(value) or ():
            yield from _array_leaves(child, depth + 1)


def _packed_leaves(value: Any) -> list[RoundPipePackedData]:
    return [leaf for leaf in _array_leaves(value) if isinstance(leaf, RoundPipePackedData)]


def _batched_leaf(value: Any) -> torch.Tensor | RoundPipePackedData | None:
    """The first tensor with a dim 0, or packed data of such; None if there is none."""
    for leaf in _array_leaves(value):
        parts = leaf if isinstance(leaf, RoundPipePackedData) else [leaf]
        if parts and all(isinstance(part, torch.Tensor) and part.ndim for part in parts):
            return leaf
    return None


def _batch_size(inputs: tuple[Any, Any], specs: tuple[Any, Any]) -> int | None:
    """Number of samples of a call; None if nothing tells.

    Raises:
        MicrobatchError: there are none.
    """
    first = _batched_leaf(inputs)
    size, where = None, "dim 0 of the first tensor given"
    if first is not None:
        size = sum(part.shape[0] for part in first) if isinstance(first, list) else first.shape[0]
    if chunked := _chunked_sizes(inputs, specs, ()):
        size, where = min(chunked)
    if size == 0:
        shape = "" if first is None else f" (shape {shape_of(first)})"
        raise MicrobatchError(f"the batch is empty: {where}{shape} has no samples; give at least one")
    return size


def _make_plan(inputs: tuple[Any, Any], specs: tuple[Any, Any], num_microbatch: int) -> _Plan:
    """How many pieces, and of how many samples each, for inputs split by the automatic rule or by specs."""
    size = _batch_size(inputs, specs)
    packed = [one for one in _packed_leaves(inputs) if len(one) > 1]
    if packed:
        number = len(packed[0])
        if number != num_microbatch:
            logger.debug("packed inputs run as %d microbatches, not %d", number, num_microbatch)
        fitting = (_sizes_of(one, size) for one in packed if len(one) == number)
        sizes = next((found for found in fitting if found), None)
        if sizes is None and size is not None:
            sizes = _even_sizes(size, number)
        return _Plan(number, sizes)
    if size is None:
        return _Plan(1 if specs == (None, None) else num_microbatch, None, labels_decide=True)
    number = min(num_microbatch, size)
    asked = num_microbatch if number < num_microbatch else 0
    return _Plan(number, _even_sizes(size, number), asked=asked)


def _sizes_of(values: Sequence[Any], batch_size: int | None) -> list[int] | None:
    """Samples of each of these values, if they are tensors that make up the batch together."""
    if not all(isinstance(value, torch.Tensor) and value.ndim for value in values):
        return None
    sizes = [value.shape[0] for value in values]
    return sizes if sum(sizes) == batch_size else None


def _chunked_sizes(value: Any, spec: Any, path: Path) -> list[tuple[int, str]]:
    """Length along the dimension to split, and name, of each tensor that a spec says to split."""
    if spec is None or isinstance(value, RoundPipePackedData):
        return []
    if is_spec_of(spec, "TensorChunkSpec"):
        where = input_name(path)
        return [(checked_dim_size(value, spec, where), where)] if isinstance(value, torch.Tensor) else []
    below = trees.children(value)
    if below is None:
        return []
    specs = spec_children(spec, below, input_name(path))
    return [
        found
        for (step, child), child_spec in zip(below, specs, strict=True)
        for found in _chunked_sizes(child, child_spec, (*path, step))
    ]


def _split_value(value: Any, spec: Any, path: Path, plan: _Plan) -> list[Any]:
    """The value of each microbatch."""
    if isinstance(value, RoundPipePackedData):
        return _take_packed(value, spec, path, plan)
    below = trees.children(value) if len(path) < trees.MAX_DEPTH else None
    if below is None:
        return _split_leaf(value, spec, path, plan)
    if (spec is None or is_spec_of(spec, "_Replicate")) and not holds_tensor(value):
        return [value] * plan.num_microbatches
    specs = spec_children(spec, below, input_name(path))
    columns = [
        _split_value(child, child_spec, (*path, step), plan)
        for (step, child), child_spec in zip(below, specs, strict=True)
    ]
    rows = zip(*columns, strict=True) if columns else [()] * plan.num_microbatches
    return [with_children(value, row) for row in rows]


def _split_leaf(value: Any, spec: Any, path: Path, plan: _Plan) -> list[Any]:
    check_leaf_spec(spec, input_name(path), ("TensorChunkSpec", "_Replicate"))
    number = plan.num_microbatches
    if isinstance(value, torch.Tensor) and spec is not None and not is_spec_of(spec, "_Replicate"):
        size = checked_dim_size(value, spec, input_name(path))
        if size < number:
            raise MicrobatchError(
                f"{input_name(path)} has only {size} samples along dim {spec.split_dim} "
                f"for {number} microbatches; set num_microbatch lower"
            )
        return _pieces(value, plan.sizes_for(size), spec.split_dim)
    if not isinstance(value, torch.Tensor) or spec is not None or value.ndim == 0 or number == 1:
        return [value] * number
    if value.shape[0] != plan.batch_size:
        plan.replicated.append(input_name(path))
        return [value] * number
    return _pieces(value, plan.sizes_for(value.shape[0]), 0)


def _pieces(tensor: torch.Tensor, sizes: list[int], dim: int) -> list[torch.Tensor]:
    """Views of a tensor, one behind the other along a dimension."""
    if len(sizes) == 1:
        return [tensor]
    if tensor.requires_grad and torch.is_grad_enabled():
        return list(torch.split(tensor, sizes, dim))  # one backward for all pieces, which joins them
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [tensor.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)]


def _take_packed(packed: RoundPipePackedData, spec: Any, path: Path, plan: _Plan) -> list[Any]:
    """Packed data as it is, or put together and cut anew where it is in another number of pieces."""
    if len(packed) == plan.num_microbatches:
        for events, event in zip(plan.events, packed.events, strict=True):
            if event is not None:
                events.append(event)
        return list(packed)
    name = input_name(path)
    if not packed:
        raise MicrobatchError(f"{name} is packed data of no microbatches; it has nothing to run on")
    if len(packed) > 1:
        logger.info("%s comes in %d pieces, is merged and cut into %d", name, len(packed), plan.num_microbatches)
    packed.synchronize()
    return _split_value(merge_value(list(packed), None, path), spec, path, plan)


def _split_labels(label: Any, rule: Any, plan: _Plan) -> list[Any]:
    number = plan.num_microbatches
    if label is None:
        return [None] * number
    if _is_function(rule):
        for packed in _packed_leaves(label):
            packed.synchronize()
        return _checked_list(rule(label, number), number, "split_label(label, num_microbatch)", "labels")
    first = _batched_leaf(label)
    if plan.labels_decide and isinstance(first, torch.Tensor) and first.shape[0] >= number:
        plan.sizes = plan.sizes_for(first.shape[0])
    return _split_value(label, rule, (Step("attribute", "label"),), plan)


def _call_split_input(rule: Any, inputs: tuple[Any, Any], number: int) -> tuple[list[Any], list[Any]]:
    for packed in _packed_leaves(inputs):
        packed.synchronize()
    what = "split_input(args, kwargs, num_microbatch)"
    result = rule(*inputs, number)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise MicrobatchError(f"{what} returned {described(result)}; it must return (args_list, kwargs_list)")
    args_list = _checked_list(result[0], number, what, "args_list")
    kwargs_list = _checked_list(result[1], number, what, "kwargs_list")
    for index, (args, kwargs) in enumerate(zip(args_list, kwargs_list, strict=True)):
        if not isinstance(args, tuple | list):
            raise MicrobatchError(f"{what}: args_list[{index}] is {described(args)}; it must be a tuple of arguments")
        if not isinstance(kwargs, Mapping):
            raise MicrobatchError(f"{what}: kwargs_list[{index}] is {described(kwargs)}; it must be a dict")
    return [tuple(args) for args in args_list], [dict(kwargs) for kwargs in kwargs_list]


def _checked_list(result: Any, number: int, what: str, name: str) -> list[Any]:
    if not isinstance(result, tuple | list):
        raise MicrobatchError(f"{what} returned {described(result)} as {name}; it must be a list of {number} items")
    if len(result) != number:
        raise MicrobatchError(
            f"{what} returned {len(result)} items in {name} for num_microbatch={number}; it must return "
            "one per microbatch (torch.chunk may give fewer than asked: use torch.tensor_split)"
        )
    return list(result)


def _plan_of(pieces: list[Any]) -> _Plan:
    """The plan that the user's own pieces follow, for the labels beside them."""
    leaves = [leaf for piece in pieces if isinstance(leaf := _batched_leaf(piece), torch.Tensor)]
    sizes = [leaf.shape[0] for leaf in leaves] if len(leaves) == len(pieces) else None
    return _Plan(len(pieces), sizes, labels_decide=True)


def tensors_of_inputs(
    args: Sequence[tuple[Any, ...]], kwargs: Sequence[Mapping[str, Any]]
) -> list[tuple[str, torch.Tensor]]:
    """The tensors that microbatches are given, on the host, and what the user would call them."""
    return [
        (input_name(path), leaf)
        for inputs in zip(args, kwargs, strict=True)
        for path, leaf in trees.walk(inputs)
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"
    ]


def input_name(path: Path) -> str:
    """A leaf as the user would write it: ``args[0]``, ``kwargs['mask']`` or ``label[1]``."""
    if path and path[0].key == "label":
        return "label" + trees.path_string(path[1:])
    return _INPUT_NAMES[path[0].key] + trees.path_string(path[1:]) if path else "(args, kwargs)"
