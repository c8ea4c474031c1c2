"""Microbatches: a batch of arguments in pieces, and the pieces of the outputs as one again.

    args, kwargs, label --split--> one (args, kwargs, label) per microbatch
    one output per microbatch --merge--> output

Pieces are views of what was given, so gradients flow back into it. How many pieces there are is decided
here, once per call, by the first of these that says it: packed data among the inputs, a function or spec
of the user's, the batch size (a batch of fewer samples has fewer pieces), the run config.

Invariant: `split` gives lists of one length, `merge` takes lists of that length; neither changes what it
is given. This file is the only user of torch's private ``torch.distributed.pipelining.microbatch``,
whose import takes longer than torch's own: a user who holds one of its specs has imported it already,
so it is looked up and never imported.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from roundpipe import structure
from roundpipe.errors import MicrobatchError
from roundpipe.runtime.config import ResolvedConfig, microbatch_count, num_microbatches
from roundpipe.structure import Path, Step

__all__ = ["RoundPipePackedData", "Split", "merge", "microbatch_count", "num_microbatches", "split"]

logger = logging.getLogger(__name__)

_SPEC_MODULE = "torch.distributed.pipelining.microbatch"
_INPUT_NAMES = ("args", "kwargs")


class Event(Protocol):
    """Something that happens once, such as the end of a transfer."""

    def synchronize(self) -> None:
        """Return when it has happened."""
        ...


class RoundPipePackedData(list[Any]):
    """One leaf of an output, kept as the list of its values per microbatch.

    The values may still be on their way: call `synchronize` before reading them. Another RoundPipe takes
    packed data as an argument as it is.

    Args:
        values: one per microbatch.
        events: end of the transfer of each value; None is one that has arrived.
    """

    def __init__(self, values: Iterable[Any] = (), events: Sequence[Event | None] | None = None) -> None:
        super().__init__(values)
        self.events: list[Event | None] = [None] * len(self) if events is None else list(events)
        if len(self.events) != len(self):
            raise MicrobatchError(f"packed data of {len(self)} values was given {len(self.events)} events")

    def synchronize(self) -> None:
        """Wait until every value has arrived."""
        _wait_for(self.events)
        self.events = [None] * len(self)


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
        return len(self.args)


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
    if rule is not None and callable(rule) and not _is_spec(rule):
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


def merge(outputs: list[Any], config: ResolvedConfig, events: Sequence[Event | None] | None = None) -> Any:
    """One output from those of all microbatches.

    Args:
        outputs: one per microbatch, in order.
        config: ``merge_output`` is read.
        events: end of the transfer of each microbatch's output; waited for, or packed with the values.

    Raises:
        MicrobatchError: the outputs differ where they must agree, or don't have the spec's structure.
    """
    rule = config.merge_output
    if rule is False:
        return _pack(outputs, (), events)
    _wait_for(events or ())
    if rule is True or rule is None:
        return outputs[0] if len(outputs) == 1 else _merge_value(outputs, None, ())
    if callable(rule) and not _is_spec(rule):
        return rule(outputs)
    return _merge_value(outputs, rule, ())


# ------------------------------------------------------------------------------------------- specs


def _spec_class(name: str) -> type | None:
    """A class of torch's microbatch module, or None while nobody has imported that."""
    return getattr(sys.modules.get(_SPEC_MODULE), name, None)


def _is_a(spec: Any, name: str) -> bool:
    kind = _spec_class(name)
    return kind is not None and (spec is kind or isinstance(spec, kind))


def _is_spec(spec: Any) -> bool:
    return any(_is_a(spec, name) for name in ("TensorChunkSpec", "_Replicate", "_CustomReducer"))


def _checked_pair(rule: Any) -> tuple[Any, Any]:
    if _is_spec(rule):
        raise MicrobatchError(
            f"split_input is {rule!r}; give a pair (args_spec, kwargs_spec), "
            "such as ((TensorChunkSpec(0),), None)"
        )
    args_spec, kwargs_spec = rule
    return args_spec, kwargs_spec


