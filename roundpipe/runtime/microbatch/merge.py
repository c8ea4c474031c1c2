"""Packed data, the specs of torch's pipelining, and the outputs of all microbatches as one output.

The specs (``TensorChunkSpec``, ``_Replicate``, ``_CustomReducer``) are classes of torch's private
``torch.distributed.pipelining.microbatch``, whose import takes nearly as long as torch's own. A user who
holds one has imported it already, so it is looked up and never imported. This file is its only user.

Invariant: values are never changed in place; what can't be merged is named in the error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.checks import items_of
from roundpipe.core.errors import MicrobatchError, RaisedIn, quoted, shown
from roundpipe.core.trees import Access, Path
from roundpipe.runtime.config import ResolvedConfig
from roundpipe.runtime.device.backend import Event

_SPEC_MODULE = "torch.distributed.pipelining.microbatch"
_RULES = ("TensorChunkSpec", "_Replicate", "_CustomReducer")


class RoundPipePackedData(list[Any]):
    """One leaf of an output, kept as the list of its values per microbatch.

    The values may still be on their way: call `synchronize` before reading them. Another RoundPipe takes
    packed data as an argument as it is.

    Args:
        values: one per microbatch.
        events: end of the transfer of each value; None is one that has arrived.
    """

    def __init__(self, values: Iterable[Any] = (), events: Sequence[Event | None] | None = None) -> None:
        super().__init__(items_of("values", values, "a list with one value per microbatch"))
        advice = "a list with one per value, or None"
        self.events: list[Event | None] = [None] * len(self) if events is None else items_of("events", events, advice)
        if len(self.events) != len(self):
            raise MicrobatchError(f"packed data of {len(self)} values was given {len(self.events)} events")

    def synchronize(self) -> None:
        """Wait until every value has arrived."""
        wait_for(self.events)
        self.events = [None] * len(self)


def is_spec_of(spec: Any, name: str) -> bool:
    """Whether a spec is of the class of torch's with this name, or that class itself."""
    kind = getattr(sys.modules.get(_SPEC_MODULE), name, None)
    return kind is not None and (spec is kind or isinstance(spec, kind))


def is_spec(spec: Any) -> bool:
    """Whether this is one of torch's specs; asked before `callable`, since a class is callable."""
    return any(is_spec_of(spec, name) for name in ("TensorChunkSpec", "_Replicate", "_CustomReducer"))


def is_function(rule: Any) -> bool:
    """Whether a rule of the user's is a function and not a spec."""
    return callable(rule) and not is_spec(rule)


def spec_children(spec: Any, below: list[tuple[Access, Any]], where: str) -> list[Any]:
    """The spec of each child of a container; None is the automatic rule."""
    if spec is None or is_spec_of(spec, "_Replicate"):
        return [spec] * len(below)
    keys = [access.key for access, _ in below]
    if isinstance(spec, Mapping):
        if set(spec) == set(keys):
            return [spec[key] for key in keys]
        raise MicrobatchError(f"{where} has the keys {keys} but its spec has {list(spec)}; they must be the same")
    if isinstance(spec, list | tuple):
        if len(spec) == len(below):
            return list(spec)
        raise MicrobatchError(f"{where} has {len(below)} items but its spec has {len(spec)}; give one for each")
    raise MicrobatchError(
        f"{_option_of(where)}: {where} is a container with the items {keys} but its spec is {shown(spec)}; "
        "give a spec of the same structure, or None in its place for the automatic rule"
    )


def check_leaf_spec(spec: Any, where: str, allowed: tuple[str, ...]) -> None:
    """Raise unless a leaf's spec is None or of one of the classes allowed."""
    if spec is None or any(is_spec_of(spec, name) for name in allowed):
        return
    place, given = f"{_option_of(where)}: {where}", shown(spec)
    if isinstance(spec, list | tuple | Mapping):
        raise MicrobatchError(f"{place} is a single value but its spec is the structure {given}; give one spec")
    raise MicrobatchError(f"{place} has the spec {given}; allowed: {', '.join(allowed)} (from {_SPEC_MODULE}) or None")


def _option_of(where: str) -> str:
    """The option of a run that has the spec of a value."""
    root = where.partition("[")[0].partition(".")[0]
    return {"label": "split_label", "output": "merge_output"}.get(root, "split_input")


def checked_dim_size(tensor: torch.Tensor, spec: Any, where: str) -> int:
    """Length of the dimension that a `TensorChunkSpec` names; an error if the tensor has none such."""
    dim = spec.split_dim
    if not -tensor.ndim <= dim < tensor.ndim:
        allowed = f"{-tensor.ndim} to {tensor.ndim - 1}" if tensor.ndim else "_Replicate, since it is a scalar"
        raise MicrobatchError(
            f"{where} has shape {tuple(tensor.shape)} but its spec takes dim {dim}; allowed: {allowed}"
        )
    return tensor.shape[dim]


