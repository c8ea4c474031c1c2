"""The outputs of all microbatches as one output.

Invariant: values are never changed in place; what can't be merged is named in the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.errors import MicrobatchError
from roundpipe.core.trees import Access, Path
from roundpipe.runtime.config import ResolvedConfig
from roundpipe.runtime.device.backend import Event
from roundpipe.runtime.microbatch.spec import (
    RoundPipePackedData,
    check_leaf_spec,
    checked_dim_size,
    described,
    holds_array,
    is_function,
    is_spec_of,
    shape_of,
    spec_children,
    wait_for,
)

_RULES = ("TensorChunkSpec", "_Replicate", "_CustomReducer")


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
    wait_for(events or ())
    if rule is True or rule is None:
        return outputs[0] if len(outputs) == 1 else merge_value(outputs, None, ())
    if is_function(rule):
        return rule(outputs)
    return merge_value(outputs, rule, ())


def merge_value(values: list[Any], spec: Any, path: Path) -> Any:
    """The value of the whole batch from those of the microbatches."""
    first, where = values[0], _output_name(path)
    if is_spec_of(spec, "_CustomReducer"):
        merged = spec.init_value.clone() if isinstance(spec.init_value, torch.Tensor) else spec.init_value
        for value in values:
            merged = spec.reduce_fn(merged, value)
        return merged
    if any(isinstance(value, torch.Tensor) for value in values):
        check_leaf_spec(spec, where, _RULES)
        return _merge_tensors(values, spec, where)
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
        merge_value(column, child_spec, (*path, access))
        for (access, column), child_spec in zip(below, specs, strict=True)
    ]
    return trees.with_children(first, merged)


def _merge_tensors(values: list[Any], spec: Any, where: str) -> torch.Tensor:
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
    dim = 0 if spec is None else spec.split_dim
    if spec is not None:
        checked_dim_size(first, spec, where)
    others = {value.select(dim, 0).shape if value.shape[dim] else None for value in values} - {None}
    if len(others) > 1:
        raise MicrobatchError(
            f"{where} can't be concatenated on dim {dim}: the microbatches gave {shape_of(values)}; "
            "use merge_output to say how it is merged, or merge_output=False to keep the pieces"
        )
    return torch.cat(values, dim)


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