def _spec_children(spec: Any, below: list[tuple[Step, Any]], where: str) -> list[Any]:
    """The part of a spec that stands for each child of a container; None stands for the automatic rule."""
    if spec is None or _is_a(spec, "_Replicate"):
        return [spec] * len(below)
    keys = [step.key for step, _ in below]
    if isinstance(spec, Mapping):
        if set(spec) == set(keys):
            return [spec[key] for key in keys]
        raise MicrobatchError(
            f"{where} has the keys {keys} but its spec has {list(spec)}; they must be the same"
        )
    if isinstance(spec, list | tuple):
        if len(spec) == len(below):
            return list(spec)
        raise MicrobatchError(
            f"{where} has {len(below)} items but its spec has {len(spec)}; give one for each"
        )
    raise MicrobatchError(
        f"{where} is a container with the items {keys} but its spec is {spec!r}; "
        "give a spec of the same structure, or None in its place for the automatic rule"
    )


def _check_leaf_spec(spec: Any, where: str, allowed: tuple[str, ...]) -> None:
    if spec is None or any(_is_a(spec, name) for name in allowed):
        return
    if isinstance(spec, list | tuple | Mapping):
        raise MicrobatchError(
            f"{where} is a single value but its spec is the structure {spec!r}; give one spec"
        )
    raise MicrobatchError(
        f"{where} has the spec {spec!r}; allowed: {', '.join(allowed)} (from {_SPEC_MODULE}) or None"
    )


# ------------------------------------------------------------------------------------------- split


@dataclass(slots=True)
class _Plan:
    """Into which pieces the leaves of one call are cut."""

    num_microbatches: int
    sizes: list[int] | None
    """Samples of each microbatch; None where the batch size is not known."""
    events: list[list[Event]]
    replicated: list[str] = field(default_factory=list)
    """Leaves that the automatic rule could not split though they have a dim 0."""
    asked: int = 0
    """Microbatches asked for, where that is more than there are samples."""
    labels_decide: bool = False
    """Whether the inputs don't tell the batch size for sure, so that the labels' own is taken for them."""

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
            warnings.warn(
                f"the batch has {self.num_microbatches} samples, so it runs as {self.num_microbatches} "
                f"microbatches instead of {self.asked}",
                stacklevel=4,
            )
        if self.replicated:
            warnings.warn(
                f"{', '.join(self.replicated)}: dim 0 is not as long as the batch, so every microbatch "
                "gets the whole tensor; say with split_input or split_label how it is split, if it is",
                stacklevel=4,
            )