def array_leaves(value: Any, depth: int = 0) -> Iterator[torch.Tensor | RoundPipePackedData]:
    """The tensors and packed data of a structure, in order."""
    if isinstance(value, torch.Tensor | RoundPipePackedData):
        yield value
    elif depth < trees.MAX_DEPTH:
        for _, child in trees.children(value) or ():
            yield from array_leaves(child, depth + 1)


def holds_array(value: Any) -> bool:
    """Whether there is a tensor, or packed data, anywhere in a structure."""
    return any(True for _ in array_leaves(value))


def wait_for(events: Iterable[Event | None]) -> None:
    """Return when all have happened."""
    for event in events:
        if event is not None:
            event.synchronize()


def shape_of(value: Any) -> Any:
    """Shape of a tensor, or the shapes of a list of tensors, for messages."""
    return tuple(value.shape) if isinstance(value, torch.Tensor) else [shape_of(item) for item in value]


def described(value: Any) -> str:
    """A value in few words, for messages."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if trees.tensors(value):
        return f"a {type(value).__name__} of tensors"
    return quoted(value, most=60)


ScalarWeights = Mapping[Path, Sequence[float] | float]
"""By place in the output, what each microbatch's scalar counts for in the mean over the batch; one number: each counts
for this, and they add up."""


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """Tensors among the outputs whose samples are not in dimension 0, or in several blocks of it."""

    rows: Mapping[Path, Sequence[int]] = field(default_factory=dict)
    """By place in the output, rows per sample of each block. If all have as many, there may be more or fewer blocks."""
    samples: Sequence[int] = ()
    """Of each microbatch."""
    dims: Mapping[Path, int] = field(default_factory=dict)
    """By place in the output, the dimension of the samples."""
    odd: Mapping[Path, str] = field(default_factory=dict)
    """Those that the microbatches' don't make up, and why."""

    def reordered(self, values: list[torch.Tensor], path: Path) -> list[torch.Tensor]:
        """The pieces of all microbatches' first blocks, of their second blocks, and so on."""
        if (rows := self.rows.get(path)) is None:
            return values
        alike = len(set(rows)) == 1
        sizes = [rows[0] * number if alike else [each * number for each in rows] for number in self.samples]
        pieces = [value.split(each) for value, each in zip(values, sizes, strict=True)]
        return [piece for block in zip(*pieces, strict=True) for piece in block]


_PLAIN = OutputLayout()


def merge(
    outputs: list[Any],
    config: ResolvedConfig,
    events: Sequence[Event | None] | None = None,
    scalars: ScalarWeights | None = None,
    layout: OutputLayout = _PLAIN,
) -> Any:
    """One output from those of all microbatches, by the config's ``merge_output``.

    ``layout`` tells of outputs whose samples are elsewhere than along dimension 0. Events, the end of the transfer of
    each microbatch's output, are waited for, or packed with the values. A `MicrobatchError` if outputs differ where
    they must agree, or don't have the spec's structure.
    """
    rule = config.merge_output
    if rule is False:
        return _pack(outputs, (), events)
    wait_for(events or ())
    if rule is True or rule is None:
        is_merged = len(outputs) == 1 and not scalars
        return outputs[0] if is_merged else merge_value(outputs, None, (), scalars, layout)
    if is_function(rule):
        with RaisedIn("code on the host, phase merge_output"):
            return rule(outputs)
    return merge_value(outputs, rule, ())


def merge_value(
    values: list[Any],
    spec: Any,
    path: Path,
    scalars: ScalarWeights | None = None,
    layout: OutputLayout = _PLAIN,
) -> Any:
    """The value of the whole batch from those of the microbatches."""
    first, where = values[0], _output_name(path)
    if is_spec_of(spec, "_CustomReducer"):
        merged = spec.init_value.clone() if isinstance(spec.init_value, torch.Tensor) else spec.init_value
        with RaisedIn("code on the host, phase merge_output"):
            for value in values:
                merged = spec.reduce_fn(merged, value)
        return merged
    if any(isinstance(value, torch.Tensor) for value in values):
        check_leaf_spec(spec, where, _RULES)
        if scalars and path in scalars and spec is None:
            return _combined(values, scalars[path])
        if spec is not None:
            return _merge_tensors(values, spec, where)
        return _merge_tensors(layout.reordered(values, path), None, where, layout.dims.get(path, 0))
    if scalars and spec is None and path in scalars and all(type(value) is int for value in values):
        return sum(values)
    if all(value is first for value in values) and spec is None and not holds_array(first):
        return first
    below = _children_of_all(values, path)
    if below is None:
        check_leaf_spec(spec, where, _RULES)
        for index, value in enumerate(values):
            if not _equal(first, value):
                rule = "what is not a tensor must be equal for all, or use merge_output to say how"
                raise _difference(values, index, where, rule)
        return first
    specs = spec_children(spec, below, where)
    merged = [
        merge_value(column, child_spec, (*path, access), scalars, layout)
        for (access, column), child_spec in zip(below, specs, strict=True)
    ]
    return trees.with_children(first, merged)


