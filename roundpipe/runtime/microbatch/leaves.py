"""The tensors of a call's arguments, and how the user would write where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.trees import Path
from roundpipe.runtime.config import ResolvedConfig, RoundPipeRunConfig
from roundpipe.runtime.microbatch.merge import RoundPipePackedData, array_leaves, is_spec_of


def packed_leaves(value: Any) -> list[RoundPipePackedData]:
    """The packed data of a structure, in order."""
    return [leaf for leaf in array_leaves(value) if isinstance(leaf, RoundPipePackedData)]


def batched_leaf(value: Any) -> torch.Tensor | RoundPipePackedData | None:
    """The first tensor with a dim 0, or packed data of such; None if there is none."""
    for leaf in array_leaves(value):
        parts = leaf if isinstance(leaf, RoundPipePackedData) else [leaf]
        if parts and all(isinstance(part, torch.Tensor) and part.ndim for part in parts):
            return leaf
    return None


def input_name(path: Path) -> str:
    """A leaf as the user would write it: ``args[0]``, ``kwargs['mask']`` or ``label[1]``."""
    if path and path[0].key == "label":
        return "label" + trees.path_string(path[1:])
    return ("args", "kwargs")[path[0].key] + trees.path_string(path[1:]) if path else "(args, kwargs)"


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


def has_samples_first(config: ResolvedConfig | RoundPipeRunConfig) -> bool:
    """Whether samples are along the first dimension of inputs, labels and outputs, as far as options tell."""
    return not any(map(_has_others_first, (config.split_input, config.split_label, config.merge_output)))


def _has_others_first(rule: Any) -> bool:
    if is_spec_of(rule, "TensorChunkSpec"):
        return getattr(rule, "split_dim", 0) != 0
    below = rule.values() if isinstance(rule, Mapping) else rule if isinstance(rule, (list, tuple)) else ()
    return any(map(_has_others_first, below))