def _even_sizes(size: int, num_pieces: int) -> list[int]:
    """Sizes that differ by at most one, larger ones first."""
    return [size // num_pieces + (index < size % num_pieces) for index in range(num_pieces)]


def _batched_leaf(value: Any) -> Any:
    """The first tensor with a dim 0, or packed data of such, in a structure; None if there is none."""
    if isinstance(value, RoundPipePackedData):
        return value if value and all(isinstance(one, torch.Tensor) and one.ndim for one in value) else None
    if isinstance(value, torch.Tensor):
        return value if value.ndim else None
    for _, child in structure.children(value) or () if _holds_tensor(value) else ():
        if (found := _batched_leaf(child)) is not None:
            return found
    return None


def _packed_leaves(value: Any) -> list[RoundPipePackedData]:
    if isinstance(value, RoundPipePackedData):
        return [value]
    if isinstance(value, torch.Tensor) or not _holds_tensor(value):
        return []
    return [packed for _, child in structure.children(value) or () for packed in _packed_leaves(child)]


def _make_plan(inputs: tuple[Any, Any], specs: tuple[Any, Any], num_microbatch: int) -> _Plan:
    """How many pieces, and of how many samples each, for inputs split by the automatic rule or by specs."""
    packed = _packed_leaves(inputs)
    lengths = [len(one) for one in packed if len(one) > 1] or [len(one) for one in packed]
    first = _batched_leaf(inputs)
    if isinstance(first, RoundPipePackedData):
        batch_size: int | None = sum(one.shape[0] for one in first)
    else:
        batch_size = None if first is None else first.shape[0]
    automatic = specs == (None, None)
    if not automatic:
        chunked = _chunked_sizes(inputs, specs, ())
        batch_size = min((size for size, _ in chunked), default=batch_size)
        if chunked and batch_size == 0:
            raise MicrobatchError(
                f"{min(chunked)[1]} is empty along the dimension to split; give at least one sample"
            )
    if batch_size == 0:
        raise MicrobatchError(
            f"the batch is empty: dim 0 of the first tensor given, of shape {_shape_of(first)}, "
            "has no samples; give at least one"
        )
    if lengths and lengths[0] > 1:
        if num_microbatch != lengths[0]:
            logger.debug("packed inputs run as %d microbatches, not %d", lengths[0], num_microbatch)
        sizes = next(
            (s for one in packed if len(one) == lengths[0] and (s := _sizes_of(one, batch_size))), None
        )
        if sizes is None and batch_size is not None:
            sizes = _even_sizes(batch_size, lengths[0])
        return _Plan(lengths[0], sizes, [[] for _ in range(lengths[0])])
    if batch_size is None:
        number = 1 if automatic else num_microbatch
        return _Plan(number, None, [[] for _ in range(number)], labels_decide=True)
    number = min(num_microbatch, batch_size)
    plan = _Plan(number, _even_sizes(batch_size, number), [[] for _ in range(number)])
    plan.asked = num_microbatch if number < num_microbatch else 0
    return plan


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
    if _is_a(spec, "TensorChunkSpec"):
        where = _input_name(path)
        return [(_checked_dim_size(value, spec, where), where)] if isinstance(value, torch.Tensor) else []
    below = structure.children(value)
    if below is None:
        return []
    specs = _spec_children(spec, below, _input_name(path))
    return [
        found
        for (step, child), child_spec in zip(below, specs, strict=True)
        for found in _chunked_sizes(child, child_spec, (*path, step))
    ]


def _checked_dim_size(tensor: torch.Tensor, spec: Any, where: str) -> int:
    dim = spec.split_dim
    if not -tensor.ndim <= dim < tensor.ndim:
        allowed = (
            f"{-tensor.ndim} to {tensor.ndim - 1}" if tensor.ndim else "_Replicate, since it is a scalar"
        )
        raise MicrobatchError(
            f"{where} has shape {tuple(tensor.shape)} but its spec takes dim {dim}; allowed: {allowed}"
        )
    return tensor.shape[dim]


def _split_value(value: Any, spec: Any, path: Path, plan: _Plan) -> list[Any]:
    """The value of each microbatch."""
    if isinstance(value, RoundPipePackedData):
        return _take_packed(value, spec, path, plan)
    below = structure.children(value) if len(path) < structure.MAX_DEPTH else None
    if below is None:
        return _split_leaf(value, spec, path, plan)
    if spec is None or _is_a(spec, "_Replicate"):
        if not _holds_tensor(value):
            return [value] * plan.num_microbatches
    specs = _spec_children(spec, below, _input_name(path))
    columns = [
        _split_value(child, child_spec, (*path, step), plan)
        for (step, child), child_spec in zip(below, specs, strict=True)
    ]
    rows = zip(*columns, strict=True) if columns else [()] * plan.num_microbatches
    return [_with_children(value, row) for row in rows]


def _split_leaf(value: Any, spec: Any, path: Path, plan: _Plan) -> list[Any]:
    _check_leaf_spec(spec, _input_name(path), ("TensorChunkSpec", "_Replicate"))
    number = plan.num_microbatches
    if isinstance(value, torch.Tensor) and spec is not None and not _is_a(spec, "_Replicate"):
        size = _checked_dim_size(value, spec, _input_name(path))
        if size < number:
            raise MicrobatchError(
                f"{_input_name(path)} has only {size} samples along dim {spec.split_dim} "
                f"for {number} microbatches; set num_microbatch lower"
            )
        return _pieces(value, plan.sizes_for(size), spec.split_dim)
    if not isinstance(value, torch.Tensor) or spec is not None or value.ndim == 0 or number == 1:
        return [value] * number
    if value.shape[0] != plan.batch_size:
        plan.replicated.append(_input_name(path))
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
    name = _input_name(path)
    if not packed:
        raise MicrobatchError(f"{name} is packed data of no microbatches; it has nothing to run on")
    if len(packed) > 1:
        logger.info(
            "%s comes in %d pieces, is merged and cut into %d", name, len(packed), plan.num_microbatches
        )
    packed.synchronize()
    return _split_value(_merge_value(list(packed), None, path), spec, path, plan)


def _split_labels(label: Any, rule: Any, plan: _Plan) -> list[Any]:
    number = plan.num_microbatches
    if label is None:
        return [None] * number
    if rule is not None and callable(rule) and not _is_spec(rule):
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
        raise MicrobatchError(
            f"{what} returned {_described(result)}; it must return (args_list, kwargs_list)"
        )
    args_list = _checked_list(result[0], number, what, "args_list")
    kwargs_list = _checked_list(result[1], number, what, "kwargs_list")
    for index, (args, kwargs) in enumerate(zip(args_list, kwargs_list, strict=True)):
        if not isinstance(args, tuple | list):
            raise MicrobatchError(
                f"{what}: args_list[{index}] is {_described(args)}; it must be a tuple of arguments"
            )
        if not isinstance(kwargs, Mapping):
            raise MicrobatchError(f"{what}: kwargs_list[{index}] is {_described(kwargs)}; it must be a dict")
    return [tuple(args) for args in args_list], [dict(kwargs) for kwargs in kwargs_list]


def _checked_list(result: Any, number: int, what: str, name: str) -> list[Any]:
    if not isinstance(result, tuple | list):
        raise MicrobatchError(
            f"{what} returned {_described(result)} as {name}; it must be a list of {number} items"
        )
    if len(result) != number:
        raise MicrobatchError(
            f"{what} returned {len(result)} items in {name} for num_microbatch={number}; it must return "
            "one per microbatch (torch.chunk may give fewer than asked: use torch.tensor_split)"
        )
    return list(result)


def _plan_of(pieces: list[Any]) -> _Plan:
    """The plan that the user's own pieces follow, for the labels beside them."""
    leaves = [_batched_leaf(piece) for piece in pieces]
    sizes = None if any(leaf is None for leaf in leaves) else [leaf.shape[0] for leaf in leaves]
    return _Plan(len(pieces), sizes, [[] for _ in pieces], labels_decide=True)


# ------------------------------------------------------------------------------------------- merge


def _merge_value(values: list[Any], spec: Any, path: Path) -> Any:
    """The value of the whole batch from those of the microbatches."""
    first, where = values[0], _output_name(path)
    if _is_a(spec, "_CustomReducer"):
        merged = spec.init_value.clone() if isinstance(spec.init_value, torch.Tensor) else spec.init_value
        for value in values:
            merged = spec.reduce_fn(merged, value)
        return merged
    if any(isinstance(value, torch.Tensor) for value in values):
        _check_leaf_spec(spec, where, ("TensorChunkSpec", "_Replicate", "_CustomReducer"))
        return _merge_tensors(values, spec, where)
    if all(value is first for value in values) and spec is None and not _holds_tensor(first):
        return first
    below = [structure.children(value) if len(path) < structure.MAX_DEPTH else None for value in values]
    if any(children is None for children in below):
        _check_leaf_spec(spec, where, ("TensorChunkSpec", "_Replicate", "_CustomReducer"))
        return _merge_equal(values, where)
    _check_same_form(values, where)
    specs = _spec_children(spec, below[0] or [], where)
    columns = zip(*([child for _, child in children or []] for children in below), strict=True)
    steps = [step for step, _ in below[0] or []]
    merged_children = [
        _merge_value(list(column), child_spec, (*path, step))
        for step, column, child_spec in zip(steps, columns, specs, strict=True)
    ]
    return _with_children(first, merged_children) if below[0] else first


def _merge_tensors(values: list[Any], spec: Any, where: str) -> torch.Tensor:
    for index, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or value.ndim != values[0].ndim:
            raise MicrobatchError(
                f"{where} is {_described(values[0])} for microbatch 0 but {_described(value)} for microbatch "
                f"{index}; it must be a tensor of as many dimensions for all, or use merge_output=f(outputs)"
            )
    first = values[0]
    if len(values) == 1:
        return first
    if _is_a(spec, "_Replicate"):
        if not all(torch.equal(first, value) for value in values):
            raise MicrobatchError(f"{where} is replicated by its spec but differs between microbatches")
        return first
    if first.ndim == 0 and spec is None:
        return _mean(values)
    dim = 0 if spec is None else spec.split_dim
    if spec is not None:
        _checked_dim_size(first, spec, where)
    try:
        return torch.cat(values, dim)
    except RuntimeError as error:
        shapes = ", ".join(str(_shape_of(value)) for value in values)
        raise MicrobatchError(
            f"{where} can't be concatenated on dim {dim}: the microbatches gave {shapes} ({error}); "
            "use merge_output to say how it is merged, or merge_output=False to keep the pieces"
        ) from error


def _mean(values: list[torch.Tensor]) -> torch.Tensor:
    """The average of scalar tensors; an integer that all agree on stays what it is."""
    stacked = torch.stack(values)
    if stacked.is_floating_point() or stacked.is_complex():
        return stacked.mean()
    return values[0] if bool((stacked == stacked[0]).all()) else stacked.to(torch.get_default_dtype()).mean()


def _merge_equal(values: list[Any], where: str) -> Any:
    for index, value in enumerate(values):
        if not _equal(values[0], value):
            raise MicrobatchError(
                f"{where} is {_described(values[0])} for microbatch 0 but {_described(value)} for microbatch "
                f"{index}; what is not a tensor must be equal for all, or use merge_output to say how"
            )
    return values[0]


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        result = one == other
        return bool(result.all() if hasattr(result, "all") else result) or bool(one != one and other != other)
    except (TypeError, ValueError, RuntimeError):
        return False


def _check_same_form(values: list[Any], where: str) -> None:
    def form(value: Any) -> tuple[type, list[Any]]:
        return type(value), [step.key for step, _ in structure.children(value) or []]

    for index, value in enumerate(values):
        if form(value) != form(values[0]):
            kinds = [f"{type(one).__name__} with the items {form(one)[1]}" for one in (values[0], value)]
            raise MicrobatchError(
                f"{where} is a {kinds[0]} for microbatch 0 but a {kinds[1]} for microbatch {index}; "
                "it must have one structure for all"
            )


def _pack(values: list[Any], path: Path, events: Sequence[Event | None] | None) -> Any:
    """The output's structure over packed data; what is no tensor and equal for all stays as it is."""
    first = values[0]
    if any(isinstance(value, torch.Tensor) for value in values):
        return RoundPipePackedData(values, events)
    if all(value is first for value in values) and not _holds_tensor(first):
        return first
    below = [structure.children(value) if len(path) < structure.MAX_DEPTH else None for value in values]
    if any(children is None for children in below):
        return first if all(_equal(first, value) for value in values) else RoundPipePackedData(values, events)
    _check_same_form(values, _output_name(path))
    columns = zip(*([child for _, child in children or []] for children in below), strict=True)
    steps = [step for step, _ in below[0] or []]
    packed = [_pack(list(column), (*path, step), events) for step, column in zip(steps, columns, strict=True)]
    return _with_children(first, packed) if below[0] else first


# ------------------------------------------------------------------------------------------- both


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, RoundPipePackedData):
        return True
    return any(isinstance(leaf, torch.Tensor) for leaf in structure.leaves(value))


def _with_children(value: Any, new: Iterable[Any]) -> Any:
    """A container of the form of ``value`` over other direct children."""
    remaining = iter(new)
    return structure.map_leaves(value, lambda _: next(remaining), structure.MAX_DEPTH - 1)


def _wait_for(events: Iterable[Event | None]) -> None:
    for event in events:
        if event is not None:
            event.synchronize()


def _input_name(path: Path) -> str:
    """A leaf as the user would write it: ``args[0]``, ``kwargs['mask']`` or ``label[1]``."""
    if path and path[0].key == "label":
        return "label" + structure.path_string(path[1:])
    return _INPUT_NAMES[path[0].key] + structure.path_string(path[1:]) if path else "(args, kwargs)"


def _output_name(path: Path) -> str:
    return "output" + structure.path_string(path)


def _shape_of(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else [_shape_of(one) for one in value]


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