def _merge_tensors(values: list[Any], spec: Any, where: str, dim: int = 0) -> torch.Tensor:
    kinds = [value.ndim if isinstance(value, torch.Tensor) else None for value in values]
    if len(set(kinds)) > 1:
        index = next(index for index, kind in enumerate(kinds) if kind != kinds[0])
        rule = "it must be a tensor of as many dimensions for all, or use merge_output=f(outputs)"
        raise _difference(values, index, where, rule)
    first = values[0]
    if len(values) == 1:
        return first
    if is_spec_of(spec, "_Replicate"):
        if not all(torch.equal(first, value) for value in values):
            raise MicrobatchError(f"{where} is replicated by its spec but differs between microbatches")
        return first
    if first.ndim == 0 and spec is None:
        return _mean(values)
    if spec is not None:
        dim = spec.split_dim
        checked_dim_size(first, spec, where)
    others = {value.select(dim, 0).shape if value.shape[dim] else None for value in values} - {None}
    if len(others) > 1:
        raise MicrobatchError(
            f"{where} can't be concatenated on dim {dim}: the microbatches gave {shape_of(values)}; "
            "use merge_output to say how it is merged, merge_output=False to keep the pieces, or num_microbatch=1. If "
            "each is padded to its own longest sample, pad to a given length (pad_packed_sequence has total_length)"
        )
    return torch.cat(values, dim)


def _combined(values: list[torch.Tensor], weights: Sequence[float] | float) -> torch.Tensor:
    """One scalar from those of the microbatches: their sum, times a number, or their mean by weights."""
    if isinstance(weights, int | float):
        added = torch.stack(values).sum()
        return added if weights == 1 else added * weights
    total = sum(weights)
    # what counts for nothing may be no number: a mean over no tokens
    parts = [value * (weight / total) for value, weight in zip(values, weights, strict=True) if weight]
    return torch.stack(parts or values).sum()


def _mean(values: list[torch.Tensor]) -> torch.Tensor:
    """The average of scalar tensors; an integer that all agree on stays what it is."""
    stacked = torch.stack(values)
    if stacked.is_floating_point() or stacked.is_complex():
        return stacked.mean()
    return values[0] if bool((stacked == stacked[0]).all()) else stacked.to(torch.get_default_dtype()).mean()


def _difference(values: list[Any], index: int, where: str, rule: str) -> MicrobatchError:
    first, other = described(values[0]), described(values[index])
    return MicrobatchError(f"{where} is {first} for microbatch 0 but {other} for microbatch {index}; {rule}")


def _equal(first: Any, second: Any) -> bool:
    if first is second:
        return True
    try:
        result = first == second
        return bool(result.all() if hasattr(result, "all") else result) or bool(first != first and second != second)
    except (TypeError, ValueError, RuntimeError):
        return False


def _children_of_all(values: list[Any], path: Path) -> list[tuple[Access, list[Any]]] | None:
    """Each direct child's values in all microbatches; None if a value is a leaf; an error if their children differ."""
    below = [trees.children(value) for value in values] if len(path) < trees.MAX_DEPTH else [None]
    columns = [children for children in below if children is not None]
    if len(columns) < len(values):
        return None
    forms = [
        f"{type(value).__name__} with the items {[access.key for access, _ in children]}"
        for value, children in zip(values, columns, strict=True)
    ]
    for index, form in enumerate(forms):
        if form != forms[0]:
            raise MicrobatchError(
                f"{_output_name(path)} is a {forms[0]} for microbatch 0 but a {form} for microbatch {index}; "
                "it must have one structure for all"
            )
    return [
        (access, [children[position][1] for children in columns]) for position, (access, _) in enumerate(columns[0])
    ]


def _pack(values: list[Any], path: Path, events: Sequence[Event | None] | None) -> Any:
    """The output's structure over packed data; what is no tensor and equal for all stays as it is."""
    first = values[0]
    if any(isinstance(value, torch.Tensor) for value in values):
        return RoundPipePackedData(values, events)
    if all(value is first for value in values) and not holds_array(first):
        return first
    below = _children_of_all(values, path)
    if below is None:
        return first if all(_equal(first, value) for value in values) else RoundPipePackedData(values, events)
    return trees.with_children(first, [_pack(column, (*path, access), events) for access, column in below])


def _output_name(path: Path) -> str:
    return "output" + trees.path_string(path)
