"""Batches that are not cut by default: where a list's entries may be the samples, or where a tensor can't be cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from roundpipe.core import trees
from roundpipe.core.trees import Access, Path
from roundpipe.runtime.microbatch.leaves import input_name, packed_leaves
from roundpipe.runtime.microbatch.merge import RoundPipePackedData
from roundpipe.runtime.microbatch.pieces import is_uncuttable


class UnclearList(NamedTuple):
    """A list of tensors, or of structures of tensors, whose entries may be samples."""

    name: str
    length: int
    size: int
    """Of dimension 0 of the first tensor in it."""
    has_fellow: bool
    """Whether another list of the call, of something else than tensors, is as long: targets of images."""


def unclear_list(args: tuple[Any, ...], kwargs: Mapping[str, Any], label: Any = None) -> UnclearList | None:
    """The list that would tell how many samples a call has, if its entries may just as well be the samples.

    Images of detection are such: each a tensor `[3, height, width]`, whose channels are no samples. That all have one
    form does not decide it, since two views of a batch have one, too; a tensor elsewhere that is as long does.
    """
    inputs = (tuple(args), dict(kwargs))
    found = {path: leaf for path, leaf in trees.walk(inputs) if isinstance(leaf, torch.Tensor) and leaf.ndim}
    first = next(iter(found), ())
    if packed_leaves(inputs):
        return None
    place = next((first[:depth] for depth in range(2, len(first)) if _is_list(trees.get(inputs, first[:depth]))), None)
    if place is None:
        return None
    entries, size = trees.get(inputs, place), found[first].shape[0]
    if len({_form(entry) for entry in entries}) > 1:
        return None
    others = [leaf for path, leaf in found.items() if path[: len(place)] != place]
    if any(leaf.shape[0] == size for leaf in (*others, *trees.tensors(label)) if leaf.ndim):
        return None
    return UnclearList(input_name(place), len(entries), size, _has_fellow((inputs, label), entries))


Kind = tuple[torch.dtype, torch.Size] | None
"""Of tensors that may be joined along dimension 0."""


def kind_of_samples(tensor: torch.Tensor) -> Kind:
    """Equal for tensors whose rows may be samples of one kind, as of two batches; None for vectors and matrices.

    The latter are those as long as wide, such as which nodes are neighbours.
    """
    if tensor.ndim < 2 or tensor.shape[0] in tensor.shape[1:2]:
        return None
    return tensor.dtype, tensor.shape[1:]


_PLAIN = (str, bytes, int, float, complex, torch.Tensor, Mapping, list, tuple)


def are_of_samples(entries: Sequence[Any], size: int, *, in_object: bool = False) -> bool:
    """Whether a list or tuple, as long as a batch of this size, has an entry for each sample, as it seems.

    Such as a dict of boxes for each image, texts, or tensors of other lengths. Not what layers have, such as keys and
    values, whose tensors all have the samples in dimension 0; nor a tuple of numbers, or of things of several kinds;
    nor, ``in_object``, such as a cache, what is an object itself, such as that of a layer.
    """
    given = [entry for entry in entries if entry is not None]
    if not given or any(isinstance(entry, RoundPipePackedData) for entry in given):
        return False
    if in_object and not all(isinstance(entry, _PLAIN) for entry in given):
        return False
    if all(isinstance(entry, Mapping) for entry in given):
        return True
    found = trees.tensors(given)
    if not found:
        return type(entries) is list or all(isinstance(entry, (str, list)) for entry in given)
    lengths = [tensor.shape[0] for tensor in found if tensor.ndim]
    is_of_layers = len(lengths) > 0 and all(length == size for length in lengths)
    return not is_of_layers and len({_kind(entry) for entry in given}) == 1


def _kind(entry: Any) -> Any:
    """Equal for what several samples have of one thing, whatever its sizes."""
    return tuple(
        (path, leaf.dtype, leaf.ndim) if isinstance(leaf, torch.Tensor) else (path, type(leaf))
        for path, leaf in trees.walk(entry)
        if not (path and type(leaf) in (int, float, str))  # as many as may be
    )


def uncuttable_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any], label: Any = None) -> str:
    """The first tensor that would have to be cut and can't be, as the user would write it; empty if there is none."""
    leaves = [*trees.walk((tuple(args), dict(kwargs))), *(((_LABEL, *path), leaf) for path, leaf in trees.walk(label))]
    found = [(path, leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
    names = (input_name(path) for path, leaf in found if is_uncuttable(leaf) and leaf.size(0) == found[0][1].size(0))
    return next(names, "")


_LABEL = Access("attribute", "label")


def _is_list(value: Any) -> bool:
    return type(value) in (list, tuple)


def _form(entry: Any) -> Any:
    """Equal for entries that may be samples of one batch: images have sizes of their own, vectors have not."""
    return tuple(
        (path, leaf.dtype, leaf.ndim, leaf.shape[1:] if leaf.ndim < 3 else ())
        if isinstance(leaf, torch.Tensor)
        else (path, type(leaf))
        for path, leaf in trees.walk(entry)
    )


def _has_fellow(value: Any, entries: Any, path: Path = ()) -> bool:
    if value is entries or len(path) >= trees.MAX_DEPTH:
        return False
    if type(value) is list and len(value) == len(entries) > 1 and not any(isinstance(x, torch.Tensor) for x in value):
        return True
    return any(_has_fellow(child, entries, (*path, access)) for access, child in trees.children(value) or ())
