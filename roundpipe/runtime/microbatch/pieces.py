"""Microbatches that functions of the user's make, and pieces of batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from roundpipe.core.errors import MicrobatchError, RaisedIn
from roundpipe.runtime.microbatch.merge import described

Inputs = tuple[Any, Any]
"""``(args, kwargs)``; also their specs."""


class BatchPieces(list[dict[str, Any]]):
    """Keyword arguments of microbatches that are pieces of ``batches``, to be taken for one thing with the rest.

    Where code of the model asks for True or False, the whole batch of a piece decides, as in eager mode.
    """

    def __init__(self, kwargs: Iterable[dict[str, Any]], batches: Sequence[Inputs]) -> None:
        super().__init__(kwargs)
        self.batches = batches


def call_split_input(rule: Any, inputs: Inputs, number: int) -> tuple[list[Inputs], Sequence[Inputs] | None]:
    """The microbatches, and the batches that they are pieces of, if it tells."""
    what = "split_input(args, kwargs, num_microbatch)"
    with RaisedIn("code on the host, phase split_input"):
        result = rule(*inputs, number)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise MicrobatchError(f"{what} returned {described(result)}; it must return (args_list, kwargs_list)")
    args_list = checked_list(result[0], number, what, "args_list")
    kwargs_list = checked_list(result[1], number, what, "kwargs_list")
    for index, (args, kwargs) in enumerate(zip(args_list, kwargs_list, strict=True)):
        if not isinstance(args, tuple | list):
            raise MicrobatchError(f"{what}: args_list[{index}] is {described(args)}; it must be a tuple of arguments")
        if not isinstance(kwargs, Mapping):
            raise MicrobatchError(f"{what}: kwargs_list[{index}] is {described(kwargs)}; it must be a dict")
    batches = result[1].batches if isinstance(result[1], BatchPieces) else None
    return [(tuple(args), dict(kwargs)) for args, kwargs in zip(args_list, kwargs_list, strict=True)], batches


def checked_list(result: Any, number: int, what: str, name: str) -> list[Any]:
    """What a function of the user's returned, as a list of as many as there are microbatches."""
    if not isinstance(result, tuple | list):
        raise MicrobatchError(f"{what} returned {described(result)} as {name}; it must be a list of {number} items")
    if len(result) != number:
        raise MicrobatchError(
            f"{what} returned {len(result)} items in {name} for num_microbatch={number}; it must return "
            "one per microbatch (torch.chunk may give fewer than asked: use torch.tensor_split)"
        )
    return list(result)


def cut(tensor: torch.Tensor, sizes: list[int], dim: int, name: str) -> list[torch.Tensor]:
    """Views of a tensor, one behind the other along a dimension."""
    if len(sizes) == 1:
        return [tensor]
    if is_uncuttable(tensor):
        raise MicrobatchError(
            f"{name} is sparse or nested, and can't be cut; use num_microbatch=1, or give split_input or split_label a "
            "function that cuts it"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        return list(torch.split(tensor, sizes, dim))  # one backward for all pieces, which joins them
    starts = itertools.accumulate(sizes, initial=0)
    return [tensor.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False)]


def is_uncuttable(tensor: torch.Tensor) -> bool:
    """Whether torch has no views of parts of such a tensor."""
    return tensor.layout is not torch.strided or tensor.is_nested
