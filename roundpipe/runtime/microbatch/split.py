"""Microbatches: a batch of arguments in pieces, and the pieces of the outputs as one again.

    args, kwargs, label --split--> one (args, kwargs, label) per microbatch
    one output per microbatch --merge--> output

Pieces are views of the arguments, so gradients flow back into them. `division` decides how many there are.

Invariant: `split` gives lists of one length, `merge` takes a list of that length; neither changes its arguments.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.caller import warn
from roundpipe.core.errors import MicrobatchError
from roundpipe.core.trees import Access, Path
from roundpipe.runtime.config import ResolvedConfig, RoundPipeRunConfig
from roundpipe.runtime.device.backend import Event
from roundpipe.runtime.microbatch.division import (
    Division,
    Inputs,
    batched_leaf,
    divide,
    division_of_pieces,
    packed_leaves,
    specs_of,
)
from roundpipe.runtime.microbatch.merge import merge_value
from roundpipe.runtime.microbatch.spec import (
    RoundPipePackedData,
    check_leaf_spec,
    checked_dim_size,
    described,
    holds_tensor,
    input_name,
    is_function,
    is_spec_of,
    spec_children,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Split:
    """The arguments of each microbatch; all lists have one length."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    labels: list[Any]
    events: list[tuple[Event, ...]]
    """What has to happen before a microbatch's arguments and labels may be read."""

    @property
    def num_microbatches(self) -> int:
        return len(self.args)

    def replay_options(self, call: RoundPipeRunConfig, resolved: ResolvedConfig) -> RoundPipeRunConfig:
        """Options for the same call again, without a second run of the user's functions that made these pieces."""
        options: dict[str, Any] = {}
        if is_function(resolved.split_input):
            options["split_input"] = lambda args, kwargs, number: (self.args, self.kwargs)
        if is_function(resolved.split_label) and any(label is not None for label in self.labels):
            options["split_label"] = lambda label, number: self.labels
        if options:
            options["num_microbatch"] = self.num_microbatches
        return dataclasses.replace(call, **options)


def split(args: tuple[Any, ...], kwargs: Mapping[str, Any], label: Any, config: ResolvedConfig) -> Split:
    """The microbatches of one call: views of its tensors (or themselves, where replicated), and what to wait for.

    Args:
        args: positional arguments of the model; tensors anywhere in them, on any device.
        kwargs: keyword arguments of the model.
        label: what ``loss_fn`` gets beside the output; None stays None.
        config: ``num_microbatch``, ``split_input`` and ``split_label`` are read.

    Raises:
        MicrobatchError: an empty batch, a spec that does not fit, or a function that returns something unusable.
    """
    inputs = (tuple(args), dict(kwargs))
    if is_function(config.split_input):
        args_list, kwargs_list = _call_split_input(config.split_input, inputs, config.num_microbatch)
        splitter = _Splitter(division_of_pieces(list(zip(args_list, kwargs_list, strict=True))))
    else:
        specs = specs_of(config)
        splitter = _Splitter(divide(inputs, specs, config.num_microbatch))
        pieces = splitter.split(inputs, specs, ())
        args_list, kwargs_list = [piece[0] for piece in pieces], [piece[1] for piece in pieces]
    labels = splitter.split_labels(label, config.split_label)
    splitter.warn()
    return Split(args_list, kwargs_list, labels, [tuple(events) for events in splitter.events])


class _Splitter:
    """Cuts values into the pieces of one division."""

    def __init__(self, division: Division) -> None:
        self._division = division
        self._whole: list[str] = []
        """Leaves that the automatic rule could not split though they have a dim 0."""
        self.events: list[list[Event]] = [[] for _ in range(division.num_microbatches)]
        """What each microbatch has to wait for."""

    def split(self, value: Any, spec: Any, path: Path) -> list[Any]:
        if isinstance(value, RoundPipePackedData):
            return self._split_packed(value, spec, path)
        below = trees.children(value) if len(path) < trees.MAX_DEPTH else None
        if below is None:
            return self._split_leaf(value, spec, path)
        number = self._division.num_microbatches
        if (spec is None or is_spec_of(spec, "_Replicate")) and not holds_tensor(value):
            return [value] * number
        specs = spec_children(spec, below, input_name(path))
        columns = [
            self.split(child, child_spec, (*path, access))
            for (access, child), child_spec in zip(below, specs, strict=True)
        ]
        rows = zip(*columns, strict=True) if columns else [()] * number
        return [trees.with_children(value, list(row)) for row in rows]

    def _split_leaf(self, value: Any, spec: Any, path: Path) -> list[Any]:
        check_leaf_spec(spec, input_name(path), ("TensorChunkSpec", "_Replicate"))
        number = self._division.num_microbatches
        if isinstance(value, torch.Tensor) and spec is not None and not is_spec_of(spec, "_Replicate"):
            size = checked_dim_size(value, spec, input_name(path))
            if size < number:
                raise MicrobatchError(
                    f"{input_name(path)} has only {size} samples along dim {spec.split_dim} "
                    f"for {number} microbatches; set num_microbatch lower"
                )
            return _pieces(value, self._division.sizes_for(size), spec.split_dim)
        if not isinstance(value, torch.Tensor) or spec is not None or value.ndim == 0 or number == 1:
            return [value] * number
        if value.shape[0] != self._division.batch_size:
            self._whole.append(input_name(path))
            return [value] * number
        return _pieces(value, self._division.sizes_for(value.shape[0]), 0)

    def _split_packed(self, packed: RoundPipePackedData, spec: Any, path: Path) -> list[Any]:
        """Packed data as it is, or put together and cut anew where it is in another number of pieces."""
        number = self._division.num_microbatches
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
        number = self._division.num_microbatches
        if label is None:
            return [None] * number
        if is_function(rule):
            for packed in packed_leaves(label):
                packed.synchronize()
            return _checked_list(rule(label, number), number, "split_label(label, num_microbatch)", "labels")
        first = batched_leaf(label)
        if self._division.labels_decide and isinstance(first, torch.Tensor) and first.shape[0] >= number:
            sizes = self._division.sizes_for(first.shape[0])
            self._division = dataclasses.replace(self._division, sizes=sizes)
        return self.split(label, rule, (Access("attribute", "label"),))

    def warn(self) -> None:
        number = self._division.num_microbatches
        if self._division.num_missing:
            warn(
                f"the batch has {number} samples, so it runs as {number} "
                f"microbatches instead of {number + self._division.num_missing}"
            )
        if self._whole:
            warn(
                f"{', '.join(self._whole)}: dim 0 is not as long as the batch, so every microbatch "
                "gets the whole tensor; say with split_input or split_label how it is split, if it is"
            )


def _pieces(tensor: torch.Tensor, sizes: list[int], dim: int) -> list[torch.Tensor]:
    """Views of a tensor, one behind the other along a dimension."""
    if len(sizes) == 1:
        return [tensor]
    if tensor.requires_grad and torch.is_grad_enabled():
        return list(torch.split(tensor, sizes, dim))  # one backward for all pieces, which joins them
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [tensor.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)]


def _call_split_input(rule: Any, inputs: Inputs, number: int) -> tuple[list[Any], list[Any]]:
    for packed in packed_leaves(inputs):
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
